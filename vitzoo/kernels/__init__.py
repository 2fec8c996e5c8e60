"""Triton kernels for operations that are slow when composed from PyTorch ops on a GPU, one file per mixer op.

An op calls `use_kernel` to decide whether its kernel may run, and only then imports the kernel's file, so nothing
depends on Triton. Each kernel is a custom op with its own backward pass, a fake implementation for torch.compile and a
FLOP formula. It computes what the op's PyTorch form computes, in float32 internally.
"""

import importlib.util
import os
import warnings
from functools import lru_cache

import torch
from timm.layers import is_exporting, use_fused_attn

__all__ = ['use_kernel']

HAS_TRITON = importlib.util.find_spec('triton') is not None
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HALF_DTYPES = (torch.bfloat16, torch.float16)
# the oldest GPUs that multiply matrices of bfloat16
_LEAST_CAPABILITY = (8, 0)


def use_kernel(x: torch.Tensor, is_faster: bool = True) -> bool:
    """Return True if a kernel should run on tensors like `x`: with values, on a GPU, outside of exports and torch.func.

    By timm's switch for fused attention: as it is by default (`TIMM_FUSED_ATTN=1`), in half precision on an NVIDIA GPU
    from Ampere on, if the caller knows that the kernel `is_faster`; on every GPU and in float32 if it allows
    experimental kernels (`TIMM_FUSED_ATTN=2` or `timm.layers.set_fused_attn(True, experimental=True)`); nowhere if it
    is off (`TIMM_FUSED_ATTN=0`). Warns once and returns False if Triton cannot compile on this machine.

    Triton's interpreter (`TRITON_INTERPRET=1`, slow, for tests) replaces the GPU.
    """
    # torch 2.7 to 2.11 answer True whenever they compile, the flag is True only in an export
    exporting = is_exporting() and getattr(torch.compiler, '_is_exporting_flag', True)
    # a traced file with custom ops would need vitzoo where it is loaded
    exporting = exporting or torch.jit.is_tracing()
    if not HAS_TRITON or not use_fused_attn() or exporting or x.dtype not in _DTYPES or x.numel() == 0:
        return False
    if not use_fused_attn(experimental=True) and not (is_faster and _is_fast_by_default(x)):
        return False
    # custom ops have no rules for transforms such as grad and vmap, and torch has no public name for this
    if torch._C._are_functorch_transforms_active():
        return False
    if x.device.type == 'cpu':
        return os.environ.get('TRITON_INTERPRET') == '1'
    return x.is_cuda and _compiles(x.device.index)


def _is_fast_by_default(x: torch.Tensor) -> bool:
    return x.is_cuda and x.dtype in _HALF_DTYPES and _is_known_gpu(x.device.index)


# the compiler calls these and takes what they return for a constant
@torch.compiler.assume_constant_result
def _is_known_gpu(index: int) -> bool:
    # fake tensors may be on a GPU that this machine lacks
    is_nvidia = torch.version.hip is None and torch.cuda.is_available()
    return is_nvidia and torch.cuda.get_device_capability(index) >= _LEAST_CAPABILITY


@torch.compiler.assume_constant_result
def _compiles(index: int) -> bool:
    return _try_kernel(index)


@lru_cache
def _try_kernel(index: int) -> bool:
    """Launch a kernel that does nothing, and warn if Triton cannot compile it."""
    try:
        from ._common import empty_kernel

        with torch.cuda.device(index):
            empty_kernel[(1,)]()
    # Triton's errors, such as that its assembler does not know the GPU, have no base that all its versions export
    except Exception as error:
        reason = str(error).strip().partition('\n')[0]
        warnings.warn(
            'Triton does not work here, so vitzoo uses slower PyTorch operations; Triton needs a C compiler and the '
            f'headers of Python, and must know the GPU: {reason}',
            stacklevel=2,
        )
        return False
    return True
