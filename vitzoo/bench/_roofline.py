"""Lower bound on the time of a layer on this machine, from its matrix products and its memory traffic.

The products run at the rate of a large square product at best. Inputs, outputs and weights are read or written once, at
the rate of a large copy at best. Both rates are measured in the same run. The larger of the two times is a lower bound
on the layer's time, and the baseline's time divided by it is the ceiling of the speedup.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vitzoo.bench._harness import copying, matmul, time_in_turn

# products and memory traffic of a pass, relative to a forward pass; gradients are as large as their tensors
_RELATIVE_WORK = {'forward': (1, 1), 'forward + backward': (3, 2), 'training step': (3, 2)}
_ROUNDS = 5


@dataclass(frozen=True)
class Rates:
    """Operations per second of a large matrix product, and bytes per second of a large copy."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Work:
    """Multiply-accumulates of a call, and the bytes that it has to read or write."""

    macs: int
    bytes: int

    @classmethod
    def of(cls, measured_pass: str, macs: int, tensors: Iterable[torch.Tensor]) -> 'Work':
        """Work of a pass, from the MACs of the forward pass and its inputs, outputs and weights."""
        products, traffic = _RELATIVE_WORK[measured_pass]
        return cls(products * macs, traffic * sum(tensor.nbytes for tensor in tensors))


def measure_rates(dtype: torch.dtype, device: torch.device) -> Rates:
    """Time products in `dtype`, and copies; the fastest of each counts, so that the ceiling is not too low."""
    (product, flops), (copy, moved) = matmul(dtype, device), copying(device)
    times = time_in_turn({'product': product, 'copy': copy}, device, seconds=0.0, min_rounds=_ROUNDS)
    return Rates(flops / min(times['product']), moved / min(times['copy']))


def roofline(work: Work, rates: Rates, seconds: float, baseline_seconds: float) -> dict:
    """The limits of a measurement, as columns of a results file.

    Args:
        work: Work of the call.
        rates: Rates of the machine.
        seconds: Time of the call.
        baseline_seconds: Time of the call that it is compared with.
    """
    products, traffic = 2 * work.macs / rates.flops, work.bytes / rates.bytes
    return dict(
        matmul_share=products / seconds,
        matmul_gflops=rates.flops / 1e9,
        io_mb=work.bytes / 1e6,
        copy_gbs=rates.bytes / 1e9,
        ceiling=baseline_seconds / max(products, traffic),
    )
