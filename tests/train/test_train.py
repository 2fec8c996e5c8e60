"""Training runs on generated images: their files, resuming, options and error messages."""

import json
import re
import subprocess
import sys
from pathlib import Path
from shlex import split

import numpy as np
import pytest
import timm
import torch
from accelerate.state import AcceleratorState
from processes import start_processes
from safetensors.torch import load_file, save_file
from toys import make_images, read_metrics

from vitzoo.data import eval_loader, eval_transform, open_dataset, resolve_data_config
from vitzoo.data.loader import TrainBatches
from vitzoo.data.transforms import PIPELINES
from vitzoo.errors import UserError
from vitzoo.figures import draw_history
from vitzoo.load import load_model
from vitzoo.metrics import evaluate
from vitzoo.train import loop as train_module
from vitzoo.train import main
from vitzoo.train.batches import plan_batches
from vitzoo.train.checkpoint import list_checkpoints
from vitzoo.train.loop import train
from vitzoo.train.recipe import make_recipe
from vitzoo.train.recipe_cli import load_recipe
from vitzoo.train.step import mix

ROOT = Path(__file__).parents[2]
TINY = split('--model test_vit --img-size 32 --workers 0 --batch-size 8 --lr 1e-3 --warmup-epochs 0 --crop-pct 1')


pytestmark = pytest.mark.usefixtures('fresh_accelerate')


def run_in_root(command: list[str]) -> subprocess.CompletedProcess:
    """Run a command in the root of the repository."""
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / 'model.safetensors')


def assert_same_weights(a: Path, b: Path) -> None:
    a, b = weights_of(a), weights_of(b)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


AUGMENTED = split('--model-ema --model-ema-warmup --mixup 0.4 --cutmix 1 --drop-path 0.2 --reprob 0.5')


def test_a_run_learns_and_prints_the_accuracy_of_the_exported_model(images, tmp_path, capsys):
    scores = train(
        [*TINY, '--data-dir', images, '--output', str(tmp_path), '--epochs', '8', '--lr', '3e-3', '--model-ema']
    )
    assert scores['top1'] > 60
    printed = capsys.readouterr().out.splitlines()[-1]
    assert printed == (
        f'{tmp_path} has the {scores["weights"]} weights after epoch 8: top-1 {scores["top1"]:.2f} %,'
        f' top-5 100.00 %, loss {scores["loss"]:.4f} on 11 images'
    )
    loaded = load_model(str(tmp_path))
    model, config = loaded.model, resolve_data_config(loaded.model)
    assert (loaded.weights, config['input_size'], config['crop_pct']) == ('trained', (3, 32, 32), 1.0)
    assert model.pretrained_cfg['label_names'] == ['blue', 'green', 'red']
    again = evaluate(model, eval_loader(open_dataset(images, 'val', eval_transform(config)), 4))
    assert (again['n'], again['correct1']) == (11, scores['correct1'])
    assert again['loss'] == pytest.approx(scores['loss'], rel=1e-5)


def test_a_run_writes_weights_recipe_metrics_and_curves(images, tmp_path, monkeypatch):
    monkeypatch.setattr('vitzoo.figures.draw_history', draw_history)
    train([*TINY, *AUGMENTED, '--data-dir', images, '--output', str(tmp_path / 'a'), '--epochs', '2'])
    assert {path.name for path in (tmp_path / 'a').iterdir()} == {
        'best', 'checkpoints', 'config.json', 'curves.png', 'metrics.csv', 'model.safetensors', 'recipe.yaml'
    }  # fmt: skip
    rows = read_metrics(tmp_path / 'a')
    assert [(row['epoch'], row['step']) for row in rows] == [('1', '5'), ('2', '10')]
    assert rows[0].keys() >= {'lr', 'train_loss', 'eval_loss', 'top1', 'top5', 'ema_top1', 'ema_eval_loss'}
    config = json.loads((tmp_path / 'a' / 'config.json').read_text())
    better = 'ema' if float(rows[-1]['ema_top1']) >= float(rows[-1]['top1']) else 'raw'
    assert config['vitzoo']['weights'] == better
    assert (tmp_path / 'a' / 'curves.png').read_bytes().startswith(b'\x89PNG')
    # the recipe replays the run in another folder
    monkeypatch.undo()
    train(['--config', str(tmp_path / 'a' / 'recipe.yaml'), '--output', str(tmp_path / 'b')])
    assert_same_weights(tmp_path / 'a', tmp_path / 'b')
    assert read_metrics(tmp_path / 'b') == rows


