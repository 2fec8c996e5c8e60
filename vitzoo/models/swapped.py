"""The entrypoint of swapped models, which builds a timm model and repeats the swaps in its config.

`swap_mixer` makes it the architecture of the model, so that what timm's `save_for_hf` and `push_to_hf_hub` write loads
by `timm.create_model` after `import vitzoo`. timm does not list its name, because it needs the name of another model.
"""

from contextlib import nullcontext
from typing import Any

import timm
from timm.layers import resample_patch_embed
from timm.models import build_model_with_cfg, is_model_in_modules, register_model, resolve_pretrained_cfg
from timm.models._pretrained import PretrainedCfg, filter_pretrained_cfg
from timm.models._registry import _deprecated_models, generate_default_cfgs
from torch import Tensor, nn

from . import swap
from ._resample import is_resizable, resample_weights
from ._swap_record import ARCHITECTURE

__all__ = ['vitzoo_swapped']

# a fixed size, so that timm's scripts pass on an image size
default_cfgs = generate_default_cfgs({ARCHITECTURE: {'fixed_input_size': True}})
_FEATURES = ('features_only', 'out_indices', 'feature_cls')


@register_model
def vitzoo_swapped(
    pretrained: bool = False,
    *,
    base_model: str | None = None,
    swap_mixer: list[dict] | None = None,
    pretrained_cfg: dict | PretrainedCfg | None = None,
    pretrained_cfg_overlay: dict | None = None,
    pretrained_model_args: dict | None = None,
    cache_dir: str | None = None,
    **kwargs: Any,
) -> nn.Module:
    """A timm model with the attention of its blocks replaced by mixers.

    With `pretrained`, the weights are those that the config names, as in a folder or repository. If it names none, they
    are the published ones of the base model, and the mixers inherit those of the attention.

    Args:
        base_model: A name in timm, with a tag or without.
        swap_mixer: The arguments of each call of `vitzoo.swap_mixer`, in order, such as `[{'mixer': 'ls'}]`.
        kwargs: Arguments of the base model.

    Raises:
        ValueError: There is no such model, or a swap is not possible.
    """
    base_model, tag = _check_base(base_model, swap_mixer)
    # timm takes a PretrainedCfg too
    config = resolve_pretrained_cfg(ARCHITECTURE, pretrained_cfg, pretrained_cfg_overlay)  # type: ignore[arg-type]
    is_saved = bool(config.has_weights or config.state_dict)
    if is_saved:
        source = {'pretrained_cfg': _without_source(config)}
    else:
        given = None if pretrained_cfg is None or _is_default(pretrained_cfg) else pretrained_cfg
        source = {'pretrained_cfg': given or tag or None, 'pretrained_cfg_overlay': pretrained_cfg_overlay}
    model = _build_base(base_model, pretrained and not is_saved, source, {**kwargs, 'cache_dir': cache_dir})
    with swap.without_warnings() if is_saved else nullcontext():
        for arguments in swap_mixer or ():
            swap.swap_mixer(model, **arguments)
    if kwargs.get('img_size') is not None and _takes_any_size(base_model, model):
        model.set_input_size(kwargs['img_size'])
    if is_saved:
        # it would be what the mixers inherit from random weights
        del model.inheritance
    traits = model._traits
    built = build_model_with_cfg(
        lambda **_: model,
        ARCHITECTURE,
        pretrained and is_saved,
        pretrained_cfg=config.to_dict() if is_saved else model.pretrained_cfg,
        pretrained_filter_fn=_resample,
        feature_cfg=_feature_cfg(model),
        pretrained_model_args=pretrained_model_args,
        cache_dir=cache_dir,
        **kwargs,
    )
    # with `dynamic_img_size` timm takes the model to be of any size again
    built._traits = traits
    return built


# not a deprecated model, but timm has no other way to leave a name out of its lists
_deprecated_models[ARCHITECTURE] = None


def _build_base(name: str, pretrained: bool, source: dict, kwargs: dict) -> nn.Module:
    """The base model, without the arguments that are for the swapped one."""
    own = {key: value for key, value in kwargs.items() if key not in _FEATURES}
    if is_model_in_modules(name, 'pvt_v2'):
        # its constructor has no image size, and timm passes the size of a fixed one to it
        own.pop('img_size', None)
        if isinstance(source['pretrained_cfg'], dict):
            source = {**source, 'pretrained_cfg': {**source['pretrained_cfg'], 'fixed_input_size': False}}
    return timm.model_entrypoint(name)(pretrained, **source, **own)


def _takes_any_size(base_model: str, model: nn.Module) -> bool:
    """Return True for PVT and NaFlexVit, which are built for images of any size, and swapped for those of one."""
    return is_model_in_modules(base_model, 'pvt_v2') or hasattr(model, 'embeds')


def _check_base(base_model: str | None, swaps: list[dict] | None) -> tuple[str, str]:
    """The name and the tag of the base model."""
    if base_model is None or not swaps:
        raise ValueError(
            f'{ARCHITECTURE} needs base_model, the name of a timm model, and swap_mixer, a list of swaps such as '
            f"[{{'mixer': 'ls'}}]."
        )
    name, _, tag = base_model.partition('.')
    if not timm.is_model(name) or name == ARCHITECTURE:
        raise ValueError(f"There is no timm model '{base_model}', the base_model of {ARCHITECTURE}.")
    if not isinstance(swaps, list | tuple) or not all(isinstance(item, dict) and 'mixer' in item for item in swaps):
        raise ValueError(f"swap_mixer is a list of swaps such as [{{'mixer': 'ls', 'blocks': [0, 1]}}], not {swaps!r}.")
    return name, tag


def _without_source(config: PretrainedCfg) -> dict:
    """A config for the base model, which gets its weights later."""
    config = filter_pretrained_cfg(config.to_dict(), remove_source=True)
    return {key: value for key, value in config.items() if key not in ('architecture', 'state_dict')}


def _is_default(config: dict | PretrainedCfg) -> bool:
    """Return True for the registered config, which timm's scripts pass on as if it were chosen."""
    default = resolve_pretrained_cfg(ARCHITECTURE).to_dict()
    return (config if isinstance(config, dict) else config.to_dict()) == default


def _resample(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Resample weights to the image size and the patch size of a model, if timm can change them."""
    if not is_resizable(model):
        return state_dict
    resampled = resample_weights(state_dict, model)
    weight, own = (weights.get('patch_embed.proj.weight') for weights in (resampled, model.state_dict()))
    if weight is None or own is None or weight.shape[2:] == own.shape[2:]:
        return resampled
    return {**resampled, 'patch_embed.proj.weight': resample_patch_embed(weight, list(own.shape[2:]))}


def _feature_cfg(model: nn.Module) -> dict:
    """timm's `features_only` of the base model: the maps of Swin are (B, H, W, C), those of others (B, C, H, W)."""
    how = {'flatten_sequential': True} if hasattr(model, 'output_fmt') else {'feature_cls': 'getter'}
    return {'out_indices': _default_indices(model), **how}


def _default_indices(model: nn.Module) -> int | tuple[int, ...]:
    """timm's feature maps of `features_only`: the last three blocks, or all stages of a hierarchical model."""
    reductions = {info['reduction'] for info in model.feature_info}
    return 3 if len(reductions) == 1 else tuple(range(len(model.feature_info)))
