"""The OpenMP setting of the commands: there before torch is imported, and only in commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def spin_count(tmp_path):
    """A function that starts Python and returns GOMP_SPINCOUNT as torch would see it."""
    # exits at the first import of torch
    stand_in = "import os\nprint(os.environ.get('GOMP_SPINCOUNT'), flush=True)\nos._exit(0)\n"
    (tmp_path / 'lib').mkdir()
    (tmp_path / 'lib' / 'torch.py').write_text(stand_in)
    ours = ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY')
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment['PYTHONPATH'] = f'{tmp_path / "lib"}{os.pathsep}{ROOT}'

    def start(*command: str, **settings: str) -> str:
        command = [sys.executable, *map(str, command)]
        child = subprocess.run(
            command, cwd=ROOT, env={**environment, **settings}, capture_output=True, text=True, timeout=60
        )
        assert child.returncode == 0, child.stderr
        return child.stdout.strip()

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
def test_threads_of_a_command_do_not_spin(spin_count, command):
    assert spin_count(*command.split()) == '1000'


def test_threads_of_the_console_script_do_not_spin(spin_count, tmp_path):
    (tmp_path / 'vitzoo').write_text('from vitzoo.cli import main\nmain()\n')
    assert spin_count(tmp_path / 'vitzoo', 'train', '--help') == '1000'


def test_a_program_that_imports_vitzoo_is_left_alone(spin_count, tmp_path):
    assert spin_count('-c', 'import vitzoo') == 'None'
    assert spin_count('-c', 'import vitzoo', '-m', 'vitzoo') == 'None'
    (tmp_path / 'train.py').write_text('import vitzoo\n')
    assert spin_count(tmp_path / 'train.py') == 'None'


@pytest.mark.parametrize(
    ('settings', 'seen'), [({'GOMP_SPINCOUNT': '7'}, '7'), ({'OMP_WAIT_POLICY': 'active'}, 'None')]
)
def test_a_setting_of_the_user_wins(spin_count, settings, seen):
    assert spin_count('-m', 'vitzoo', 'train', **settings) == seen
