"""In-place replacement of the attention of a vision transformer by a token mixer that inherits its weights."""

import logging
from collections.abc import Collection
from contextlib import AbstractContextManager
from math import log
from numbers import Real
from operator import index as as_int
from typing import Any

from timm.layers import get_device_dtype
from timm.models._features import FeatureDictNet, FeatureGetterNet, FeatureHookNet
from timm.models._input import update_model_args
from timm.models.vision_transformer import init_weights_vit_timm
from torch import nn

from vitzoo._arguments import is_whole
from vitzoo.errors import is_first_process, silenced
from vitzoo.mixers import TokenMixer, create_mixer, mixer_class

from ._swap_attention import AttentionParts, Unsupported, take_apart
from ._swap_blocks import SWAPPED_BLOCKS, SwappedTimmBlock
from ._swap_models import SWAPPED_MODELS, SwappedModel
from ._swap_record import name_entrypoint, recorded_swaps
from .inherit import Inheritance, inherit_weights, summarize_names

__all__ = ['swap_mixer']

_logger = logging.getLogger(__name__)
# millions of parameters
_SIZES = {
    'vit_tiny_patch16_224': 6,
    'vit_small_patch16_dinov3': 22,
    'vit_base_patch16_dinov3': 86,
    'vit_large_patch16_dinov3': 303,
    'vit_huge_patch14_224': 631,
}
# arguments of mixers that no other value suits
_OF_THE_MODEL = ('dim', 'grid_size', 'num_prefix_tokens', 'layer', 'device', 'dtype')
# where torch.compile, and wrappers such as that of DDP, have the model
_WRAPPED = ('_orig_mod', 'module')
_REASONS = {
    **dict.fromkeys(
        ('SwinTransformerV2', 'SwinTransformerV2Cr'), 'its attention compares directions with learned scales'
    ),
    **dict.fromkeys(('MultiScaleVit', 'Hiera'), 'its attention reduces the number of queries'),
    'Xcit': 'its attention is between channels',
}


def swap_mixer(
    model: nn.Module, mixer: str | list[str], blocks: list[int] | None = None, **mixer_kwargs: Any
) -> nn.Module:
    """Replace the attention of a vision transformer of timm or vitzoo by `mixer`, in all blocks or in the given ones.

    The model is changed in place and returned. A list of mixers has one for each of these blocks, in their order. A
    mixer inherits the settings and weights of the attention under the same parameter names (`blocks.0.attn.qkv.weight`,
    …), frozen ones stay frozen; parameters that attention does not have are initialised. In a model of vitzoo it
    inherits those of the mixer that it replaces. Rotary positions rotate the queries and keys of the mixer. The
    `Inheritance` of each block is in `model.inheritance`; warnings name the weights of the attention that are lost, and
    the blocks that lose rotary positions. Random values of mixers are drawn from their `seed`, and are never inherited.
    `mixer_kwargs` are the mixer's own arguments, or override those settings. The grid is that of the model's image
    size, and follows `model.set_input_size()`. timm exports and loads the model as any other; to load a bare checkpoint
    of it, repeat the swap first. The models, and what each mixer inherits from them, are in docs/swap.md.

    Raises:
        ValueError: The type of the model, of a block or of its attention is not supported, the block or mixer does not
            exist, the list of mixers does not fit the blocks, or an argument of the mixer is the model's to choose.
        TypeError: The mixer does not have one of the arguments.
    """
    family = _family(model)
    _check_choice(mixer, blocks)
    mixer_kwargs = {key: _as_python(x) for key, x in mixer_kwargs.items()}
    for key in _OF_THE_MODEL:
        if key in mixer_kwargs:
            raise ValueError(f'The {key} of a mixer is that of the model; leave {key}={mixer_kwargs[key]} out.')
    timm_blocks = family.token_blocks(model)
    paths = list(timm_blocks)
    chosen = [i for i, path in enumerate(paths) if family.is_default(timm_blocks[path])] if blocks is None else blocks
    names = _mixer_of_block(len(paths), mixer, chosen, mixer_kwargs)
    new = {i: _new_mixers(family, model, i, paths[i], name, mixer_kwargs) for i, name in names.items()}
    for i, mixers in new.items():
        _put(timm_blocks[paths[i]], [mixer for mixer, _ in mixers])
    swapped: Any = model
    swapped.__class__ = family
    _drop_shared_bias(swapped)
    freeze_unused_rope(swapped)
    reports = {i: _merge(timm_blocks[paths[i]], [report for _, report in mixers]) for i, mixers in new.items()}
    swapped.inheritance = {**getattr(model, 'inheritance', {}), **reports}
    if is_first_process():
        for name in dict.fromkeys(names.values()):
            _warn_of_losses(model, name, [i for i in names if names[i] == name])
    # recorded in an exported config, whose architecture repeats the swaps
    swaps = recorded_swaps(model)
    recorded = mixer if isinstance(mixer, str) else list(names.values())
    update_model_args(model, swap_mixer=[*swaps, {'mixer': recorded, 'blocks': list(names), **mixer_kwargs}])
    name_entrypoint(model)
    return model


