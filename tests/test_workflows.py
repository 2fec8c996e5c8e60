"""The workflows of continuous integration run targets that the Makefile has, and all tests."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from matrix import INTERPRETERS, lowest_versions

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / '.github' / 'workflows').glob('*.yml'))
CHECKS = {'lint', 'test-matrix', 'test-slow', 'site', 'dist'}


def jobs(path: Path) -> dict[str, dict]:
    return yaml.safe_load(path.read_text())['jobs']


def commands(path: Path) -> Iterator[list[str]]:
    """The words of the commands of a workflow."""
    for job in jobs(path).values():
        yield from (step['run'].split() for step in job['steps'] if 'run' in step)


@pytest.mark.parametrize('path', WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_targets_of_the_makefile_only(path):
    targets = set(re.findall(r'^([\w-]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE))
    assert [words for words in commands(path) if words[0] != 'make' or words[1] not in targets] == []


def test_the_targets_that_check_something_all_run():
    assert {words[1] for path in WORKFLOWS for words in commands(path)} == CHECKS


def test_every_job_ends_before_it_is_stopped_after_6_hours():
    minutes = [job['timeout-minutes'] for path in WORKFLOWS for job in jobs(path).values()]
    assert max(minutes) < 6 * 60


def test_the_matrix_begins_with_the_lowest_versions_that_are_promised():
    rows = jobs(ROOT / '.github' / 'workflows' / 'test.yml')['test']['strategy']['matrix']['include']
    assert {row['cell']: f'python{row["python"]}' for row in rows} == INTERPRETERS
    text = (ROOT / 'pyproject.toml').read_text()
    assert f'requires-python = ">={rows[0]["python"]}"' in text
    (block,) = re.findall(r'^dependencies = \[\n(.*?)^\]', text, re.MULTILINE | re.DOTALL)
    promised = re.findall(r'"([\w-]+)', block)
    assert [line.partition('==')[0] for line in lowest_versions().splitlines()] == promised


def test_the_nightly_jobs_run_each_file_of_tests_once():
    parts = jobs(ROOT / '.github' / 'workflows' / 'nightly.yml')['slow']['strategy']['matrix']['tests']
    chosen = []
    for part in parts:
        words = part.split()
        ignored = [ROOT / word.removeprefix('--ignore=') for word in words if word.startswith('--')]
        folders = [ROOT / word for word in words if not word.startswith('--')]
        assert [path for path in (*ignored, *folders) if not path.exists()] == []
        files = {path for folder in folders for path in [folder, *folder.rglob('test_*.py')] if path.is_file()}
        chosen += [path for path in files if not {path, *path.parents} & set(ignored)]
    assert sorted(chosen) == sorted((ROOT / 'tests').rglob('test_*.py'))
