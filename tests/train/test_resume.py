"""A run that is killed, stopped or has a damaged checkpoint ends like an uninterrupted run."""

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
from pathlib import Path
from shlex import split

import pytest
import torch
from processes import read_log, start_processes, train_and_log
from safetensors.torch import load_file
from toys import read_metrics

from vitzoo.errors import UserError
from vitzoo.train import checkpoint as checkpoint_module
from vitzoo.train import loop as train_module
from vitzoo.train.checkpoint import list_checkpoints

# 40 images and batches of 8 make 5 steps an epoch
TINY = split('--model test_vit --img-size 32 --workers 0 --batch-size 8 --lr 1e-3 --warmup-epochs 1 --crop-pct 1')
RICH = split('--model-ema --model-ema-warmup --mixup 0.4 --cutmix 1 --drop-path 0.2 --reprob 0.5 --clip-grad 1')
RUN = [*TINY, *RICH, *split('--epochs 4 --checkpoint-every 3')]
STEPS = 20


def kill_self(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_evaluation(run) -> None:
    train_module.evaluate_epoch = kill_self


def kill_while_saving(run) -> None:
    # after the files are written, and before the folder is renamed
    checkpoint_module._fingerprint = kill_self


def terminate_last(run) -> None:
    # a single process receives the signal
    if run.accelerator.is_last_process:
        os.kill(os.getpid(), signal.SIGTERM)


def terminate_with_workers(run) -> None:
    # as `timeout` and Slurm do
    pids = [os.getpid(), *(worker.pid for worker in multiprocessing.active_children())]
    subprocess.run(['kill', '-TERM', *map(str, pids)], check=True)


def forbid_large_files(run) -> None:
    """Limit the size of files, which makes writes fail as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))


EVENTS = {
    'killed': kill_self,
    'killed in evaluation': kill_in_evaluation,
    'killed while saving': kill_while_saving,
    'terminated': terminate_last,
    'terminated with workers': terminate_with_workers,
    'disk full': forbid_large_files,
}


def assert_same_run(a: Path, b: Path) -> None:
    """Compare weights, EMA, optimizer state and metrics bit for bit."""
    assert read_metrics(a) == read_metrics(b)
    checkpoints = [list_checkpoints(folder / 'checkpoints')[-1] for folder in (a, b)]
    assert checkpoints[0].name == checkpoints[1].name == f'step-{STEPS:08d}'
    folders = {'': (a, b), 'best': (a / 'best', b / 'best'), 'checkpoint': checkpoints}
    for kind, (one, other) in folders.items():
        for file in ('model.safetensors', 'ema.safetensors')[: 2 if kind == 'checkpoint' else 1]:
            left, right = load_file(one / file), load_file(other / file)
            assert left.keys() == right.keys()
            assert [name for name in left if not torch.equal(left[name], right[name])] == [], (kind, file)
    optimizers = [torch.load(folder / 'optimizer.pt', weights_only=True)['state'] for folder in checkpoints]
    for index, state in optimizers[0].items():
        assert all(torch.equal(state[name], optimizers[1][index][name]) for name in state)


@pytest.fixture(scope='module', params=[pytest.param(1, marks=pytest.mark.slow), 2], ids='{} processes'.format)
def uninterrupted(request, images, tmp_path_factory) -> tuple[int, Path]:
    """The number of processes and the folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp(f'uninterrupted{request.param}')
    arguments = [*RUN, '--data-dir', images, '--output', str(folder / 'run')]
    assert start_processes(request.param, train_and_log, arguments, str(folder / 'log')).codes == [0] * request.param
    return request.param, folder


def test_a_run_that_is_killed_five_times_ends_like_an_uninterrupted_run(images, uninterrupted, tmp_path):
    world_size, expected = uninterrupted
    first = [*RUN, '--data-dir', images, '--output', str(tmp_path / 'run')]
    again = ['--resume', 'auto', '--output', str(tmp_path / 'run')]
    generator = random.Random(world_size)
    # within an epoch, at its end, while evaluating, while saving, and within an epoch again
    kills = {
        generator.randint(3, 4): 'killed',
        5: 'killed',
        10: 'killed in evaluation',
        12: 'killed while saving',
        generator.randint(16, 19): 'killed',
    }
    for number, (step, event) in enumerate(kills.items()):
        command = again if number else first
        outcome = start_processes(world_size, train_and_log, command, str(tmp_path / 'log'), EVENTS[event], step)
        assert -signal.SIGKILL in outcome.codes
        assert not (tmp_path / 'run' / 'model.safetensors').exists()
    assert start_processes(world_size, train_and_log, again, str(tmp_path / 'log')).codes == [0] * world_size
    assert read_log(tmp_path / 'log', world_size) == read_log(expected / 'log', world_size)
    assert_same_run(tmp_path / 'run', expected / 'run')


def test_sigterm_to_one_process_ends_all_with_a_checkpoint_and_exit_code_0(images, uninterrupted, tmp_path):
    world_size, expected = uninterrupted
    first = [*RUN, '--data-dir', images, '--output', str(tmp_path / 'run')]
    outcome = start_processes(world_size, train_and_log, first, str(tmp_path / 'log'), EVENTS['terminated'], 7)
    assert outcome.codes == [0] * world_size
    # a signal after step 7 is seen at step 8
    assert [path.name for path in list_checkpoints(tmp_path / 'run' / 'checkpoints')][-1] == 'step-00000008'
    assert not (tmp_path / 'run' / 'model.safetensors').exists()
    again = ['--resume', str(tmp_path / 'run')]
    assert start_processes(world_size, train_and_log, again, str(tmp_path / 'log')).codes == [0] * world_size
    assert read_log(tmp_path / 'log', world_size) == read_log(expected / 'log', world_size)
    assert_same_run(tmp_path / 'run', expected / 'run')


def test_sigterm_to_a_run_and_its_loader_workers_ends_it_with_a_checkpoint(images, tmp_path):
    command = [*RUN, '--data-dir', images, '--output', str(tmp_path / 'run'), '--workers', '2']
    event = EVENTS['terminated with workers']
    outcome = start_processes(1, train_and_log, command, str(tmp_path / 'log'), event, 7)
    assert outcome.codes == [0], outcome.err
    assert [path.name for path in list_checkpoints(tmp_path / 'run' / 'checkpoints')][-1] == 'step-00000008'


def test_a_full_disk_leaves_the_last_checkpoint_intact(images, uninterrupted, tmp_path):
    world_size, expected = uninterrupted
    first = [*RUN, '--data-dir', images, '--output', str(tmp_path / 'run')]
    outcome = start_processes(world_size, train_and_log, first, str(tmp_path / 'log'), EVENTS['disk full'], 4)
    assert outcome.codes == [2] * world_size
    (line,) = (line for line in outcome.err.splitlines() if line.startswith('vitzoo: error:'))
    assert 'cannot write a checkpoint to' in line and 'step-00000003 is intact; free some space' in line
    assert [path.name for path in (tmp_path / 'run' / 'checkpoints').iterdir()] == ['step-00000003']
    again = ['--resume', 'auto', '--output', str(tmp_path / 'run')]
    assert start_processes(world_size, train_and_log, again, str(tmp_path / 'log')).codes == [0] * world_size
    assert_same_run(tmp_path / 'run', expected / 'run')


def truncate(checkpoint: Path) -> None:
    file = checkpoint / 'optimizer.pt'
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(checkpoint: Path) -> None:
    file = checkpoint / 'model.safetensors'
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)


