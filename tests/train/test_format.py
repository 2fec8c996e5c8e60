"""Weights in bfloat16, and the channels-last memory format: training, averaging, resuming and the exported model."""

from contextlib import nullcontext
from functools import partial
from shlex import split
from types import SimpleNamespace

import pytest
import timm
import torch
from accelerate.utils import DistributedType
from processes import start_processes, train_and_log
from safetensors.torch import load_file
from toys import read_metrics

from vitzoo.errors import UserError
from vitzoo.train import loop as train_module
from vitzoo.train import opening
from vitzoo.train.checkpoint import list_checkpoints
from vitzoo.train.loop import train
from vitzoo.train.model import check_cuda_graphs, compile_model, convert_format
from vitzoo.train.recipe import make_recipe

pytestmark = pytest.mark.usefixtures('fresh_accelerate')
TINY = split('--model test_vit --img-size 32 --workers 0 --batch-size 8 --lr 1e-3 --warmup-epochs 0 --crop-pct 1')
CVT = ['--model', 'cvt_13', '--model-kwargs', '{depths: [1, 1, 1], embed_dims: [16, 16, 32], num_heads: [1, 2, 2]}']
FORMATS = {
    'bfloat16': ['--model-dtype', 'bfloat16'],
    'channels last': ['--channels-last'],
    'both': ['--model-dtype', 'bfloat16', '--channels-last'],
}


@pytest.fixture
def kept(monkeypatch) -> list:
    """The runs, as of their last step."""
    runs, train_step = [], train_module.train_step

    def step_and_keep(run, *args, **kwargs):
        runs[:] = [run]
        return train_step(run, *args, **kwargs)

    monkeypatch.setattr(train_module, 'train_step', step_and_keep)
    return runs


@pytest.mark.parametrize('kind', FORMATS)
def test_a_model_in_another_format_trains_and_is_exported(images, tmp_path, kept, kind):
    arguments = [*TINY, *CVT, *FORMATS[kind], '--model-ema', '--mixup', '0.4', '--data-dir', images, '--epochs', '1']
    scores = train([*arguments, '--output', str(tmp_path / 'run')])
    (run,) = kept
    dtype = torch.float32 if kind == 'channels last' else torch.bfloat16
    assert {parameter.dtype for parameter in run.raw_model.parameters()} == {dtype}
    assert {parameter.dtype for parameter in run.ema.module.parameters()} == {torch.float32}
    convolution = next(parameter for parameter in run.raw_model.parameters() if parameter.ndim == 4)
    assert convolution.is_contiguous(memory_format=torch.channels_last) or kind == 'bfloat16'
    # the exported files hold for the plain model
    exported = timm.create_model(f'local-dir:{tmp_path / "run"}', pretrained=True)
    assert {parameter.dtype for parameter in exported.parameters()} == {torch.float32}
    assert float(read_metrics(tmp_path / 'run')[-1]['train_loss']) < 2 and scores['n'] == 11


def test_a_model_in_another_format_resumes_bit_for_bit(images, tmp_path):
    arguments = [*TINY, *CVT, *FORMATS['both'], '--model-ema', '--data-dir', images]
    train([*arguments, '--output', str(tmp_path / 'halves'), '--epochs', '1', '--sched', 'constant'])
    train([*arguments, '--output', str(tmp_path / 'whole'), '--epochs', '2', '--sched', 'constant'])
    train(['--resume', str(tmp_path / 'halves'), '--epochs', '2'])
    whole, halves = (list_checkpoints(tmp_path / name / 'checkpoints')[-1] for name in ('whole', 'halves'))
    for file in ('model.safetensors', 'ema.safetensors'):
        left, right = load_file(whole / file), load_file(halves / file)
        assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_a_model_in_bfloat16_learns_like_one_in_float32(images, tmp_path):
    options = [*TINY, '--epochs', '3', '--data-dir', images, '--output']
    train([*options, str(tmp_path / 'float32')])
    train([*options, str(tmp_path / 'bfloat16'), '--model-dtype', 'bfloat16'])
    losses = [[float(row['train_loss']) for row in read_metrics(tmp_path / name)] for name in ('float32', 'bfloat16')]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert losses[1] != losses[0]


@pytest.fixture(scope='module')
def teacher(images, tmp_path_factory) -> str:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    folder = tmp_path_factory.mktemp('teacher') / 'run'
    train([*TINY, '--epochs', '1', '--data-dir', images, '--output', str(folder)])
    return str(folder)


@pytest.mark.parametrize('kind', ['logit', 'token'])
def test_a_student_in_another_format_has_a_teacher_in_float32(images, teacher, tmp_path, kept, kind):
    tiny = ['--model', 'deit_tiny_distilled_patch16_224', '--model-kwargs', '{depth: 1, embed_dim: 24, num_heads: 2}']
    distillation = ['--kd-model-name', teacher, '--kd-distill-type', kind, '--grad-accum-steps', '2']
    arguments = [*TINY, *tiny, *distillation, *FORMATS['both'], '--data-dir', images, '--epochs', '1']
    assert train([*arguments, '--output', str(tmp_path / 'run')])['n'] == 11
    assert {parameter.dtype for parameter in kept[0].task.teacher.parameters()} == {torch.float32}


