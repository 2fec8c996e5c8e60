"""Parts that all kernels share: loading and storing rows, matrix products, and the memory layout of tensors."""

import os

import torch
import triton
import triton.language as tl

__all__ = [
    'RCP_LN2', 'contiguous_rows', 'dot', 'dot_precision', 'empty_kernel', 'empty_output', 'load_rows', 'store_rows',
]  # fmt: skip

# log2(e): exponentials are to base 2
RCP_LN2 = tl.constexpr(1.4426950408889634)
# read once at import, as Triton's decorator does
_IS_INTERPRETED = tl.constexpr(os.environ.get('TRITON_INTERPRET') == '1')
# Triton 3.6 does not convert the default of an argument
_IEEE = tl.constexpr('ieee')


@triton.jit
def empty_kernel():
    """Does nothing; it shows that Triton works."""


@triton.jit
def load_rows(ptr, row, mask, stride, D, BLOCK_D: tl.constexpr):
    """Load rows of D channels, (rows, BLOCK_D), with zeros where `mask` (rows) is false."""
    channel = tl.arange(0, BLOCK_D)
    mask = mask[:, None] & (channel < D)[None, :]
    return tl.load(ptr + row[:, None].to(tl.int64) * stride + channel[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(ptr, x, row, mask, stride, D, BLOCK_D: tl.constexpr):
    """Store rows of D channels in the dtype of `ptr`, where `mask` (rows) is true."""
    channel = tl.arange(0, BLOCK_D)
    mask = mask[:, None] & (channel < D)[None, :]
    tl.store(ptr + row[:, None].to(tl.int64) * stride + channel[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def dot(a, b, acc=None, PRECISION: tl.constexpr = _IEEE):
    """The product of a (M, K) and b (K, N), accumulated in float32 onto `acc` if given."""
    if _IS_INTERPRETED:
        # the interpreter multiplies the bits of bfloat16 as integers; in float32 the product is the same
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision='ieee')
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


def dot_precision(x: torch.Tensor, half: str = 'tf32') -> str:
    """`dot`'s precision for float32 operands: 'ieee', or `half` if the inputs are like `x` in float16."""
    return half if x.dtype == torch.float16 else 'ieee'


def contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def empty_output(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialized tensor like x (B, heads, N, D), but (B, N, heads, D) in memory: merging the heads is free."""
    B, heads, N, D = x.shape
    return x.new_empty(B, N, heads, D, dtype=dtype).transpose(1, 2)