DAMAGES = {
    'truncated': (truncate, 'optimizer.pt does not match its checksum'),
    'one bit flipped': (flip_a_bit, 'model.safetensors does not match its checksum'),
    'missing a file': (lambda checkpoint: (checkpoint / 'ema.safetensors').unlink(), 'No such file'),
    'half a state': (lambda checkpoint: (checkpoint / 'state.json').write_text('{"step": 1'), 'damaged'),
    'another file': (lambda checkpoint: (checkpoint / 'state.json').write_text('{}'), "state.json has no 'files'"),
}


@pytest.fixture(scope='module')
def killed(images, tmp_path_factory) -> Path:
    """A run of two epochs that was killed after step 8, with checkpoints of steps 5 and 6."""
    folder = tmp_path_factory.mktemp('killed')
    arguments = [*RUN, '--epochs', '2', '--data-dir', images, '--output', str(folder / 'run')]
    start_processes(1, train_and_log, arguments, str(folder / 'log'), EVENTS['killed'], 8)
    return folder


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(killed, tmp_path, damage):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    older, newer = list_checkpoints(tmp_path / 'run' / 'checkpoints')
    assert (older.name, newer.name) == ('step-00000005', 'step-00000006')
    apply, words = DAMAGES[damage]
    apply(newer)
    again = ['--resume', 'auto', '--output', str(tmp_path / 'run')]
    outcome = start_processes(1, train_and_log, again, str(tmp_path / 'log'))
    assert outcome.codes == [0]
    note, resumed = (line for line in outcome.out.splitlines() if 'checkpoints/step' in line)
    assert f'{newer} is damaged: ' in note and words in note
    assert resumed == f'resumed from {older} at step 5 of 10'
    # read_log also checks that repeated steps had the same losses
    assert list(read_log(tmp_path / 'log', 1)) == list(range(1, 11))


