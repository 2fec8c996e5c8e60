"""Prints the median times of `import timm` and `import vitzoo` in new processes; their ratio should stay below 1.5."""

import statistics
import subprocess
import sys
import time

RUNS = 5


def seconds_to_import(name: str) -> float:
    """Seconds of a new process that imports a package."""
    start = time.perf_counter()
    subprocess.run([sys.executable, '-c', f'import {name}'], check=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure both packages in turn, and print the medians."""
    names = ('timm', 'vitzoo')
    # the first import reads from disk and writes byte code
    for name in names:
        seconds_to_import(name)
    rounds = [[seconds_to_import(name) for name in names] for _ in range(RUNS)]
    timm_time, vitzoo_time = (statistics.median(column) for column in zip(*rounds))
    print(f'medians of {RUNS}: import timm {timm_time:.2f} s, import vitzoo {vitzoo_time:.2f} s', end=', ')
    print(f'ratio {vitzoo_time / timm_time:.2f}')


if __name__ == '__main__':
    main()
