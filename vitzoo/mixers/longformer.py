"""Vision Longformer attention: 2-D sliding chunks, with global tokens and relative bias.

    out_i = sum_{j in prefix + near(i)} softmax_j(scale * q_i . k_j + bias_ij) v_j   for i in the grid
    out_i = sum_j softmax_j(scale * q'_i . k'_j + bias_ij) v'_j                      for i in the prefix

The grid is divided into w x w chunks, and near(i) is the chunk of i and the 8 around it; with `exact` (SW_EXACT 1 of
the authors' code), the tokens at most w rows and w columns away; with `random_shift` (MODE 1), in training, the chunk
of i and one of the 8. Prefix tokens are global. Their q', k', v' are q, k, v (sharew) or, with `global_proj`, come from
separate linear layers, also if q, k and v are convolutional, and have a separate output projection. On a grid of at
most two chunks per side (with `exact`, w + 1 tokens), with shared projections, it is softmax attention. Linear in the
number of tokens: O(N (9 w^2 + P) dim). Multi-Scale Vision Longformer, section 3.2, https://arxiv.org/abs/2103.15358;
projections of global tokens: Longformer, https://arxiv.org/abs/2004.05150
"""

from typing import Any

import torch
from torch import nn
from torch.types import Device

from ._qkv import split_heads, split_prefix, split_qkv
from ._random_shift import draw_neighbor, shifted_attention
from ._rel_bias import OffsetBias, PrefixBias
from ._rope import Rope
from ._window import window_attention
from .base import QKVMixer, register_mixer
from .softmax import softmax_attention, softmax_naive

__all__ = ['Longformer', 'longformer_attention', 'longformer_naive']


