"""Vision Longformer attention: 2-D sliding chunks, with global tokens and relative bias.

    out_i = sum_{j in prefix + near(i)} softmax_j(scale * q_i . k_j + bias_ij) v_j   for i in the grid
    out_i = sum_j softmax_j(scale * q_i . k_j + bias_ij) v_j                         for i in the prefix

The grid is cut into w x w chunks, and near(i) is the chunk of i and the 8 around it. Prefix tokens are global. Queries,
keys and values of the prefix tokens are projected by the same layers (`sharew` of the authors' code). Where the grid
has no more than two chunks a side it is softmax attention. Linear in the number of tokens: O(N (9 w^2 + P) dim).
Multi-Scale Vision Longformer, section 3.2, https://arxiv.org/abs/2103.15358
"""

import torch

from ._rel_bias import OffsetBias, PrefixBias
from ._window import window_attention, window_attention_naive
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
) -> torch.Tensor:
    """Chunk by chunk; arguments as `longformer_attention`."""
    return _longformer(
        window_attention_naive, softmax_naive,
        q, k, v, grid_size, window_size, scale, bias, bias_queries, bias_keys, dropout_p,
    )  # fmt: skip


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
) -> torch.Tensor:
    """q, k, v (B, heads, P + H*W, d), the first P tokens global -> (B, heads, P + H*W, d).

    Biases: between the tokens of neighbouring chunks (heads, w*w, 9*w*w), of prefix queries on all keys (heads, P, P +
    H*W), of grid queries on prefix keys (heads, P).
    """
    return _longformer(
        window_attention, softmax_attention,
        q, k, v, grid_size, window_size, scale, bias, bias_queries, bias_keys, dropout_p,
    )  # fmt: skip


def _longformer(window_op, global_op, q, k, v, grid_size, window_size, scale, bias, bias_queries, bias_keys, dropout_p):
    P = q.shape[2] - grid_size[0] * grid_size[1]
    grid = window_op(
        q[:, :, P:], k[:, :, P:], v[:, :, P:], k[:, :, :P], v[:, :, :P],
        grid_size, window_size, window_size, scale, bias, bias_keys, dropout_p,
    )  # fmt: skip
    if P == 0:
        return grid
    prefix = global_op(q[:, :, :P], k, v, scale, bias_queries, dropout_p)
    return torch.cat([prefix, grid], dim=2)


@register_mixer('longformer')
class Longformer(QKVMixer):
    """2-D sliding chunk attention of Vision Longformer with `window_size` x `window_size` chunks.

    `rel_bias` is 'none' or 'table'. The table belongs to the window, so no parameter is bound to the grid.
    """

    attn_weights = True
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
        device=None,
        dtype=None,
        **kwargs,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if rel_bias not in ('none', 'table'):
            raise ValueError(f"rel_bias of longformer is 'none' or 'table', not {rel_bias!r}.")
        if window_size < 1:
            raise ValueError(f'window_size must be at least 1, not {window_size}.')
        dd = {'device': device, 'dtype': dtype}
        # a bias that ends with the window has no counterpart in attention over all tokens
        self.approximates_softmax = rel_bias == 'none'
        self.window_size = window_size
        window = (window_size, window_size)
        self.rel_bias = OffsetBias(num_heads, window, halo=window_size, **dd) if rel_bias == 'table' else None
        has_prefix = self.rel_bias is not None and self.num_prefix_tokens
        self.prefix_bias = PrefixBias(num_heads, self.num_prefix_tokens, **dd) if has_prefix else None

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        bias = self.rel_bias() if self.rel_bias is not None else None
        bias_queries = bias_keys = None
        if self.prefix_bias is not None:
            bias_queries = self.prefix_bias.queries(grid_size[0] * grid_size[1])
            bias_keys = self.prefix_bias.keys()
        return self.op(q, k, v, grid_size, self.window_size, self.scale, bias, bias_queries, bias_keys, self.dropout_p)
