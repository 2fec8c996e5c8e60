"""Mixers of other packages: the entry points of the group `vitzoo.mixers` are loaded whenever vitzoo is imported.

An entry point has the name of one mixer and leads to the module, or the class in it, that registers it:

    [project.entry-points."vitzoo.mixers"]
    toy = "toy_package.toy"
"""

import sys
from importlib.metadata import EntryPoint, entry_points

from .base import list_mixers

__all__ = ['load_plugins']

GROUP = 'vitzoo.mixers'


def load_plugins() -> None:
    """Load every plugin, in the order of the names of their distributions and mixers.

    Raises RuntimeError, with the distribution and the entry point named, for a plugin that cannot be imported, takes
    the name of another mixer, or does not register its own.
    """
    imported, own = set(sys.modules), set(list_mixers())
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.dist.name, point.name, point.value)):
        try:
            point.load()
        except Exception as error:
            raise RuntimeError(f'{_blame(point)} {type(error).__name__}: {error}') from error
        if point.name in set(list_mixers()) - own:
            continue
        if point.module in imported:
            raise RuntimeError(
                f'{_blame(point)} {point.module} is still being imported, and itself imports vitzoo: import vitzoo '
                f'before {point.module}.'
            )
        raise RuntimeError(f"{_blame(point)} it registers no mixer '{point.name}'.")


def _blame(point: EntryPoint) -> str:
    """The beginning of an error: whose plugin fails, and what to do."""
    return (
        f"The plugin {point.dist.name} {point.dist.version} breaks vitzoo with its entry point '{point.name} = "
        f"{point.value}'; mend it, or remove it with `pip uninstall {point.dist.name}`:"
    )