class Interrupted(Exception):
    pass


INTERRUPTIBLE = [*TINY, *AUGMENTED, '--epochs', '3', '--checkpoint-every', '3']


@pytest.fixture(scope='module')
def uninterrupted(images, tmp_path_factory) -> Path:
    """The folder of an uninterrupted run."""
    AcceleratorState._reset_state(reset_partial_state=True)
    folder = tmp_path_factory.mktemp('uninterrupted')
    train([*INTERRUPTIBLE, '--data-dir', images, '--output', str(folder)])
    return folder


@pytest.mark.parametrize('steps', [3, 5, 7, 10], ids='interrupted after step {}'.format)
def test_an_interrupted_run_ends_like_an_uninterrupted_one(images, uninterrupted, tmp_path, monkeypatch, steps):

    def step_or_stop(run, *args, **kwargs):
        if run.step == steps:
            raise Interrupted
        return train_step(run, *args, **kwargs)

    train_step = train_module.train_step
    monkeypatch.setattr(train_module, 'train_step', step_or_stop)
    with pytest.raises(Interrupted):
        train([*INTERRUPTIBLE, '--data-dir', images, '--output', str(tmp_path)])
    monkeypatch.undo()
    assert not (tmp_path / 'model.safetensors').exists()
    train(['--resume', 'auto', '--output', str(tmp_path)])
    assert_same_weights(uninterrupted, tmp_path)
    assert read_metrics(uninterrupted) == read_metrics(tmp_path)
    last = list_checkpoints(tmp_path / 'checkpoints')[-1].name
    for name in ('model.safetensors', 'ema.safetensors'):
        files = [load_file(folder / 'checkpoints' / last / name) for folder in (uninterrupted, tmp_path)]
        assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])


def test_resuming_a_finished_run_changes_nothing(images, tmp_path):
    arguments = [*TINY, '--data-dir', images, '--epochs', '1', '--output']
    scores = train([*arguments, str(tmp_path / 'a')])
    train([*arguments, str(tmp_path / 'b')])
    assert train(['--resume', str(tmp_path / 'b')]) == {**scores, 'folder': str(tmp_path / 'b')}
    assert_same_weights(tmp_path / 'a', tmp_path / 'b')
    recipe = (tmp_path / 'b' / 'recipe.yaml').read_text()
    # options that compute nothing
    train(['--resume', str(tmp_path / 'b'), '--lr', '0.5'])
    assert (tmp_path / 'b' / 'recipe.yaml').read_text() == recipe
    with pytest.raises(UserError, match="there is a run in '.*b' already"):
        train([*arguments, str(tmp_path / 'b')])
    assert train([*arguments, str(tmp_path / 'b'), '--overwrite'])['correct1'] == scores['correct1']


def test_the_saved_recipe_has_the_steps_of_a_named_augmentation(images, tmp_path):
    options = ['--aug', 'albumentations', '--albumentations', 'light', '--output', str(tmp_path)]
    train([*TINY, '--data-dir', images, '--epochs', '1', *options])
    assert load_recipe(['--config', str(tmp_path / 'recipe.yaml')]).albumentations == PIPELINES['light']


def test_only_the_last_complete_checkpoints_are_kept_and_listed(images, tmp_path):
    arguments = [*TINY, '--data-dir', images, '--output', str(tmp_path), '--epochs', '4', '--checkpoint-hist', '2']
    train(arguments)
    folder = tmp_path / 'checkpoints'
    assert [path.name for path in sorted(folder.iterdir())] == ['step-00000015', 'step-00000020']
    # left by a crash while writing
    (folder / '.partial-step-00000025').mkdir()
    (folder / 'step-00000025').mkdir()
    assert [path.name for path in list_checkpoints(folder)] == ['step-00000015', 'step-00000020']


