"""Triton kernels for what PyTorch composes badly on a GPU, one file for each mixer's op that has one.

An op asks `use_kernel` whether its kernel may compute, and imports the kernel's file only then: where Triton is missing
nothing else changes. Each kernel is a custom op with its own backward pass, a fake form for torch.compile and a formula
for the FLOP counter, and computes what the op's PyTorch form does, in float32 inside.
"""

import importlib.util
import os

import torch
from timm.layers import is_exporting, use_fused_attn

__all__ = ['use_kernel']

HAS_TRITON = importlib.util.find_spec('triton') is not None
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def use_kernel(x: torch.Tensor) -> bool:
    """Whether a kernel may compute on tensors like `x`: where timm's switch allows what is experimental
    (`TIMM_FUSED_ATTN=2` or `timm.layers.set_fused_attn(True, experimental=True)`), on a GPU and outside of exports.

    Triton's interpreter (`TRITON_INTERPRET=1`, slow, for tests) stands in for a GPU.
    """
    if not use_fused_attn(experimental=True) or is_exporting() or x.dtype not in DTYPES:
        return False
    is_interpreted = x.device.type == 'cpu' and os.environ.get('TRITON_INTERPRET') == '1'
    return HAS_TRITON and (x.is_cuda or is_interpreted)
