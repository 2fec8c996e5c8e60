"""What no implementation of a layer can beat on this machine: the time of its matrix products, and of its tensors.

The products are counted, and done at the rate of a large square one. Inputs, outputs and weights are read and written
once, at the rate of a large copy. Both rates are measured beside what is compared to them. The longer of the two times
is the least that a layer can take, and what it is compared to over it the ceiling of the ratio.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vitzoo.bench._harness import copying, matmul, time_in_turn

# how often a call does the products of a forward pass, and how often it moves its tensors, gradients being as large
PASSES = {'forward': (1, 1), 'forward + backward': (3, 2), 'training step': (3, 2)}
ROUNDS = 5


@dataclass(frozen=True)
class Rates:
    """Operations per second of a large matrix product, and bytes per second of a large copy."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Work:
    """What a call cannot do without: multiply-accumulates, and bytes that are read or written."""

    macs: int
    bytes: int

    @classmethod
    def of(cls, what: str, macs: int, tensors: Iterable[torch.Tensor]) -> 'Work':
        """That of a forward pass with so many MACs on these inputs, outputs and weights, or of it and its backward."""
        products, moves = PASSES[what]
        return cls(products * macs, moves * sum(tensor.nbytes for tensor in tensors))


def measure_rates(dtype: torch.dtype, device: torch.device) -> Rates:
    """Time products in `dtype`, and copies, for a second or so; the fastest counts, lest a ceiling be too low."""
    (product, flops), (copy, moved) = matmul(dtype, device), copying(device)
    times = time_in_turn({'product': product, 'copy': copy}, device, seconds=0.0, min_rounds=ROUNDS)
    return Rates(flops / min(times['product']), moved / min(times['copy']))


def roofline(work: Work, rates: Rates, seconds: float, against: float) -> dict:
    """What a row says of its limits.

    Args:
        seconds: What the call took.
        against: What that took which it is compared to.
    """
    products, traffic = 2 * work.macs / rates.flops, work.bytes / rates.bytes
    return dict(
        matmul_share=products / seconds,
        matmul_gflops=rates.flops / 1e9,
        io_mb=work.bytes / 1e6,
        copy_gbs=rates.bytes / 1e9,
        ceiling=against / max(products, traffic),
    )
