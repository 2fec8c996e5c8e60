"""Settings of the process of a command, made before PyTorch loads: threads that sleep, and memory that is reused.

Idle threads of GNU OpenMP spin for milliseconds before they sleep. If other programs need the cores, the threads that
have work wait for those that spin, which makes a command more than ten times slower.

glibc returns every freed block above 32 MB to the system, which must fill the next one with zeros. At 16,384 tokens
this takes a third to a half of the time of a linear mixer on a CPU. Blocks above 512 MB, which are rare in linear
mixers at this size, are still returned: glibc reuses freed blocks of different sizes badly, and a process that kept a
few of several GB would fill the memory.
"""

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

# iterations; libgomp's default is 300,000
_SPIN_COUNT = '1000'
_ALLOCATOR = {'GLIBC_TUNABLES', 'MALLOC_MMAP_MAX_', 'MALLOC_MMAP_THRESHOLD_', 'MALLOC_TRIM_THRESHOLD_'}
# parameters of mallopt(3): free memory to keep, and the size from which a block is returned as soon as it is freed
_M_TRIM_THRESHOLD, _ALL = -1, -1
_M_MMAP_THRESHOLD, _LARGE = -3, 512 * 2**20
_SCRIPTS = [Path(__file__).parents[1] / name for name in ('train.py', 'validate.py')]


def _limit_spinning() -> None:
    """Limit the spinning of OpenMP threads, unless the user has set it."""
    if not {'GOMP_SPINCOUNT', 'OMP_WAIT_POLICY'} & os.environ.keys():
        os.environ['GOMP_SPINCOUNT'] = _SPIN_COUNT


def _reuse_memory() -> None:
    """Let glibc keep freed memory for the next tensors, unless the user has set its allocator."""
    # other C libraries have no mallopt
    if sys.platform == 'linux' and not _ALLOCATOR & os.environ.keys():
        with suppress(AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_TRIM_THRESHOLD, _ALL)
            mallopt(_M_MMAP_THRESHOLD, _LARGE)


def _is_command() -> bool:
    """Return True for `vitzoo`, `python -m vitzoo`, `python -m vitzoo.train`, train.py and the like."""
    program = Path(sys.argv[0]) if getattr(sys, 'argv', None) else Path()
    # Python's name for a program whose module it has not imported yet
    if str(program) == '-m':
        words = sys.orig_argv
        module = words[words.index('-m') + 1] if '-m' in words else ''
        return module.partition('.')[0] == 'vitzoo'
    return program.stem == 'vitzoo' or program.resolve() in _SCRIPTS


# programs that import vitzoo are left alone
if _is_command():
    _limit_spinning()
    _reuse_memory()