def test_all_files_of_a_checkpoint_can_be_read_by_those_who_read_the_run(killed):
    mode = (killed / 'run' / 'recipe.yaml').stat().st_mode
    for checkpoint in list_checkpoints(killed / 'run' / 'checkpoints'):
        assert {path.name: path.stat().st_mode for path in checkpoint.iterdir() if path.stat().st_mode != mode} == {}


def test_a_run_without_an_intact_checkpoint_cannot_resume(killed, tmp_path):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    for path in list_checkpoints(tmp_path / 'run' / 'checkpoints'):
        truncate(path)
    again = ['--resume', str(tmp_path / 'run'), '--output', str(tmp_path / 'new')]
    outcome = start_processes(1, train_and_log, again, str(tmp_path / 'log'))
    assert outcome.codes == [2]
    assert f"cannot resume: all checkpoints in '{tmp_path / 'run' / 'checkpoints'}' are damaged" in outcome.err


SPLIT = [*TINY, *RICH, '--epochs', '2', '--checkpoint-every', '3']


@pytest.fixture(scope='module')
def accumulated(images, tmp_path_factory) -> dict[int, list[dict]]:
    """The log of a run on one process with two accumulation steps."""
    folder = tmp_path_factory.mktemp('accumulated')
    arguments = [*SPLIT, '--grad-accum-steps', '2', '--data-dir', images, '--output', str(folder / 'run')]
    assert start_processes(1, train_and_log, arguments, str(folder / 'log')).codes == [0]
    return read_log(folder / 'log', 1)


@pytest.mark.parametrize(('before', 'after'), [(1, 2), (2, 1)])
def test_a_run_resumes_on_another_number_of_processes(images, accumulated, tmp_path, before, after):
    first = [*SPLIT, '--grad-accum-steps', str(3 - before), '--data-dir', images, '--output', str(tmp_path / 'run')]
    start_processes(before, train_and_log, first, str(tmp_path / 'before'), EVENTS['killed'], 7)
    again = ['--resume', 'auto', '--output', str(tmp_path / 'run'), '--grad-accum-steps', str(3 - after)]
    assert start_processes(after, train_and_log, again, str(tmp_path / 'after')).codes == [0] * after
    log = read_log(tmp_path / 'after', after)
    assert list(log) == [7, 8, 9, 10]
    for step, entries in log.items():
        (expected,) = accumulated[step]
        assert sorted(image for entry in entries for image in entry['images']) == sorted(expected['images'])
        assert entries[0]['lr'] == expected['lr']
        assert entries[0]['loss'] == pytest.approx(expected['loss'], abs=1e-5)


@pytest.mark.usefixtures('fresh_accelerate')
def test_checkpoints_are_written_every_few_minutes(images, tmp_path, monkeypatch):
    arguments = [*TINY, '--epochs', '1', '--checkpoint-hist', '9', '--data-dir', images, '--output', str(tmp_path)]
    now = iter(range(0, 10_000, 60))
    monkeypatch.setattr(train_module.time, 'monotonic', lambda: next(now))
    train_module.train([*arguments, '--checkpoint-minutes', '3'])
    steps = [int(path.name[5:]) for path in list_checkpoints(tmp_path / 'checkpoints')]
    assert 1 < len(steps) < 5 and steps[-1] == 5


class Malicious:
    """Runs a command when unpickled."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.usefixtures('fresh_accelerate')
@pytest.mark.parametrize('name', ['optimizer.pt', 'model.safetensors'])
def test_code_in_a_checkpoint_is_not_executed(images, tmp_path, name):
    arguments = [*TINY, '--epochs', '2', '--data-dir', images, '--output', str(tmp_path / 'run')]
    train_module.train(arguments)
    newer = list_checkpoints(tmp_path / 'run' / 'checkpoints')[-1]
    torch.save({'state': Malicious(f'touch {tmp_path}/executed')}, newer / name)
    # an attacker would update the checksums too
    state = json.loads((newer / 'state.json').read_text())
    state['files'][name] = checkpoint_module._fingerprint(newer / name)
    (newer / 'state.json').write_text(json.dumps(state))
    with pytest.raises(UserError, match=f'cannot resume from {newer}'):
        train_module.train([*arguments, '--resume', 'auto'])
    assert not (tmp_path / 'executed').exists()
