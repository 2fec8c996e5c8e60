"""Initialising a model with the weights of another, as the AFT paper does with those of DeiT.

Tensors of the same name and shape are copied. A tensor of the same name and another shape is fitted by the module that
owns it, if that has a method

    fit_from(name, parent) -> (tensor, number of values inherited) | None

where `parent` is the state dict of the same module in the other model. A mixer's `inherit_from` gives the tensors that
have another name in the parent, such as layers that are fused there. Everything else stays as initialised.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from timm.models.eva import EvaBlockPostNorm
from timm.models.vision_transformer import ResPostBlock, VisionTransformer
from timm.models.vision_transformer_relpos import ResPostRelPosBlock
from torch import Tensor, nn
from torch.nn import functional as F

from vitzoo.mixers.base import named_mixers

__all__ = ['Inheritance', 'differing_settings', 'inherit_weights', 'summarize_names']

# prefix tokens of timm's ViT and DeiT, in order
_PREFIX_TOKENS = ('cls_token', 'dist_token', 'reg_token')

# attributes of modules that change what their weights compute
_SETTINGS = ('num_heads', 'eps', 'global_pool', 'dynamic_img_pad')

# norms by their names in blocks and models
_NORMS = ('norm', 'norm1', 'norm2')

# blocks of timm with the names of pre-norm ones
_POST_NORM = (ResPostBlock, ResPostRelPosBlock, EvaBlockPostNorm)


@dataclass(frozen=True)
class Inheritance:
    """Names of the tensors that a model inherited from its parent, and of those that it did not.

    Attributes:
        copied: Tensors equal to the parent's.
        fitted: Tensors resampled, inherited in part, or from tensors of another name.
        initialized: Tensors of the model that are not inherited.
        dropped: Tensors of the parent that no tensor of the model comes from.
        lost: Tensors of the parent of which not all values are inherited, those dropped included.
        share: Fraction of the parent's parameters that are inherited.
        sources: Names in the parent of tensors made from those of other names.
    """

    copied: list[str]
    fitted: list[str]
    initialized: list[str]
    dropped: list[str]
    lost: list[str]
    share: float
    sources: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"inherited {self.share:.2%} of the parent's parameters, {len(self.copied)} tensors as they are"]
        for label in ('fitted', 'initialized', 'dropped'):
            names = getattr(self, label)
            lines.append(f'{label} {len(names)}: {summarize_names(names)}' if names else f'{label} none')
        return '\n'.join(lines)


def summarize_names(names: list[str], limit: int = 8) -> str:
    """Join names, grouping those that differ in an index as `blocks.*.attn.u_key (12)`, up to `limit` groups."""
    groups: dict[str, list[str]] = {}
    for name in names:
        pattern = re.sub(r'(?<![^. ])\d+(?=\.)', '*', name)
        groups.setdefault(pattern, []).append(name)
    shown = [group[0] if len(group) == 1 else f'{pattern} ({len(group)})' for pattern, group in groups.items()]
    return ', '.join(shown[:limit] + ['…'] * (len(shown) > limit))


def inherit_weights(model: nn.Module, parent: dict[str, Tensor]) -> Inheritance:
    """Load all tensors of a parent's state dict that fit, and return the names of those that do and do not.

    A fused qkv layer with fewer keys inherits queries and values; position embeddings are resampled to the model's
    grid; relative position bias keeps the values of its offsets, and offsets beyond the parent's range take the nearest
    one. The head is not inherited if the number of classes differs. The layer scale of a parent (`ls1`, `ls2`) is
    multiplied into the layers before it, if the model has none.
    """
    own = model.state_dict()
    parent = _fold_layer_scale(parent, own)
    buffers = {name for name, _ in model.named_buffers()}
    inherited, copied = {}, set()
    # values of each tensor of the parent that are inherited
    num_used: Counter[str] = Counter()
    for name in parent.keys() & own.keys():
        is_same = parent[name].shape == own[name].shape
        fit = (parent[name], own[name].numel()) if is_same else _fit(model, name, parent)
        if fit is None:
            continue
        inherited[name], num_used[name] = fit
        if is_same:
            copied.add(name)
    num_inherited = sum(num_values for name, num_values in num_used.items() if name not in buffers)
    same_name, other_names = set(inherited), {}
    for name, (tensor, sources) in _from_other_names(model, parent).items():
        if name in own and name not in inherited and own[name].shape == tensor.shape:
            inherited[name], other_names[name] = tensor, sources
            # a copy of a tensor that is inherited anyway does not count
            if same_name.isdisjoint(sources):
                num_inherited += tensor.numel()
                # a tensor made of several ones has all their values
                for source in sources:
                    num_used[source] += min(tensor.numel(), parent[source].numel())
    model.load_state_dict({**own, **inherited})
    num_parent = sum(tensor.numel() for name, tensor in parent.items() if name not in buffers)
    return Inheritance(
        copied=[name for name in own if name in copied],
        fitted=[name for name in own if name in inherited and name not in copied],
        initialized=[name for name in own if name not in inherited],
        dropped=[name for name in parent if name not in num_used],
        lost=[name for name, tensor in parent.items() if num_used[name] < tensor.numel()],
        share=num_inherited / max(1, num_parent),
        sources=other_names,
    )


def _fold_layer_scale(parent: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a parent without the layer scales that a model lacks, which are factors of the layers before.

    That of a mixer with several output layers, such as `proj_conv` next to `proj`, stays.
    """
    folded = dict(parent)
    for name, gamma in parent.items():
        path, _, scale = name.rpartition('.ls')
        layer = {'1.gamma': f'{path}.attn.proj', '2.gamma': f'{path}.mlp.fc2'}.get(scale)
        if name in own or layer is None or f'{layer}.weight' not in parent.keys() & own.keys():
            continue
        if any(other.startswith(f'{layer}_') for other in parent):
            continue
        del folded[name]
        folded[f'{layer}.weight'] = gamma[:, None] * parent[f'{layer}.weight']
        if f'{layer}.bias' in parent:
            folded[f'{layer}.bias'] = gamma * parent[f'{layer}.bias']
    return folded


