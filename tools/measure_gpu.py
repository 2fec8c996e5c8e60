"""Measures on an NVIDIA GPU what docs/gpu.md estimates, the kernels and compiled models, in under 30 minutes.

    python tools/measure_gpu.py           # appends to weights/benchmarks.csv and writes docs/gpu.md
    python tools/measure_gpu.py --minutes 5
    python tools/measure_gpu.py --toy     # tiny sizes on the CPU into a temporary folder, to try the commands

Run by `make measure-gpu`. A command that exceeds the time that is left is stopped; its rows up to then are kept.
"""

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import docs_gpu
import torch

from vitzoo.errors import UserError, run_command

MINUTES = 28
MODELS = 'deit_softmax_small deit_ls_small deit_performer_small cvt_13 vil_ls_small aft_conv_small_h16'
# at 4,096 tokens
LARGE = ' '.join(
    f'deit_{mixer}_small'
    for mixer in ('softmax', 'aft_conv', 'linformer', 'local', 'longformer', 'ls', 'nystrom', 'performer', 'swin')
)
SIZES = ' '.join(map(str, docs_gpu.SHOWN))
SHAPE = f'--dim {docs_gpu.DIM} --heads {docs_gpu.HEADS} --batch {docs_gpu.BATCH}'
LAYER = f'{SHAPE} --dtype {docs_gpu.DTYPE}'
# in order of importance
COMMANDS = (
    f'bench mixers {LAYER} --tokens {SIZES} --seconds 0.05 --max-seconds 2 --plots {{plots}}',
    # the time of the kernels, without that of their launches
    f'bench mixers {LAYER} --tokens {SIZES} --seconds 0.05 --max-seconds 2 --cuda-graphs --plots {{plots}}_graphs',
    f'bench kernels {LAYER} --tokens {SIZES} --seconds 0.1',
    f'bench models {LARGE} --img-size 1024 --against deit_softmax_small --what forward "training step"'
    ' --dtype bfloat16 --batch 16 --seconds 0.5',
    f'bench kernels {SHAPE} --dtype float32 --against pytorch --tokens 196 1024 4096 --seconds 0.1',
    # heads of one channel, as in the paper's models
    f'bench kernels --kernels aft_conv --against pytorch compile {LAYER} --heads {docs_gpu.DIM} --tokens 196 1024',
    f'bench models {MODELS} --backend eager,compile,cuda-graphs --dtype bfloat16 --batch 64 --seconds 0.3',
)
TOY = (
    'bench mixers --mixers linear ls --tokens 16 64 --dim 24 --heads 2 --batch 1 --dtype bfloat16 --seconds 0'
    ' --min-rounds 1 --plots {plots}',
    'bench models deit_linear_nano --backend eager --img-size 32 --batch 2 --seconds 0 --min-rounds 1 --what forward',
)


def main(argv: list[str] | None = None) -> None:
    """Run the commands, and write the page.

    Raises:
        UserError: There is no CUDA device, or a command failed.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('--toy', action='store_true', help='try the commands at tiny sizes on the CPU')
    parser.add_argument('--minutes', type=float, default=MINUTES, help=f'time limit [{MINUTES}]')
    args = parser.parse_args(argv)
    if args.toy:
        with TemporaryDirectory() as folder:
            measure(TOY, 'cpu', Path(folder, 'benchmarks.csv'), Path(folder, 'gpu.md'), Path(folder, 'gpu'), MINUTES)
        return
    if not torch.cuda.is_available():
        raise UserError('there is no CUDA device; try the commands without one with --toy')
    # relative, because results contain the command
    plots = docs_gpu.PAGE.with_suffix('').relative_to(docs_gpu.ROOT)
    measure(COMMANDS, 'cuda', docs_gpu.BENCHMARKS, docs_gpu.PAGE, plots, args.minutes)


def measure(commands: tuple[str, ...], device: str, results: Path, page: Path, plots: Path, minutes: float) -> None:
    """Run the commands on a device while there is time, and write the page from the results.

    Raises:
        UserError: A command failed; the results of the others are kept.
    """
    end, failed = time.monotonic() + 60 * minutes, []
    for command in commands:
        print(f'vitzoo {command}', flush=True)
        words = [word.format(plots=plots) for word in shlex.split(command)]
        options = ['--device', device, '--results-file', str(results)]
        try:
            command_line = [sys.executable, '-m', 'vitzoo', *words, *options]
            done = subprocess.run(command_line, cwd=docs_gpu.ROOT, timeout=end - time.monotonic())
            failed += [command] if done.returncode else []
        except subprocess.TimeoutExpired:
            print(f'stopped after {minutes:g} minutes in all', flush=True)
            break
    docs_gpu.main(results, page)
    if failed:
        raise UserError(f'a command failed, see above: vitzoo {failed[0]}')


if __name__ == '__main__':
    run_command(main)
