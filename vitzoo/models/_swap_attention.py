"""Attention layers of timm and mixers taken apart: the settings and weights that a mixer in their place can inherit.

Weights have their names in vitzoo's softmax: `qkv` for queries, keys and values together, `proj`, `q_norm`, `k_norm`,
`scale_norm` for a norm before `proj`, `rel_bias` and `prefix_bias` for a bias of relative positions, in whose order of
offsets the two agree.
"""

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from timm.layers import Attention, AttentionRope, RelPosMlp, to_2tuple
from timm.models.beit import Attention as BeitAttention
from timm.models.cait import TalkingHeadAttn
from timm.models.eva import EvaAttention
from timm.models.pvt_v2 import Attention as PVTAttention
from timm.models.swin_transformer import WindowAttention
from timm.models.twins import GlobalSubSampleAttn, LocallyGroupedAttn
from timm.models.vision_transformer_relpos import RelPosAttention
from timm.models.vision_transformer_sam import Attention as SAMAttention
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from vitzoo.mixers import QKVMixer, TokenMixer
from vitzoo.mixers._qkv import LinearQKV
from vitzoo.mixers._rel_bias import OffsetBias

__all__ = ['AttentionParts', 'Unsupported', 'take_apart']


# linear layers of attention, which packages for fine-tuning wrap
_LAYERS = ('qkv', 'q', 'kv', 'q_proj', 'k_proj', 'v_proj', 'proj')
# names of the parameters of pruning, and of torch's older weight norm and spectral norm
_COMPUTED = ('weight_orig', 'bias_orig', 'weight_g')


class Unsupported(Exception):
    """A feature of an attention layer that mixers do not have; the end of a sentence."""