@pytest.mark.slow
def test_two_launched_processes_train_like_one_with_two_accumulation_steps(images, tmp_path):
    arguments = [*TINY, *AUGMENTED, '--data-dir', images, '--epochs', '2', '--output']
    launch = [sys.executable, '-m', 'accelerate.commands.launch', '--cpu', '--num_processes', '2', 'train.py']
    child = run_in_root([*launch, *arguments, str(tmp_path / 'two')])
    assert child.returncode == 0, child.stderr
    assert 'batch 8 = 2 processes x 1 accumulated x 4 images' in child.stdout
    assert child.stdout.count('epoch   2/2') == 1
    train([*arguments, str(tmp_path / 'one'), '--grad-accum-steps', '2'])
    two, one = weights_of(tmp_path / 'two'), weights_of(tmp_path / 'one')
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-5)
    for row, other in zip(read_metrics(tmp_path / 'two'), read_metrics(tmp_path / 'one'), strict=True):
        assert all(row[name] == other[name] for name in ('step', 'lr', 'top1', 'ema_top1'))
        assert float(row['train_loss']) == pytest.approx(float(other['train_loss']), abs=1e-5)
    # one process measures the accuracy that two printed
    model = load_model(str(tmp_path / 'two')).model
    scores = evaluate(model, eval_loader(open_dataset(images, 'val', eval_transform(resolve_data_config(model))), 8))
    printed = f'top-1 {scores["top1"]:.2f} %, top-5 {scores["top5"]:.2f} %, loss {scores["loss"]:.4f} on 11 images'
    assert printed in child.stdout.splitlines()[-1]


@pytest.mark.parametrize('batch_size', ['4', '3', '64'])
def test_seven_images_of_two_classes_are_enough(tmp_path, batch_size):
    data = make_images(tmp_path / 'data', train_red=4, train_blue=3, val_red=1, val_blue=2)
    output = tmp_path / 'run'
    arguments = [*TINY, *AUGMENTED, '--data-dir', str(data), '--output', str(output), '--epochs', '2']
    scores = train([*arguments, '--batch-size', batch_size])
    assert scores['n'] == 3
    assert [row['step'] for row in read_metrics(output)] == (['2', '4'] if batch_size == '3' else ['1', '2'])


def test_the_loss_of_an_epoch_is_the_mean_over_its_steps(images, tmp_path, monkeypatch):
    losses, train_step = [], train_module.train_step

    def keep_loss(*args, **options):
        status = train_step(*args, **options)
        losses.append(status.loss)
        return status

    monkeypatch.setattr(train_module, 'train_step', keep_loss)
    train([*TINY, '--data-dir', images, '--output', str(tmp_path), '--epochs', '2'])
    found = [float(row['train_loss']) for row in read_metrics(tmp_path)]
    assert len(losses) == 10 and found == pytest.approx([sum(losses[:5]) / 5, sum(losses[5:]) / 5])


def test_a_mixed_batch_of_odd_size_keeps_its_last_image():
    images = torch.arange(5.0)[:, None, None, None].expand(5, 3, 8, 8).clone()
    target = mix(timm.data.Mixup(mixup_alpha=1, label_smoothing=0.1, num_classes=4), images, torch.arange(5) % 4)
    assert target.shape == (5, 4)
    assert target.sum(dim=1).allclose(torch.ones(5))
    assert (images[4] == 4).all() and target[4].argmax() == 0 and target[4, 0] == pytest.approx(0.925)


@pytest.mark.parametrize(
    'options',
    [
        '--amp --amp-dtype bfloat16 --clip-grad 1',
        '--no-aug --channels-last --cutmix-minmax 0.2 0.8 --mixup-off-epoch 1 --eval-metric loss --dist-bn none',
        '--clip-grad 0.1 --clip-mode agc --opt sgd --sched step --decay-epochs 1',
        '--clip-grad 0.1 --clip-mode value --bce-loss --bce-target-thresh 0.2 --mixup 0.2 --mixup-mode elem',
        '--layer-decay 0.7 --opt-betas 0.9 0.95 --opt-eps 1e-6 --smoothing 0 --sched wsd --grad-checkpointing',
        '--in-chans 1 --aug albumentations --albumentations light --cooldown-epochs 1 --validation-batch-size 3',
        '--model test_resnet --img-size 32 48 --model-ema --aug-repeats 2 --num-classes 5 --pretrained no',
        '--model deit_softmax_tiny --model-kwargs depth=2 embed_dim=24 num_heads=2 patch_size=8',
    ],
)  # fmt: skip
def test_options_work_together(images, tmp_path, options):
    scores = train([*TINY, '--data-dir', images, '--output', str(tmp_path), '--epochs', '1', *options.split()])
    assert scores['n'] == 11
    assert np.isfinite(scores['loss'])


