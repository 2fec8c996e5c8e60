"""Triton kernels for operations that are slow when composed from PyTorch ops on a GPU, one file per mixer op.

An op calls `use_kernel` to decide whether its kernel may run, and only then imports the kernel's file, so nothing
depends on Triton. Each kernel is a custom op with its own backward pass, a fake implementation for torch.compile and a
FLOP formula. It computes what the op's PyTorch form computes, in float32 internally.
"""

import importlib.util
import os

import torch
from timm.layers import is_exporting, use_fused_attn

__all__ = ['use_kernel']

HAS_TRITON = importlib.util.find_spec('triton') is not None
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def use_kernel(x: torch.Tensor) -> bool:
    """Return True if a kernel may run on tensors like `x`: with values, on a GPU, outside of exports and torch.func, if
    timm's switch allows experimental kernels (`TIMM_FUSED_ATTN=2` or `timm.layers.set_fused_attn(True,
    experimental=True)`).

    Triton's interpreter (`TRITON_INTERPRET=1`, slow, for tests) replaces the GPU.
    """
    # torch 2.7 to 2.11 answer True whenever they compile, the flag is True only in an export
    exporting = is_exporting() and getattr(torch.compiler, '_is_exporting_flag', True)
    if not use_fused_attn(experimental=True) or exporting or x.dtype not in _DTYPES or x.numel() == 0:
        return False
    # custom ops have no rules for transforms such as grad and vmap, and torch has no public name for this
    if torch._C._are_functorch_transforms_active():
        return False
    is_interpreted = x.device.type == 'cpu' and os.environ.get('TRITON_INTERPRET') == '1'
    return HAS_TRITON and (x.is_cuda or is_interpreted)
