"""Options of training: freezing, layer decay, distillation, compilation, trackers and precision."""

import json
import math
from shlex import split

import pytest
import timm
import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from accelerate.utils import LoggerType
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from toys import read_metrics

from vitzoo.data import resolve_data_config
from vitzoo.errors import UserError
from vitzoo.train.checkpoint import list_checkpoints
from vitzoo.train.freeze import freeze
from vitzoo.train.loop import train
from vitzoo.train.loss import build_task
from vitzoo.train.model import build_ema, compile_model
from vitzoo.train.optim import build_optimizer, build_scheduler
from vitzoo.train.recipe import make_recipe

pytestmark = pytest.mark.usefixtures('fresh_accelerate')

TINY = split('--model test_vit --img-size 32 --workers 0 --batch-size 8 --lr 1e-3 --warmup-epochs 0 --crop-pct 1')
DEIT = dict(img_size=32, patch_size=8, embed_dim=24, num_heads=2, depth=4, num_classes=3)


def run_once(images, output, *options) -> dict:
    return train([*TINY, '--epochs', '1', '--data-dir', images, '--output', str(output), *options])


@pytest.mark.parametrize('frozen', [None, 'patch_embed,cls_token,pos_embed,blocks.0,blocks.2'])
@pytest.mark.parametrize('sched', ['cosine', 'constant', 'step'])
def test_layer_decay_scales_the_step_of_every_layer(frozen, sched):
    torch.manual_seed(0)
    recipe = make_recipe(
        dict(layer_decay=0.5, opt='momentum', momentum=0, weight_decay=0, lr=0.1, sched=sched, warmup_epochs=0)
    )
    model = timm.create_model('deit_linear_tiny', **DEIT)
    freeze(model, frozen)
    optimizer = build_optimizer(recipe, model, recipe.lr)
    scheduler = build_scheduler(recipe, optimizer, 10)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    scheduler.step_update(0)
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    # layers as in timm's VisionTransformer: stem, blocks (with the norm in the last), head
    depth_of = {'patch_embed.proj.weight': 5, 'cls_token': 5, 'norm.weight': 1, 'head.weight': 0}
    depth_of |= {f'blocks.{block}.{name}.weight': 4 - block for block in range(4) for name in ('mlp.fc1', 'norm1')}
    for name, depth in depth_of.items():
        parameter = model.get_parameter(name)
        if not parameter.requires_grad:
            assert frozen and torch.equal(parameter, before[name])
            continue
        torch.testing.assert_close(before[name] - parameter, 0.1 * 0.5**depth * parameter.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ('opt', 'betas', 'takes'), [('lion', 3, 2), ('adamw', 3, 2), ('adafactor', 3, 2), ('adan', 2, 3)]
)
def test_another_number_of_betas_than_the_optimizer_takes_is_refused(opt, betas, takes):
    model = nn.Linear(2, 2)
    build_optimizer(make_recipe(dict(opt=opt, opt_betas=[0.9] * takes)), model, 0.1)
    with pytest.raises(UserError, match=f'opt {opt} takes {takes} opt_betas, not {betas}'):
        build_optimizer(make_recipe(dict(opt=opt, opt_betas=[0.9] * betas)), model, 0.1)


@pytest.mark.parametrize('milestones', [[6, 3], [3, 3], [1, 5, 4]], ids=str)
def test_milestones_that_do_not_increase_are_refused(milestones):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.raises(UserError, match='decay_milestones must increase, not'):
        build_scheduler(make_recipe(dict(sched='multistep', decay_milestones=milestones)), optimizer, 10)
    # of other schedules they have no effect
    build_scheduler(make_recipe(dict(decay_milestones=milestones)), optimizer, 10)


