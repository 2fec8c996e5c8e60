"""Mixers of other packages: importing vitzoo loads the entry points of the group `vitzoo.mixers`.

An entry point has the name of one mixer and refers to the module, or the class in it, that registers it:

    [project.entry-points."vitzoo.mixers"]
    toy = "toy_package.toy"
"""

import sys
from importlib.metadata import Distribution, EntryPoint, entry_points

from .base import list_mixers

__all__ = ['load_plugins']

_GROUP = 'vitzoo.mixers'


def load_plugins() -> None:
    """Load every plugin, sorted by distribution and mixer name.

    Raises RuntimeError that names the distribution and the entry point for a plugin that cannot be imported, takes the
    name of another mixer, or does not register its own.
    """
    imported, own = set(sys.modules), set(list_mixers())
    for point in sorted(
        entry_points(group=_GROUP), key=lambda point: (_distribution(point).name, point.name, point.value)
    ):
        try:
            point.load()
        except Exception as error:
            raise RuntimeError(f'{_describe(point)} {type(error).__name__}: {error}') from error
        if point.name in set(list_mixers()) - own:
            continue
        if point.module in imported:
            raise RuntimeError(
                f'{_describe(point)} {point.module} imports vitzoo and is itself still being imported: import vitzoo '
                f'before {point.module}.'
            )
        raise RuntimeError(f"{_describe(point)} it registers no mixer '{point.name}'.")


def _distribution(point: EntryPoint) -> Distribution:
    # entry_points() sets it
    assert point.dist is not None
    return point.dist


def _describe(point: EntryPoint) -> str:
    """The beginning of an error message: the plugin that fails, and what to do."""
    dist = _distribution(point)
    return (
        f"The plugin {dist.name} {dist.version} fails to load from its entry point '{point.name} = "
        f"{point.value}'; fix it, or remove it with `pip uninstall {dist.name}`:"
    )
