"""Numerical settings shared by the mixers: the base of exponentials, the size of a CPU cache, autocast, and tracing."""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from timm.layers import is_exporting
from torch.nn import functional as F

__all__ = [
    'CACHED', 'LOG2_E', 'UNIT_SILU', 'at_least', 'dot_tokens', 'is_compiled', 'is_empty', 'is_traced', 'is_transformed',
    'mask_bias', 'needs_gradient', 'no_autocast', 'pad', 'sum_products', 'wide_dtype',
]  # fmt: skip

# exponentials are to base 2, which PyTorch computes several times faster on a CPU
LOG2_E = math.log2(math.e)
# float32 elements that fit in one core's L2 cache
CACHED = 2**18
# silu(UNIT_SILU) = 1
UNIT_SILU = 1.2784645


def no_autocast(x: torch.Tensor) -> AbstractContextManager:
    """Disable autocast on the device of `x`, so that operations keep the dtype of their inputs."""
    # the meta device has no autocast and raises
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """Float32, or the dtype of `x` if that is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def is_traced() -> bool:
    """Return True while torch.compile, torch.export, torch.jit or torch.func needs operations of PyTorch.

    They need the gradients of these too, and know no loops over the samples of a batch.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed()


def is_transformed() -> bool:
    """Return True within a transform of torch.func, such as grad or vmap."""
    # torch has no public name for this
    return torch._C._are_functorch_transforms_active()


def is_compiled() -> bool:
    """Return True if the compiler, an exporter or torch.func traces, and decides itself what to store and to fuse."""
    return is_traced() or is_exporting()


def is_empty(x: torch.Tensor) -> bool:
    """Return True if `x` (B, ...) has no samples; False if it is traced, for any batch size that is not 0."""
    return not is_compiled() and x.shape[0] == 0


def needs_gradient(*tensors: torch.Tensor | None) -> bool:
    """Return True if gradients are enabled and one of the tensors needs one."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def pad(x: torch.Tensor, padding: tuple[int, ...]) -> torch.Tensor:
    """F.pad with zeros, which returns `x` itself and no copy if all of `padding` is 0."""
    return F.pad(x, padding) if any(padding) else x


def mask_bias(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A bias of scores that is 0 where `mask` is true and -inf elsewhere, in the dtype of `like`.

    The gradient of a masked_fill of the scores of all samples and heads takes ten times as long on a CPU.
    """
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, -math.inf)


def at_least(x: torch.Tensor, least: float) -> torch.Tensor:
    """The larger of `x` and a number, like x.clamp(min=least), whose gradient takes ten times as long on a CPU."""
    return F.threshold(x, least, least)


def sum_products(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """sum_j k_j v_j^T of tokens k (..., N, m) and v (..., N, d) -> (..., m, d).

    If the heads of a token are next to each other in memory, the product of the transpose of k would copy it in another
    order, which takes twice as long as a copy.
    """
    return k.contiguous().mT @ v


def dot_tokens(q: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """q_i . total of tokens q (..., N, m) and a vector (..., 1, m) -> (..., N, 1).

    A product of a matrix with one column takes three times as long on a CPU.
    """
    return (q * total).sum(dim=-1, keepdim=True)
