"""PoolFormer's pooling: the mean of a token's neighbourhood minus the token.

    out_i = mean of x_j over the k x k positions around i inside the grid - x_i

There are no parameters. Linear in the number of tokens: O(N k^2 dim) additions and no multiplication. PoolFormer has no
prefix tokens: here the neighbourhood of a prefix token is the whole grid and itself, and grid tokens do not depend on
prefix tokens. MetaFormer Is Actually What You Need for Vision, equation 4, https://arxiv.org/abs/2111.11418
"""

from typing import Any

import torch
from torch.nn import functional as F

from ._numerics import wide_dtype
from .base import ParameterFreeMixer, no_autocast, register_mixer

__all__ = ['Pool', 'pool', 'pool_naive']


def pool_naive(x: torch.Tensor, grid_size: tuple[int, int], pool_size: int) -> torch.Tensor:
    """Token by token; arguments as `pool`."""
    (H, W), halo = grid_size, pool_size // 2
    P = x.shape[1] - H * W
    image = x[:, P:].unflatten(1, grid_size)
    out = [(x[:, p] + x[:, P:].sum(dim=1)) / (1 + H * W) for p in range(P)]
    for i in range(H):
        for j in range(W):
            near = image[:, max(i - halo, 0) : i + halo + 1, max(j - halo, 0) : j + halo + 1]
            out.append(near.mean(dim=(1, 2)))
    return torch.stack(out, dim=1) - x


def pool(x: torch.Tensor, grid_size: tuple[int, int], pool_size: int) -> torch.Tensor:
    """Tokens (B, P + H*W, C) -> the same shape, in float32 or wider."""
    num_grid = grid_size[0] * grid_size[1]
    with no_autocast(x):
        wide = x.to(wide_dtype(x))
        prefix, grid = wide.split([x.shape[1] - num_grid, num_grid], dim=1)
        image = grid.mT.unflatten(2, grid_size)  # (B, C, H, W)
        if image.is_cuda:
            # the gradient for channels_last is wrong: https://github.com/pytorch/pytorch/issues/188344
            image = image.contiguous()
        near = F.avg_pool2d(image, pool_size, stride=1, padding=pool_size // 2, count_include_pad=False)
        prefix = (prefix + grid.sum(dim=1, keepdim=True)) / (1 + num_grid)
        return (torch.cat([prefix, near.flatten(2).mT], dim=1) - wide).to(x.dtype)


@register_mixer('pool')
class Pool(ParameterFreeMixer):
    """Average pooling over `pool_size` x `pool_size` places, less the token; it has no projections and no heads."""

    op = staticmethod(pool)
    op_naive = staticmethod(pool_naive)

    def __init__(self, dim: int, num_heads: int, *, pool_size: int = 3, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if pool_size < 1 or pool_size % 2 == 0:
            raise ValueError(f'pool_size must be odd and at least 1, not {pool_size}.')
        self.pool_size = pool_size

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.proj_drop(self.op(x, grid_size, self.pool_size))