def _as_python(value: Any) -> Any:
    """A number of another library as Python's, because those of numpy and torch cannot be saved in a config."""
    if is_whole(value):
        return as_int(value)
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value


def _check_choice(mixer: Any, blocks: Any) -> None:
    """Raise ValueError if these are not names of mixers and numbers of blocks."""
    names = [mixer] if isinstance(mixer, str) else mixer
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"mixer is a name such as 'ls', or a list of names, not {mixer!r}.")
    numbers = [] if blocks is None else blocks
    is_list = isinstance(numbers, Collection) and not isinstance(numbers, str)
    if not is_list or not all(map(is_whole, numbers)):
        raise ValueError(f'blocks is a list of numbers of blocks, such as [0, 1], not {blocks!r}.')


def _family(model: nn.Module) -> type[SwappedModel]:
    """The class of the model after the swap; raises ValueError if it is not supported."""
    family = SWAPPED_MODELS.get(type(model), type(model))
    wrapped = next((part for part in _WRAPPED if isinstance(getattr(model, part, None), nn.Module)), None)
    if not issubclass(family, SwappedModel) and wrapped:
        raise ValueError(
            f'swap_mixer does not support {type(model).__name__}, which is around a model: swap the mixers of its'
            f' .{wrapped}, and wrap that again.'
        )
    if not issubclass(family, SwappedModel):
        raise ValueError(
            f'swap_mixer does not support {type(model).__name__}: {_reason(model)}. A model of about its size that it '
            f'supports is {_model_of_size(model)}; docs/swap.md lists the others.'
        )
    if not isinstance(getattr(model, 'patch_drop', None), (nn.Identity, type(None))):
        raise ValueError('patch_drop_rate removes tokens from the grid that mixers need; build the model without it.')
    return family


def _reason(model: nn.Module) -> str:
    """Why a model is not supported."""
    cls = type(model)
    if isinstance(model, (FeatureDictNet, FeatureGetterNet, FeatureHookNet)):
        return 'it has the features of a model; swap the mixers of one made without features_only'
    base = next((base.__name__ for base in SWAPPED_MODELS if issubclass(cls, base)), None)
    if base is not None:
        return f'it is a subclass of {base}, and may compute something else'
    return _REASONS.get(cls.__name__, 'it has no attention that mixers can take the place of')


def _model_of_size(model: nn.Module) -> str:
    """The supported model whose number of parameters is nearest."""
    size = sum(parameter.numel() for parameter in model.parameters())
    return min(_SIZES, key=lambda name: abs(log(_SIZES[name] * 1e6 / max(size, 1))))


def _mixer_of_block(depth: int, mixer: str | list[str], blocks: list[int], mixer_kwargs: dict) -> dict[int, str]:
    """The mixer of each block by its index, in order."""
    wrong = [i for i in blocks if not -depth <= i < depth]
    if wrong:
        raise ValueError(f'There is no block {wrong[0]}: the model has {depth}, from 0 to {depth - 1}.')
    indices = [as_int(i) % depth for i in blocks]
    if not indices:
        raise ValueError('There is no block to replace the attention of; choose blocks.')
    if isinstance(mixer, str):
        return dict.fromkeys(sorted(indices), mixer)
    if len(mixer) != len(indices):
        raise ValueError(f'A list of {len(mixer)} mixers does not fit {len(indices)} blocks: give one for each block.')
    if len(set(indices)) < len(indices):
        raise ValueError(
            f'A block has two mixers: blocks is {blocks}, and each mixer of a list has a block of its own.'
        )
    if mixer_kwargs and len(set(mixer)) > 1:
        raise ValueError(
            f'It is unclear to which of several mixers {", ".join(mixer_kwargs)} belongs: call swap_mixer for each '
            f'mixer, with its blocks.'
        )
    return dict(sorted(zip(indices, mixer)))


