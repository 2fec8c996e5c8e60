"""Training gives the same numbers on one process, on several, and on several machines."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from shlex import split
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from processes import free_port, read_log, shard_accelerators, start_processes, train_and_log
from safetensors.torch import load_file, save_file
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from toys import read_metrics

from vitzoo.errors import UserError, run_command
from vitzoo.launch import _run_processes, start_missing_processes
from vitzoo.train.processes import raise_together

ROOT = Path(__file__).parents[2]
# nothing random that involves several images, such as mixup, whose pairs are within a micro-batch
RUN = split(
    '--model test_vit --img-size 32 --workers 0 --batch-size 8 --lr 1e-3 --warmup-epochs 1 --epochs 2 --crop-pct 1'
    ' --reprob 0.5 --color-jitter 0.4 --model-ema --clip-grad 1'
)
# processes, machines, accumulation steps
CASES = {
    '2 processes': (2, 1, '1'),
    '1 process, 2 accumulation steps': (1, 1, '2'),
    '2 processes, 2 accumulation steps': (2, 1, '2'),
    '2 machines': (2, 2, '1'),
}


@pytest.fixture(scope='module')
def single(images, tmp_path_factory) -> Path:
    """A run on one process."""
    folder = tmp_path_factory.mktemp('single')
    arguments = [*RUN, '--data-dir', images, '--output', str(folder / 'run')]
    assert start_processes(1, train_and_log, arguments, str(folder / 'log')).codes == [0]
    return folder


def assert_same_numbers(a: Path, b: Path) -> None:
    """Compare counts exactly, and losses and weights up to rounding."""
    for row, other in zip(read_metrics(a), read_metrics(b), strict=True):
        assert all(row[name] == other[name] for name in ('epoch', 'step', 'lr', 'top1', 'top5', 'ema_top1'))
        for name in ('train_loss', 'eval_loss', 'ema_eval_loss'):
            assert float(row[name]) == pytest.approx(float(other[name]), abs=1e-5)
    weights, others = load_file(a / 'model.safetensors'), load_file(b / 'model.safetensors')
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('case', CASES)
def test_images_rates_and_losses_do_not_depend_on_how_a_batch_is_split(images, single, tmp_path, case):
    world_size, machines, accum_steps = CASES[case]
    arguments = [*RUN, '--data-dir', images, '--output', str(tmp_path / 'run'), '--grad-accum-steps', accum_steps]
    outcome = start_processes(world_size, train_and_log, arguments, str(tmp_path / 'log'), machines=machines)
    assert outcome.codes == [0] * world_size, outcome.err
    log, expected = read_log(tmp_path / 'log', world_size), read_log(single / 'log', 1)
    assert list(log) == list(expected) == list(range(1, 11))
    for step, entries in log.items():
        (reference,) = expected[step]
        assert sorted(image for entry in entries for image in entry['images']) == sorted(reference['images'])
        for entry in entries:
            assert entry['lr'] == reference['lr']
            assert entry['loss'] == pytest.approx(reference['loss'], abs=1e-5)
    # only the main process prints
    assert outcome.out.count('epoch   2/2') == 1
    assert_same_numbers(tmp_path / 'run', single / 'run')


def test_a_model_trains_in_two_processes_with_checkpointed_and_frozen_blocks(images, tmp_path):
    # DDP fails if a gradient is ready twice, or never
    tiny = '{depth: 2, embed_dim: 24, num_heads: 2, patch_size: 8}'
    arguments = [*RUN, '--model', 'deit_performer_tiny', '--model-kwargs', tiny, '--data-dir', images]
    arguments += ['--output', str(tmp_path / 'run'), '--grad-checkpointing', '--freeze', 'patch_embed,blocks.0']
    outcome = start_processes(2, train_and_log, [*arguments, '--epochs', '1'], str(tmp_path / 'log'))
    assert outcome.codes == [0, 0], outcome.err


def launch_command(machines: int, processes: int, rank: int, port: int) -> list[str]:
    command = ['-m', 'accelerate.commands.launch', '--cpu', '--num_machines', str(machines)]
    command += ['--num_processes', str(processes), '--machine_rank', str(rank)]
    return [sys.executable, *command, '--main_process_ip', '127.0.0.1', '--main_process_port', str(port)]


@pytest.mark.parametrize(
    ('machines', 'options'),
    [
        (1, '--standalone --nproc_per_node 4'),
        (2, '--nnodes 2 --nproc_per_node 2 --node_rank 1 --master_addr 127.0.0.1 --master_port 29500'),
    ],
)
def test_torchrun_starts_the_processes_that_accelerate_launch_on_cpus_does_not(monkeypatch, machines, options):
    launcher = [*launch_command(machines, 4, machines - 1, 29500), 'train.py', '--epochs', '2']
    monkeypatch.setattr('vitzoo.launch.Process', lambda: SimpleNamespace(parent=lambda: launcher_process))
    launcher_process = SimpleNamespace(cmdline=lambda: launcher)
    for name in ('LOCAL_RANK', 'WORLD_SIZE', 'PMI_SIZE', 'OMPI_COMM_WORLD_SIZE'):
        monkeypatch.delenv(name, raising=False)
    for name, value in dict(ACCELERATE_USE_CPU='true', MASTER_ADDR='127.0.0.1', MASTER_PORT='29500').items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, 'argv', ['train.py', '--epochs', '2'])
    started = []
    monkeypatch.setattr('vitzoo.launch.torchrun.run', started.append)
    with pytest.raises(SystemExit) as exit:
        start_missing_processes()
    assert exit.value.code is None
    assert started == [torchrun.parse_args([*options.split(), 'train.py', '--epochs', '2'])]


@pytest.mark.parametrize(
    ('exitcode', 'code', 'words'), [(2, 2, ''), (-9, 137, 'vitzoo: error: process 1 was killed by SIGKILL\n')]
)
def test_the_exit_code_of_a_process_is_that_of_the_command(tmp_path, monkeypatch, capsys, exitcode, code, words):
    def fail(args):
        failure = ProcessFailure(local_rank=1, pid=5, exitcode=exitcode, error_file=str(tmp_path / 'none'))
        raise ChildFailedError('train.py', {1: failure})

    monkeypatch.setattr('vitzoo.launch.torchrun.run', fail)
    with pytest.raises(SystemExit) as exit:
        _run_processes(['--standalone', 'train.py'])
    assert exit.value.code == code
    # warnings of what runs after it in the same process
    assert logging.getLogger().isEnabledFor(logging.WARNING)
    assert capsys.readouterr().err == words


def fail_on(rank: int) -> None:
    """Make a mistake that only one process sees, after the processes have joined."""
    accelerator = Accelerator(cpu=True)

    def command(argv) -> None:
        with raise_together(accelerator):
            if accelerator.process_index == rank:
                raise UserError(f'process {rank} has no such folder')

    run_command(command)


def test_a_mistake_that_one_process_sees_is_printed_once_by_the_first(tmp_path):
    outcome = start_processes(2, fail_on, 1)
    assert outcome.codes == [2, 2]
    assert [line for line in outcome.err.splitlines() if 'vitzoo' in line] == [
        'vitzoo: error: process 1 has no such folder'
    ]


@pytest.mark.slow
def test_two_machines_launched_by_accelerate_give_the_numbers_of_one_process(images, single, tmp_path):
    environment = {**os.environ, 'GLOO_SOCKET_IFNAME': 'lo'}
    train, port = ['train.py', *RUN, '--data-dir', images, '--output', str(tmp_path / 'run')], free_port()
    options = dict(cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    machines = [subprocess.Popen([*launch_command(2, 2, rank, port), *train], **options) for rank in (0, 1)]
    printed = [machine.communicate(timeout=900)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], printed
    assert 'batch 8 = 2 processes x 1 accumulated x 4 images' in printed[0]
    assert printed[0].count('epoch   2/2') == 1 and 'epoch   2/2' not in printed[1]
    assert_same_numbers(tmp_path / 'run', single / 'run')


def train_sharded(argv: list[str], log: str, event=None, at: int = -1) -> None:
    """Train with FSDP, which Accelerate only starts on accelerators."""
    shard_accelerators()
    train_and_log(argv, log, event, at)


def kill_if_sharded(run) -> None:
    assert all(isinstance(parameter, DTensor) for parameter in run.raw_model.parameters())
    assert all(isinstance(block, FSDPModule) for block in run.raw_model.blocks)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.xfail(torch.__version__.startswith('2.6'), reason='torch 2.6 shards on GPUs only')
def test_fsdp_gives_the_numbers_and_the_checkpoint_files_of_one_process(images, single, tmp_path):
    arguments = [*RUN, '--data-dir', images, '--output', str(tmp_path / 'run'), '--checkpoint-every', '2']
    outcome = start_processes(2, train_sharded, arguments, str(tmp_path / 'log'), kill_if_sharded, 3)
    assert -signal.SIGKILL in outcome.codes, outcome.err
    again = ['--resume', 'auto', '--output', str(tmp_path / 'run')]
    outcome = start_processes(2, train_sharded, again, str(tmp_path / 'log'))
    assert outcome.codes == [0, 0], outcome.err
    assert_same_numbers(tmp_path / 'run', single / 'run')
    # the same checkpoints resume on one process
    for folder in ('step-00000010', '../best'):
        shutil.rmtree(tmp_path / 'run' / 'checkpoints' / folder)
    assert start_processes(1, train_and_log, again, str(tmp_path / 'other')).codes == [0]
    assert_same_numbers(tmp_path / 'run', single / 'run')


def keep_statistics(run) -> None:
    """Write the running statistics of this process next to the run, before they are shared."""
    statistics = {name: tensor for name, tensor in run.raw_model.named_buffers() if 'running' in name}
    save_file(statistics, f'{run.folder}-{run.accelerator.process_index}.safetensors')


@pytest.mark.slow
def test_with_fsdp_batch_norm_has_the_mean_of_the_statistics_of_all_processes(images, tmp_path):
    kwargs = dict(depths=[1, 1, 1], embed_dims=[16, 16, 32], num_heads=[1, 2, 2])
    model = ['--model', 'cvt_13', '--model-kwargs', json.dumps(kwargs), '--epochs', '1', '--warmup-epochs', '0']
    arguments = [*RUN, *model, '--data-dir', images, '--output', str(tmp_path / 'run')]
    outcome = start_processes(2, train_sharded, arguments, str(tmp_path / 'log'), keep_statistics, 5)
    assert outcome.codes == [0, 0], outcome.err
    first, second = (load_file(tmp_path / f'run-{rank}.safetensors') for rank in range(2))
    assert first and not all(torch.equal(first[name], second[name]) for name in first)
    saved = load_file(tmp_path / 'run' / 'checkpoints' / 'step-00000005' / 'model.safetensors')
    for name, tensor in first.items():
        torch.testing.assert_close(saved[name], (tensor + second[name]) / 2)


def train_unshared(argv: list[str], output: str) -> None:
    """Train with a separate folder for each process, as on machines without a shared file system."""
    from vitzoo.train import main

    main([*argv, '--output', output + os.environ['RANK']])


def test_machines_without_a_shared_folder_are_refused(images, tmp_path):
    outcome = start_processes(2, train_unshared, [*RUN, '--data-dir', images], str(tmp_path / 'run'))
    assert outcome.codes == [2, 2]
    (line,) = (line for line in outcome.err.splitlines() if line.startswith('vitzoo: error:'))
    assert 'is not shared by all machines' in line
