"""InLine attention: linear attention whose scores are made to sum to 1 by subtraction, with a local residual.

    out_i = sum_j (s_ij - mean_j s_ij + 1 / N) v_j + sum_{j near i} r_{j - i} v_j,  s_ij = scale / N * q_i . k_j

where the 3 x 3 kernel r of each channel is a two-layer network of the mean of the tokens. Linear in the number of
tokens: O(N dim head_dim). Scores can be negative. The sums do not depend on the order of tokens, so the first term
applies to a grid unchanged, and prefix tokens are ordinary tokens in it and in the mean; the second is on the grid
only, padded with zeros. A constant added to all keys changes nothing. Scores are divided by N as in the official code;
the paper does not divide them, which `mean_scores=False` reproduces: the outputs then grow with N, and exceed float16
for large tokens (of standard deviation 10). Bridging the Divide: Reconsidering Softmax and Linear Attention, sections
4.1 and 4.2, https://arxiv.org/abs/2412.06590
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._grid_conv import convolve_samples
from ._kernel_mixer import KernelMixer
from ._numerics import sum_products, wide_dtype
from ._recompute import recompute_heads
from .base import no_autocast, register_mixer

__all__ = ['InLine', 'inline_attention', 'inline_naive']


def inline_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kernels: torch.Tensor | None,
    grid_size: tuple[int, int],
    scale: float,
) -> torch.Tensor:
    """The N x N attention matrix, and a convolution of each sample; arguments as `inline_attention`."""
    (B, heads, N, d), P = q.shape, q.shape[2] - grid_size[0] * grid_size[1]
    scores = scale * q @ k.mT
    out = (scores - scores.mean(dim=-1, keepdim=True) + 1 / N) @ v
    if kernels is None:
        return out
    samples = []
    for image, kernel in zip(v[:, :, P:].mT.reshape(B, heads * d, *grid_size), kernels):
        local = F.conv2d(image, kernel.reshape(heads * d, 1, 3, 3), padding=1, groups=heads * d)
        samples.append(local.reshape(heads, d, -1).mT)
    return torch.cat([out[:, :, :P], out[:, :, P:] + torch.stack(samples)], dim=2)


def inline_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kernels: torch.Tensor | None,
    grid_size: tuple[int, int],
    scale: float,
) -> torch.Tensor:
    """q, k, v (B, heads, N, d) and kernels (B, heads, d, 9) -> (B, heads, N, d), in float32 or wider.

    The last H*W tokens are the grid.
    """
    # keys without their mean, the output before its mean is added, and the nine neighbours of the local term
    num_elements = (3 if kernels is None else 10) * q.shape[2] * q.shape[3]
    tensors = (q, k, v) if kernels is None else (q, k, v, kernels)
    return recompute_heads(partial(_attend, grid_size=grid_size, scale=scale), tensors, num_elements)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kernels: torch.Tensor | None = None,
    *,
    grid_size: tuple[int, int],
    scale: float,
) -> torch.Tensor:
    with no_autocast(q):
        dtype = wide_dtype(q)
        q, k, v_wide, N = q.to(dtype), k.to(dtype), v.to(dtype), q.shape[2]
        mean = v_wide.mean(dim=2, keepdim=True)
        # scores of keys without their mean sum to 0
        context = sum_products(k - k.mean(dim=2, keepdim=True), v_wide)  # (B, heads, d, d)
        out = q @ (scale * context) + mean
        if kernels is not None:
            grid = v_wide[:, :, N - grid_size[0] * grid_size[1] :]
            local = convolve_samples(grid, kernels.to(dtype).mT, grid_size)
            out = out + F.pad(local, (0, 0, N - local.shape[2], 0))
        return out.to(v.dtype)


@register_mixer('inline')
class InLine(KernelMixer):
    """InLine attention.

    `residual` adds the local term, without which it has no parameters of its own, and `mean_scores` divides the scores
    by the number of tokens.
    """

    ignores_mean_key = True
    start_arguments = {'dwc': 'v', 'residual': False}
    op = staticmethod(inline_attention)
    op_naive = staticmethod(inline_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        residual: bool = True,
        mean_scores: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        self.mean_scores = mean_scores
        self.residual = None
        self.token_weights = not residual and self.dwc_v is None
        if residual:
            dd: dict[str, Any] = {'groups': num_heads, 'device': device, 'dtype': dtype}
            self.residual = nn.Sequential(nn.Conv1d(dim, dim, 1, **dd), nn.GELU(), nn.Conv1d(dim, 9 * dim, 1, **dd))

    def mix_input(
        self, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]
    ) -> torch.Tensor:
        kernels = None
        if self.residual is not None:
            mean = x.mean(dim=1).unsqueeze(-1)  # (B, dim, 1)
            kernels = self.residual(mean).reshape(-1, self.num_heads, self.head_dim, 9)
        return self.op(q, k, v, kernels, grid_size, self.factor(q))

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        """The form without the residual, which depends only on q, k and v."""
        return self.op(q, k, v, None, grid_size, self.factor(q))

    def factor(self, q: torch.Tensor) -> float:
        """The factor of the scores of queries (B, heads, N, d)."""
        return self.scale / q.shape[2] if self.mean_scores else self.scale
