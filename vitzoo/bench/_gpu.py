"""Estimates of the time of a mixer on a GPU that is not present, from the operations of its PyTorch form.

A roofline for each operation: it takes as long as its products at the peak rate of their dtype, or as long as reading
its inputs and writing its output once from and to memory at the peak bandwidth, whichever is longer. An operation is
one kernel, as in eager mode, and the times of all operations are added. Caches, the time to launch a kernel, and the
difference between peak and real rates are left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from vitzoo.mixers import TokenMixer
from vitzoo.models._meta import meta_copy

# operations that move nothing, in addition to those that torch marks as views
_FREE = {
    '_unsafe_view',
    '_reshape_alias',
    'empty',
    'empty_like',
    'empty_strided',
    'empty_permuted',
    'new_empty',
    'set_',
}
# these read as many elements as they write, and not all of their input
_SELECTIONS = {'index', 'index_select', 'gather', 'embedding', 'take_along_dim'}
# these only write to their first argument
_OVERWRITES = {'copy_', 'fill_', 'zero_'}


@dataclass(frozen=True)
class Gpu:
    """Peak rates of a GPU: operations per second by dtype, without sparsity, and bytes per second."""

    name: str
    flops: dict[torch.dtype, float]
    bytes: float


# PyTorch's products in float32 do not use tensor cores by default
_HOPPER = {torch.bfloat16: 989.4e12, torch.float16: 989.4e12, torch.float32: 66.9e12, torch.complex64: 66.9e12}
# https://www.nvidia.com/en-us/data-center/h100/, SXM
H100 = Gpu('H100', _HOPPER, 3.35e12)
# https://www.nvidia.com/en-us/data-center/h200/, SXM
H200 = Gpu('H200', _HOPPER, 4.8e12)


@dataclass
class GpuEstimate:
    """Operations, bytes, kernels and seconds of a call; `memory_seconds` are those of kernels that memory limits."""

    flops: int = 0
    bytes: int = 0
    kernels: int = 0
    seconds: float = 0.0
    memory_seconds: float = 0.0

    def add(self, gpu: Gpu, dtype: torch.dtype, flops: int, moved: int) -> None:
        """Add a kernel."""
        products, memory = flops / gpu.flops.get(dtype, gpu.flops[torch.float32]), moved / gpu.bytes
        self.flops += flops
        self.bytes += moved
        self.kernels += 1
        self.seconds += max(products, memory)
        self.memory_seconds += memory if memory >= products else 0.0


@torch.no_grad()
def estimate_mixer(mixer: TokenMixer, batch_size: int, dtype: torch.dtype, gpu: Gpu = H100) -> GpuEstimate:
    """Estimate the forward pass of a mixer in `dtype`; the mixer is neither run nor changed."""
    H, W = mixer.grid_size
    copied = meta_copy(mixer).eval().requires_grad_(False).to(dtype)
    x = torch.empty(batch_size, mixer.num_prefix_tokens + H * W, mixer.dim, dtype=dtype, device='meta')
    estimate = GpuEstimate()
    with torch.device('meta'), _FusedAttention(estimate, gpu), _Kernels(estimate, gpu):
        copied(x, mixer.grid_size)
    return estimate


def memory_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors in memory; elements that are there once but repeated by strides count once."""
    total = 0
    for x in tensors:
        elements = 1
        for length, stride in zip(x.shape, x.stride()):
            elements *= length if stride else 1
        total += min(elements * x.element_size(), x.untyped_storage().nbytes())
    return total


class _Kernels(TorchDispatchMode):
    """Adds every operation that moves memory to an estimate."""

    def __init__(self, estimate: GpuEstimate, gpu: Gpu) -> None:
        super().__init__()
        self.estimate, self.gpu = estimate, gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet, name = func._overloadpacket, func._overloadpacket.__name__
        if func.is_view or name in _FREE:
            return out
        inputs = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}.values()
        outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        written = memory_bytes(outputs)
        if name in _SELECTIONS:
            source, *indices = inputs
            read = min(memory_bytes([source]), written) + memory_bytes(indices)
        elif name in _OVERWRITES:
            read = memory_bytes(list(inputs)[1:])
        else:
            read = memory_bytes(inputs)
        flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out) if packet in flop_registry else 0
        self.estimate.add(self.gpu, outputs[0].dtype if outputs else torch.float32, flops, read + written)
        return out


class _FusedAttention(TorchFunctionMode):
    """Adds fused attention to an estimate as one kernel that never stores the scores."""

    def __init__(self, estimate: GpuEstimate, gpu: Gpu) -> None:
        super().__init__()
        self.estimate, self.gpu = estimate, gpu

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args[:3]
        *batch, heads, N, _ = q.shape
        # the heads of a token are adjacent in memory, so merging them is free
        out = q.new_empty(*batch, N, heads, v.shape[-1]).transpose(-3, -2)
        pairs = q.shape[:-1].numel() * k.shape[-2]
        moved = memory_bytes(x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor))
        self.estimate.add(self.gpu, q.dtype, 2 * pairs * (q.shape[-1] + v.shape[-1]), moved)
        return out