@pytest.mark.parametrize(('options', 'skipped'), [('', 0), ('--batch-size 12', 4), ('--aug-repeats 3', 26)])
def test_the_images_that_an_epoch_skips_are_counted(images, tmp_path, capsys, options, skipped):
    arguments = [*TINY, *options.split(), '--data-dir', images, '--output', str(tmp_path), '--epochs', '1']
    train(arguments)
    assert re.findall(r'every epoch skips (\d+) images', capsys.readouterr().out) == [str(skipped)] * bool(skipped)
    recipe = load_recipe(arguments)
    batches = TrainBatches(40, recipe.batch_size, aug_repeats=recipe.aug_repeats)
    assert len({index for batch in batches for index, _ in batch}) == 40 - skipped


def test_a_checkpoint_has_averaged_statistics_and_the_counters_of_the_model(images, tmp_path):
    options = split('--model test_resnet --model-ema --epochs 1')
    train([*TINY, *options, '--data-dir', images, '--output', str(tmp_path)])
    (checkpoint,) = list_checkpoints(tmp_path / 'checkpoints')
    raw, ema = (load_file(checkpoint / name) for name in ('model.safetensors', 'ema.safetensors'))
    counters = [name for name in raw if 'num_batches' in name]
    assert counters and all(torch.equal(raw[name], ema[name]) for name in counters)
    assert not any(torch.equal(raw[name], ema[name]) for name in raw if 'running' in name)


@pytest.mark.parametrize(
    ('values', 'world', 'expected'),
    [
        (dict(batch_size=64), 1, (64, 64, 15)),
        (dict(batch_size=64), 2, (64, 32, 15)),
        (dict(batch_size=64, grad_accum_steps=2), 2, (64, 16, 15)),
        (dict(batch_size=4096, grad_accum_steps=3), 2, UserError),
        (dict(batch_size=6000, grad_accum_steps=3), 2, (996, 166, 1)),
    ],
)
def test_the_batch_is_global(values, world, expected):
    recipe = make_recipe(values)
    if expected is UserError:
        with pytest.raises(UserError, match='batch_size 4096 is not a multiple of 6'):
            plan_batches(recipe, 1000, world)
        return
    plan = plan_batches(recipe, 1000, world)
    assert (plan.batch_size, plan.micro_batch_size, plan.steps_per_epoch) == expected
    assert plan.lr == pytest.approx(5e-4 * plan.batch_size / 512)


def test_too_few_images_for_the_processes_are_refused_with_advice():
    with pytest.raises(UserError, match='5 training images are too few for 6 processes .*; add images, or reduce'):
        plan_batches(make_recipe(dict(batch_size=6)), 5, 6)


@pytest.mark.parametrize(('scale', 'rate'), [('linear', 0.025), ('sqrt', 0.05)])
def test_the_rate_follows_the_size_of_the_batch(scale, rate):
    values = dict(batch_size=64, lr_base=0.1, lr_base_size=256, lr_base_scale=scale)
    assert plan_batches(make_recipe(values), 1000, 1).lr == pytest.approx(rate)
    assert plan_batches(make_recipe(values | dict(lr=0.2)), 1000, 1).lr == 0.2


