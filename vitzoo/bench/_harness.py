"""How `vitzoo bench` measures: the only place that looks at a clock or counts bytes for a table.

What is compared runs in one process and in turn, A B A B, on several inputs, after a warm-up, and the device is waited
for. A time is a median with its quartiles. A ratio is taken round by round, so that a machine that slows down for a
while slows both sides of it.
"""

import csv
import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import timm
import torch

from vitzoo.errors import UserError

RESULTS = 'weights/benchmarks.csv'
DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
KEYS = (
    *('run', 'table', 'name', 'what', 'against'),
    *('tokens', 'img_size', 'dim', 'num_heads', 'batch_size', 'dtype', 'device'),
    *('seconds', 'seconds_low', 'seconds_high', 'rounds', 'ratio', 'ratio_low', 'ratio_high'),
    *('peak_mb', 'gmacs', 'matmul_share'),
    *('cpu', 'threads', 'gpu', 'load', 'torch', 'timm', 'python', 'versions'),
    *('matmul_gflops', 'io_mb', 'copy_gbs', 'ceiling', 'command'),
)
# a call shorter than this is repeated to fill it, because a clock and a scheduler are coarse
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


def time_in_turn(
    calls: dict[str, Callable[[int], object]],
    device: torch.device,
    *,
    seconds: float = 1.0,
    min_rounds: int = 5,
    on_round: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Seconds that each of `calls` takes, one number per round.

    A round runs all of them once, in order, a short one several times; a call is told the number of the round and takes
    another of its inputs each time. There are rounds for `seconds` per contender, and at least `min_rounds`.
    """
    repeats = {name: _warm_up(call, device) for name, call in calls.items()}
    times = {name: [] for name in calls}
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
        gc.enable()
    return times


def ratios(slow: list[float], fast: list[float]) -> Spread:
    """How many times faster the second is than the first; both from one `time_in_turn`, round by round."""
    return Spread.of(a / b for a, b in zip(slow, fast, strict=True))


def _warm_up(call: Callable[[int], object], device: torch.device) -> int:
    """Run a call until it is warm, and say how often it fits into the shortest sample."""
    _time(call, 0, 1, device)
    return max(1, round(SHORTEST_SAMPLE / _time(call, 1, 1, device)))


def _time(call: Callable[[int], object], number: int, repeats: int, device: torch.device) -> float:
    synchronise(device)
    start = time.perf_counter()
    for repeat in range(repeats):
        call(number + repeat)
    synchronise(device)
    return (time.perf_counter() - start) / repeats


def synchronise(device: torch.device) -> None:
    """Wait for the device, which works behind the program's back."""
    if device.type != 'cpu':
        torch.accelerator.synchronize(device)


def peak_megabytes(call: Callable[[int], object], device: torch.device) -> float:
    """The most memory (10^6 bytes) that tensors of one call take at once, beside what was there before it.

    As PyTorch's allocator of the device counts it, so it is the same on every machine and in every run.
    """
    call(0)
    if device.type == 'cuda':
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call(1)
        return (torch.cuda.max_memory_allocated(device) - before) / 1e6
    # where there is no GPU the profiler says so at length, in a language for its authors
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
    """A large square matrix product, and its operations: the rate that the machine reaches where nothing is in the way.

    To be timed in turn with what is compared to it.
    """
    size = size or (2048 if device.type == 'cpu' else 8192)
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    return lambda number: a @ b, 2.0 * size**3


def copying(device: torch.device, size: int | None = None) -> tuple[Callable[[int], object], float]:
    """A copy of `size` numbers, more than any cache holds, and the bytes that it reads and writes."""
    size = size or (2**25 if device.type == 'cpu' else 2**28)
    source, target = torch.ones(2, size, device=device)
    return lambda number: target.copy_(source), 2.0 * source.nbytes


def autocast(dtype: torch.dtype, device: torch.device) -> AbstractContextManager:
    """The context in which a float32 model computes in `dtype`."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def describe_machine(device: torch.device) -> dict:
    """What a measurement depends on beside the code, for the row of a results file."""
    return dict(
        cpu=f'{_cpu_name()}, {os.cpu_count()} cores',
        threads=torch.get_num_threads(),
        gpu=torch.cuda.get_device_name(device) if device.type == 'cuda' else None,
        # above the number of cores, others were at work and the times are worth little
        load=round(os.getloadavg()[0], 1) if hasattr(os, 'getloadavg') else None,
        torch=torch.__version__,
        timm=timm.__version__,
        python=platform.python_version(),
    )


def say_machine(machine: dict) -> str:
    """The machine in a line."""
    device = machine['gpu'] or f'{machine["cpu"]}, {machine["threads"]} threads'
    versions = f'torch {machine["torch"]}, timm {machine["timm"]}, Python {machine["python"]}'
    return f'{device}; {versions}; load {machine["load"]}'


def _cpu_name() -> str:
    info = Path('/proc/cpuinfo')
    names = [line for line in info.read_text().splitlines() if line.startswith('model name')] if info.exists() else []
    return names[0].partition(':')[2].strip() if names else platform.processor() or platform.machine()


def start_run() -> str:
    """What the rows of one run have in common and no other: the time it began."""
    return datetime.now(timezone.utc).strftime('%Y-%m-%dT%H:%M:%SZ')


def row(times: Spread | None = None, ratio: Spread | None = None, **fields) -> dict:
    """A measurement under the names of `KEYS`."""
    if times is not None:
        fields |= dict(seconds=times.median, seconds_low=times.low, seconds_high=times.high, rounds=times.count)
    if ratio is not None:
        fields |= dict(ratio=ratio.median, ratio_low=ratio.low, ratio_high=ratio.high)
    return fields


def check_columns(path: str) -> bool:
    """Say whether a results file is yet to be begun.

    Raises:
        UserError: It is another file, or was begun by a version with other columns.
    """
    if not Path(path).exists() or not Path(path).stat().st_size:
        return True
    with open(path, newline='') as file:
        columns = next(csv.reader(file))
    if columns != [*KEYS]:
        other = ', '.join(sorted({*KEYS} ^ {*columns})) or 'order'
        raise UserError(f"cannot add to '{path}': it has other columns ({other}); name another with --results-file")
    return False


def append_rows(path: str, rows: list[dict], **common) -> None:
    """Add rows to a CSV file with the columns `KEYS`, what they have in common in each."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    is_new = check_columns(path)
    with open(path, 'a', newline='') as file:
        writer = csv.DictWriter(file, KEYS)
        if is_new:
            writer.writeheader()
        for fields in rows:
            rounded = {key: _short(value) for key, value in {**common, **fields}.items()}
            writer.writerow(rounded)


def _short(value):
    return float(f'{value:.5g}') if isinstance(value, float) else value


def read_rows(path: str) -> list[dict]:
    """The rows of a results file, numbers as numbers and empty fields as None."""
    with open(path, newline='') as file:
        return [{key: _number(value) for key, value in fields.items()} for fields in csv.DictReader(file)]


def _number(text: str):
    try:
        number = float(text)
    except ValueError:
        return text or None
    return int(number) if number.is_integer() and '.' not in text and 'e' not in text else number