@pytest.mark.slow
def test_a_model_in_another_format_is_compiled(images, tmp_path):
    options = [*FORMATS['both'], '--torchcompile', 'aot_eager', '--model-kwargs', 'depth=1', '--epochs', '1']
    assert train([*TINY, *options, '--data-dir', images, '--output', str(tmp_path / 'run')])['n'] == 11


@pytest.mark.slow
def test_a_model_in_bfloat16_trains_in_two_processes(images, tmp_path):
    arguments = [*TINY, *CVT, *FORMATS['both'], '--model-ema', '--epochs', '1', '--data-dir', images]
    outcome = start_processes(2, train_and_log, [*arguments, '--output', str(tmp_path / 'run')], str(tmp_path / 'log'))
    assert outcome.codes == [0, 0], outcome.err


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        ('--model-dtype bfloat16 --amp', 'model_dtype bfloat16 leaves nothing to amp'),
        ('--model-dtype float16', "model_dtype must be one of float32, bfloat16, not 'float16'"),
        ('--amp --amp-dtype float16', 'amp_dtype float16 needs a GPU'),
        ('--torchcompile-mode max-autotune', 'torchcompile_mode max-autotune needs --torchcompile inductor'),
        ('--torchcompile eager --torchcompile-mode default', 'torchcompile_mode default needs --torchcompile inductor'),
        ('--torchcompile-mode fast', 'torchcompile_mode must be one of default, reduce-overhead'),
        ('--opt adahessian', 'opt adahessian needs second derivatives'),
        ('--opt bnbadam', 'opt bnbadam cannot be used here: CUDA required'),
    ],
)
def test_what_a_machine_or_a_precision_cannot_do_is_refused(images, tmp_path, options, words):
    with pytest.raises(UserError, match=words):
        train([*TINY, '--epochs', '1', '--data-dir', images, '--output', str(tmp_path / 'run'), *split(options)])
    assert not (tmp_path / 'run').exists()


def test_kron_without_its_package_is_refused(images, tmp_path, monkeypatch):
    monkeypatch.setattr('torch.backends.opt_einsum.is_available', lambda: False)
    with pytest.raises(UserError, match='opt kron needs its package'):
        train([*TINY, '--epochs', '1', '--data-dir', images, '--output', str(tmp_path / 'run'), '--opt', 'kron'])


def test_channels_last_weights_cannot_be_sharded():
    accelerator = SimpleNamespace(mixed_precision='no', distributed_type=DistributedType.FSDP)
    with pytest.raises(UserError, match='channels_last does not work with FSDP'):
        convert_format(timm.create_model('test_vit'), make_recipe(dict(channels_last=True)), accelerator)


def test_the_mode_of_the_compiler_is_passed_on(monkeypatch):
    model, given = timm.create_model('test_vit'), {}
    monkeypatch.setattr(model, 'compile', lambda **options: given.update(options))
    compile_model(model, 'inductor', 'reduce-overhead')
    assert given == dict(backend='inductor', mode='reduce-overhead')


@pytest.mark.parametrize(
    ('mode', 'accum_steps', 'device', 'is_refused'),
    [
        ('reduce-overhead', 2, 'cuda', True),
        ('max-autotune', 2, 'cuda', True),
        ('max-autotune-no-cudagraphs', 2, 'cuda', False),
        ('default', 2, 'cuda', False),
        (None, 2, 'cuda', False),
        ('reduce-overhead', 1, 'cuda', False),
        ('reduce-overhead', 2, 'cpu', False),
    ],
)
def test_gradients_are_not_accumulated_in_cuda_graphs(mode, accum_steps, device, is_refused):
    recipe = make_recipe(dict(torchcompile='inductor', torchcompile_mode=mode, grad_accum_steps=accum_steps))
    with pytest.raises(UserError, match='use max-autotune-no-cudagraphs') if is_refused else nullcontext():
        check_cuda_graphs(recipe, torch.device(device))


def test_a_run_that_would_accumulate_gradients_in_cuda_graphs_does_not_begin(images, tmp_path, monkeypatch):
    on_a_gpu = partial(check_cuda_graphs, device=torch.device('cuda'))
    monkeypatch.setattr(opening, 'check_cuda_graphs', lambda recipe, device: on_a_gpu(recipe))
    options = ['--torchcompile', 'inductor', '--torchcompile-mode', 'reduce-overhead', '--grad-accum-steps', '2']
    with pytest.raises(UserError, match='torchcompile_mode reduce-overhead uses CUDA graphs'):
        train([*TINY, *options, '--epochs', '1', '--data-dir', images, '--output', str(tmp_path / 'run')])
    assert not (tmp_path / 'run').exists()
