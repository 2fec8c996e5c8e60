"""A run that is killed, told to stop, or whose files are damaged ends as one that was left alone."""

import json
import os
import random
import resource
import signal
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


def kill_while_it_saves(run) -> None:
    # the files are written, and the name they are to have is not
    checkpoint_module._fingerprint = kill_self


def terminate_last(run) -> None:
    # only one of the processes hears of it
    if run.accelerator.is_last_process:
        os.kill(os.getpid(), signal.SIGTERM)


def forbid_large_files(run) -> None:
    """From now on the system refuses to let a file grow, as a full disk does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))


EVENTS = {
    'killed': kill_self,
    'killed in evaluation': kill_in_evaluation,
    'killed while it saves': kill_while_it_saves,
    'terminated': terminate_last,
    'disk full': forbid_large_files,
}


def assert_same_run(a: Path, b: Path) -> None:
    """Weights, average, optimizer and history are the same, bit for bit."""
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


@pytest.fixture(scope='module', params=[1, 2], ids='{} processes'.format)
def whole(request, images, tmp_path_factory) -> tuple[int, Path]:
    """A run that nothing happened to, and how many processes it had."""
    folder = tmp_path_factory.mktemp(f'whole{request.param}')
    arguments = [*RUN, '--data-dir', images, '--output', str(folder / 'run')]
    assert start_processes(request.param, train_and_log, arguments, str(folder / 'log')).codes == [0] * request.param
    return request.param, folder


def test_a_run_that_is_killed_five_times_is_the_run_that_was_not(images, whole, tmp_path):
    world, uninterrupted = whole
    first = [*RUN, '--data-dir', images, '--output', str(tmp_path / 'run')]
    again = ['--resume', 'auto', '--output', str(tmp_path / 'run')]
    dice = random.Random(world)
    # in the middle of an epoch, at its end, while evaluating, while saving, and in the middle again
    deaths = {
        dice.randint(3, 4): 'killed',
        5: 'killed',
        10: 'killed in evaluation',
        12: 'killed while it saves',
        dice.randint(16, 19): 'killed',
    }
    for number, (step, event) in enumerate(deaths.items()):
        command = again if number else first
        outcome = start_processes(world, train_and_log, command, str(tmp_path / 'log'), EVENTS[event], step)
        assert -signal.SIGKILL in outcome.codes
        assert not (tmp_path / 'run' / 'model.safetensors').exists()
    assert start_processes(world, train_and_log, again, str(tmp_path / 'log')).codes == [0] * world
    assert read_log(tmp_path / 'log', world) == read_log(uninterrupted / 'log', world)
    assert_same_run(tmp_path / 'run', uninterrupted / 'run')


def test_sigterm_to_one_process_ends_all_with_a_checkpoint_and_exit_code_0(images, whole, tmp_path):
    world, uninterrupted = whole
    first = [*RUN, '--data-dir', images, '--output', str(tmp_path / 'run')]
    assert (
        start_processes(world, train_and_log, first, str(tmp_path / 'log'), EVENTS['terminated'], 7).codes
        == [0] * world
    )
    # what was asked for during step 7 is heard with step 8
    assert [path.name for path in list_checkpoints(tmp_path / 'run' / 'checkpoints')][-1] == 'step-00000008'
    assert not (tmp_path / 'run' / 'model.safetensors').exists()
    again = ['--resume', str(tmp_path / 'run')]
    assert start_processes(world, train_and_log, again, str(tmp_path / 'log')).codes == [0] * world
    assert read_log(tmp_path / 'log', world) == read_log(uninterrupted / 'log', world)
    assert_same_run(tmp_path / 'run', uninterrupted / 'run')


def test_a_full_disk_leaves_the_last_good_checkpoint_to_continue_from(images, whole, tmp_path):
    world, uninterrupted = whole
    first = [*RUN, '--data-dir', images, '--output', str(tmp_path / 'run')]
    outcome = start_processes(world, train_and_log, first, str(tmp_path / 'log'), EVENTS['disk full'], 4)
    assert outcome.codes == [2] * world
    (line,) = (line for line in outcome.err.splitlines() if line.startswith('vitzoo: error:'))
    assert 'cannot write a checkpoint to' in line and 'step-00000003 is intact; make room' in line
    assert [path.name for path in (tmp_path / 'run' / 'checkpoints').iterdir()] == ['step-00000003']
    again = ['--resume', 'auto', '--output', str(tmp_path / 'run')]
    assert start_processes(world, train_and_log, again, str(tmp_path / 'log')).codes == [0] * world
    assert_same_run(tmp_path / 'run', uninterrupted / 'run')


def truncate(checkpoint: Path) -> None:
    file = checkpoint / 'optimizer.pt'
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(checkpoint: Path) -> None:
    file = checkpoint / 'model.safetensors'
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)


DAMAGES = {
    'truncated': (truncate, 'optimizer.pt is not as it was written'),
    'one bit off': (flip_a_bit, 'model.safetensors is not as it was written'),
    'without a file': (lambda checkpoint: (checkpoint / 'ema.safetensors').unlink(), 'No such file'),
    'with half a state': (lambda checkpoint: (checkpoint / 'state.json').write_text('{"step": 1'), 'damaged'),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(images, tmp_path, damage):
    first = [*RUN, '--data-dir', images, '--output', str(tmp_path / 'run'), '--epochs', '2']
    start_processes(1, train_and_log, first, str(tmp_path / 'log'), EVENTS['killed'], 8)
    older, newer = list_checkpoints(tmp_path / 'run' / 'checkpoints')
    assert (older.name, newer.name) == ('step-00000005', 'step-00000006')
    harm, words = DAMAGES[damage]
    harm(newer)
    again = ['--resume', 'auto', '--output', str(tmp_path / 'run')]
    outcome = start_processes(1, train_and_log, again, str(tmp_path / 'log'))
    assert outcome.codes == [0]
    note, resumed = (line for line in outcome.out.splitlines() if 'checkpoints/step' in line)
    assert f'{newer} is damaged: ' in note and words in note
    assert resumed == f'resumed from {older} at step 5 of 10'
    # the steps that were done twice were the same, which read_log checks
    assert list(read_log(tmp_path / 'log', 1)) == list(range(1, 11))


def test_a_run_without_a_whole_checkpoint_says_so(images, tmp_path):
    first = [*RUN, '--data-dir', images, '--output', str(tmp_path / 'run')]
    start_processes(1, train_and_log, first, str(tmp_path / 'log'), EVENTS['killed'], 4)
    for path in list_checkpoints(tmp_path / 'run' / 'checkpoints'):
        truncate(path)
    again = ['--resume', 'auto', '--output', str(tmp_path / 'run')]
    outcome = start_processes(1, train_and_log, again, str(tmp_path / 'log'))
    assert outcome.codes == [2]
    assert 'cannot resume: ' in outcome.err and 'no other checkpoint before it' in outcome.err


@pytest.mark.parametrize(('before', 'after'), [(1, 2), (2, 1)])
def test_a_run_continues_on_another_number_of_processes(images, tmp_path, before, after):
    arguments = [*TINY, *RICH, '--epochs', '2', '--checkpoint-every', '3', '--data-dir', images, '--output']
    options = {1: ['--grad-accum-steps', '2'], 2: []}
    first = [*arguments, str(tmp_path / 'run'), *options[before]]
    start_processes(before, train_and_log, first, str(tmp_path / 'a'), EVENTS['killed'], 7)
    again = ['--resume', 'auto', '--output', str(tmp_path / 'run'), '--grad-accum-steps', str(3 - after)]
    assert start_processes(after, train_and_log, again, str(tmp_path / 'b')).codes == [0] * after
    assert start_processes(
        1, train_and_log, [*arguments, str(tmp_path / 'one'), *options[1]], str(tmp_path / 'c')
    ).codes == [0]
    notes, expected = read_log(tmp_path / 'b', after), read_log(tmp_path / 'c', 1)
    assert list(notes) == [7, 8, 9, 10]
    for step, members in notes.items():
        assert sorted(image for note in members for image in note['images']) == sorted(expected[step][0]['images'])
        assert members[0]['lr'] == expected[step][0]['lr']
        assert members[0]['loss'] == pytest.approx(expected[step][0]['loss'], abs=1e-5)


@pytest.mark.usefixtures('fresh_accelerate')
def test_checkpoints_come_by_the_clock(images, tmp_path, monkeypatch):
    arguments = [*TINY, '--epochs', '1', '--checkpoint-hist', '9', '--data-dir', images, '--output', str(tmp_path)]
    now = iter(range(0, 10_000, 60))
    monkeypatch.setattr(train_module.time, 'monotonic', lambda: next(now))
    train_module.train([*arguments, '--checkpoint-minutes', '3'])
    steps = [int(path.name[5:]) for path in list_checkpoints(tmp_path / 'checkpoints')]
    assert 1 < len(steps) < 5 and steps[-1] == 5


class Harmful:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.usefixtures('fresh_accelerate')
@pytest.mark.parametrize('name', ['optimizer.pt', 'model.safetensors'])
def test_a_checkpoint_with_code_in_it_is_refused_and_the_code_not_run(images, tmp_path, name):
    arguments = [*TINY, '--epochs', '2', '--data-dir', images, '--output', str(tmp_path / 'run')]
    train_module.train(arguments)
    newer = list_checkpoints(tmp_path / 'run' / 'checkpoints')[-1]
    torch.save({'state': Harmful(f'touch {tmp_path}/harmed')}, newer / name)
    # as somebody who knows about the checksums would
    state = json.loads((newer / 'state.json').read_text())
    state['files'][name] = checkpoint_module._fingerprint(newer / name)
    (newer / 'state.json').write_text(json.dumps(state))
    with pytest.raises(UserError, match=f'cannot resume from {newer}'):
        train_module.train([*arguments, '--resume', 'auto'])
    assert not (tmp_path / 'harmed').exists()
