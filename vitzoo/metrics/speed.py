"""Images per second and peak memory of a model on one device."""

import gc
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

CLEAR_REFS, STATUS = Path('/proc/self/clear_refs'), Path('/proc/self/status')


@torch.no_grad()
def images_per_second(model: nn.Module, images: torch.Tensor, seconds: float = 1.0) -> float:
    """Time the forward pass of one batch, over and over for `seconds` after a warm-up pass, and take the median.

    Reading and preparing images is not part of it.
    """
    model(images)
    times = []
    while sum(times) < seconds:
        _finish(images.device)
        start = time.perf_counter()
        model(images)
        _finish(images.device)
        times.append(time.perf_counter() - start)
    return len(images) / sorted(times)[len(times) // 2]


class PeakMemory:
    """The most memory used while the context is open, as `megabytes` (10^6 bytes) on leaving it.

    On a GPU: what PyTorch had allocated on it, weights included. On the CPU: the resident memory of the whole process,
    Python and PyTorch included and the worker processes of a DataLoader not; where the system does not let a process
    reset its high-water mark, it is the peak since the process started.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.megabytes = 0.0

    def __enter__(self) -> 'PeakMemory':
        gc.collect()
        if self.device.type == 'cuda':
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            # 5 resets the high-water mark of resident memory, VmHWM; not every system has the file or lets us write it
            with suppress(OSError):
                CLEAR_REFS.write_text('5')
        return self

    def __exit__(self, *exc_info) -> None:
        self.megabytes = peak_megabytes(self.device)


def peak_megabytes(device: torch.device) -> float:
    """The high-water mark that `PeakMemory` reads, since it was last reset."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device) / 1e6
    if STATUS.exists():
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith('VmHWM'))
        return int(line.split()[1]) * 1024 / 1e6
    # kilobytes except on macOS; imported here because Windows has no such module
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024) / 1e6


def _finish(device: torch.device) -> None:
    """Wait for the device, which works behind the program's back."""
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
    elif device.type == 'mps':
        torch.mps.synchronize()
