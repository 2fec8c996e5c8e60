"""Threads that sleep instead of spin: set for vitzoo's commands, before PyTorch loads OpenMP.

Idle threads of GNU OpenMP spin for milliseconds before they sleep. If other programs need the cores, the threads that
have work wait for those that spin, which makes a command more than ten times slower.
"""

import os
import sys
from pathlib import Path

# iterations; libgomp's default is 300,000
_SPIN_COUNT = '1000'
_SCRIPTS = [Path(__file__).parents[1] / name for name in ('train.py', 'validate.py')]


def _limit_spinning() -> None:
    """Limit the spinning of OpenMP threads if this process is a command of vitzoo; the user's own settings win.

    Has no effect on programs that import vitzoo.
    """
    if _is_command() and not {'GOMP_SPINCOUNT', 'OMP_WAIT_POLICY'} & os.environ.keys():
        os.environ['GOMP_SPINCOUNT'] = _SPIN_COUNT


def _is_command() -> bool:
    """Return True for `vitzoo`, `python -m vitzoo`, `python -m vitzoo.train`, train.py and the like."""
    program = Path(sys.argv[0]) if getattr(sys, 'argv', None) else Path()
    # Python's name for a program whose module it has not imported yet
    if str(program) == '-m':
        words = sys.orig_argv
        module = words[words.index('-m') + 1] if '-m' in words else ''
        return module.partition('.')[0] == 'vitzoo'
    return program.stem == 'vitzoo' or program.resolve() in _SCRIPTS


_limit_spinning()
