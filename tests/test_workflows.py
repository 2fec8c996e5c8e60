"""The workflows of continuous integration run targets that the Makefile has."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / '.github' / 'workflows').glob('*.yml'))


@pytest.mark.parametrize('path', WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile_only(path):
    jobs = yaml.safe_load(path.read_text())['jobs']
    commands = [step['run'] for job in jobs.values() for step in job['steps'] if 'run' in step]
    targets = set(re.findall(r'^([\w-]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE))
    assert commands and {command.removeprefix('make ') for command in commands} <= targets


def test_the_targets_that_check_something_all_run():
    text = ''.join(path.read_text() for path in WORKFLOWS)
    assert [target for target in ('lint', 'test', 'test-slow', 'dist') if f'- run: make {target}\n' not in text] == []
