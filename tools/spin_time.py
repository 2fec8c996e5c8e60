"""Prints the speed of a forward pass with PyTorch's own spinning and with that of vitzoo's commands, in turn.

On a quiet machine the ratio should be 1. `--beside N` keeps N cores busy, to measure the gain on a busy machine.
"""

import argparse
import os
import statistics
import subprocess
import sys

RUNS = 5
MEASURE = """
import timm, torch
from vitzoo.metrics.speed import measure_throughput
model = timm.create_model({name!r}).eval()
print(measure_throughput(model, torch.randn(8, 3, 224, 224), seconds=3).images_per_second)
"""


def measure(name: str, spin_count: str | None) -> float:
    environment = {key: value for key, value in os.environ.items() if key not in ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY')}
    environment |= {'GOMP_SPINCOUNT': spin_count} if spin_count else {}
    command = [sys.executable, '-c', MEASURE.format(name=name)]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('models', nargs='*', default=['tf_efficientnet_lite0', 'deit_softmax_tiny'])
    parser.add_argument('--beside', type=int, default=0, metavar='N', help='number of cores to keep busy (default: 0)')
    args = parser.parse_args()
    others = [subprocess.Popen([sys.executable, '-c', 'while True: pass']) for _ in range(args.beside)]
    try:
        for name in args.models:
            rounds = [(measure(name, None), measure(name, '1000')) for _ in range(RUNS)]
            default, low = (statistics.median(column) for column in zip(*rounds))
            ratio = statistics.median(b / a for a, b in rounds)
            print(f'{name}: default {default:.1f} images/s, low spinning {low:.1f}, median ratio {ratio:.2f}')
    finally:
        for other in others:
            other.kill()


if __name__ == '__main__':
    main()
