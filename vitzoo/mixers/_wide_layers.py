"""Layers that compute in the dtype of their input, which in half precision is wider than that of their weights.

Mixers call them instead of reading their weights, so that hooks, pruning and adapters have an effect.
"""

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ['WideConv2d', 'WideLayerNorm']


class WideConv2d(nn.Conv2d):
    """A convolution with zero padding, if any."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.conv2d(x, self.weight.to(x.dtype), bias, self.stride, self.padding, self.dilation, self.groups)


class WideLayerNorm(nn.LayerNorm):
    """A layer norm with weight and bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)
