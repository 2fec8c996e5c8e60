"""The OpenMP and memory settings of the commands: there before torch is imported, and only in commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# exits at the first import of torch
STAND_IN = """
import os
import ctypes

def resident():
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')

spin_count = os.environ.get('GOMP_SPINCOUNT')
if os.path.exists('/proc/self/statm'):
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    before = resident()
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(64 << 20)))
    ctypes.memset(block, 1, 64 << 20)
    libc.free(block)
    is_kept = resident() - before > 32 << 20
else:
    is_kept = None
print(spin_count, is_kept, flush=True)
os._exit(0)
"""
HAS_GLIBC = 'CS_GNU_LIBC_VERSION' in getattr(os, 'confstr_names', {})
OURS = ['1000', str(HAS_GLIBC if sys.platform == 'linux' else None)]
THEIRS = ['None', str(False if sys.platform == 'linux' else None)]


@pytest.fixture
def settings(tmp_path):
    """A function that starts Python and returns GOMP_SPINCOUNT and if a freed block is kept, before torch loads."""
    (tmp_path / 'lib').mkdir()
    (tmp_path / 'lib' / 'torch.py').write_text(STAND_IN)
    ours = ('GOMP_', 'OMP_', 'MALLOC_', 'GLIBC_')
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment['PYTHONPATH'] = f'{tmp_path / "lib"}{os.pathsep}{ROOT}'

    def start(*command: str, **variables: str) -> list[str]:
        command = [sys.executable, *map(str, command)]
        child = subprocess.run(
            command, cwd=ROOT, env={**environment, **variables}, capture_output=True, text=True, timeout=60
        )
        assert child.returncode == 0, child.stderr
        return child.stdout.split()

    return start


@pytest.mark.parametrize(
    'command',
    [
        '-m vitzoo validate',
        '-m vitzoo.train --help',
        '-u -m vitzoo.validate',
        'train.py',
        '-u ./validate.py --help',
        'tests/../train.py',
    ],
)
def test_a_command_has_sleeping_threads_and_keeps_memory(settings, command):
    assert settings(*command.split()) == OURS


def test_the_console_script_has_the_same_settings(settings, tmp_path):
    (tmp_path / 'vitzoo').write_text('from vitzoo.cli import main\nmain()\n')
    assert settings(tmp_path / 'vitzoo', 'train', '--help') == OURS


def test_a_program_that_imports_vitzoo_is_left_alone(settings, tmp_path):
    assert settings('-c', 'import vitzoo') == THEIRS
    assert settings('-c', 'import vitzoo', '-m', 'vitzoo') == THEIRS
    (tmp_path / 'train.py').write_text('import vitzoo\n')
    assert settings(tmp_path / 'train.py') == THEIRS


@pytest.mark.parametrize(
    'variables, seen',
    [
        ({'GOMP_SPINCOUNT': '7'}, ['7', OURS[1]]),
        ({'OMP_WAIT_POLICY': 'active'}, ['None', OURS[1]]),
        ({'MALLOC_TRIM_THRESHOLD_': '131072'}, [OURS[0], THEIRS[1]]),
    ],
)
def test_a_setting_of_the_user_wins(settings, variables, seen):
    assert settings('-m', 'vitzoo', 'train', **variables) == seen