def longformer_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grid_size: tuple[int, int],
    window_size: int,
    scale: float,
    bias: torch.Tensor | None = None,
    bias_queries: torch.Tensor | None = None,
    bias_keys: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    exact: bool = False,
    neighbor: torch.Tensor | None = None,
    q_global: torch.Tensor | None = None,
    k_global: torch.Tensor | None = None,
    v_global: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention of the grid, with its mask and bias written out, and of the prefix; arguments as
    `longformer_attention`."""
    (H, W), w = grid_size, window_size
    P, token = q.shape[2] - H * W, torch.arange(H * W, device=q.device)
    y, x = token // W, token % W
    # distance in chunks from query to key
    down, right = (place // w - (place // w).unsqueeze(1) for place in (y, x))
    if exact:
        near = torch.maximum((y - y.unsqueeze(1)).abs(), (x - x.unsqueeze(1)).abs()) <= w
    elif neighbor is None:
        near = torch.maximum(down.abs(), right.abs()) <= 1
    else:
        near = (down == 0) & (right == 0) | (down == neighbor // 3 - 1) & (right == neighbor % 3 - 1)
    i, j = near.nonzero(as_tuple=True)
    dense = q.new_full((q.shape[1], H * W, P + H * W), float('-inf'))
    dense[:, :, :P] = 0 if bias_keys is None else bias_keys.unsqueeze(1)
    if bias is None:
        dense[:, i, P + j] = 0
    else:
        place_q = y[i] % w * w + x[i] % w
        place_k = (down[i, j] * w + w + y[j] % w) * 3 * w + right[i, j] * w + w + x[j] % w
        dense[:, i, P + j] = bias[:, place_q, place_k]
    grid = softmax_naive(q[:, :, P:], k, v, scale, dense, dropout_p)
    if q_global is None or k_global is None or v_global is None:
        q_global, k_global, v_global = q[:, :, :P], k, v
    return torch.cat([softmax_naive(q_global, k_global, v_global, scale, bias_queries, dropout_p), grid], dim=2)


def longformer_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grid_size: tuple[int, int],
    window_size: int,
    scale: float,
    bias: torch.Tensor | None = None,
    bias_queries: torch.Tensor | None = None,
    bias_keys: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    exact: bool = False,
    neighbor: torch.Tensor | None = None,
    q_global: torch.Tensor | None = None,
    k_global: torch.Tensor | None = None,
    v_global: torch.Tensor | None = None,
) -> torch.Tensor:
    """q, k, v (B, heads, P + H*W, d), the first P tokens global -> (B, heads, P + H*W, d).

    `bias` (heads, w*w, 9*w*w) is between tokens of neighbouring chunks, `bias_queries` (heads, P, P + H*W) of prefix
    queries on all keys, `bias_keys` (heads, P) of grid queries on prefix keys. `neighbor` is the result of
    `draw_neighbor`. Prefix tokens use `q_global` (B, heads, P, d), `k_global` and `v_global` if given.
    """
    P = q.shape[2] - grid_size[0] * grid_size[1]
    (q_prefix, q_grid), (k_prefix, k_grid), (v_prefix, v_grid) = (split_prefix(x, P) for x in (q, k, v))
    local = q_grid, k_grid, v_grid, k_prefix, v_prefix, grid_size, window_size
    if neighbor is not None:
        grid = shifted_attention(*local, neighbor, scale, bias, bias_keys, dropout_p)
    else:
        bias = _within(bias, window_size, q) if exact else bias
        grid = window_attention(*local, window_size, scale, bias, bias_keys, dropout_p)
    if P == 0:
        return grid
    if q_global is None or k_global is None or v_global is None:
        q_global, k_global, v_global = q_prefix, k, v
    return torch.cat([softmax_attention(q_global, k_global, v_global, scale, bias_queries, dropout_p), grid], dim=2)


def _within(bias: torch.Tensor | None, window_size: int, q: torch.Tensor) -> torch.Tensor:
    """The bias (heads or 1, w*w, 9*w*w), -inf for keys more than w rows or columns away from the query."""
    w = window_size
    query, key = torch.arange(w, device=q.device), torch.arange(-w, 2 * w, device=q.device)
    near = (query[:, None] - key).abs() <= w  # (w, 3w)
    near = (near[:, None, :, None] & near[None, :, None, :]).flatten(2).flatten(0, 1)
    if bias is None:
        bias = q.new_zeros(1, *near.shape)
    return bias.masked_fill(~near, float('-inf'))


@register_mixer('longformer')
class Longformer(QKVMixer):
    """2-D sliding chunk attention of Vision Longformer with `window_size` x `window_size` chunks.

    `rel_bias` is 'none' or 'table'. The table belongs to the window, so no parameter is bound to the grid. `exact`
    limits attention to `window_size` rows and columns around each token. `random_shift` makes training cheaper, only in
    the first `shift_steps` optimizer steps if given (the authors: three quarters of all; a training loop other than
    `vitzoo train` calls `vitzoo.set_step` for this); in evaluation all 9 chunks are attended. `global_proj` adds
    separate projections for prefix tokens.
    """

    attn_weights = True
    token_weights = True
    has_rel_bias = True
    op = staticmethod(longformer_attention)
    op_naive = staticmethod(longformer_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        window_size: int = 7,
        rel_bias: str = 'none',
        exact: bool = False,
        random_shift: bool = False,
        shift_steps: int | None = None,
        global_proj: bool = False,
        qkv_bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias=qkv_bias, device=device, dtype=dtype, **kwargs)
        if rel_bias not in ('none', 'table'):
            raise ValueError(f"rel_bias of longformer is 'none' or 'table', not {rel_bias!r}.")
        if window_size < 1:
            raise ValueError(f'window_size must be at least 1, not {window_size}.')
        if random_shift and exact:
            raise ValueError('random_shift attends whole chunks and exact attends parts of them; choose one.')
        if shift_steps is not None and not random_shift:
            raise ValueError(f'shift_steps={shift_steps} has an effect only with random_shift; set random_shift=True.')
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.window_size = window_size
        self.exact = exact
        self.random_shift = random_shift
        self.shift_steps = shift_steps
        window = (window_size, window_size)
        self.rel_bias = OffsetBias(num_heads, window, halo=window_size, **dd) if rel_bias == 'table' else None
        has_prefix = self.rel_bias is not None and self.num_prefix_tokens
        self.prefix_bias = PrefixBias(num_heads, self.num_prefix_tokens, **dd) if has_prefix else None
        self.q_global = self.kv_global = self.proj_global = None
        if global_proj and self.num_prefix_tokens:
            self.q_global = nn.Linear(dim, dim, bias=qkv_bias, **dd)
            self.kv_global = nn.Linear(dim, 2 * dim, bias=qkv_bias, **dd)
            self.proj_global = nn.Linear(dim, dim, **dd)
        # prefix tokens take values from kv_global, not from the v of mix
        self.token_weights = self.q_global is None
        # attention over all tokens has no equivalent of a bias limited to the window or of a second set of keys
        self.approximates_softmax = rel_bias == 'none' and self.q_global is None

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int], rope: Rope | None = None) -> torch.Tensor:
        q, k, v = self.to_qkv(x, grid_size, rope)
        return self.project(self.mix(q, k, v, grid_size, *self.to_global_qkv(x, rope)))

    def mix(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int], *global_qkv: torch.Tensor
    ) -> torch.Tensor:
        """`global_qkv` is the result of `to_global_qkv`; without it the projections are shared."""
        bias = self.rel_bias() if self.rel_bias is not None else None
        bias_queries = bias_keys = None
        if self.prefix_bias is not None:
            bias_queries = self.prefix_bias.queries(grid_size[0] * grid_size[1])
            bias_keys = self.prefix_bias.keys()
        neighbor = draw_neighbor(q.device) if self.training and self.random_shift else None
        return self.op(
            q, k, v, grid_size, self.window_size, self.scale, bias, bias_queries, bias_keys, self.dropout_p,
            self.exact, neighbor, *global_qkv,
        )  # fmt: skip

    def to_global_qkv(self, x: torch.Tensor, rope: Rope | None = None) -> tuple[torch.Tensor, ...]:
        """Queries of the prefix tokens and the keys and values that they attend; empty if projections are shared."""
        if self.q_global is None or self.kv_global is None:
            return ()
        q = split_heads(self.q_global(x[:, : self.num_prefix_tokens]), self.num_heads)
        k, v = (split_heads(part, self.num_heads) for part in self.kv_global(x).chunk(2, dim=-1))
        q, k = self.norm_qk(q, k)
        if rope is not None:
            k = rope.rotate(k)
        return q.to(v.dtype), k.to(v.dtype), v

    def project(self, x: torch.Tensor) -> torch.Tensor:
        if self.proj_global is None:
            return super().project(x)
        x = self.scale_norm(x.transpose(1, 2).flatten(2))
        prefix, grid = x[:, : self.num_prefix_tokens], x[:, self.num_prefix_tokens :]
        return self.proj_drop(torch.cat([self.proj_global(prefix), self.proj(grid)], dim=1))

    def inherit_from(self, parent: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, tuple[str, ...]]]:
        """The projections of prefix tokens, which start as copies of the others (Longformer, section 3.1)."""
        inherited = super().inherit_from(parent)
        copied = (
            {} if self.q_global is None else split_qkv(parent, self.dim, q_global=slice(0, 1), kv_global=slice(1, 3))
        )
        if copied:
            copied |= {
                f'proj_global.{kind}': (parent[name], (name,))
                for kind in ('weight', 'bias')
                if (name := f'proj.{kind}') in parent
            }
        return {**inherited, **copied}

    def to_qkv(
        self, x: torch.Tensor, grid_size: tuple[int, int], rope: Rope | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if self.shift_steps is not None:
            self.warn_without_step(f'shift_steps={self.shift_steps}')
        return super().to_qkv(x, grid_size, rope)

    def set_step(self, step: int) -> None:
        super().set_step(step)
        if self.shift_steps is not None:
            self.random_shift = step < self.shift_steps