@pytest.mark.parametrize('sched', ['wsd', 'rsqrt'])
@pytest.mark.parametrize(
    ('epochs', 'warmup', 'decay', 'updates'),
    [(10, 1, 0.5, 5), (10, 1, 2, 20), (1, 0.5, 0.5, 5), (2, 1.2, 0.6, 6), (10, 5, None, 10)],
)
def test_the_decay_phase_has_the_length_of_decay_epochs(sched, epochs, warmup, decay, updates):
    recipe = make_recipe(dict(sched=sched, epochs=epochs, warmup_epochs=warmup, decay_epochs=decay))
    assert build_scheduler(recipe, torch.optim.SGD([torch.zeros(1)], lr=0.1), 10).decay_t == updates


def test_the_rate_rises_and_follows_a_cosine_that_ends_before_the_cool_down():
    recipe = make_recipe(dict(epochs=4, warmup_epochs=1, cooldown_epochs=2, warmup_lr=1e-3, min_lr=1e-2))
    optimizer, rates = torch.optim.SGD([torch.zeros(1)], lr=0.1), []
    scheduler = build_scheduler(recipe, optimizer, 10)
    for step in range(60):
        scheduler.step_update(step)
        rates.append(optimizer.param_groups[0]['lr'])
    rise = [1e-3 + step / 10 * (0.1 - 1e-3) for step in range(10)]
    fall = [1e-2 + (0.1 - 1e-2) * (1 + math.cos(math.pi * step / 40)) / 2 for step in range(10, 40)]
    assert rates == pytest.approx([*rise, *fall, *[1e-2] * 20])


@pytest.mark.parametrize('model', ['test_vit', 'test_resnet'])
def test_a_linear_probe_changes_the_head_and_nothing_else(images, tmp_path, capsys, model):
    torch.manual_seed(0)
    source = timm.create_model(model, num_classes=3)
    torch.save(source.state_dict(), tmp_path / 'start.pth')
    start = ['--model', model, '--initial-checkpoint', str(tmp_path / 'start.pth'), '--freeze', 'backbone']
    size = ['--img-size', '160'] if model == 'test_vit' else []
    run_once(images, tmp_path / 'run', *start, *size, '--drop-path', '0.5', '--model-ema')
    trained = load_file(tmp_path / 'run' / 'model.safetensors')
    # statistics of BatchNorm are part of the backbone
    changed = {name for name, tensor in source.state_dict().items() if not torch.equal(tensor, trained[name])}
    assert changed == {f'{source.default_cfg["classifier"]}.{name}' for name in ('weight', 'bias')}
    assert 'frozen except for 0.00 M parameters' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('names', 'words'),
    [
        ('blocks.9', "no parameters in 'blocks.9', did you mean blocks"),
        ('patch_embed,heads', "no parameters in 'heads', did you mean head"),
        ('backbone,head', "no parameters in 'backbone'"),
    ],
)
def test_freezing_unknown_modules_is_refused(names, words):
    with pytest.raises(UserError, match=words):
        freeze(timm.create_model('test_vit'), names)


def test_freezing_everything_is_refused():
    with pytest.raises(UserError, match='leaves nothing to train'):
        freeze(nn.Sequential(nn.Linear(2, 2)), '0')


def test_a_frozen_module_stays_in_evaluation_mode():
    model = timm.create_model('deit_softmax_tiny', **DEIT, drop_path_rate=0.5)
    frozen = freeze(model, 'blocks.0,blocks.1')
    model.train()
    for module in frozen:
        module.eval()
    assert [block.training for block in model.blocks] == [False, False, True, True]
    assert not any(module.training for block in model.blocks[:2] for module in block.modules())


@pytest.mark.parametrize('names', ['patch_embed', 'blocks.0', 'blocks.1.mlp', 'backbone'])
def test_freezing_leaves_dropout_of_trained_modules_active(names):
    model = timm.create_model('deit_softmax_tiny', **DEIT, drop_rate=0.5, proj_drop_rate=0.5, drop_path_rate=0.5)
    frozen = freeze(model, names)
    model.train()
    for module in frozen:
        module.eval()
    assert model.head_drop.training
    inactive = [number for number, block in enumerate(model.blocks) if not block.drop_path1.training]
    assert inactive == {'blocks.0': [0], 'backbone': [0, 1, 2, 3]}.get(names, [])
    assert [block.mlp.drop1.training for block in model.blocks][1] == (names in ('patch_embed', 'blocks.0'))