def differing_settings(model: nn.Module, parent: nn.Module) -> list[str]:
    """Settings in which modules of the same name differ, such as 'blocks.*.mlp.act (12): GELU, not QuickGELU'.

    These are what a state dict does not show: numbers of heads, the scale of their products, the kind of norms and
    their epsilon, activations, whether norms are before or after the layers of a block, the pooling, padded images, and
    rotary positions.
    """
    parents = dict(parent.named_modules())
    differing: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        new, old = _settings(path, module), _settings(path, parents[path]) if path in parents else {}
        for name in new:
            if new[name] != old.get(name, new[name]):
                differing.setdefault(f'{new[name]}, not {old[name]}', []).append(name)
    return [f'{summarize_names(names)}: {values}' for values, names in differing.items()]


def _settings(path: str, module: nn.Module) -> dict[str, Any]:
    """Values of a module by their names in the model."""
    prefix = f'{path}.' if path else ''
    settings = {prefix + name: getattr(module, name) for name in _SETTINGS if hasattr(module, name)}
    if isinstance(getattr(module, 'scale', None), float) and hasattr(module, 'num_heads'):
        settings[f'{prefix}scale'] = round(module.scale, 4)
    if path.rpartition('.')[2] == 'act':
        settings[path] = type(module).__name__
    if path.rpartition('.')[2] in _NORMS and not isinstance(module, nn.Identity):
        # forms in float32 compute the same
        settings[path] = type(module).__name__.removesuffix('Fp32')
    if hasattr(module, 'norm1'):
        settings[f'{prefix}norm1'] = 'post-norm' if isinstance(module, _POST_NORM) else 'pre-norm'
    if not path:
        rope = getattr(module, 'rope', None)
        settings['rope'] = 'none' if rope is None else type(rope).__name__
    return settings


