"""Throughput and peak memory of a model on one device, and whether a time is reliable."""

import ctypes
import gc
import os
import re
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from torch import nn

CLEAR_REFS, STATUS = Path('/proc/self/clear_refs'), Path('/proc/self/status')
# system load per core above which a machine is busy; an evaluation with its loader is somewhat above 1
BUSY_LOAD = 1.5
# difference of the quartiles, as a fraction of the median, above which rounds disagree
MAX_SPREAD = 0.2


class Speed(NamedTuple):
    """A throughput, and the reason to doubt it: 'busy machine', 'uneven rounds' or None."""

    images_per_second: float
    doubt: str | None = None


@torch.no_grad()
def measure_throughput(model: nn.Module, images: torch.Tensor, seconds: float = 1.0) -> Speed:
    """Median throughput of the forward pass of one batch, repeated for `seconds` after a warm-up pass.

    Loading and preprocessing are not included. A machine is only called busy if the model runs on its CPU.
    """
    model(images)
    times: list[float] = []
    while sum(times) < seconds:
        synchronize(images.device)
        start = time.perf_counter()
        model(images)
        synchronize(images.device)
        times.append(time.perf_counter() - start)
    speed = len(images) / statistics.median(times)
    if images.device.type == 'cpu' and is_busy(system_load(), os.cpu_count()):
        return Speed(speed, 'busy machine')
    # twice, because a single round has no quartiles
    low, _, high = statistics.quantiles(times * 2, n=4, method='inclusive')
    return Speed(speed, 'uneven rounds' if rounds_disagree(low, statistics.median(times), high) else None)


def format_speed(images_per_second: float) -> str:
    """A whole number of images per second, below ten two digits: as a whole number, the speed of a large model is 0."""
    return f'{images_per_second:,.0f}' if images_per_second >= 9.95 else f'{images_per_second:.2g}'


def system_load() -> float | None:
    """Average number of running processes in the last minute; None if the system does not tell."""
    return round(os.getloadavg()[0], 1) if hasattr(os, 'getloadavg') else None


def is_busy(load: float | None, cores: int | None) -> bool:
    """Return True if other programs slowed a measurement on a CPU; False if the load or the cores are unknown."""
    return load is not None and cores is not None and load > BUSY_LOAD * cores


def rounds_disagree(low: float, median: float, high: float) -> bool:
    """Return True if the quartiles of the times of a measurement are too far apart for its median to be reliable."""
    return high - low > MAX_SPREAD * median


class PeakMemory:
    """Peak memory while the context is open, in `megabytes` (10^6 bytes), set on exit.

    On a GPU, the memory that PyTorch has allocated, weights included. On the CPU, the resident memory of the whole
    process, including Python and PyTorch and excluding DataLoader workers; if the system does not allow a process to
    reset its high-water mark, the peak since the process started.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.megabytes = 0.0

    def __enter__(self) -> 'PeakMemory':
        gc.collect()
        if self.device.type == 'cuda':
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            _return_freed_memory()
            # 5 resets the high-water mark of resident memory (VmHWM); the file may be missing or read-only
            with suppress(OSError):
                CLEAR_REFS.write_text('5')
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.megabytes = peak_process_megabytes(self.device)


def _return_freed_memory() -> None:
    """Return the memory that glibc keeps for later tensors to the system, so that it does not count as used."""
    if sys.platform == 'linux':
        # other C libraries do not have it
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def peak_process_megabytes(device: torch.device) -> float:
    """Peak memory of the process on a device since the last reset, as `PeakMemory` defines it."""
    if device.type == 'cuda':
        return torch.cuda.max_memory_allocated(device) / 1e6
    if sys.platform == 'win32':
        return psutil.Process().memory_info().peak_wset / 1e6
    # some containers have no such line
    peaks = re.findall(r'^VmHWM:\s*(\d+)', STATUS.read_text(), re.MULTILINE) if STATUS.exists() else []
    if peaks:
        return int(peaks[0]) * 1024 / 1e6
    # imported here because Windows does not have the module
    import resource

    # in kilobytes, except on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == 'darwin' else 1024) / 1e6


def synchronize(device: torch.device) -> None:
    """Wait for all work queued on a device."""
    if device.type != 'cpu':
        torch.accelerator.synchronize(device)