def _new_mixers(
    family: type[SwappedModel], model: nn.Module, index: int, path: str, name: str, mixer_kwargs: dict
) -> list[tuple[TokenMixer, Inheritance]]:
    """Mixers in place of the attention layers of a block, and what they inherit."""
    block, cls = model.get_submodule(path), mixer_class(name)
    shared_bias = getattr(model, family.shared_bias) if family.shared_bias else None
    try:
        holders = _attention_holders(block).values()
        parts = [take_apart(holder.attn, shared_bias) for holder in holders]
    except Unsupported as error:
        raise ValueError(
            f'swap_mixer cannot replace the attention of block {index}: {error}. docs/swap.md lists the blocks and '
            f'attention layers that it supports.'
        ) from None
    new = []
    for number, part in enumerate(parts):
        of_family = family.mixer_settings(model, path, cls)
        settings = get_device_dtype(block) | of_family | part.settings(cls, mixer_kwargs.get('num_heads'))
        if 'qkv_layer' in of_family and 'qkv.proj_q.weight' not in part.weights:
            # CvT's convolutions inherit no queries and keys, and keep its scale
            settings['scale'] = of_family['scale']
        settings |= dict(
            grid_size=family.grid_size_of(model, path),
            num_prefix_tokens=family.num_prefix_in_block(model, path),
            layer=index * len(parts) + number,
        )
        if cls.subsampled_kv and getattr(model, 'stride_kv', 1) > 1:
            # a bias of windows has no place between queries and fewer keys
            settings.pop('rel_bias', None)
        if cls.has_own_rope and getattr(model, 'rope', None) is not None:
            # the weights are made for the positions of the model
            settings['rope'] = False
        settings |= mixer_kwargs
        if settings.get('attn_drop') and not cls.attn_weights and 'attn_drop' not in mixer_kwargs:
            raise ValueError(
                f'{name} never forms attention weights, on which the attn_drop_rate={settings["attn_drop"]} of the'
                f' model acts; pass attn_drop=0 to swap_mixer, or build the model without it.'
            )
        mixer = create_mixer(name, **settings)
        _check_heads(model, mixer)
        mixer.apply(getattr(model, '_init_weights', init_weights_vit_timm))
        _restart_at_zero(mixer)
        proj = getattr(mixer, 'proj', None)
        if isinstance(proj, nn.Linear) and 'proj.weight' in part.weights and 'proj.bias' not in part.weights:
            proj.register_parameter('bias', None)
        report = inherit_weights(mixer, part.weights_for(mixer))
        _keep_frozen(mixer, part, report)
        new.append((mixer.train(part.attn.training), report))
    return new


def _check_heads(model: Any, mixer: TokenMixer) -> None:
    """Raise ValueError if a mixer has heads of another width than those that the model's rotary positions rotate."""
    rope = getattr(model, 'rope', None)
    if rope is None or not mixer.has_rope:
        return
    # learned frequencies of each head have the width of all heads
    width = rope.dim // getattr(rope, 'num_heads', 1)
    if mixer.dim // mixer.num_heads != width:
        raise ValueError(
            f'The rotary positions of the model are for heads of width {width}, not for num_heads={mixer.num_heads};'
            f' use num_heads={mixer.dim // width}.'
        )


def _restart_at_zero(mixer: TokenMixer) -> None:
    """Set convolutions to 0 that start there: PVTv2 and Twins draw the weights of all convolutions."""
    for module in mixer.modules():
        if getattr(module, 'zero_init', False):
            nn.init.zeros_(module.weight)


