"""Times and memory of calls, measured in turn for the tables of `vitzoo bench`.

All contenders run in one process and take turns (A B A B) on several inputs, after a warm-up and with the device
synchronized around each sample. A time is a median with its quartiles. A ratio is taken within each round, so that a
slowdown of the machine affects both sides.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from timm.layers import set_fused_attn, use_fused_attn

from vitzoo.metrics.speed import synchronize

PRECISIONS = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
# the two passes of a layer that are measured
LAYER_PASSES = ('forward', 'forward + backward')
# the backend of times without those of launches
CUDA_GRAPHS = 'cuda-graphs'
# in seconds; a shorter call is repeated within a sample, because the clock and the scheduler are coarse
SHORTEST_SAMPLE = 0.01
INPUT_SETS = 3


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of `count` numbers."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, numbers: Iterable[float]) -> 'Spread':
        """Summarise at least one number."""
        numbers = list(numbers)
        if len(numbers) == 1:
            return cls(numbers[0], numbers[0], numbers[0], 1)
        low, median, high = statistics.quantiles(numbers, n=4, method='inclusive')
        return cls(median, low, high, len(numbers))


_Key = TypeVar('_Key')


def time_in_turn(
    calls: dict[_Key, Callable[[int], object]],
    device: torch.device,
    *,
    seconds: float = 1.0,
    min_rounds: int = 5,
    warm_up: int = 2,
    on_round: Callable[[], object] = lambda: None,
) -> dict[_Key, list[float]]:
    """Seconds per call of each of `calls`, one number per round.

    A round takes one sample of each call, in order; a short call is repeated within its sample. The argument of a call
    grows with each round, and selects its input. Rounds continue for `seconds` per contender on average, and for at
    least `min_rounds`. Before, each call is run `warm_up` times.
    """
    repeats = {name: _warm_up(call, device, warm_up) for name, call in calls.items()}
    times: dict[_Key, list[float]] = {name: [] for name in calls}
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for number in range(10_000):
            if number >= min_rounds and time.perf_counter() - start > seconds * len(calls):
                break
            for name, call in calls.items():
                times[name].append(_time(call, number, repeats[name], device))
            on_round()
    finally:
        if was_enabled:
            gc.enable()
    return times


def ratios(slow: list[float], fast: list[float]) -> Spread:
    """Speedup of `fast` over `slow` in each round; both are from the same `time_in_turn`."""
    return Spread.of(a / b for a, b in zip(slow, fast, strict=True))


def _warm_up(call: Callable[[int], object], device: torch.device, times: int) -> int:
    """Run a call several times, and return how many times it fits into the shortest sample."""
    seconds = [_time(call, number, 1, device) for number in range(times)]
    return max(1, round(SHORTEST_SAMPLE / seconds[-1]))


def _time(call: Callable[[int], object], number: int, repeats: int, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    for repeat in range(repeats):
        call(number + repeat)
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def with_fused_attn(
    function: Callable[..., Any], *, enable: bool = True, experimental: bool = False
) -> Callable[..., Any]:
    """The function with timm's switch for fused attention in another state, which is put back after each call."""

    def call(*args: Any) -> Any:
        was_fused, was_experimental = use_fused_attn(), use_fused_attn(experimental=True)
        set_fused_attn(enable, experimental=experimental)
        try:
            return function(*args)
        finally:
            set_fused_attn(was_fused, experimental=was_experimental)

    return call


def in_cuda_graphs(call: Callable[[int], object], stream: torch.cuda.Stream, pool: Any) -> Callable[[int], object]:
    """The call as CUDA graphs, one per input, which launch all kernels at once and so take the time of the kernels.

    Graphs that are captured on one stream with one `pool` (`torch.cuda.graph_pool_handle()`) share their memory, so
    only one may run at a time.

    Raises:
        RuntimeError: The call waits for the GPU, such as to read a value, and cannot be captured.
    """
    stream.wait_stream(torch.cuda.current_stream())
    # outside of the default stream, as gradients stay on the stream of their first call
    with torch.cuda.stream(stream):
        for number in range(INPUT_SETS):
            call(number)
    torch.cuda.current_stream().wait_stream(stream)
    graphs = [torch.cuda.CUDAGraph() for _ in range(INPUT_SETS)]
    for number, graph in enumerate(graphs):
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            call(number)
    return lambda number: graphs[number % INPUT_SETS].replay()


def call_peak_megabytes(call: Callable[[int], object], device: torch.device, warm_up: bool = True) -> float:
    """Peak memory (10^6 bytes) of the tensors that one call allocates, not counting what was allocated before it.

    Counted by PyTorch's allocator for the device, so on a CPU the result does not depend on the machine or the run.
    With `warm_up`, what the first call allocates and keeps does not count, as it is the second that is measured.
    """
    if warm_up:
        call(0)
    if device.type == 'cuda':
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call(1)
        return (torch.cuda.max_memory_allocated(device) - before) / 1e6
    # without a GPU, the profiler logs warnings that do not concern the user
    os.environ.setdefault('KINETO_LOG_LEVEL', '99')
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call(1)
    now = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == '[memory]':
            now += event.nbytes()
            peak = max(peak, now)
    return peak / 1e6


def matmul(dtype: torch.dtype, device: torch.device, size: int | None = None) -> tuple[Callable[[int], object], float]:
    """A large square matrix product and its number of floating-point operations.

    Timed in the same rounds as a layer or a model, it gives the rate to compare them with.
    """
    size = size or (2048 if device.type == 'cpu' else 8192)
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return lambda number: a @ b, 2.0 * size**3


def copying(device: torch.device, size: int | None = None) -> tuple[Callable[[int], object], float]:
    """A copy of `size` float32 numbers, too many for any cache, and the number of bytes it reads and writes."""
    size = size or (2**25 if device.type == 'cpu' else 2**28)
    source, target = torch.ones(2, size, device=device)
    return lambda number: target.copy_(source), 2.0 * source.nbytes