def test_a_head_for_other_classes_is_replaced(images, tmp_path, capsys):
    torch.manual_seed(0)
    source = timm.create_model('test_vit', img_size=32, num_classes=7)
    save_file(source.state_dict(), tmp_path / 'seven.safetensors')
    freeze = ['--data-dir', images, '--epochs', '1', '--lr', '0', '--warmup-lr', '0', '--min-lr', '0']
    start = ['--initial-checkpoint', str(tmp_path / 'seven.safetensors')]
    train([*TINY, *freeze, *start, '--output', str(tmp_path / 'a')])
    assert 'seven.safetensors has a head for 7 classes; using a new head for 3' in capsys.readouterr().out
    trained = weights_of(tmp_path / 'a')
    changed = {name for name in trained if not torch.equal(trained[name], source.state_dict()[name])}
    assert changed == {'head.weight', 'head.bias'}
    # a run folder is a model to start from
    train([*TINY, *freeze, '--model', str(tmp_path / 'a'), '--output', str(tmp_path / 'b')])
    assert_same_weights(tmp_path / 'a', tmp_path / 'b')
    train([*TINY, *freeze, '--model', str(tmp_path / 'a'), '--num-classes', '4', '--output', str(tmp_path / 'c')])
    assert 'has a head for 3 classes; using a new head for 4' in capsys.readouterr().out
    assert weights_of(tmp_path / 'c')['head.weight'].shape[0] == 4
    assert torch.equal(weights_of(tmp_path / 'c')['pos_embed'], trained['pos_embed'])


@pytest.mark.parametrize('accum', ['1', '2'])
def test_a_loss_that_is_not_finite_stops_the_run_before_it_changes_a_weight(images, tmp_path, monkeypatch, accum):
    kept = {}

    def poison(run, *args, **kwargs):
        if run.step == 7:
            # like an overflow in one layer
            model = run.raw_model
            hook = model.blocks[1].mlp.fc2.register_forward_hook(lambda module, inputs, output: output * torch.inf)
            kept.update({name: tensor.clone() for name, tensor in model.state_dict().items()}, run=run, hook=hook)
        return train_step(run, *args, **kwargs)

    train_step = train_module.train_step
    monkeypatch.setattr(train_module, 'train_step', poison)
    arguments = [*TINY, '--data-dir', images, '--output', str(tmp_path), '--epochs', '2', '--grad-accum-steps', accum]
    words = r'is nan at step 8: .* not finite is blocks\.1\.mlp\.fc2\. .*half the lr \(0\.0005\), --clip-grad 1'
    with pytest.raises(UserError, match=words):
        train(arguments)
    run, _ = kept.pop('run'), kept.pop('hook').remove()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in run.raw_model.state_dict().items())
    assert [path.name for path in list_checkpoints(tmp_path / 'checkpoints')] == ['step-00000005']
    # the advice of the message works
    monkeypatch.undo()
    assert train([*arguments, '--resume', 'auto', '--clip-grad', '1'])['n'] == 11


def test_a_far_too_high_learning_rate_stops_the_run(images, tmp_path):
    with pytest.raises(UserError, match='the loss is (nan|inf) at step [2-5]: .*No weight was changed by this step'):
        train([*TINY, '--lr', '1e30', '--opt', 'sgd', '--data-dir', images, '--output', str(tmp_path), '--epochs', '2'])
    assert list_checkpoints(tmp_path / 'checkpoints') == []


