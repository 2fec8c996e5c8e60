"""Workers as jobs of submitit."""

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from studies import STUDY, Executor, write_study

from vitzoo.errors import UserError
from vitzoo.study.command import run_study
from vitzoo.study.plan import read_study
from vitzoo.study.results import collect
from vitzoo.study.slurm import WorkerJob, slurm_settings, submit_workers
from vitzoo.study.status import find_state

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('partition', "'partition' is not KEY=VALUE"),
        ('minutes=60,jobs=0', 'jobs must be a number of 1 or more, not 0'),
        ('minutes=60,timeouts=often', 'timeouts must be a number of 1 or more, not often'),
        ('partition=gpu', 'minutes must be a number of 1 or more, not None'),
    ],
)
def test_wrong_settings_are_one_sentence(text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        slurm_settings(text)


def test_settings_become_parameters_of_submitit(tmp_path, monkeypatch, capsys):
    seen = {}

    class Executor:
        def __init__(self, folder, cluster, slurm_max_num_timeout):
            seen.update(folder=folder, cluster=cluster, timeouts=slurm_max_num_timeout, jobs=[])

        def update_parameters(self, **parameters):
            seen.update(parameters)

        def batch(self):
            return nullcontext()

        def submit(self, job):
            seen['jobs'].append(job)
            return SimpleNamespace(job_id=f'7_{len(seen["jobs"])}')

    monkeypatch.setitem(sys.modules, 'submitit', SimpleNamespace(AutoExecutor=Executor))
    path = write_study(tmp_path)
    run_study(
        [
            'run',
            path,
            '--launch',
            'accelerate launch',
            '--slurm',
            'partition=gpu,gpus=2,minutes=60,jobs=3',
            '--cells',
            '*/seed-0',
        ]
    )
    jobs = seen.pop('jobs')
    assert seen == dict(
        folder=tmp_path / 'out' / 'slurm',
        cluster='slurm',
        name='vitzoo',
        slurm_partition='gpu',
        gpus_per_node=2,
        timeout_min=60,
        timeouts=1000,
    )
    assert {(job.path, *job.launch, *job.cells) for job in jobs} == {
        (path, 'accelerate', 'launch', '*/seed-0')
    } and len(jobs) == 3
    assert 'submitted 7_1, 7_2, 7_3' in capsys.readouterr().out


def test_without_submitit_or_slurm_there_is_one_sentence(tmp_path, monkeypatch):
    settings = slurm_settings('minutes=1')
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(UserError, match='--slurm cannot submit the jobs: .*srun'):
        submit_workers('study.yaml', [sys.executable], settings, tmp_path)
    with pytest.raises(UserError, match='--slurm cannot submit the jobs: .*slurm_color'):
        submit_workers('study.yaml', [sys.executable], slurm_settings('minutes=1,color=red,cluster=local'), tmp_path)
    monkeypatch.setitem(sys.modules, 'submitit', None)
    with pytest.raises(UserError, match='needs the package submitit; install it'):
        submit_workers('study.yaml', [sys.executable], settings, tmp_path)


def test_a_job_refuses_a_study_that_was_changed_while_it_was_queued(tmp_path, monkeypatch):
    path, executor = write_study(tmp_path, seeds=[0]), Executor()
    monkeypatch.setattr('vitzoo.study.worker.run_process', executor)
    job = WorkerJob(path, ['python'], ['scratch/*'])
    job()
    number = len(executor.commands)
    ways = {**STUDY['ways'], 'scratch': dict(train=dict(epochs=4))}
    write_study(tmp_path, seeds=[0, 1], ways=ways)
    with pytest.raises(UserError, match='was computed with train epochs = 3, not 4; undo the change'):
        job()
    assert len(executor.commands) == number > 0


def test_a_job_fails_if_a_cell_has_failed(tmp_path, monkeypatch):
    path = write_study(tmp_path, seeds=[0])
    monkeypatch.setattr(
        'vitzoo.study.worker.run_process', Executor(lambda command: 2 if 'deit_ls_nano' in ' '.join(command) else None)
    )
    with pytest.raises(UserError, match='1 of 2 cells failed, the first is scratch/deit_ls_nano/seed-0'):
        WorkerJob(path, ['python'], ['scratch/*'])()


@pytest.mark.slow
def test_the_local_executor_computes_a_study(tmp_path, monkeypatch):
    # the steps of the cells write their files without computing anything
    script = tmp_path / 'step.py'
    script.write_text('import sys\nfrom studies import write_results\nwrite_results(sys.argv)\n')
    monkeypatch.setenv('PYTHONPATH', f'{TESTS.parent}:{TESTS}')
    path = write_study(tmp_path)
    launch = [sys.executable, str(script)]
    jobs = submit_workers(path, launch, slurm_settings('cluster=local,minutes=10,jobs=2'), tmp_path / 'slurm')
    assert [job.result() for job in jobs] == [None, None]
    study = read_study(path)
    assert {find_state(cell).value for cell in study.cells} == {'finished'}
    assert len(collect(study)) == 5


@pytest.mark.parametrize(('setting', 'times'), [('', 1000), (',timeouts=20', 20)])
def test_a_job_may_reach_its_limit_as_often_as_the_user_wants(tmp_path, monkeypatch, setting, times):
    submitit = pytest.importorskip('submitit')
    seen = []
    for name in ('srun', 'sbatch'):
        command = tmp_path / name
        command.write_text('#!/bin/sh\necho Submitted batch job 12\n')
        command.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}{os.pathsep}{os.environ["PATH"]}')
    # a job counts these down at its limits
    monkeypatch.setattr(
        submitit.core.utils.DelayedSubmission, 'set_timeout', lambda job, minutes, count: seen.append((minutes, count))
    )
    submit_workers('study.yaml', [sys.executable], slurm_settings(f'minutes=60{setting}'), tmp_path)
    assert seen == [(60, times)]


def test_an_interrupted_job_is_queued_again():
    pytest.importorskip('submitit')
    job = WorkerJob('study.yaml', ['python'])
    assert job.checkpoint().function is job
