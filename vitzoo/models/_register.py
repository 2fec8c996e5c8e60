"""Registers a table of variants with timm: `<backbone>_<size>` and `<backbone>_<mixer>_<size>`."""

import sys
from collections.abc import Callable

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import generate_default_cfgs, register_model
from torch import nn

from ..mixers import list_mixers

__all__ = ['cfg', 'register_variants', 'swapped']


def cfg(**kwargs) -> dict:
    """A pretrained config with ImageNet's usual values, overridden by `kwargs`."""
    return {
        'url': '',
        'num_classes': 1000,
        'input_size': (3, 224, 224),
        'pool_size': None,
        'crop_pct': 0.875,
        'interpolation': 'bicubic',
        'mean': IMAGENET_DEFAULT_MEAN,
        'std': IMAGENET_DEFAULT_STD,
        'classifier': 'head',
        **kwargs,
    }


def swapped(backbone: str, sizes: dict[str, dict], stages: Callable[[str], str | tuple[str, ...]]) -> dict[str, dict]:
    """Variants of every size with every mixer; `stages(mixer)` says where in the backbone the mixer goes.

    The backbone's own name is not repeated: the AFT body with `aft_conv` is `aft_conv_<size>`. Where that takes the
    name of another mixer (`aft_local` and `local`), the backbone's own mixer has it, and the other goes in by `mixer=`.
    """
    mixers = [mixer for mixer in list_mixers() if f'{backbone}_{mixer}' not in list_mixers()]
    return {
        f'{backbone}_{mixer.removeprefix(backbone + "_")}_{size}': {**args, 'mixer': stages(mixer)}
        for mixer in mixers
        for size, args in sizes.items()
    }


def register_variants(
    module: str, create: Callable[..., nn.Module], variants: dict[str, dict], cfgs: dict[str, dict]
) -> None:
    """Give timm an entrypoint for each of `variants` in `module`, with its pretrained configs.

    `create(name, pretrained, **kwargs)` builds the model; `cfgs` is keyed by name or name.tag as in timm.
    """
    space = sys.modules[module]
    space.default_cfgs = generate_default_cfgs(cfgs)
    for name, args in variants.items():
        entrypoint = _entrypoint(module, name, create, args)
        setattr(space, name, entrypoint)
        register_model(entrypoint)


def _entrypoint(module: str, name: str, create: Callable[..., nn.Module], args: dict) -> Callable[..., nn.Module]:
    def entrypoint(pretrained: bool = False, **kwargs) -> nn.Module:
        return create(name, pretrained, **_override(args, kwargs))

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__module__ = module
    entrypoint.__doc__ = f'{name}: ' + ', '.join(f'{key}={value!r}' for key, value in args.items())
    return entrypoint


def _override(args: dict, kwargs: dict) -> dict:
    """The variant's arguments under the caller's; another mixer drops the variant's `mixer_kwargs`, a dict adds to
    them."""
    if 'mixer' in kwargs and kwargs['mixer'] != args.get('mixer'):
        args = {key: value for key, value in args.items() if key != 'mixer_kwargs'}
    own, given = args.get('mixer_kwargs'), kwargs.get('mixer_kwargs')
    if isinstance(own, dict) and isinstance(given, dict):
        kwargs = {**kwargs, 'mixer_kwargs': {**own, **given}}
    return {**args, **kwargs}
