"""Training is the same on one process, on several, and on several machines."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from shlex import split

import pytest
import torch
from processes import free_port, read_log, start_processes, train_and_log
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from toys import read_metrics

ROOT = Path(__file__).parents[2]
# nothing random that spans several images, such as mixup: its partners come from the same micro-batch
RUN = split(
    '--model test_vit --img-size 32 --workers 0 --batch-size 8 --lr 1e-3 --warmup-epochs 1 --epochs 2 --crop-pct 1'
    ' --reprob 0.5 --color-jitter 0.4 --model-ema --clip-grad 1'
)
CASES = {
    '1 process': (1, '1'),
    '2 processes': (2, '1'),
    '1 process, 2 steps': (1, '2'),
    '2 processes, 2 steps': (2, '2'),
}


@pytest.fixture(scope='module')
def alone(images, tmp_path_factory) -> Path:
    """The run of one process."""
    folder = tmp_path_factory.mktemp('alone')
    arguments = [*RUN, '--data-dir', images, '--output', str(folder / 'run')]
    assert start_processes(1, train_and_log, arguments, str(folder / 'log')).codes == [0]
    return folder


def assert_same_numbers(a: Path, b: Path) -> None:
    """The metrics agree in what is counted, and in losses and weights but for rounding."""
    for row, other in zip(read_metrics(a), read_metrics(b), strict=True):
        assert all(row[name] == other[name] for name in ('epoch', 'step', 'lr', 'top1', 'top5', 'ema_top1'))
        for name in ('train_loss', 'eval_loss', 'ema_eval_loss'):
            assert float(row[name]) == pytest.approx(float(other[name]), abs=1e-5)
    weights, others = load_file(a / 'model.safetensors'), load_file(b / 'model.safetensors')
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('case', CASES)
def test_processes_and_accumulation_change_neither_images_nor_rates_nor_losses(images, alone, tmp_path, case):
    world, accum = CASES[case]
    arguments = [*RUN, '--data-dir', images, '--output', str(tmp_path / 'run'), '--grad-accum-steps', accum]
    assert start_processes(world, train_and_log, arguments, str(tmp_path / 'log')).codes == [0] * world
    notes, expected = read_log(tmp_path / 'log', world), read_log(alone / 'log', 1)
    assert list(notes) == list(expected) == list(range(1, 11))
    for step, members in notes.items():
        (single,) = expected[step]
        assert sorted(image for note in members for image in note['images']) == sorted(single['images'])
        for note in members:
            assert note['lr'] == single['lr']
            assert note['loss'] == pytest.approx(single['loss'], abs=1e-5)
    assert_same_numbers(tmp_path / 'run', alone / 'run')


def test_a_model_trains_in_two_processes_with_checkpointed_and_frozen_blocks(images, tmp_path):
    # nothing is ready twice, and nothing unused is waited for
    tiny = 'model_kwargs={depth: 2, embed_dim: 24, num_heads: 2, patch_size: 8}'.partition('=')[2]
    arguments = [*RUN, '--model', 'deit_performer_tiny', '--model-kwargs', tiny, '--data-dir', images]
    arguments += ['--output', str(tmp_path / 'run'), '--grad-checkpointing', '--freeze', 'patch_embed,blocks.0']
    outcome = start_processes(2, train_and_log, arguments, str(tmp_path / 'log'))
    assert outcome.codes == [0, 0], outcome.err


def test_two_machines_give_the_numbers_of_two_processes(images, alone, tmp_path):
    port = str(free_port())
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'GLOO_SOCKET_IFNAME': 'lo'}
    launch = [
        sys.executable,
        '-m',
        'accelerate.commands.launch',
        '--cpu',
        '--num_machines',
        '2',
        '--num_processes',
        '2',
    ]
    launch += ['--main_process_ip', '127.0.0.1', '--main_process_port', port]
    train = ['train.py', *RUN, '--data-dir', images, '--output', str(tmp_path / 'run')]
    options = dict(cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    machines = [subprocess.Popen([*launch, '--machine_rank', rank, *train], **options) for rank in '01']
    printed = [machine.communicate(timeout=240)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], printed
    assert 'batch 8 = 2 processes x 1 accumulated x 4 images' in printed[0]
    # one machine speaks
    assert printed[0].count('epoch   2/2') == 1 and 'epoch   2/2' not in printed[1]
    assert_same_numbers(tmp_path / 'run', alone / 'run')


def train_sharded(argv: list[str], log: str, event=None, at: int = -1) -> None:
    """Train with FSDP, which Accelerate itself starts on accelerators only."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    from vitzoo.train import loop as train_module

    start_processes = train_module.start_processes

    def start_sharded(recipe, folder):
        accelerator = start_processes(recipe, folder)
        wrap = dict(auto_wrap_policy='transformer_based_wrap', transformer_cls_names_to_wrap=['Block'])
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **wrap)
        accelerator.state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
        return accelerator

    train_module.start_processes = start_sharded
    train_and_log(argv, log, event, at)


def kill_if_sharded(run) -> None:
    assert all(isinstance(parameter, DTensor) for parameter in run.raw_model.parameters())
    os.kill(os.getpid(), signal.SIGKILL)


def test_sharded_weights_train_as_whole_ones_and_their_checkpoints_are_the_same(images, alone, tmp_path):
    arguments = [*RUN, '--data-dir', images, '--output', str(tmp_path / 'run'), '--checkpoint-every', '2']
    outcome = start_processes(2, train_sharded, arguments, str(tmp_path / 'log'), kill_if_sharded, 7)
    assert -signal.SIGKILL in outcome.codes, outcome.err
    again = ['--resume', 'auto', '--output', str(tmp_path / 'run')]
    outcome = start_processes(2, train_sharded, again, str(tmp_path / 'log'))
    assert outcome.codes == [0, 0], outcome.err
    assert_same_numbers(tmp_path / 'run', alone / 'run')
    # a checkpoint of sharded weights continues in one process
    for folder in ('step-00000010', '../best'):
        shutil.rmtree(tmp_path / 'run' / 'checkpoints' / folder)
    assert start_processes(1, train_and_log, again, str(tmp_path / 'other')).codes == [0]
    assert_same_numbers(tmp_path / 'run', alone / 'run')


def train_apart(argv: list[str], output: str) -> None:
    """Train with a folder of its own for each process, as machines have that share no disk."""
    from vitzoo.train import main

    main([*argv, '--output', output + os.environ['RANK']])


def test_machines_that_share_no_folder_are_told_at_the_start(images, tmp_path):
    outcome = start_processes(2, train_apart, [*RUN, '--data-dir', images], str(tmp_path / 'run'))
    assert outcome.codes == [2, 2]
    (line,) = (line for line in outcome.err.splitlines() if line.startswith('vitzoo: error:'))
    assert 'must be one that all machines share' in line
