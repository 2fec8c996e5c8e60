"""QuickGELU, the activation of CvT: x sigmoid(1.702 x), saving only its input for the backward pass.

Differentiated by autograd, the formula saves three tensors of that size and takes twice as long in training.
"""

from typing import Any

import torch
from timm.layers import register_notrace_function
from torch import nn

__all__ = ['QuickGELU']

SLOPE = 1.702


class QuickGELU(nn.Module):
    """x sigmoid(1.702 x), a close approximation of GELU. https://arxiv.org/abs/1606.08415, section 2"""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return quick_gelu(x)


@register_notrace_function
def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x sigmoid(1.702 x) of a tensor of any shape."""
    if torch.compiler.is_compiling():
        # the compiler fuses it, and differentiates it
        return x * torch.sigmoid(SLOPE * x)
    return _QuickGELU.apply(x) if x.requires_grad else _in_place(x)


def _in_place(x: torch.Tensor) -> torch.Tensor:
    # a new tensor for each factor takes longer than the operations
    return (SLOPE * x).sigmoid_().mul_(x)


class _QuickGELU(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return _in_place(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            # a graph of the gradient is made, and silu_backward has no derivative
            sigmoid = torch.sigmoid(SLOPE * x)
            return grad * sigmoid * (1 + SLOPE * x * (1 - sigmoid))
        # the derivative of x sigmoid(s x) is that of SiLU at s x
        return torch.ops.aten.silu_backward(grad, SLOPE * x)
