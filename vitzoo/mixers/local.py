"""Local 2-D attention of the Image Transformer: blocks of queries, each with a rectangular memory block around it.

    out_i = sum_{j in M(i)} softmax_j(scale * q_i . k_j) v_j

M(i) is the b x b query block of token i and a halo of h tokens on every side of it. The paper generates pixels in
raster order, so its memory lies above and to the left; here nothing is causal and the memory surrounds the block.
Prefix tokens are global: every token attends them and they attend every token. If one block covers the grid it is
softmax attention. Linear in the number of tokens: O(N ((b + 2h)^2 + P) dim). Image Transformer, section 3.2 "2D Local
Attention", https://arxiv.org/abs/1802.05751
"""

from typing import Any

import torch

from ._window import window_attention
from .base import QKVMixer, register_mixer
from .softmax import prepend_global_tokens, softmax_naive

__all__ = ['Local', 'local_attention', 'local_naive']


def local_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grid_size: tuple[int, int],
    block_size: int,
    memory_halo: int,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Softmax attention under a dense N x N mask; arguments as `local_attention`."""
    (H, W), b, h = grid_size, block_size, memory_halo
    P, token = q.shape[2] - H * W, torch.arange(H * W, device=q.device)

    def in_memory(place: torch.Tensor) -> torch.Tensor:
        first = (place // b * b).unsqueeze(1)
        return (place >= first - h) & (place < first + b + h)

    bias = q.new_zeros(P + H * W, P + H * W)
    bias[P:, P:].masked_fill_(~(in_memory(token // W) & in_memory(token % W)), float('-inf'))
    return softmax_naive(q, k, v, scale, bias, dropout_p)


def local_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grid_size: tuple[int, int],
    block_size: int,
    memory_halo: int,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """q, k, v (B, heads, P + H*W, d), the first P tokens global -> (B, heads, P + H*W, d)."""
    P = q.shape[2] - grid_size[0] * grid_size[1]
    grid = window_attention(
        q[:, :, P:], k[:, :, P:], v[:, :, P:], k[:, :, :P], v[:, :, :P],
        grid_size, block_size, memory_halo, scale, None, None, dropout_p,
    )  # fmt: skip
    return prepend_global_tokens(grid, q, k, v, scale, dropout_p)


@register_mixer('local')
class Local(QKVMixer):
    """2-D local attention in `block_size` x `block_size` blocks with a memory of `memory_halo` tokens on every side."""

    attn_weights = True
    approximates_softmax = True
    token_weights = True
    op = staticmethod(local_attention)
    op_naive = staticmethod(local_naive)

    def __init__(self, dim: int, num_heads: int, *, block_size: int = 7, memory_halo: int = 3, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if block_size < 1 or memory_halo < 0:
            raise ValueError(f'local needs block_size >= 1 and memory_halo >= 0, not {block_size} and {memory_halo}.')
        self.block_size = block_size
        self.memory_halo = memory_halo

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v, grid_size, self.block_size, self.memory_halo, self.scale, self.dropout_p)
