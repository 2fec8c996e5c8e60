"""Registers a table of variants with timm: `<backbone>_<size>` and `<backbone>_<mixer>_<size>`, with their weights."""

import sys
from collections.abc import Callable
from pathlib import Path

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, resolve_pretrained_cfg
from timm.models._hub import get_cache_dir
from torch import nn
from torch.hub import download_url_to_file

from vitzoo.mixers import list_mixers

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
    module: str,
    model_cls: type[nn.Module],
    variants: dict[str, dict],
    default_cfg: Callable[[str], dict],
    weights: dict[str, dict] | None = None,
    *,
    filter_fn: Callable[..., dict],
    out_indices: int | tuple[int, ...],
) -> None:
    """Give timm an entrypoint in `module` for each of `variants`, the arguments of `model_cls` by name.

    `weights` has the pretrained configs by name.tag, `default_cfg(name)` gives that of a name without weights.
    `filter_fn` turns official weights into ours, and `out_indices` are the features that `features_only=True` gives by
    default.
    """
    weights = weights or {}
    with_weights = {name.partition('.')[0] for name in weights}
    space = sys.modules[module]
    space.default_cfgs = generate_default_cfgs(
        {**weights, **{name: default_cfg(name) for name in variants if name not in with_weights}}
    )

    def create(name: str, pretrained: bool, *, out_indices=out_indices, **kwargs) -> nn.Module:
        if pretrained:
            kwargs['pretrained_cfg_overlay'] = _fetch_official(name, kwargs)
        return build_model_with_cfg(
            model_cls,
            name,
            pretrained,
            pretrained_filter_fn=filter_fn,
            feature_cfg={'out_indices': out_indices, 'feature_cls': 'getter'},
            **kwargs,
        )

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
    """The variant's arguments under the caller's; another mixer drops the `mixer_kwargs`, a dict adds to them."""
    if 'mixer' in kwargs and kwargs['mixer'] != args.get('mixer'):
        args = {key: value for key, value in args.items() if key != 'mixer_kwargs'}
    own, given = args.get('mixer_kwargs'), kwargs.get('mixer_kwargs')
    if isinstance(own, dict) and isinstance(given, dict):
        kwargs = {**kwargs, 'mixer_kwargs': {**own, **given}}
    return {**args, **kwargs}


def _fetch_official(name: str, kwargs: dict) -> dict | None:
    """The caller's config overlay, with the local file of weights that lie on their authors' own hosts.

    All those files have one name, so timm's cache would mix them up; here each has the name of its model. Raises
    OSError where a host does not answer, with what to do by hand.
    """
    overlay = kwargs.get('pretrained_cfg_overlay')
    config = resolve_pretrained_cfg(name, kwargs.get('pretrained_cfg'), overlay)
    if not config.url or config.file or config.hf_hub_id or config.source or config.state_dict:
        return overlay
    file = Path(kwargs.get('cache_dir') or get_cache_dir(), f'{config.architecture}.{config.tag}.pth')
    if not file.exists():
        try:
            download_url_to_file(config.url, str(file), progress=False)
        except OSError as error:
            raise OSError(
                f'The weights of {name} are at {config.url}, which does not answer ({error}). Fetch that file by hand, '
                f'name it {file.name}, and run: vitzoo convert {file.name} --model {name} --out {name}'
            ) from error
    return {**(overlay or {}), 'file': str(file)}
