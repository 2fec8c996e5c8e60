"""Prints the speed of a forward pass on the CPU in a program and in a command of vitzoo, in turn.

A command's threads sleep instead of spinning, and it keeps freed memory. On a quiet machine the ratio should be 1 or
more. `--beside N` keeps N cores busy, to measure the gain on a busy machine.
"""

import argparse
import os
import statistics
import subprocess
import sys

RUNS = 5
SETTINGS = ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY', 'GLIBC_TUNABLES', 'MALLOC_TRIM_THRESHOLD_')
# vitzoo takes the process for its command if that is the name of the program
MEASURE = """
import sys
sys.argv = [{program!r}]
import vitzoo, timm, torch
from vitzoo.metrics.speed import measure_throughput
model = timm.create_model({name!r}, img_size={size}).eval() if {size} else timm.create_model({name!r}).eval()
print(measure_throughput(model, torch.randn(8, 3, {size} or 224, {size} or 224), seconds=5).images_per_second)
"""


def measure(program: str, model: str) -> float:
    """Images per second of a model in a new process whose program has this name; a model may end in @SIZE."""
    name, _, size = model.partition('@')
    environment = {key: value for key, value in os.environ.items() if key not in SETTINGS}
    command = [sys.executable, '-c', MEASURE.format(program=program, name=name, size=int(size or 0))]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Measure each model in both kinds of process, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    models = ['tf_efficientnet_lite0', 'deit_softmax_tiny', 'deit_linear_tiny@1024']
    parser.add_argument('models', nargs='*', default=models, metavar='NAME[@SIZE]', help=f'default: {" ".join(models)}')
    parser.add_argument('--beside', type=int, default=0, metavar='N', help='number of cores to keep busy (default: 0)')
    args = parser.parse_args()
    others = [subprocess.Popen([sys.executable, '-c', 'while True: pass']) for _ in range(args.beside)]
    try:
        for model in args.models:
            rounds = [(measure('program', model), measure('vitzoo', model)) for _ in range(RUNS)]
            program, command = (statistics.median(column) for column in zip(*rounds))
            ratio = statistics.median(b / a for a, b in rounds)
            print(
                f'{model}: program {program:.1f} images/s, command {command:.1f}, median ratio {ratio:.2f}', flush=True
            )
    finally:
        for other in others:
            other.kill()


if __name__ == '__main__':
    main()
