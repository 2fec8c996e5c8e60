"""Starts a model from the weights of another one, as the AFT paper starts its models from DeiT's.

What has the same name and shape is copied, what has the same name and a known meaning is fitted, the rest is left as
the model was initialised.
"""

import math
import re
from dataclasses import dataclass

import torch
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn
from torch.nn import functional as F

from vitzoo.mixers._qkv import LinearQKV
from vitzoo.mixers._rel_bias import OffsetBias
from vitzoo.models.vil import AxialPosEmbed

__all__ = ['Inheritance', 'inherit_weights', 'shorten']


@dataclass(frozen=True)
class Inheritance:
    """Which tensors a model got from its parent, by name.

    `fitted` are resampled, or inherited in part; `dropped` are the parent's that the model does not have. `share` is
    that of the parent's parameters, by count, from 0 to 1.
    """

    copied: list[str]
    fitted: list[str]
    initialised: list[str]
    dropped: list[str]
    share: float

    def __str__(self) -> str:
        lines = [f"inherited {self.share:.2%} of the parent's parameters, {len(self.copied)} tensors as they are"]
        for what in ('fitted', 'initialised', 'dropped'):
            names = getattr(self, what)
            lines.append(f'{what} {len(names)}: {shorten(names)}' if names else f'{what} none')
        return '\n'.join(lines)


def shorten(names: list[str], limit: int = 8) -> str:
    """Names with the same words as one, such as `blocks.*.attn.u_key (12)`, and an ellipsis after `limit` of them."""
    counts = {}
    for name in names:
        pattern = re.sub(r'(?<![^. ])\d+(?=\.)', '*', name)
        counts.setdefault(pattern, []).append(name)
    shown = [group[0] if len(group) == 1 else f'{pattern} ({len(group)})' for pattern, group in counts.items()]
    return ', '.join(shown[:limit] + ['…'] * (len(shown) > limit))


def inherit_weights(model: nn.Module, parent: dict[str, Tensor]) -> Inheritance:
    """Load what fits of a parent's state dict, and say what does not.

    Tensors of the same name and shape are copied. Of a fused qkv with other keys the queries and values are; positions
    of another grid are resampled; biases of relative position keep their offsets, and those out of the parent's reach
    have that of its nearest. The head of another number of classes is left as it is.
    """
    own = model.state_dict()
    fits, fitted, num_inherited = {}, [], 0
    buffers = {name for name, _ in model.named_buffers()}
    for name in parent.keys() & own.keys():
        old, new = parent[name], own[name]
        value, count = (old, old.numel()) if old.shape == new.shape else _fit(model, name, parent, new)
        if value is None:
            continue
        fits[name] = value
        num_inherited += 0 if name in buffers else count
        if old.shape != new.shape:
            fitted.append(name)
    model.load_state_dict({**own, **fits})
    num_parent = sum(tensor.numel() for name, tensor in parent.items() if name not in buffers)
    return Inheritance(
        copied=[name for name in own if name in fits and name not in fitted],
        fitted=[name for name in own if name in fitted],
        initialised=[name for name in own if name not in fits],
        dropped=[name for name in parent if name not in fits],
        share=num_inherited / max(1, num_parent),
    )


def _fit(model: nn.Module, name: str, parent: dict[str, Tensor], new: Tensor) -> tuple[Tensor | None, int]:
    """A tensor of another shape made fit, None where that has no meaning, and how many of its numbers are in it."""
    path, _, leaf = name.rpartition('.')
    owner, old, value = model.get_submodule(path), parent[name], None
    if isinstance(owner, LinearQKV) and parent[f'{path}.weight'].shape[1] == owner.in_features:
        return _queries_and_values(old, new, owner)
    if isinstance(owner, OffsetBias):
        value = _same_offsets(old, owner)
    elif isinstance(owner, AxialPosEmbed) and leaf in ('row', 'column') and old.shape[2] == new.shape[2]:
        value = F.interpolate(old.float().transpose(1, 2), size=new.shape[1], mode='linear').transpose(1, 2)
    elif name == 'pos_embed' and old.shape[2] == new.shape[2]:
        value = _resampled_positions(old, model)
    return value, min(old.numel(), new.numel())


def _queries_and_values(old: Tensor, new: Tensor, qkv: LinearQKV) -> tuple[Tensor, int]:
    """The first and the last `dim` rows, whatever the number of rows for keys between them."""
    dim = qkv.in_features
    value = new.clone()
    value[:dim], value[-dim:] = old[:dim], old[-dim:]
    return value, 2 * old[:dim].numel()


def _same_offsets(old: Tensor, bias: OffsetBias) -> Tensor | None:
    """A square table brought to the offsets of `bias`; a table in which offsets share rows has no such meaning."""
    side = math.isqrt(len(old))
    sizes = [2 * (size + bias.halo) - 1 for size in bias.query_size]
    if side**2 != len(old) or side % 2 == 0 or bias.row_stride is not None or old.shape[1] != bias.table.shape[1]:
        return None
    rows, columns = ((torch.arange(size) + (side - size) // 2).clamp(0, side - 1) for size in sizes)
    return old.unflatten(0, (side, side))[rows][:, columns].flatten(0, 1)


def _resampled_positions(old: Tensor, model: nn.Module) -> Tensor | None:
    """A ViT's positions on the model's grid, where the parent's was square and had as many prefix tokens."""
    P = 0 if model.no_embed_class else model.num_prefix_tokens
    side = math.isqrt(max(0, old.shape[1] - P))
    if side == 0 or side**2 != old.shape[1] - P:
        return None
    return resample_abs_pos_embed(old, model.patch_embed.grid_size, (side, side), num_prefix_tokens=P)