@pytest.fixture
def bad(tmp_path, images):
    """A folder of unsuitable datasets, runs and weights."""
    make_images(tmp_path / 'no_val', train_red=2, train_blue=2)
    make_images(tmp_path / 'one_class', train_red=2, val_red=2)
    make_images(tmp_path / 'other_class', train_red=2, train_blue=2, val_bleu=1)
    make_images(tmp_path / 'damaged', train_red=2, train_blue=2, val_red=1)
    (tmp_path / 'damaged' / 'train' / 'red' / '0.jpg').write_text('not an image')
    (tmp_path / 'no_split').symlink_to(tmp_path / 'no_val' / 'train')
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'recipe.yaml').write_text('# model  test_vit\n')
    (tmp_path / 'photos' / 'best').mkdir(parents=True)
    save_file({'head.weight': torch.zeros(3, 3), 'lost': torch.zeros(1)}, tmp_path / 'other.safetensors')
    return tmp_path


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        ('--model test_vitt', "unknown model 'test_vitt', did you mean test_vit"),
        ('--model test_vit*', 'stands for'),
        ('--model empty', 'has no config.json'),
        ('--model cvt_ls_13 --pretrained', 'no published weights of cvt_ls_13'),
        ('--model deit_softmax_tiny --img-size 8', 'deit_softmax_tiny cannot'),
        ('--model-kwargs widht=3', "has no argument 'widht'"),
        ('--modle test_vit', "unknown option '--modle', did you mean --model"),
        ('--data-dir nowhere', 'does not exist'),
        ('--data-dir empty', 'is empty'),
        ('--data-dir no_val --val-fraction 0', 'has a train split but no split named val'),
        ('--data-dir no_split --val-fraction 0', 'has no validation images'),
        ('--data-dir one_class', 'has only one class, red'),
        ('--data-dir other_class', "class 'bleu'"),
        ('--data-dir damaged', 'cannot read the image red/0.jpg of'),
        ('--num-classes 2', 'num_classes is 2, but'),
        ('--initial-checkpoint other.safetensors', 'does not fit VisionTransformer'),
        ('--initial-checkpoint gone.safetensors', 'does not exist'),
        ('--grad-accum-steps 3', 'batch_size 8 is not a multiple of 3'),
        ('--opt adamm', "unknown optimizer 'adamm', did you mean adam"),
        ('--opt sgd --momentum 0', 'opt sgd cannot be used here: Nesterov momentum requires a momentum'),
        ('--opt-betas 1 1', 'opt adamw cannot be used here: Invalid beta parameter'),
        ('--opt-betas [0.9]', 'opt_betas must have 2 or 3 items, not 1'),
        ('--sched wsd --decay-epochs 9', 'after the warm-up, but decay_epochs is 9; change one of them'),
        ('--sched wsd --epochs 1 --warmup-epochs 0.7 --decay-epochs 0.5', 'sched wsd decays in the 0.3 epochs'),
        ('--sched step --decay-epochs 0', 'sched step needs decay_epochs above 0'),
        ('--color-jitter 0 0 0 0.9', 'the hue of color_jitter, its last number, is at most 0.5, not 0.9'),
        ('--model-kwargs num_classes=2', 'has 2 classes, but training needs 3'),
        ('--model-kwargs features_only=true', 'is not a classifier, but training needs 3'),
        ('--sched rsqrt --warmup-epochs 0', 'sched rsqrt decays by the length of the warm-up: set warmup_epochs'),
        ('--aa best', "unknown aa 'best'"),
        ('--output run', "there is a run in"),
        ('--output photos', "'photos' contains best, which is not of a training run"),
        ('--output photos --overwrite', "'photos' contains best, which is not of a training run"),
        ('--resume auto --data-dir empty --output empty', 'is empty'),
        ('--resume empty', 'there is no checkpoint in'),
        ('--resume auto', 'needs the folder of the run'),
    ],
)  # fmt: skip
def test_a_user_error_is_one_line_and_exit_code_2(images, bad, monkeypatch, capsys, options, words):
    monkeypatch.chdir(bad)
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit:
        main([*TINY, '--data-dir', images, '--epochs', '1', '--batch-size', '8', *options.split()])
    assert exit.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith('vitzoo: error: ') and words in lines[0]
    assert not (bad / 'runs' / 'test_vit' / 'model.safetensors').exists()


def test_a_checkpoint_of_another_run_is_refused(images, tmp_path):
    arguments = [*TINY, '--data-dir', images, '--output', str(tmp_path), '--epochs', '1']
    train(arguments)
    for options, words in {
        ('--batch-size', '4'): 'its batch_size is 8, not 4',
        ('--seed', '1'): 'its seed is 42, not 1',
        ('--model', 'test_vit2'): 'cannot resume from',
    }.items():
        with pytest.raises(UserError, match=words):
            train([*arguments, '--resume', 'auto', *options])


def test_an_unreadable_image_is_reported_on_one_line_by_loader_worker_and_process(bad):
    arguments = [*TINY, '--data-dir', str(bad / 'damaged'), '--output', str(bad / 'out'), '--workers', '1']
    outcome = start_processes(1, main, arguments)
    assert outcome.codes == [2]
    (line,) = outcome.err.splitlines()
    assert line.startswith('vitzoo: error: cannot read the image red/0.jpg of ')


def test_an_unreadable_image_is_reported_once_by_two_processes(bad):
    arguments = [*TINY, '--data-dir', str(bad / 'damaged'), '--output', str(bad / 'two')]
    outcome = start_processes(2, main, arguments)
    assert 2 in outcome.codes and 'Traceback' not in outcome.err
    found = [line for line in outcome.err.splitlines() if 'cannot read the image red/0.jpg of ' in line]
    assert len(found) == 1
