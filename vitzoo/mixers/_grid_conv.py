"""Depthwise convolutions of the grid tokens of queries, keys or values."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._depthwise_conv import depthwise_conv

__all__ = ['GridConv', 'convolve_samples', 'grid_conv_naive', 'near_tokens']


class GridConv(nn.Conv2d):
    """Depthwise `kernel_size` x `kernel_size` convolution of (B, heads, P + H*W, d); prefix tokens give 0.

    With `channels` = heads * d every channel has its own kernel; with `channels` = d all heads share them. The grid is
    padded with zeros. `zero_init` starts the kernels at 0. Raises ValueError if `kernel_size` is even.
    """

    def __init__(
        self,
        channels: int,
        kernel_size: int,
        *,
        bias: bool = True,
        zero_init: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.zero_init = zero_init
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f'A convolution centred on each token needs an odd kernel size, not {kernel_size}.')
        super().__init__(
            channels,
            channels,
            kernel_size,
            padding=kernel_size // 2,
            groups=channels,
            bias=bias,
            device=device,
            dtype=dtype,
        )

    def reset_parameters(self) -> None:
        # timm calls this again after the layers are built
        super().reset_parameters()
        if self.zero_init:
            nn.init.zeros_(self.weight)

    # other arguments than nn.Conv2d's
    def forward(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:  # type: ignore[override]
        B, heads, N, d = x.shape
        P = N - grid_size[0] * grid_size[1]
        x = x[:, :, P:]
        # the channels stay last in memory, where the convolution takes half as long, for one sample, too: a transpose
        # before the grid is unflattened would leave it a stride that PyTorch takes for another order
        image = x.transpose(1, 2).flatten(2) if self.in_channels == heads * d else x.flatten(0, 1).contiguous()
        image = image.unflatten(1, grid_size).permute(0, 3, 1, 2)
        grid = depthwise_conv(image, self.weight, self.bias).reshape(B, heads, d, N - P).mT
        return F.pad(grid, (0, 0, P, 0)) if P else grid


def grid_conv_naive(conv: GridConv, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    """The sum over the offsets of the kernel; arguments as `GridConv.forward`."""
    (N, d), (H, W) = x.shape[2:], grid_size
    P, reach = N - H * W, conv.kernel_size[0] // 2
    kernels = conv.weight.squeeze(1).unflatten(0, (-1, d))  # (heads or 1, d, k, k)
    padded = F.pad(x[:, :, P:].unflatten(2, grid_size), (0, 0, reach, reach, reach, reach))
    out = torch.zeros_like(x[:, :, P:]).unflatten(2, grid_size)
    for dy in range(2 * reach + 1):
        for dx in range(2 * reach + 1):
            out = out + kernels[:, None, None, :, dy, dx] * padded[:, :, dy : dy + H, dx : dx + W]
    if conv.bias is not None:
        out = out + conv.bias.reshape(-1, 1, 1, d)
    return torch.cat([torch.zeros_like(x[:, :, :P]), out.flatten(2, 3)], dim=2)


def near_tokens(x: torch.Tensor, grid_size: tuple[int, int]) -> list[torch.Tensor]:
    """The 3 x 3 tokens around each token of (..., H*W, d), zero outside the grid, as nine views (..., H, W, d)."""
    H, W = grid_size
    padded = F.pad(x.unflatten(-2, grid_size), (0, 0, 1, 1, 1, 1))
    return [padded[..., dy : dy + H, dx : dx + W, :] for dy in range(3) for dx in range(3)]


def convolve_samples(x: torch.Tensor, kernels: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
    """Grid tokens (..., H*W, d) convolved with 3 x 3 kernels (..., 9, d), which differ between samples.

    A grouped convolution would have the batch in its number of groups, which cannot be compiled for any batch size.
    """
    weights = [weight[..., None, None, :] for weight in kernels.contiguous().unbind(-2)]
    near = near_tokens(x, grid_size)
    out = weights[0] * near[0]
    for weight, tokens in zip(weights[1:], near[1:]):
        # in place, because a new tensor for each term takes longer than the product
        out.addcmul_(weight, tokens)
    return out.flatten(-3, -2)
