"""Matrix products in the kernels: of what was rounded to the input's precision, summed in float32.

Triton's interpreter multiplies the bits of bfloat16 as if they were integers; there the same numbers go in as float32.
"""

import os

import torch
import triton
import triton.language as tl

__all__ = ['dot', 'precision']

# as Triton's decorator decides it, once
INTERPRETED = tl.constexpr(os.environ.get('TRITON_INTERPRET') == '1')


def precision(x: torch.Tensor, half: str = 'tf32') -> str:
    """How `dot` multiplies operands that are float32: with all digits, or as `half` says for inputs of float16."""
    return half if x.dtype == torch.float16 else 'ieee'


@triton.jit
def dot(a, b, acc=None, PRECISION: tl.constexpr = 'ieee'):
    """The product of a (M, K) and b (K, N), and `acc` if there is one."""
    if INTERPRETED:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision='ieee')
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc
