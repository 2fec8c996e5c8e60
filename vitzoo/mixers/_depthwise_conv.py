"""Depthwise convolution with a fast gradient of its filters on a CPU.

PyTorch's takes 10 to 60 times as long as the convolution, for filters of 5 x 5 and more. The gradient of a filter is
the product of the image and the gradient of the output at each offset, which is another depthwise convolution: of the
image of each sample and channel, with the gradient as its filter.
"""

from typing import Any

import torch
from torch.nn import functional as F

from ._numerics import is_compiled, is_empty, needs_gradient, no_autocast, wide_dtype

__all__ = ['depthwise_conv']

# the smallest filters whose gradient is faster here
_LEAST_SIZE = 5
# the largest filters that are fast on a GPU with the channels last in memory
_LARGEST_SIZE = 5
# elements of the image whose planes are copied at once, 4 MB in float32
_COPIED = 2**20


def depthwise_conv(image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Image (B, C, H, W), filters (C, 1, k, k) with odd k and bias (C,) -> (B, C, H, W), padded with zeros."""
    if not _is_faster(image, weight):
        return _convolve(image, weight, bias)
    if torch.is_autocast_enabled('cpu') and image.dtype != torch.float64:
        # as autocast casts the arguments of a convolution, before it keeps them for the backward pass
        dtype = torch.get_autocast_dtype('cpu')
        image, weight = image.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    return _DepthwiseConv.apply(image, weight, bias)


def _is_faster(image: torch.Tensor, weight: torch.Tensor) -> bool:
    if image.device.type != 'cpu' or is_compiled() or is_empty(image):
        return False
    size = weight.shape[-1]
    # on a strip, most offsets of the filters are beyond the image
    is_image = min(image.shape[2:]) > size // 2
    return needs_gradient(weight) and size >= _LEAST_SIZE and is_image


def _convolve(image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    reach = weight.shape[-1] // 2
    if image.is_cuda and weight.shape[-1] > _LARGEST_SIZE:
        image = image.contiguous()
    # torch.jit.trace of PyTorch 2.6 refuses a single number
    return F.conv2d(image, weight, bias, padding=(reach, reach), groups=len(weight))


class _DepthwiseConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(image, weight)
        return _convolve(image, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        image, weight = ctx.saved_tensors
        # backward may be called within autocast
        with no_autocast(grad):
            d_image = _convolve(grad, weight.flip(2, 3)) if ctx.needs_input_grad[0] else None
            d_weight = _grad_weight(image, grad, weight.shape[-1]).to(weight.dtype) if ctx.needs_input_grad[1] else None
            d_bias = grad.sum(dim=(0, 2, 3)) if ctx.needs_input_grad[2] else None
        return d_image, d_weight, d_bias


def _grad_weight(image: torch.Tensor, grad: torch.Tensor, size: int) -> torch.Tensor:
    """The gradient of filters (C, 1, size, size), in float32 or wider."""
    (B, _, H, W), dtype = image.shape, wide_dtype(image)
    step = max(1, _COPIED // (B * H * W))
    parts = []
    for x, g in zip(image.split(step, dim=1), grad.split(step, dim=1)):
        x, g = (y.to(dtype).reshape(-1, H, W) for y in (x, g))
        part = F.conv2d(x.unsqueeze(0), g.unsqueeze(1), padding=size // 2, groups=len(x))  # (1, B * step, size, size)
        parts.append(part.view(B, -1, 1, size, size).sum(dim=0))
    return torch.cat(parts)
