"""Registration with timm of a table of variants, `<backbone>_<size>` and `<backbone>_<mixer>_<size>`."""

import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model, resolve_pretrained_cfg
from timm.models._hub import get_cache_dir
from torch import nn
from torch.hub import download_url_to_file

from vitzoo.mixers import list_mixers

from ._pyramid import per_stage_mixers
from ._shipped import shipped_configs

__all__ = ['cfg', 'register_variants', 'swapped']


def cfg(**kwargs: Any) -> dict:
    """A pretrained config with the usual values for ImageNet, overridden by `kwargs`."""
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


def swapped(
    backbone: str, sizes: dict[str, dict], per_stage: Callable[[str], tuple[str, ...]] | None = None
) -> dict[str, dict]:
    """Variants of every size with every mixer, in all blocks or in the stages given by `per_stage(mixer)`.

    The prefix of the backbone's own mixers is not repeated: AFT with `aft_conv` is `aft_conv_<size>`.
    """
    own = {mixer: mixer for mixer in list_mixers() if mixer.startswith(f'{backbone}_')}
    others = {f'{backbone}_{mixer}': mixer for mixer in list_mixers() if mixer not in own}
    # own mixers win: `aft_local` is the AFT mixer of that name, and AFT with the mixer `local` needs `mixer='local'`
    prefixes = {**others, **own}
    return {
        f'{prefix}_{size}': {**args, 'mixer': per_stage(mixer) if per_stage else mixer}
        for prefix, mixer in prefixes.items()
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
    """Register an entrypoint in `module` for each of `variants`, which maps names to arguments of `model_cls`.

    Args:
        default_cfg: Returns the pretrained config of a name without weights.
        weights: Pretrained configs by `name.tag`; those of shipped weights are added.
        filter_fn: Converts official weights to ours.
        out_indices: Feature maps that `features_only=True` returns by default.
    """
    weights = weights or {}
    with_weights = {name.partition('.')[0] for name in weights}
    plain = {name: default_cfg(name) for name in variants if name not in with_weights}
    # timm looks up `default_cfgs` in the module of an entrypoint, and lists the entrypoint's name in its `__all__`
    namespace: Any = sys.modules[module]
    namespace.default_cfgs = generate_default_cfgs({**weights, **shipped_configs(variants), **plain})

    def create(
        name: str, pretrained: bool, *, out_indices: int | tuple[int, ...] = out_indices, **kwargs: Any
    ) -> nn.Module:
        if name in plain and not pretrained and not kwargs.get('pretrained_cfg'):
            # a model without weights does not have the classes and the preprocessing of shipped ones
            kwargs['pretrained_cfg'] = {**plain[name], 'architecture': name}
        # timm does this only for models of a fixed size
        config = resolve_pretrained_cfg(name, kwargs.get('pretrained_cfg'), kwargs.get('pretrained_cfg_overlay'))
        kwargs.setdefault('img_size', config.input_size[-2:])
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
        entrypoint = _entrypoint(module, name, create, args, signature(model_cls.__init__).parameters['mixer'].default)
        setattr(namespace, name, entrypoint)
        register_model(entrypoint)


def _entrypoint(
    module: str, name: str, create: Callable[..., nn.Module], args: dict, default_mixer: str | tuple[str, ...]
) -> Callable[..., nn.Module]:
    # the image size of a variant is in the config of its name; weights of a tag may have another
    arguments = {key: value for key, value in args.items() if key != 'img_size'}

    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return create(name, pretrained, **_override(arguments, kwargs, default_mixer))

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__module__ = module
    entrypoint.__doc__ = f'{name}: ' + ', '.join(f'{key}={value!r}' for key, value in args.items())
    return entrypoint


def _override(args: dict, kwargs: dict, default_mixer: str | tuple[str, ...]) -> dict:
    """The variant's arguments, overridden by the caller's.

    `mixer_kwargs` are merged with the variant's in each stage. The variant's are dropped if the caller chooses other
    mixers.
    """
    both, own, given = {**args, **kwargs}, args.get('mixer_kwargs'), kwargs.get('mixer_kwargs')
    if own is None:
        return both
    mixer, num_stages = args.get('mixer', default_mixer), len(both.get('depths', (None,)))
    old = per_stage_mixers(mixer, own, num_stages)
    new = per_stage_mixers(kwargs.get('mixer', mixer), given, num_stages)
    if [name for name, _ in old] != [name for name, _ in new]:
        return {**both, 'mixer_kwargs': given}
    merged = tuple({**options, **chosen} for (_, options), (_, chosen) in zip(old, new))
    return {**both, 'mixer_kwargs': merged if 'depths' in both else merged[0]}


def _fetch_official(name: str, kwargs: dict) -> dict | None:
    """The caller's config overlay, with the path of the downloaded file if the authors host the weights themselves.

    Those files all have the same name, which collides in timm's cache; here each is named after its model. Raises
    OSError with the steps to do by hand if the download fails.
    """
    overlay = kwargs.get('pretrained_cfg_overlay')
    config = resolve_pretrained_cfg(name, kwargs.get('pretrained_cfg'), overlay)
    if (
        not isinstance(config.url, str)
        or not config.url
        or config.file
        or config.hf_hub_id
        or config.source
        or config.state_dict
    ):
        return overlay
    file = Path(kwargs.get('cache_dir') or get_cache_dir(), f'{config.architecture}.{config.tag}.pth')
    if not file.exists():
        try:
            download_url_to_file(config.url, str(file), progress=False)
        except OSError as error:
            raise OSError(
                f'The weights of {name} cannot be downloaded from {config.url} ({error}). Download them by hand to '
                f'{file.name}, and run: vitzoo convert {file.name} --model {name} --out {name}'
            ) from error
    return {**(overlay or {}), 'file': str(file)}