@pytest.mark.parametrize('name', ['deit_softmax_tiny', 'vit_tiny_patch16_224'])
def test_a_frozen_backbone_is_without_dropout_and_its_head_keeps_it(name):
    model = timm.create_model(name, **DEIT, drop_rate=0.5, pos_drop_rate=0.5, proj_drop_rate=0.5)
    frozen = freeze(model, 'backbone')
    model.train()
    for module in frozen:
        module.eval()
    active = {name for name, module in model.named_modules() if 'drop' in name and module.training}
    assert active == {'head_drop'}


def test_a_compiled_run_equals_the_eager_run(images, tmp_path):
    options = ['--model-ema', '--epochs', '2', '--model-kwargs', 'depth=1']
    eager = run_once(images, tmp_path / 'eager', *options)
    compiled = run_once(images, tmp_path / 'compiled', *options, '--torchcompile', 'aot_eager')
    assert compiled['loss'] == pytest.approx(eager['loss'], abs=1e-5)
    files = [next((tmp_path / run / 'checkpoints').glob('*10')) for run in ('eager', 'compiled')]
    for name in ('model.safetensors', 'ema.safetensors'):
        one, other = (load_file(folder / name) for folder in files)
        assert one.keys() == other.keys()
        assert all(torch.allclose(one[key], other[key], atol=1e-5) for key in one)
    # a run resumes with another backend
    options = ['--resume', str(tmp_path / 'compiled'), '--torchcompile', 'eager', '--epochs', '3']
    assert train(options)['n'] == 11
    assert [row['step'] for row in read_metrics(tmp_path / 'compiled')] == ['5', '10', '15']


def test_the_ema_follows_a_compiled_model():
    model = timm.create_model('test_vit', img_size=32)
    ema = build_ema(make_recipe(dict(model_ema=True, model_ema_decay=0.5)), model)
    compile_model(model, 'eager')
    before = ema.module.head.bias.clone()
    with torch.no_grad():
        model.head.bias += 1
    ema.update(model)
    assert torch.allclose(ema.module.head.bias, before + 0.5)
    with pytest.raises(UserError, match="no backend 'inducktor'"):
        compile_model(model, 'inducktor')


@pytest.mark.parametrize(
    ('options', 'decays'), [('', [0, 0.5, 0.5, 0.5]), ('--model-ema-warmup', [0, 1 - 2 ** (-2 / 3), 0.5, 0.5])]
)
def test_the_weights_of_every_step_are_averaged(images, tmp_path, options, decays):
    options = f'--model-ema --model-ema-decay 0.5 --checkpoint-every 1 --checkpoint-hist 9 {options}'
    run_once(images, tmp_path, *split(options))
    averaged = None
    for checkpoint, decay in zip(list_checkpoints(tmp_path / 'checkpoints'), decays):
        weights, found = (load_file(checkpoint / f'{name}.safetensors')['head.weight'] for name in ('model', 'ema'))
        averaged = weights if averaged is None else decay * averaged + (1 - decay) * weights
        torch.testing.assert_close(found, averaged)


