"""Distillation of the whole network by `vitzoo train`."""

from shlex import split

import pytest
import timm
import torch
from teachers import batches, divergence_of, make_student, make_teacher, save_teacher
from torch.nn import functional as F

from vitzoo.errors import UserError
from vitzoo.train.distill import Teacher, TransferTask
from vitzoo.train.loop import train
from vitzoo.train.network_loss import NetworkLoss
from vitzoo.transfer.outputs import output_error

pytestmark = pytest.mark.usefixtures('fresh_accelerate')
TINY = split(
    '--img-size 32 --workers 0 --batch-size 8 --lr 1e-3 --warmup-epochs 0 --epochs 1 --kd-distill-type transfer'
)
# of the teacher
SHAPE = ['depth=2', 'patch_size=8', 'embed_dim=24', 'num_heads=2']


@pytest.fixture(scope='module')
def teacher(tmp_path_factory) -> str:
    return save_teacher(tmp_path_factory.mktemp('teacher'))


def network_loss(teacher, student, images, **options) -> torch.Tensor:
    with NetworkLoss(student, teacher, **options) as loss:
        student(images)
        with torch.no_grad():
            teacher(images)
        return loss()


@pytest.mark.parametrize('multi_label', [False, True])
def test_the_loss_of_the_network_is_that_of_its_formula(multi_label):
    teacher = make_teacher()
    student = make_student(teacher, 'linear')
    (images,) = batches(1)
    tokens, expected = (F.layer_norm(model.forward_features(images), (24,)) for model in (student, teacher))
    logits = [model(images) / 2 for model in (student, teacher)]
    outputs = {}
    for model in (student, teacher):
        found = outputs.setdefault(model, [])
        for block in model.blocks:
            block.attn.register_forward_hook(lambda attn, args, output, found=found: found.append(output))
        model(images)
    errors = [
        ((a - b).square().mean((1, 2)) / b.flatten(1).var(1)).mean() for a, b in zip(outputs[student], outputs[teacher])
    ]
    formula = (tokens - expected).square().mean() + 4 * divergence_of(*logits, multi_label)
    formula = formula + 0.5 * torch.stack(errors).mean()
    options = dict(block_weight=0.5, temperature=2.0, multi_label=multi_label)
    torch.testing.assert_close(network_loss(teacher, student, images, **options), formula)


def test_the_loss_does_not_depend_on_how_a_batch_is_divided():
    teacher = make_teacher()
    student = make_student(teacher, 'linear')
    (images,) = batches(1)
    parts = [network_loss(teacher, student, part) for part in images.split(2)]
    torch.testing.assert_close(torch.stack(parts).mean(), network_loss(teacher, student, images))


def test_labels_count_only_with_a_weight():
    teacher = make_teacher()
    (images,) = batches(1)
    labels = torch.zeros(4, dtype=torch.long), torch.ones(4, dtype=torch.long)
    for weight in (0.0, 1.0):
        student = make_student(teacher, 'linear')
        task = TransferTask(student, teacher, distill_loss_weight=1.0, task_loss_weight=weight, verbose=False)
        first, second = (task(images, label)['loss'].item() for label in labels)
        assert (first == second) == (weight == 0)


def test_the_trainer_distils_a_swapped_teacher(teacher, images, tmp_path):
    arguments = ['--model', teacher, '--mixer', 'linear', '--kd-model-name', teacher, '--data-dir', images]
    arguments += split('--kd-temperature 1 --epochs 3 --model-ema --model-ema-decay 0.5')
    scores = train([*TINY, *arguments, '--output', str(tmp_path)])
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    original = timm.create_model(f'local-dir:{teacher}', pretrained=True).eval()
    assert scores['n'] == 11
    # better than the swap alone, on other images
    untrained = make_student(original, 'linear')
    assert output_error(original, loaded, batches(1, size=32)) < output_error(original, untrained, batches(1, size=32))


@pytest.mark.parametrize('kind', ['logit', 'hard', 'transfer'])
@pytest.mark.parametrize('amp', ['', '--amp'])
def test_the_teacher_runs_in_the_precision_of_the_student(amp, kind, teacher, images, tmp_path, monkeypatch):
    seen, forward, linear = set(), Teacher.forward, F.linear

    def see(what, x):
        seen.add((what, x.dtype))
        return x

    def record(self, *args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(F, 'linear', lambda *args: see('product', linear(*args)))
            return see('output', forward(self, *args, **kwargs))

    monkeypatch.setattr(Teacher, 'forward', record)
    arguments = ['--model', teacher, '--mixer', 'linear', '--kd-model-name', teacher, '--data-dir', images]
    train([*TINY, *arguments, *split(amp), '--kd-distill-type', kind, '--output', str(tmp_path)])
    assert seen == {('product', torch.bfloat16 if amp else torch.float32), ('output', torch.float32)}


@pytest.mark.parametrize('options', ['depth=1', 'embed_dim=48', 'patch_size=16'])
def test_a_student_of_another_shape_is_refused(options, teacher, images, tmp_path):
    shape = {name: option for option in [*SHAPE, options] for name in [option.partition('=')[0]]}
    arguments = ['--model', 'deit_linear_tiny', '--model-kwargs', *shape.values()]
    with pytest.raises(UserError, match='has another .*needs a student that is the teacher with another --mixer'):
        train([*arguments, *TINY, '--kd-model-name', teacher, '--data-dir', images, '--output', str(tmp_path / 'run')])


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ('', 'has no mixers'),
        ('--mixer linear --torchcompile eager', 'leave out --torchcompile'),
        ('--model deit_linear_tiny --model-kwargs depth=3', 'has no blocks.2.attn'),
    ],
)
def test_a_student_that_is_not_the_teacher_with_other_mixers_is_refused(options, message, teacher, images, tmp_path):
    arguments = ['--model', teacher, *TINY, '--kd-model-name', teacher, '--data-dir', images]
    with pytest.raises(UserError, match=message):
        train([*arguments, *split(options), '--output', str(tmp_path / 'run')])