@dataclass
class AttentionParts:
    """An attention layer, and its norms and weights by their names in `Softmax`."""

    attn: nn.Module
    norms: dict[str, nn.Module]
    weights: dict[str, Tensor]

    @property
    def dim(self) -> int:
        """The width of the tokens."""
        return self.attn.dim if isinstance(self.attn, TokenMixer) else self.weights['qkv.weight'].shape[1]

    def settings(self, cls: type[TokenMixer], num_heads: int | None = None) -> dict:
        """Keywords for a mixer of class `cls` that takes the place of the layer, perhaps with other heads."""
        layers = [name for name in _BIASED_LAYERS if f'{name}.weight' in self.weights]
        settings: dict[str, Any] = dict(
            dim=self.dim,
            num_heads=self.attn.num_heads,
            qkv_bias=all(f'{name}.bias' in self.weights for name in layers),
            proj_drop=self.attn.proj_drop.p,
        )
        if hasattr(self.attn, 'attn_drop'):
            settings.update(attn_drop=self.attn.attn_drop.p)
        if hasattr(self.attn, 'scale') and issubclass(cls, QKVMixer):
            # also where the mixer's own scale is another: it is that of the inherited queries and keys
            is_usual = self.attn.scale == (self.dim // self.attn.num_heads) ** -0.5
            has_other_heads = num_heads not in (None, self.attn.num_heads)
            settings.update(scale=None if is_usual and has_other_heads else self.attn.scale)
        # mixers without queries and keys have nothing to normalize
        if 'q_norm' in self.norms and cls.has_qk_norm:
            settings.update(qk_norm=True, norm_layer=self._norm_layer)
        if 'scale_norm' in self.norms and issubclass(cls, QKVMixer):
            settings.update(scale_norm=True, norm_layer=self._norm_layer)
        if 'rel_bias.table' in self.weights and cls.has_rel_bias:
            settings.update(rel_bias='table')
        if 'rel_bias.rows' in self.weights and cls.has_decomposed_bias:
            settings.update(rel_bias='decomposed')
        if 'proj_l.weight' in self.weights and cls.has_talking_heads:
            settings.update(talking_heads=True)
        if hasattr(self.attn, 'sr') and cls.has_reduction:
            settings.update(sr_ratio=1 if self.attn.sr is None else self.attn.sr.stride[0])
        return settings

    def weights_for(self, mixer: TokenMixer) -> dict[str, Tensor]:
        """The weights, with a table of relative positions that a mixer with windows can inherit."""
        table, rel_bias = self.weights.get('rel_bias.table'), getattr(mixer, 'rel_bias', None)
        if table is None or not isinstance(rel_bias, OffsetBias) or rel_bias.table.shape == table.shape:
            return self.weights
        # Swin's windows need not have the shape of the grid
        window = getattr(self.attn, 'window_size', None) or mixer.grid_size
        return {**self.weights, 'rel_bias.table': _squared(table, to_2tuple(window))}

    def is_trained(self, name: str) -> bool:
        """True if a weight, or one of those that it is made of, requires a gradient."""
        trained = {old: parameter.requires_grad for old, parameter in self.attn.named_parameters()}
        sources = [name] if name in trained else [old for old in trained if _source_names(name).fullmatch(old)]
        # a bias of the model, or one that a network computes, is trained if anything is
        return any(trained[old] for old in sources or trained)

    def _norm_layer(self, width: int, **kwargs: Any) -> nn.Module:
        """A norm like that of the layer for heads or, before `proj`, for tokens of this width."""
        if 'q_norm' in self.norms and width == self.dim // self.attn.num_heads:
            return deepcopy(self.norms['q_norm'])
        if width != self.dim or 'scale_norm' not in self.norms:
            raise ValueError(
                f'The model normalizes queries and keys of {self.attn.num_heads} heads, and those of the mixer have the'
                f' width {width}; leave num_heads out.'
            )
        return deepcopy(self.norms['scale_norm'])


def take_apart(attn: nn.Module, shared_bias: nn.Module | None = None) -> AttentionParts:
    """The parts of an attention layer of timm, or of a mixer.

    `shared_bias` is the model's bias of relative positions for all its layers, which becomes part of the layer's own.
    Raises Unsupported if mixers lack a feature of the layer.
    """
    # the weight of such a layer is not one of its parameters
    names = [name for name, _ in attn.named_parameters()]
    if any(map(is_parametrized, attn.modules())) or any(name.endswith(_COMPUTED) for name in names):
        raise Unsupported('its weights are parametrized or pruned; make them permanent first')
    if not isinstance(attn, TokenMixer) and type(attn) not in _READERS:
        raise Unsupported(f'it has {type(attn).__name__}')
    for name in _LAYERS:
        _check_layer(attn, name)
    if isinstance(attn, TokenMixer):
        return AttentionParts(attn, _norms(attn), _fuse_q_kv(_weights(attn)))
    parts = _READERS[type(attn)](attn)
    biases = [bias for bias in (_own_bias(attn), shared_bias) if bias is not None]
    return replace(parts, weights={**parts.weights, **_bias_weights(biases)}) if biases else parts


def _check_layer(attn: nn.Module, name: str) -> None:
    """Raise Unsupported if a layer is not linear, or computes another product than that with its weight."""
    layer = getattr(attn, name, None)
    # a mixer of another package may have any other layer
    is_own = isinstance(attn, TokenMixer) and not isinstance(layer, nn.Linear)
    if layer is None or is_own:
        return
    # quantized layers and those of low rank are also subclasses of linear ones
    if type(layer) not in (nn.Linear, LinearQKV):
        cls = type(layer)
        raise Unsupported(f'its {name} is a {cls.__module__}.{cls.__qualname__}; merge it into a linear layer first')
    if not layer.weight.is_floating_point():
        raise Unsupported(f'the weight of its {name} is quantized to {layer.weight.dtype}; convert it to float32 first')


def _attention(attn: Attention | AttentionRope | EvaAttention) -> AttentionParts:
    """timm's attention, with queries, keys and values in one layer or in three."""
    if attn.gate is not None:
        raise Unsupported('its attention is gated')
    weights = _fuse_qkv(_weights(attn), getattr(attn, 'num_kv_groups', 1), attn.head_dim)
    if attn.num_heads * attn.head_dim != weights['qkv.weight'].shape[1]:
        raise Unsupported(f'its attn_head_dim is {attn.head_dim}, not dim / num_heads')
    return AttentionParts(attn, _norms(attn, 'norm'), _rename(weights, 'norm.', 'scale_norm.'))


def _plain_attention(
    attn: RelPosAttention | BeitAttention | TalkingHeadAttn | WindowAttention | LocallyGroupedAttn,
) -> AttentionParts:
    """An attention with one layer of queries, keys and values; the bias of relative positions is read elsewhere."""
    weights = _fuse_qkv({name: w for name, w in _weights(attn).items() if not name.startswith(_BIAS_PREFIXES)})
    if len(weights['qkv.weight']) != 3 * weights['qkv.weight'].shape[1]:
        raise Unsupported('its heads do not have the width dim / num_heads')
    return AttentionParts(attn, _norms(attn), weights)


def _sam_attention(attn: SAMAttention) -> AttentionParts:
    """An attention whose bias of relative positions depends on the queries."""
    if attn.rope is not None:
        raise Unsupported('its rotary positions are part of its attention')
    weights = _rename(_rename(_weights(attn), 'rel_pos_h', 'rel_bias.rows'), 'rel_pos_w', 'rel_bias.columns')
    return AttentionParts(attn, _norms(attn), weights)


def _reduced_attention(attn: PVTAttention | GlobalSubSampleAttn) -> AttentionParts:
    """Attention to a reduced grid, whose layers are those of `SRFormer`."""
    if getattr(attn, 'pool', None) is not None:
        raise Unsupported('its attention pools the keys to 7 x 7 tokens')
    return AttentionParts(attn, {}, _fuse_q_kv(_weights(attn)))


_BIAS_PREFIXES = ('rel_pos.', 'relative_position_bias_table')
# layers whose bias `qkv_bias` adds: all, CvT's, and that of a mixer without queries and keys
_BIASED_LAYERS = ('qkv', 'qkv.proj_q', 'v')
_READERS: dict[type, Callable[[Any], AttentionParts]] = {
    Attention: _attention,
    AttentionRope: _attention,
    EvaAttention: _attention,
    RelPosAttention: _plain_attention,
    BeitAttention: _plain_attention,
    TalkingHeadAttn: _plain_attention,
    WindowAttention: _plain_attention,
    LocallyGroupedAttn: _plain_attention,
    PVTAttention: _reduced_attention,
    GlobalSubSampleAttn: _reduced_attention,
    SAMAttention: _sam_attention,
}


def _own_bias(attn: nn.Module) -> nn.Module | None:
    """The module that has the bias of relative positions of a layer."""
    if isinstance(attn, RelPosAttention):
        return attn.rel_pos
    return attn if getattr(attn, 'relative_position_bias_table', None) is not None else None


def _bias_weights(biases: list[nn.Module]) -> dict[str, Tensor]:
    """Tables of the sum of biases of relative positions: of grid tokens, and of the prefix token if there is one."""
    tables = [_bias_table(bias) for bias in biases]
    grid, prefix = (sum(parts) for parts in zip(*tables))
    if not len(prefix):
        return {'rel_bias.table': grid}
    queries, keys, itself = prefix.unsqueeze(-1)  # (heads, 1) each
    return {
        'rel_bias.table': grid,
        'prefix_bias.prefix_prefix': itself.unsqueeze(-1),
        'prefix_bias.prefix_grid': torch.stack([queries, keys]),
    }


@torch.no_grad()
def _bias_table(bias: nn.Module) -> tuple[Tensor, Tensor]:
    """A bias for each offset, (offsets, heads), and for the pairs with a prefix token, (3, heads) or (0, heads)."""
    if not isinstance(bias, RelPosMlp):
        num_offsets = (2 * bias.window_size[0] - 1) * (2 * bias.window_size[1] - 1)
        table = bias.relative_position_bias_table
        return table[:num_offsets], table[num_offsets:]
    training = bias.training
    # its dropout acts on the table
    table = bias.eval().mlp(bias.rel_coords_log).flatten(0, 1)
    bias.train(training)
    table = bias.bias_act(table)
    table = table if bias.bias_gain is None else bias.bias_gain * table
    return table, table.new_zeros(3 * bias.prefix_tokens, table.shape[1])


def _fuse_qkv(weights: dict[str, Tensor], num_kv_groups: int = 1, head_dim: int = 1) -> dict[str, Tensor]:
    """Weights with queries, keys and values in one layer, from one layer or from `q_proj`, `k_proj` and `v_proj`.

    If one of the three has a bias, the others have zeros. Keys and values that `num_kv_groups` heads share are repeated
    for each of these heads.
    """
    weights = dict(weights)
    if 'q_proj.weight' in weights:
        parts = [weights.pop(f'{part}_proj.weight') for part in 'qkv']
        biases = [weights.pop(f'{part}_proj.bias', None) for part in 'qkv']
        weights['qkv.weight'] = torch.cat([parts[0], *(_repeat(x, num_kv_groups, head_dim) for x in parts[1:])])
    else:
        biases = [weights.pop('q_bias', None), None, weights.pop('v_bias', None)]
        parts = weights['qkv.weight'].chunk(3)
    if any(bias is not None for bias in biases):
        biases = [part.new_zeros(len(part)) if bias is None else bias for part, bias in zip(parts, biases)]
        weights['qkv.bias'] = torch.cat([biases[0], *(_repeat(x, num_kv_groups, head_dim) for x in biases[1:])])
    return weights


def _fuse_q_kv(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights with the layers `q` and `kv`, if there are such, as one layer `qkv`."""
    weights = dict(weights)
    for kind in ('weight', 'bias'):
        if f'q.{kind}' in weights:
            weights[f'qkv.{kind}'] = torch.cat([weights.pop(f'q.{kind}'), weights.pop(f'kv.{kind}')])
    return weights


def _repeat(x: Tensor, num_kv_groups: int, head_dim: int) -> Tensor:
    """Rows of the heads of keys or values, each head repeated."""
    return x.unflatten(0, (-1, head_dim)).repeat_interleave(num_kv_groups, dim=0).flatten(0, 1)


def _source_names(name: str) -> re.Pattern:
    """The names in timm's attention of the parameters that become the weight `name` of another name."""
    layer, _, kind = name.rpartition('.')
    if layer == 'qkv':
        return re.compile(rf'([qkv]_proj|q|kv)\.{kind}' if kind == 'weight' else r'([qkv]_proj|q|kv)\.bias|[qv]_bias')
    if layer in ('rel_bias', 'prefix_bias'):
        return re.compile(r'rel_pos.*|relative_position_bias_table')
    return re.compile(rf'norm\.{kind}')


def _weights(attn: nn.Module) -> dict[str, Tensor]:
    # of the buffers only statistics of CvT's projection: those of timm follow from its settings, and random values of
    # mixers are not inherited
    buffers = attn.qkv.named_buffers('qkv') if isinstance(attn, QKVMixer) else ()
    return {name: parameter.detach() for name, parameter in attn.named_parameters()} | dict(buffers)


def _norms(attn: nn.Module, scale_norm: str = 'scale_norm') -> dict[str, nn.Module]:
    """The norms of a layer, whose norm before `proj` has the name `scale_norm`."""
    norms = {'q_norm': getattr(attn, 'q_norm', None), 'scale_norm': getattr(attn, scale_norm, None)}
    norms = {name: norm for name, norm in norms.items() if not isinstance(norm, (nn.Identity, type(None)))}
    # mixers normalize the queries and keys of each head, not of all together
    if any(parameter.dim() > 1 for parameter in norms.get('q_norm', nn.Identity()).parameters()):
        del norms['q_norm']
    return norms


def _rename(weights: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    """Weights with another prefix of their names."""
    return {new + name[len(old) :] if name.startswith(old) else name: weight for name, weight in weights.items()}


def _squared(table: Tensor, window: tuple[int, int]) -> Tensor:
    """A bias for the offsets of a window, for those of a square one; further offsets have the value of the nearest."""
    sizes = [2 * size - 1 for size in window]
    if table.shape[0] != sizes[0] * sizes[1]:
        return table
    rows, columns = ((torch.arange(max(sizes)) - (max(sizes) - size) // 2).clamp(0, size - 1) for size in sizes)
    return table.unflatten(0, sizes)[rows][:, columns].flatten(0, 1)