@pytest.fixture(scope='module')
def teacher(images, tmp_path_factory) -> str:
    """The folder of a trained model."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    folder = tmp_path_factory.mktemp('teacher') / 'run'
    run_once(images, folder, '--epochs', '3', '--lr', '3e-3')
    return str(folder)


def kl(student, teacher, temperature):
    """Kullback-Leibler divergence of softened probabilities times the squared temperature."""
    p, q = (teacher / temperature).softmax(1), (student / temperature).softmax(1)
    return temperature**2 * (p * (p / q).log()).sum(1).mean()


@pytest.mark.parametrize('kind', ['logit', 'hard', 'token soft', 'token hard'])
def test_the_distillation_loss_is_a_weighted_sum(teacher, kind):
    torch.manual_seed(0)
    kind, _, token = kind.partition(' ')
    values = dict(kd_model_name=teacher, kd_distill_type=kind, kd_temperature=3.0, distill_loss_weight=0.7)
    recipe = make_recipe(values | dict(task_loss_weight=0.2, kd_token_distill_type=token or None))
    name = 'deit_tiny_distilled_patch16_224' if token else 'deit_softmax_tiny'
    student = timm.create_model(name, **DEIT)
    data_config, classes = resolve_data_config(student), ['blue', 'green', 'red']
    task = build_task(recipe, student, nn.CrossEntropyLoss(), classes, data_config, Accelerator(cpu=True)).train()
    images, target = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 1])
    loss = task(images, target)['loss']
    own, from_teacher = student(images) if token else [student(images)] * 2
    mean, std = (torch.tensor(task.teacher.model.pretrained_cfg[key])[:, None, None] for key in ('mean', 'std'))
    student_mean, student_std = (torch.tensor(student.pretrained_cfg[key])[:, None, None] for key in ('mean', 'std'))
    with torch.no_grad():
        taught = task.teacher.model((images * student_std + student_mean - mean) / std)
    is_hard = 'hard' in (kind, token)
    second = F.cross_entropy(from_teacher, taught.argmax(1)) if is_hard else kl(from_teacher, taught, 3.0)
    torch.testing.assert_close(loss, 0.2 * F.cross_entropy(own, target) + 0.7 * second)
    assert not task.teacher.model.training and not any(p.requires_grad for p in task.teacher.parameters())


@pytest.mark.parametrize('kind', ['logit', 'hard'])
def test_a_student_is_exported_without_the_weights_of_its_teacher(images, teacher, tmp_path, kind):
    options = ['--model', 'test_vit2', '--kd-model-name', teacher, '--kd-distill-type', kind, '--amp']
    assert run_once(images, tmp_path / 'run', *options, '--mixup', '0.2')['n'] == 11
    assert (
        load_file(tmp_path / 'run' / 'model.safetensors').keys() == timm.create_model('test_vit2').state_dict().keys()
    )


@pytest.mark.parametrize('kind', ['logit', 'hard'])
def test_a_teacher_of_another_size_is_resized_to_the_student(images, teacher, tmp_path, kind):
    options = ['--kd-model-name', teacher, '--kd-distill-type', kind, '--img-size', '48', '32']
    assert run_once(images, tmp_path / 'run', *options)['n'] == 11


def test_a_grey_teacher_gets_grey_images(images, tmp_path):
    run_once(images, tmp_path / 'teacher', '--in-chans', '1')
    options = ['--in-chans', '1', '--kd-model-name', str(tmp_path / 'teacher')]
    assert run_once(images, tmp_path / 'run', *options)['n'] == 11


def test_a_teacher_with_more_outputs_than_classes_teaches_a_student_with_as_many(images, tmp_path):
    run_once(images, tmp_path / 'teacher', '--num-classes', '5')
    options = ['--kd-model-name', str(tmp_path / 'teacher')]
    with pytest.raises(UserError, match='has 5 outputs and the student 3; give num_classes 5$'):
        run_once(images, tmp_path / 'run', *options)
    assert run_once(images, tmp_path / 'run', *options, '--num-classes', '5')['n'] == 11
    config = json.loads((tmp_path / 'teacher' / 'config.json').read_text())
    for names in (None, ['blue', 'green', 'yellow']):
        (tmp_path / 'teacher' / 'config.json').write_text(json.dumps(config | dict(label_names=names)))
        with pytest.raises(UserError, match='the 5 classes of the teacher .* are not the 3 of'):
            run_once(images, tmp_path / 'other', *options, '--num-classes', '5')


def test_a_distilled_checkpoint_gets_new_heads_for_other_classes(images, tmp_path, capsys):
    model = 'deit_tiny_distilled_patch16_224'
    source = timm.create_model(model, num_classes=5, img_size=32, depth=1, embed_dim=24, num_heads=2)
    torch.save(source.state_dict(), tmp_path / 'start.pth')
    kwargs = ['--model-kwargs', 'depth=1', 'embed_dim=24', 'num_heads=2']
    run_once(images, tmp_path / 'run', '--model', model, '--initial-checkpoint', str(tmp_path / 'start.pth'), *kwargs)
    assert 'has a head for 5 classes; using a new head for 3' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        ('--kd-model-name test_vitt', "unknown model 'test_vitt'"),
        ('--kd-model-name cvt_ls_13', 'the teacher cvt_ls_13 has no published weights'),
        ('--kd-model-name TEACHER --kd-distill-type token', 'has no distillation token'),
        (
            '--kd-model-name TEACHER --data-dir sample --img-size 32',
            'the 3 classes of .* are not the 10 of sample',
        ),
        ('--kd-model-name TEACHER --num-classes 5', 'has 3 outputs and the student 5'),
        ('--kd-model-name TEACHER --in-chans 1', 'takes images of 3 channels and the student of 1'),
        ('--kd-model-name TEACHER --task-loss-weight 1.5', 'which is below 0; add --distill-loss-weight'),
        ('--log-with tensorbord', "unknown tracker 'tensorbord' in log_with, did you mean tensorboard"),
        ('--log-with dvclive', "log_with 'dvclive' needs its package: pip install dvclive"),
        ('--torchcompile inducktor', "torch.compile has no backend 'inducktor'"),
        ('--freeze heads', "freeze: the model has no parameters in 'heads'"),
        ('--img-size 32 --model-kwargs img_size=64', 'img_size is 32, but 64 in model_kwargs; leave out one'),
        ('--model twins_svt_small --grad-checkpointing', 'twins_svt_small cannot recompute activations'),
    ],
)
def test_an_invalid_option_is_refused_before_the_folder_is_created(images, teacher, tmp_path, options, words):
    with pytest.raises(UserError, match=words):
        run_once(images, tmp_path / 'run', *options.replace('TEACHER', teacher).split())
    assert not (tmp_path / 'run').exists()


def test_images_have_the_size_that_is_given_as_an_argument_of_the_model(images, tmp_path, capsys):
    options = split('--model test_vit --model-kwargs img_size=32 --workers 0 --epochs 1 --warmup-epochs 0')
    train([*options, '--data-dir', images, '--output', str(tmp_path / 'run')])
    assert 'images 32 x 32' in capsys.readouterr().out
    assert json.loads((tmp_path / 'run' / 'config.json').read_text())['pretrained_cfg']['input_size'] == [3, 32, 32]


def test_a_tracker_logs_every_epoch(images, tmp_path):
    from tensorboard.backend.event_processing import event_accumulator

    run_once(images, tmp_path / 'run', '--epochs', '2', '--log-with', 'tensorboard')
    events = event_accumulator.EventAccumulator(str(tmp_path / 'run' / 'vitzoo')).Reload()
    rows = read_metrics(tmp_path / 'run')
    for name in ('train_loss', 'top1', 'lr'):
        scalars = events.Scalars(name)
        assert [scalar.step for scalar in scalars] == [5, 10]
        assert [scalar.value for scalar in scalars] == pytest.approx([float(row[name]) for row in rows])


class StandInTracker(GeneralTracker):
    """A tracker whose package need not be installed."""

    name, requires_logging_directory, tracker = 'stand_in', False, None
    started, logged = [], []

    def __init__(self, project: str):
        super().__init__()

    def store_init_configuration(self, values: dict) -> None:
        self.started.append(values)

    def log(self, values: dict, step: int | None = None) -> None:
        self.logged.append((step, values))


@pytest.fixture
def stand_in(monkeypatch) -> type:
    monkeypatch.setattr(StandInTracker, 'started', [])
    monkeypatch.setattr(StandInTracker, 'logged', [])
    monkeypatch.setattr('vitzoo.train.progress.get_available_trackers', lambda: [LoggerType.WANDB])
    monkeypatch.setattr('accelerate.tracking.get_available_trackers', lambda: [LoggerType.WANDB])
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, 'wandb', StandInTracker)
    return StandInTracker


def test_a_tracker_gets_the_recipe_and_the_rows_of_the_metrics(images, tmp_path, stand_in):
    run_once(images, tmp_path / 'run', '--epochs', '2', '--val-interval', '2', '--log-with', 'wandb')
    (settings,) = stand_in.started
    assert settings['model'] == 'test_vit' and settings['lr'] == 1e-3 and settings['clip_grad'] == 'None'
    assert [step for step, _ in stand_in.logged] == [5, 10]
    first, last = (values for _, values in stand_in.logged)
    assert first['epoch'] == 1 and 'top1' not in first and {'top1', 'eval_loss'} <= last.keys()
    # a reserved name of some trackers
    assert 'step' not in first


def test_a_tracker_that_cannot_start_is_a_sentence(images, tmp_path, monkeypatch, stand_in):
    def refuse(self, values):
        raise Exception('not logged in')

    monkeypatch.setattr(stand_in, 'store_init_configuration', refuse)
    with pytest.raises(UserError, match=r'cannot start log_with wandb \(not logged in\); set it up, or leave out'):
        run_once(images, tmp_path / 'run', '--log-with', 'wandb')


def test_the_best_epoch_is_exported_as_well_as_the_last(images, tmp_path, monkeypatch):
    from vitzoo.train import loop as train_module

    scores = iter([30.0, 60.0, 60.0, 50.0])
    evaluate_epoch = train_module.evaluate_epoch
    monkeypatch.setattr(train_module, 'evaluate_epoch', lambda *args: evaluate_epoch(*args) | dict(top1=next(scores)))
    run_once(images, tmp_path / 'run', '--epochs', '4')
    epochs = [json.loads((folder / 'config.json').read_text())['vitzoo']['epochs'] for folder in
              (tmp_path / 'run' / 'best', tmp_path / 'run')]  # fmt: skip
    assert epochs == [2, 4]
    best = timm.create_model(f'local-dir:{tmp_path / "run" / "best"}', pretrained=True)
    assert best.pretrained_cfg['label_names'] == ['blue', 'green', 'red']


def test_a_tiny_grid_of_tokens_is_noted(images, tmp_path, capsys):
    tiny = dict(depths=(1, 1, 1), embed_dims=(24, 24, 24), num_heads=(1, 1, 1))
    run_once(images, tmp_path / 'a', '--model', 'cvt_linear_13', '--model-kwargs', json.dumps(tiny))
    assert 'tokens are mixed on a grid as small as 2 x 2, ' in capsys.readouterr().out
    run_once(images, tmp_path / 'b', '--model', 'deit_linear_tiny', '--model-kwargs', 'depth=1', 'patch_size=8')
    assert 'on a grid as small as' not in capsys.readouterr().out


def test_checkpointed_activations_change_neither_loss_nor_gradients():
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = timm.create_model('deit_performer_tiny', **DEIT, drop_path_rate=0.3, proj_drop_rate=0.2)
        model.set_grad_checkpointing(checkpointing)
        loss = model.train()(torch.randn(4, 3, 32, 32)).square().mean()
        loss.backward()
        gradients.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize(
    ('launcher', 'options', 'precision'),
    [
        (None, [], 'fp32'),
        ('bf16', [], 'bf16'),
        ('bf16', ['--amp', 'no'], 'fp32'),
        ('no', ['--amp'], 'bf16'),
        (None, ['--model-dtype', 'bfloat16'], 'bf16'),
    ],
)
def test_the_recipe_takes_precedence_over_the_precision_of_the_launcher(
    images, tmp_path, monkeypatch, capsys, launcher, options, precision
):
    if launcher:
        monkeypatch.setenv('ACCELERATE_MIXED_PRECISION', launcher)
    monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: 'AVX2')
    monkeypatch.setattr('platform.machine', lambda: 'x86_64')
    run_once(images, tmp_path / 'run', *options)
    out = capsys.readouterr().out
    assert f'on     1 process on cpu in {precision}, seed 42' in out
    assert ('note   bfloat16 can be ten times slower than float32' in out) is (precision == 'bf16')
    assert f'in {precision}' in (tmp_path / 'run' / 'recipe.yaml').read_text()
