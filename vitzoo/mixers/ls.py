"""Long-short attention on a 2-D grid: a segment-wise sliding window and a dynamic low-rank projection in one softmax.

    P   = softmax over tokens of W_P x            (rank r per head)
    K'  = LN_dp(P LN(K)),  V' = LN_dp(P LN(V))    (DualLN)
    out = softmax(scale * q . [K' ; LN(K) of the window ; LN(K) of the prefix]) [V' ; LN(V) ... ]

A window is the query's w x w segment and max(1, w // 2) tokens around it. Prefix tokens are global: all grid tokens
attend them, and they attend themselves and the *outputs* of the grid tokens. With r = 0, no prefix tokens and a window
that holds the grid it is softmax attention on normalised keys and values. Linear in the number of tokens: O(N (4 w^2 +
r + P) dim). Long-Short Transformer, sections 3.2 and 3.3, https://arxiv.org/abs/2107.02192
"""

import torch
from torch import nn

from ._qkv import split_heads
from ._rel_bias import OffsetBias
from ._window import window_attention, window_attention_naive
from .base import QKVMixer, register_mixer
from .softmax import softmax_attention, softmax_naive

__all__ = ['LongShort', 'long_short_attention', 'long_short_naive']


def long_short_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_landmarks: torch.Tensor,
    v_landmarks: torch.Tensor,
    grid_size: tuple[int, int],
    window_size: int,
    scale: float,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Segment by segment; arguments as `long_short_attention`."""
    return _long_short(
        window_attention_naive, softmax_naive,
        q, k, v, k_landmarks, v_landmarks, grid_size, window_size, scale, bias, dropout_p,
    )  # fmt: skip


def long_short_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_landmarks: torch.Tensor,
    v_landmarks: torch.Tensor,
    grid_size: tuple[int, int],
    window_size: int,
    scale: float,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """q, k, v (B, heads, P + H*W, d), the first P tokens global -> (B, heads, P + H*W, d).

    Keys and values are normalised already; landmarks are (B, heads, r, d) and `bias` is (heads, w*w, (w + 2 (w //
    2))^2).
    """
    return _long_short(
        window_attention, softmax_attention,
        q, k, v, k_landmarks, v_landmarks, grid_size, window_size, scale, bias, dropout_p,
    )  # fmt: skip


def _long_short(
    window_op, global_op, q, k, v, k_landmarks, v_landmarks, grid_size, window_size, scale, bias, dropout_p
):
    P = q.shape[2] - grid_size[0] * grid_size[1]
    k_shared = torch.cat([k_landmarks, k[:, :, :P]], dim=2)
    v_shared = torch.cat([v_landmarks, v[:, :, :P]], dim=2)
    grid = window_op(
        q[:, :, P:], k[:, :, P:], v[:, :, P:], k_shared, v_shared,
        grid_size, window_size, max(1, window_size // 2), scale, bias, None, dropout_p,
    )  # fmt: skip
    if P == 0:
        return grid
    k_prefix = torch.cat([k[:, :, :P], grid.to(k.dtype)], dim=2)
    v_prefix = torch.cat([v[:, :, :P], grid.to(v.dtype)], dim=2)
    prefix = global_op(q[:, :, :P], k_prefix, v_prefix, scale, None, 0.0)
    return torch.cat([prefix, grid.to(prefix.dtype)], dim=2)


@register_mixer('ls')
class LongShort(QKVMixer):
    """Long-short attention with `window_size` (w of the paper) and `rank` (r; 0 leaves the window alone).

    `rel_bias` is 'none', 'table' (one row per offset), or 'nvidia': the index of the published ViL-LS models, in which
    different offsets share rows (361 offsets on 253 rows at w = 7). The table belongs to the window, not to the grid.
    """

    attn_weights = True
    has_rel_bias = True
    op = staticmethod(long_short_attention)
    op_naive = staticmethod(long_short_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        window_size: int = 7,
        rank: int = 8,
        rel_bias: str = 'none',
        device=None,
        dtype=None,
        **kwargs,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if rel_bias not in ('none', 'table', 'nvidia'):
            raise ValueError(f"rel_bias of ls is 'none', 'table' or 'nvidia', not {rel_bias!r}.")
        if window_size < 1 or rank < 0:
            raise ValueError(f'ls needs window_size >= 1 and rank >= 0, not {window_size} and {rank}.')
        dd = {'device': device, 'dtype': dtype}
        self.window_size = window_size
        self.rank = rank
        self.dynamic_proj = nn.Linear(dim, num_heads * rank, **dd) if rank else None
        self.norm_full = nn.LayerNorm(dim, **dd)
        self.norm_landmarks = nn.LayerNorm(dim, **dd) if rank else None
        self.rel_bias = None
        if rel_bias != 'none':
            halo = max(1, window_size // 2)
            row_stride = window_size + 2 * halo if rel_bias == 'nvidia' else None
            self.rel_bias = OffsetBias(num_heads, (window_size, window_size), halo=halo, row_stride=row_stride, **dd)

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        q, k, v = self.to_qkv(x, grid_size)
        k, v = self.norm_heads(self.norm_full, k), self.norm_heads(self.norm_full, v)
        k_landmarks, v_landmarks = self.landmarks(x, k, v)
        bias = self.rel_bias() if self.rel_bias is not None else None
        x = self.op(q, k, v, k_landmarks, v_landmarks, grid_size, self.window_size, self.scale, bias, self.dropout_p)
        return self.project(x)

    def landmarks(self, x: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The r projected keys and values of each head, (B, heads, r, d), from the grid tokens."""
        P = self.num_prefix_tokens
        k, v = k[:, :, P:], v[:, :, P:]
        if self.dynamic_proj is None:
            return k[:, :, :0], v[:, :, :0]
        weights = split_heads(self.dynamic_proj(x[:, P:]), self.num_heads)  # (B, heads, N, r)
        weights = weights.softmax(dim=2, dtype=torch.promote_types(x.dtype, torch.float32)).to(v.dtype)
        weights = weights.transpose(-2, -1)
        return self.norm_heads(self.norm_landmarks, weights @ k), self.norm_heads(self.norm_landmarks, weights @ v)

    def norm_heads(self, norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
        """Normalise over all heads of a token together, (B, heads, N, d) -> the same."""
        return split_heads(norm(x.transpose(1, 2).flatten(2)).to(x.dtype), self.num_heads)