def _from_other_names(model: nn.Module, parent: dict[str, Tensor]) -> dict[str, tuple[Tensor, list[str]]]:
    """Tensors that mixers take from tensors of other names in the parent, and those names."""
    found = {}
    for path, mixer in named_mixers(model):
        prefix, part = _part_of(parent, path)
        for name, (tensor, sources) in mixer.inherit_from(part).items():
            found[prefix + name] = tensor, [prefix + source for source in sources]
    return found


def _part_of(state_dict: dict[str, Tensor], path: str) -> tuple[str, dict[str, Tensor]]:
    """The prefix of the names of a module's tensors, and these tensors by their names without it."""
    prefix = f'{path}.' if path else ''
    return prefix, {name.removeprefix(prefix): x for name, x in state_dict.items() if name.startswith(prefix)}


def _fit(model: nn.Module, name: str, parent: dict[str, Tensor]) -> tuple[Tensor, int] | None:
    """A tensor of another shape fitted to the model, and the number of values inherited; None if it cannot be."""
    path, _, leaf = name.rpartition('.')
    owner = model.get_submodule(path)
    _, siblings = _part_of(parent, path)
    if hasattr(owner, 'fit_from'):
        return owner.fit_from(leaf, siblings)
    if isinstance(owner, VisionTransformer) and leaf == 'pos_embed':
        return _fit_pos_embed(owner, siblings)
    return None


def _fit_pos_embed(model: VisionTransformer, parent: dict[str, Tensor]) -> tuple[Tensor, int] | None:
    """The position embedding of a ViT with the grid of the model or a square one, resampled to the model's grid.

    Positions of prefix tokens that only the parent has, such as DeiT's distillation token, are left out. They are zero
    if the parent has none (`no_embed_class`). None if the model has other prefix tokens.
    """
    old, states = parent['pos_embed'], (parent, model.state_dict())
    tokens, wanted = ([name for name in _PREFIX_TOKENS for _ in range(_num_tokens(state, name))] for state in states)
    wanted = [] if model.no_embed_class else wanted
    kept = _positions(tokens, wanted)
    if model.pos_embed is None or old.shape[2] != model.pos_embed.shape[2] or kept is None:
        return None
    counts = (0, len(tokens)) if model.no_embed_class else (len(tokens), 0)
    layouts = _possible_layouts(old.shape[1], counts, model.patch_embed.grid_size)
    if not layouts:
        return None
    num_prefix, grid_size = layouts[0]
    positions = F.pad(old, (0, 0, len(tokens) - num_prefix, 0))
    positions = torch.cat([positions[:, kept], positions[:, len(tokens) :]], dim=1)
    new = resample_abs_pos_embed(positions, model.patch_embed.grid_size, grid_size, num_prefix_tokens=len(kept))
    return new, min(old.numel(), new.numel())


def _possible_layouts(
    num_positions: int, counts: tuple[int, int], own: tuple[int, int]
) -> list[tuple[int, tuple[int, int]]]:
    """Numbers of prefix positions, of those in `counts`, and grids of the others: that of the model, or square ones."""
    sides = {count: math.isqrt(max(0, num_positions - count)) for count in counts}
    same = [(count, own) for count in counts if num_positions - count == math.prod(own)]
    square = [(count, (side, side)) for count, side in sides.items() if side > 0 and side**2 == num_positions - count]
    return same + square


def _num_tokens(state_dict: dict[str, Tensor], name: str) -> int:
    return state_dict[name].shape[1] if name in state_dict else 0


def _positions(names: list[str], wanted: list[str]) -> list[int] | None:
    """The place of each wanted token among `names`; None if there are too few of one."""
    if any(names.count(name) < wanted.count(name) for name in wanted):
        return None
    return [names.index(name) + number for name in dict.fromkeys(wanted) for number in range(wanted.count(name))]
