"""Long-short attention on a 2-D grid: a segment-wise sliding window and a dynamic low-rank projection in one softmax.

    P   = softmax over tokens of W_P x            (rank r per head)
    K'  = LN_dp(P LN(K)),  V' = LN_dp(P LN(V))    (DualLN)
    out = softmax(scale * q . [K' ; LN(K) of the window ; LN(K) of the prefix]) [V' ; LN(V) ... ]

The window is the query's w x w segment and max(1, w // 2) tokens around it. Prefix tokens are global: all grid tokens
attend them, and they attend themselves and the *outputs* of the grid tokens. With r = 0, no prefix tokens and a window
that covers the grid it is softmax attention on normalized keys and values. Linear in the number of tokens: O(N (4 w^2 +
r + P) dim). Long-Short Transformer, sections 3.2 and 3.3, https://arxiv.org/abs/2107.02192
"""

from typing import Any

import torch
from torch import nn
from torch.types import Device

from ._numerics import wide_dtype
from ._qkv import split_heads, split_prefix
from ._rel_bias import OffsetBias
from ._rope import Rope
from ._window import window_attention, window_attention_naive
from .base import QKVMixer, register_mixer
from .softmax import softmax_attention, softmax_naive

__all__ = ['LongShort', 'long_short_attention', 'long_short_naive']


