"""A run resumes with the model, data and fixed recipe keys that it began with; other keys may change."""

import json
from dataclasses import asdict
from pathlib import Path
from shlex import split

import pytest
import torch

from vitzoo.errors import UserError
from vitzoo.train import loop as train_module
from vitzoo.train.checkpoint import _fingerprint, list_checkpoints
from vitzoo.train.loop import train
from vitzoo.train.recipe import CHANGES, FIELDS, FIXED, NEUTRAL, Recipe, read_recipe_file
from vitzoo.train.resume import changed_keys

pytestmark = pytest.mark.usefixtures('fresh_accelerate')
TINY = split('--model test_vit --img-size 32 --workers 0 --batch-size 8 --lr 1e-3 --warmup-epochs 0 --crop-pct 1')
# two mixers without parameters of their own, so that their checkpoints have the same tensors
SMALL = split('--model deit_softmax_tiny --model-kwargs depth=1 embed_dim=24 num_heads=2 patch_size=16')


@pytest.fixture
def finished(images, tmp_path) -> Path:
    """A finished run of one epoch of 5 steps."""
    train([*TINY, '--data-dir', images, '--output', str(tmp_path / 'run'), '--epochs', '1'])
    return tmp_path / 'run'


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob('*')) if path.is_file()}


def test_another_model_with_the_same_weights_cannot_resume(images, tmp_path):
    options = ['--data-dir', images, '--output', str(tmp_path / 'run'), '--epochs', '1']
    train([*TINY, *SMALL, *options])
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match='its model is deit_softmax_tiny, not deit_linear_tiny; leave out --model'):
        train([*TINY, *SMALL, *options, '--resume', 'auto', '--model', 'deit_linear_tiny'])
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        ('--model-kwargs qk_norm=false', "its model_kwargs is {}, not {'qk_norm': False}"),
        ('--batch-size 4', 'its batch_size is 8, not 4'),
        ('--seed 1', 'its seed is 42, not 1'),
        ('--opt sgd', 'its opt is adamw, not sgd'),
        ('--layer-decay 0.5', 'its layer_decay is None, not 0.5'),
        ('--model-ema', 'its model_ema is False, not True'),
        ('--freeze backbone', 'its freeze is None, not backbone'),
        ('--config empty.yaml', 'its model is test_vit, not cvt_ls_13'),
    ],
)
def test_a_fixed_key_cannot_change(images, finished, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    Path('empty.yaml').write_text(f'workers: 0\nimg_size: 32\nbatch_size: 8\ndata_dir: {images}\n')
    before = snapshot(finished)
    with pytest.raises(UserError) as error:
        train(['--resume', 'auto', '--output', 'run', *split(options)])
    assert words in str(error.value) and '\n' not in str(error.value)
    assert snapshot(finished) == before


def test_other_data_cannot_be_resumed_with(images, finished, tmp_path):
    (tmp_path / 'fewer' / 'train').mkdir(parents=True)
    for path in Path(images).iterdir():
        (tmp_path / 'fewer' / path.name).mkdir(exist_ok=True)
        for label in ('red', 'green'):
            (tmp_path / 'fewer' / path.name / label).symlink_to(path / label)
    with pytest.raises(UserError, match='its training images are 40, not 27'):
        train(['--resume', str(finished), '--data-dir', str(tmp_path / 'fewer')])


def test_fewer_epochs_than_done_are_refused(images, tmp_path):
    options = [*TINY, '--data-dir', images, '--output', str(tmp_path), '--epochs']
    train([*options, '2'])
    with pytest.raises(UserError, match='it is at step 10, but 1 epochs end at step 5'):
        train([*options, '1', '--resume', 'auto'])


@pytest.mark.parametrize('name', FIELDS)
def test_every_key_is_either_fixed_or_may_change(name):
    how = FIELDS[name].metadata['on_resume']
    assert how in (FIXED, CHANGES, NEUTRAL)
    changed = changed_keys(Recipe(), {**asdict(Recipe()), name: 'another value'})
    assert list(changed) == ([name] if how == FIXED else [])


def test_keys_that_are_newer_than_a_checkpoint_had_their_default():
    saved = asdict(Recipe())
    del saved['freeze']
    assert changed_keys(Recipe(), saved) == {}
    assert changed_keys(Recipe(freeze='backbone'), saved) == {'freeze': (None, 'backbone')}


CHANGED = {
    'weight_decay': '0.3',
    'opt_betas': '[0.8, 0.9]',
    'opt_eps': '1.0e-5',
    'lr': '0.5',
    'sched': 'constant',
    'mixup': '0.5',
    'smoothing': '0.2',
    'clip_grad': '1',
    'drop_path': '0.1',
    'bce_loss': 'true',
    'grad_accum_steps': '2',
    'log_interval': '1',
}


@pytest.mark.parametrize(('opt', 'ema'), [('adamw', 'no'), ('sgd', 'yes'), ('adamc', 'no')])
def test_a_key_that_may_change_takes_effect_and_is_recorded(images, tmp_path, monkeypatch, opt, ema):
    changed = {name: value for name, value in CHANGED.items() if opt != 'sgd' or not name.startswith('opt_')}
    changed |= dict(momentum='0.5') if opt == 'sgd' else {}
    arguments = [*TINY, '--opt', opt, '--model-ema', ema, '--data-dir', images, '--output', str(tmp_path)]
    train([*arguments, '--epochs', '1'])
    runs, train_step = [], train_module.train_step

    def step_and_keep(run, *args, **kwargs):
        runs[:] = [run]
        return train_step(run, *args, **kwargs)

    monkeypatch.setattr(train_module, 'train_step', step_and_keep)
    options = [word for name, value in changed.items() for word in (f'--{name}', value)]
    train(['--resume', str(tmp_path), '--epochs', '2', *options])
    saved, groups = read_recipe_file(tmp_path / 'recipe.yaml'), runs[0].optimizer.param_groups
    for name, value in changed.items():
        assert str(saved[name]).lower() == value.lower() or float(value) == saved[name], name
    assert sorted({group['weight_decay'] for group in groups}) == [0, 0.3]
    assert {group['lr'] for group in groups} == {0.5}
    # weight decay is lr * lr / max_lr
    assert {group.get('max_lr_snapshot', 0.5) for group in groups} == {0.5}
    if opt == 'sgd':
        assert {group['momentum'] for group in groups} == {0.5}
    else:
        assert {tuple(group['betas']) for group in groups} == {(0.8, 0.9)}
        assert {group['eps'] for group in groups} == {1e-5}


@pytest.mark.parametrize('layer_decay', [[], ['--layer-decay', '0.5']], ids=['', 'layer_decay'])
def test_weight_decay_may_change_to_and_from_zero(images, tmp_path, layer_decay):
    arguments = [*TINY, *layer_decay, '--data-dir', images, '--output', str(tmp_path)]
    train([*arguments, '--epochs', '1', '--weight-decay', '0'])
    for epochs, weight_decay in (('2', '0.1'), ('3', '0')):
        train(['--resume', str(tmp_path), '--epochs', epochs, '--weight-decay', weight_decay])
        checkpoint = list_checkpoints(tmp_path / 'checkpoints')[-1]
        groups = torch.load(checkpoint / 'optimizer.pt', weights_only=True)['param_groups']
        assert {group['weight_decay'] for group in groups} == {0, float(weight_decay)}


def test_an_optimizer_state_of_other_groups_is_a_user_error(finished):
    # as earlier versions wrote it with weight_decay 0
    checkpoint = list_checkpoints(finished / 'checkpoints')[-1]
    state = torch.load(checkpoint / 'optimizer.pt', weights_only=True)
    first, second = state['param_groups']
    state['param_groups'] = [dict(first, params=first['params'] + second['params'])]
    torch.save(state, checkpoint / 'optimizer.pt')
    saved = json.loads((checkpoint / 'state.json').read_text())
    saved['files']['optimizer.pt'] = _fingerprint(checkpoint / 'optimizer.pt')
    (checkpoint / 'state.json').write_text(json.dumps(saved))
    with pytest.raises(UserError, match='its optimizer has 1 instead of 2 groups.*start again with --overwrite'):
        train(['--resume', str(finished), '--epochs', '2'])