def _keep_frozen(mixer: TokenMixer, part: AttentionParts, report: Inheritance) -> None:
    """Freeze what a mixer inherits from frozen weights of the attention."""
    parameters = dict(mixer.named_parameters())
    for name in [*report.copied, *report.fitted]:
        if name in parameters and not any(map(part.is_trained, report.sources.get(name, [name]))):
            parameters[name].requires_grad_(False)


def _attention_holders(block: nn.Module) -> dict[str, nn.Module]:
    """The modules of a block that have an attention layer `attn`, by name; raises Unsupported for an unknown block."""
    cls = SWAPPED_BLOCKS.get(type(block), type(block))
    if not issubclass(cls, SwappedTimmBlock):
        raise Unsupported(f'it is a {type(block).__name__}')
    return cls.attention_holders(block)


def _put(block: nn.Module, mixers: list[TokenMixer]) -> None:
    """Replace the attention layers of a block."""
    # change the class in place so that weights, hooks and references to the modules survive
    block.__class__ = SWAPPED_BLOCKS.get(type(block), type(block))
    for holder, mixer in zip(block.attention_holders().values(), mixers, strict=True):
        block.keep_settings(holder.attn)
        holder.attn = mixer


def _drop_shared_bias(model: SwappedModel) -> None:
    """Drop a bias for all blocks that no block uses any more, whose parameters would have no gradient."""
    if model.shared_bias and all(isinstance(block, SwappedTimmBlock) for block in model.token_blocks().values()):
        setattr(model, model.shared_bias, None)


def freeze_unused_rope(model: Any) -> None:
    """Freeze rotary positions that no block uses, which would have no gradient; train them again if one does.

    What was frozen before stays frozen.
    """
    if getattr(model, 'rope', None) is None:
        return
    parameters = dict(model.rope.named_parameters())
    if _uses_rope(model):
        for name in model.__dict__.pop('_unused_rope', []):
            parameters[name].requires_grad_()
    elif not hasattr(model, '_unused_rope'):
        model._unused_rope = [name for name, parameter in parameters.items() if parameter.requires_grad]
        model.rope.requires_grad_(False)


def _uses_rope(model: SwappedModel) -> bool:
    """True if a block, of timm or with a mixer, uses rotary positions."""
    return any(
        not isinstance(block, SwappedTimmBlock)
        or any(holder.attn.has_rope for holder in block.attention_holders().values())
        for block in model.token_blocks().values()
    )


def _merge(block: Any, reports: list[Inheritance]) -> Inheritance:
    """One report for a block; if it has several mixers, with their names."""
    if len(reports) == 1:
        return reports[0]
    names = [f'{name}.attn' for name in block.attention_holders()]
    lists = {
        label: [f'{name}.{tensor}' for name, report in zip(names, reports) for tensor in getattr(report, label)]
        for label in ('copied', 'fitted', 'initialized', 'dropped', 'lost')
    }
    sources = {
        f'{name}.{tensor}': [f'{name}.{source}' for source in report.sources[tensor]]
        for name, report in zip(names, reports)
        for tensor in report.sources
    }
    return Inheritance(**lists, share=sum(report.share for report in reports) / len(reports), sources=sources)


def _warn_of_losses(model: nn.Module, name: str, indices: list[int]) -> None:
    """Warn of the weights, and of the rotary positions, that blocks lose by the mixer `name`."""
    blocks = list(model.token_blocks().items())
    prefix = 'attn.' if len(blocks[indices[0]][1].attention_holders()) == 1 else ''
    lost = [f'{blocks[i][0]}.{prefix}{tensor}' for i in indices for tensor in model.inheritance[i].lost]
    if lost:
        _logger.warning('%s does not inherit all weights of the attention, in %s', name, summarize_names(lost))
    if getattr(model, 'rope', None) is not None and not mixer_class(name).has_rope:
        _logger.warning(
            '%s does not compare queries with keys: the rotary positions of the model are lost in %d blocks, and it %s '
            'a position embedding',
            name,
            len(indices),
            'keeps' if model.has_pos_embed() else 'does not have',
        )


def without_warnings() -> AbstractContextManager[None]:
    """Do not name the weights that mixers lose, because they were named before, or others will replace them."""
    return silenced(_logger)
