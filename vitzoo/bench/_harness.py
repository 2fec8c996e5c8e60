"""Timing, memory measurement and the results file shared by the tables of `vitzoo bench`.

All contenders run in one process and take turns (A B A B) on several inputs, after a warm-up and with the device
synchronized around each sample. A time is a median with its quartiles. A ratio is taken within each round, so that a
slowdown of the machine affects both sides.
"""

import csv
import gc
import os
import platform
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

import timm
import torch

from vitzoo.errors import UserError
from vitzoo.metrics.speed import is_busy, rounds_disagree, synchronize, system_load

RESULTS = 'weights/benchmarks.csv'
PRECISIONS = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
BENCHMARK_COLUMNS = (
    *('run', 'table', 'name', 'what', 'against'),
    *('tokens', 'img_size', 'dim', 'num_heads', 'batch_size', 'dtype', 'device'),
    *('seconds', 'seconds_low', 'seconds_high', 'rounds', 'ratio', 'ratio_low', 'ratio_high'),
    *('peak_mb', 'gmacs', 'matmul_share'),
    *('cpu', 'threads', 'gpu', 'load', 'torch', 'timm', 'python', 'versions'),
    *('matmul_gflops', 'io_mb', 'copy_gbs', 'ceiling', 'command', 'backend', 'difference'),
)
_QUARTILES = ('seconds_low', 'seconds', 'seconds_high')
# the two passes of a layer that are measured
LAYER_PASSES = ('forward', 'forward + backward')
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


def describe_machine(device: torch.device) -> dict:
    """Hardware, load and versions that a measurement depends on, as columns of a results file."""
    return dict(
        cpu=f'{_cpu_name()}, {os.cpu_count()} cores',
        threads=torch.get_num_threads(),
        gpu=torch.cuda.get_device_name(device) if device.type == 'cuda' else None,
        load=system_load(),
        torch=torch.__version__,
        timm=timm.__version__,
        python=platform.python_version(),
    )


def format_machine(machine: dict) -> str:
    """One line on the machine and the versions."""
    device = machine['gpu'] or f'{machine["cpu"]}, {machine["threads"]} threads'
    versions = f'torch {machine["torch"]}, timm {machine["timm"]}, Python {machine["python"]}'
    busy = ' (busy machine: the times are unreliable)' if find_doubt(machine) == 'busy machine' else ''
    load = '' if machine['load'] is None else f'; load {machine["load"]}{busy}'
    return f'{device}; {versions}{load}'


def find_doubt(row: dict) -> str | None:
    """The reason to doubt the times in a row of a results file: 'busy machine', 'uneven rounds' or None."""
    cores = re.search(r'(\d+) cores$', row.get('cpu') or '')
    if cores and not row.get('gpu') and is_busy(row.get('load'), int(cores[1])):
        return 'busy machine'
    quartiles = [row[key] for key in _QUARTILES if row.get(key) is not None]
    return 'uneven rounds' if len(quartiles) == len(_QUARTILES) and rounds_disagree(*quartiles) else None


def _cpu_name() -> str:
    info = Path('/proc/cpuinfo')
    names = [line for line in info.read_text().splitlines() if line.startswith('model name')] if info.exists() else []
    return names[0].partition(':')[2].strip() if names else platform.processor() or platform.machine()


def start_run() -> str:
    """Identifier of a run, shared by its rows: its start time in UTC."""
    return datetime.now(timezone.utc).strftime('%Y-%m-%dT%H:%M:%SZ')


def make_row(times: Spread | None = None, ratio: Spread | None = None, **fields: Any) -> dict:
    """A measurement as a dictionary with keys from `BENCHMARK_COLUMNS`."""
    if times is not None:
        fields |= dict(seconds=times.median, seconds_low=times.low, seconds_high=times.high, rounds=times.count)
    if ratio is not None:
        fields |= dict(ratio=ratio.median, ratio_low=ratio.low, ratio_high=ratio.high)
    return fields


def check_columns(path: str) -> bool:
    """Return True if a results file is missing or empty, and so needs a header.

    Raises:
        UserError: The file has other columns, as a results file of another version has.
    """
    if not Path(path).exists() or not Path(path).stat().st_size:
        return True
    with open(path, newline='') as file:
        columns = next(csv.reader(file))
    if columns != [*BENCHMARK_COLUMNS]:
        other = ', '.join(sorted({*BENCHMARK_COLUMNS} ^ {*columns})) or 'order'
        raise UserError(
            f"cannot append to '{path}': its columns differ ({other}); choose another file with --results-file"
        )
    return False


def append_rows(path: str, rows: list[dict], **common: Any) -> None:
    """Append rows to a CSV file with the columns `BENCHMARK_COLUMNS`; `common` is added to each of them.

    If the machine has become busy, its load is recorded as it is now. Prints the names of unreliable rows.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    is_new = check_columns(path)
    load = system_load()
    if load is not None and is_busy(load, os.cpu_count()):
        common['load'] = max(load, common.get('load') or 0)
    rows = [{**common, **fields} for fields in rows]
    with open(path, 'a', newline='') as file:
        writer = csv.DictWriter(file, BENCHMARK_COLUMNS)
        if is_new:
            writer.writeheader()
        for fields in rows:
            writer.writerow({key: _short(value) for key, value in fields.items()})
    doubtful = defaultdict(list)
    for fields in rows:
        doubtful[find_doubt(fields)].append(f'{fields.get("name")} {fields.get("what")}')
    for doubt in filter(None, doubtful):
        print(f'{doubt}: {", ".join(dict.fromkeys(doubtful[doubt]))}; measure again on a quiet machine')


def _short(value: Any) -> Any:
    return float(f'{value:.5g}') if isinstance(value, float) else value


def read_rows(path: str) -> list[dict]:
    """The rows of a results file, with numbers converted and None for empty fields."""
    with open(path, newline='') as file:
        # rows of earlier versions lack the last columns
        reader = csv.DictReader(file, restval='')
        return [{key: _number(value) for key, value in fields.items()} for fields in reader]


def _number(text: str) -> float | str | None:
    try:
        number = float(text)
    except ValueError:
        return text or None
    return int(number) if number.is_integer() and '.' not in text and 'e' not in text else number
