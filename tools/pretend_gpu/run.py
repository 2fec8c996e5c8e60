"""Runs the cases and prints what was found; check.py starts it."""

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from traceback import walk_tb

import torch
from cases import BATCH, Case, mixer_cases, model_cases
from rich.console import Console
from rich.progress import track
from timm.layers import set_fused_attn
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from watch import Watch, place

import vitzoo.kernels
from vitzoo import list_mixers

# the beginnings of places: gated_linear reads whether its decays are in range, and lines of timm are not ours to mend
EXPECTED_WAITS = ('vitzoo/mixers/_gated_scan.py:', 'timm/')
# passes named for each finding
SHOWN = 3

# there is no GPU to ask; the kernels are selected by the experimental switch only, so that both forms are run
vitzoo.kernels._is_known_gpu = lambda index: False
vitzoo.kernels._compiles = lambda index: True


class FakeTensors(FakeTensorMode):
    """Tensors without values, for which an operation that `Watch` sees copies lists to the device."""

    avoid_device_init = True


class Findings:
    """Failures and host waits, each with the names of the passes in which it was found, and of failures the message."""

    def __init__(self) -> None:
        self.passes = 0
        self.failures: dict[str, set[str]] = defaultdict(set)
        self.waits: dict[str, set[str]] = defaultdict(set)

    def run(self, case: Case) -> None:
        """Run a case in evaluation and in training in each of its modes."""
        fake = FakeTensors()
        with self.recording(case.name):
            module = move(case.build(), fake)
            for (precision, kernels), training in product(case.modes, (False, True)):
                set_fused_attn(True, experimental=kernels)
                name = f'{case.name} {precision}{" kernels" * kernels} {"training" if training else "evaluation"}'
                self.passes += 1
                with self.recording(name), fake, Watch(lambda wait, name=name: self.waits[wait].add(name)):
                    run_pass(module.train(training), case, precision)

    @contextmanager
    def recording(self, name: str) -> Iterator[None]:
        """Add the errors of a pass."""
        try:
            yield
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            self.waits[f'{place_of(error)} reads the result or its size of {error}'].add(name)
        except Exception as error:
            text = str(error).strip().partition('\n')[0]
            self.failures[f'{place_of(error)} {type(error).__name__}'].add(f'{name}: {text}')

    def print(self) -> int:
        """Print all, and return the exit code."""
        expected = {wait: names for wait, names in self.waits.items() if wait.startswith(EXPECTED_WAITS)}
        waits = {wait: names for wait, names in self.waits.items() if wait not in expected}
        for title, found in {'expected host wait': expected, 'host wait': waits, 'failure': self.failures}.items():
            for line, names in sorted(found.items()):
                print(f'{title}: {line}, in {len(names)} passes, such as', *sorted(names)[:SHOWN], sep='\n    ')
        counts = f'{len(self.failures)} failures, {len(waits)} host waits, {len(expected)} expected host waits'
        print(f'{self.passes} passes: {counts}')
        return 1 if self.failures or waits else 0


def run_pass(module: nn.Module, case: Case, precision: torch.dtype) -> None:
    """A forward pass under autocast and, in training, a backward pass."""
    x = torch.empty(case.shape, device='cuda', requires_grad=True)
    with torch.set_grad_enabled(module.training), torch.autocast('cuda', precision, precision != torch.float32):
        out = module(x, *case.others)
    if module.training:
        out.float().square().mean().backward()


def move(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Replace parameters and buffers by fake ones on the device, as `module.cuda()` does; other tensors stay."""
    with mode:
        return module._apply(lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device='cuda'))


def place_of(error: Exception) -> str:
    """The line that raised an error."""
    return place(reversed([*walk_tb(error.__traceback__)]))


def check_device() -> None:
    """Exit with 2 if torch does not use the pretended GPU, or not for a simple pass."""
    findings, cause = Findings(), 'it does not see the device'
    if torch.cuda.is_available() and torch.cuda.get_device_name() == 'pretended GPU':
        findings.run(Case('linear', lambda: nn.Linear(8, 8), (BATCH, 8)))
        cause = next((name for names in findings.failures.values() for name in names), '')
    if cause:
        print(f'check.py: error: torch {torch.__version__} does not work with runtime.c: {cause}', file=sys.stderr)
        sys.exit(2)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser('check.py', description='Run mixers and models on a GPU that is not there.')
    parser.add_argument('--mixers', nargs='+', choices=list_mixers(), metavar='NAME', default=list_mixers())
    parser.add_argument('--quick', action='store_true', help='each mixer once, and in one backbone, in bfloat16')
    args = parser.parse_args()
    check_device()
    cases = [*mixer_cases(args.mixers, args.quick), *model_cases(args.mixers, args.quick)]
    findings, console = Findings(), Console(stderr=True)
    for case in track(cases, 'checking', console=console, disable=not console.is_terminal):
        findings.run(case)
    code = findings.print()
    sys.stdout.flush()
    # the threads of backward passes on the device that is not there sometimes abort a process that ends by itself
    os._exit(code)


if __name__ == '__main__':
    main()