def long_short_naive(
    x: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dynamic_proj: nn.Linear | None,
    norm_full: nn.LayerNorm | None,
    norm_landmarks: nn.LayerNorm | None,
    grid_size: tuple[int, int],
    window_size: int,
    halo: int,
    scale: float,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """The formula line by line, with its window segment by segment; arguments as `long_short_attention`."""
    heads, P = q.shape[1], q.shape[2] - grid_size[0] * grid_size[1]

    def layer_norm(norm: nn.LayerNorm | None, x: torch.Tensor) -> torch.Tensor:
        if norm is None:
            return x
        x = x.transpose(1, 2).flatten(2)
        x = (x - x.mean(dim=-1, keepdim=True)) / (x.var(dim=-1, keepdim=True, correction=0) + norm.eps).sqrt()
        return (x * norm.weight + norm.bias).unflatten(2, (heads, -1)).transpose(1, 2)

    k, v = layer_norm(norm_full, k), layer_norm(norm_full, v)
    k_shared, v_shared = k[:, :, :P], v[:, :, :P]
    if dynamic_proj is not None:
        logits = x[:, P:] @ dynamic_proj.weight.T + dynamic_proj.bias
        proj = logits.unflatten(2, (heads, -1)).permute(0, 2, 3, 1).softmax(dim=-1)  # (B, heads, r, H*W)
        k_shared = torch.cat([layer_norm(norm_landmarks, proj @ k[:, :, P:]), k_shared], dim=2)
        v_shared = torch.cat([layer_norm(norm_landmarks, proj @ v[:, :, P:]), v_shared], dim=2)
    grid = window_attention_naive(
        q[:, :, P:], k[:, :, P:], v[:, :, P:], k_shared, v_shared,
        grid_size, window_size, halo, scale, bias, None, dropout_p,
    )  # fmt: skip
    k_prefix, v_prefix = (torch.cat([x[:, :, :P], grid], dim=2) for x in (k, v))
    return torch.cat([softmax_naive(q[:, :, :P], k_prefix, v_prefix, scale), grid], dim=2)


def long_short_attention(
    x: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dynamic_proj: nn.Linear | None,
    norm_full: nn.LayerNorm | None,
    norm_landmarks: nn.LayerNorm | None,
    grid_size: tuple[int, int],
    window_size: int,
    halo: int,
    scale: float,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """x (B, P + H*W, dim) and q, k, v (B, heads, P + H*W, d), the first P tokens global -> (B, heads, P + H*W, d).

    W_P is `dynamic_proj`, LN is `norm_full`, and LN_dp is `norm_landmarks`; there is no low-rank projection if
    `dynamic_proj` is None, and no DualLN if the norms are. `bias` is (heads, w*w, (w + 2 halo)^2).
    """
    P = q.shape[2] - grid_size[0] * grid_size[1]
    k, v = _norm_tokens(norm_full, k), _norm_tokens(norm_full, v)
    if dynamic_proj is not None:
        # by heads, a copy that the product with the projection would make and keep, too
        k, v = k.contiguous(), v.contiguous()
    (q_prefix, q_grid), (k_prefix, k_grid), (v_prefix, v_grid) = (split_prefix(x, P) for x in (q, k, v))
    k_shared, v_shared = k_prefix, v_prefix
    if dynamic_proj is not None:
        proj = split_heads(dynamic_proj(x[:, P:]), q.shape[1])  # (B, heads, H*W, r)
        proj = proj.softmax(dim=2, dtype=wide_dtype(x)).to(v.dtype).mT
        k_shared = torch.cat([_norm_tokens(norm_landmarks, proj @ k_grid), k_prefix], dim=2)
        v_shared = torch.cat([_norm_tokens(norm_landmarks, proj @ v_grid), v_prefix], dim=2)
    grid = window_attention(
        q_grid, k_grid, v_grid, k_shared, v_shared, grid_size, window_size, halo, scale, bias, None, dropout_p
    )
    if P == 0:
        return grid
    keys, values = (torch.cat([x, grid.to(x.dtype)], dim=2) for x in (k_prefix, v_prefix))
    prefix = softmax_attention(q_prefix, keys, values, scale)
    return torch.cat([prefix, grid.to(prefix.dtype)], dim=2)


def _norm_tokens(norm: nn.LayerNorm | None, x: torch.Tensor) -> torch.Tensor:
    """Normalize each token of (B, heads, N, d) over all heads together."""
    if norm is None:
        return x
    B, heads, N, d = x.shape
    # rows of one matrix, because compiled code fails in the backward pass of a layer norm of transposed tokens
    rows = norm(x.transpose(1, 2).reshape(B * N, heads * d)).to(x.dtype)
    return split_heads(rows.view(B, N, heads * d), heads)


@register_mixer('ls')
class LongShort(QKVMixer):
    """Long-short attention with `window_size` (the paper's w) and `rank` (r; 0 disables the low-rank projection).

    `rel_bias` is 'none', 'table' (one row per offset), or 'nvidia': the index of the published ViL-LS models, in which
    different offsets share rows (361 offsets on 253 rows at w = 7). The table belongs to the window, not to the grid.
    `dual_norm=False` leaves DualLN out, so that keys and values inherited from softmax attention keep their scale. The
    `parts` are 'local', without the low-rank projection, and 'global', without the window.
    """

    attn_weights = True
    has_rel_bias = True
    start_arguments = {'dual_norm': False}
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
        dual_norm: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if rel_bias not in ('none', 'table', 'nvidia'):
            raise ValueError(f"rel_bias of ls is 'none', 'table' or 'nvidia', not {rel_bias!r}.")
        if window_size < 1 or rank < 0:
            raise ValueError(f'ls needs window_size >= 1 and rank >= 0, not {window_size} and {rank}.')
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.window_size = window_size
        self.halo = max(1, window_size // 2)
        self.rank = rank
        self.parts = ('local', 'global') if rank else ()
        self.dynamic_proj = nn.Linear(dim, num_heads * rank, **dd) if rank else None
        self.norm_full = nn.LayerNorm(dim, **dd) if dual_norm else None
        self.norm_landmarks = nn.LayerNorm(dim, **dd) if rank and dual_norm else None
        self.rel_bias = None
        if rel_bias != 'none':
            row_stride = window_size + 2 * self.halo if rel_bias == 'nvidia' else None
            window = (window_size, window_size)
            self.rel_bias = OffsetBias(num_heads, window, halo=self.halo, row_stride=row_stride, **dd)

    def implied_arguments(self) -> dict[str, Any]:
        if self.rel_bias is None:
            return {'rel_bias': 'none'}
        return {'rel_bias': 'table' if self.rel_bias.row_stride is None else 'nvidia'}

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int], rope: Rope | None = None) -> torch.Tensor:
        q, k, v = self.to_qkv(x, grid_size, rope)
        bias = self.rel_bias() if self.rel_bias is not None else None
        dynamic_proj = None if self.part == 'local' else self.dynamic_proj
        if self.part == 'global':
            window = self.window_size**2, (self.window_size + 2 * self.halo) ** 2
            bias = q.new_full((1, *window), -torch.inf)
        x = self.op(
            x, q, k, v, dynamic_proj, self.norm_full, self.norm_landmarks,
            grid_size, self.window_size, self.halo, self.scale, bias, self.dropout_p,
        )  # fmt: skip
        return self.project(x)
