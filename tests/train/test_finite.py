"""Weights and scores that are not finite end a run, and are neither saved nor exported nor resumed."""

import json
from shlex import split

import pytest
import torch
from safetensors.torch import load_file, save_file

from vitzoo.errors import UserError
from vitzoo.train import checkpoint as checkpoint_module
from vitzoo.train import evaluation
from vitzoo.train import loop as train_module
from vitzoo.train.checkpoint import list_checkpoints
from vitzoo.train.loop import train

pytestmark = pytest.mark.usefixtures('fresh_accelerate')
TINY = split('--model test_vit --img-size 32 --workers 0 --batch-size 8 --lr 1e-3 --warmup-epochs 0 --crop-pct 1')


@pytest.mark.parametrize('ema', ['no', 'yes'])
def test_weights_that_the_last_step_of_an_epoch_breaks_are_not_saved(images, tmp_path, monkeypatch, ema):
    train_step = train_module.train_step

    def step_and_break(run, *args, **kwargs):
        status = train_step(run, *args, **kwargs)
        if run.step == 10:
            model = run.raw_model if ema == 'no' else run.ema.module
            model.blocks[1].norm1.weight.data[0] = torch.nan
        return status

    monkeypatch.setattr(train_module, 'train_step', step_and_break)
    arguments = [*TINY, '--model-ema', ema, '--data-dir', images, '--output', str(tmp_path), '--epochs', '3']
    with pytest.raises(UserError, match=r'weights blocks.1.norm1.weight are not finite after step 10; .*05 is intact'):
        train(arguments)
    assert [path.name for path in list_checkpoints(tmp_path / 'checkpoints')] == ['step-00000005']
    assert not (tmp_path / 'model.safetensors').exists()
    assert json.loads((tmp_path / 'best' / 'config.json').read_text())['vitzoo']['epochs'] == 1
    monkeypatch.undo()
    train([*arguments, '--resume', 'auto'])


def test_a_checkpoint_with_weights_that_are_not_finite_is_passed_over(images, tmp_path, capsys):
    arguments = [*TINY, '--data-dir', images, '--output', str(tmp_path), '--epochs', '2']
    train(arguments)
    newest = list_checkpoints(tmp_path / 'checkpoints')[-1]
    weights = load_file(newest / 'model.safetensors')
    weights['head.weight'][0, 0] = torch.inf
    save_file(weights, newest / 'model.safetensors')
    state = json.loads((newest / 'state.json').read_text())
    state['files']['model.safetensors'] = checkpoint_module._fingerprint(newest / 'model.safetensors')
    (newest / 'state.json').write_text(json.dumps(state))
    train([*arguments, '--resume', 'auto'])
    assert 'cannot be used: head.weight in model.safetensors is not finite' in capsys.readouterr().out.replace('\n', '')


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_model_that_is_not_finite_in_validation_ends_the_run(images, tmp_path, monkeypatch, dtype):
    evaluate_shared = evaluation.evaluate_shared

    def evaluate_broken(run, model, advance=None):
        model.blocks[1].mlp.fc2.register_forward_hook(lambda module, inputs, output: output * torch.inf)
        return evaluate_shared(run, model, advance)

    monkeypatch.setattr(evaluation, 'evaluate_shared', evaluate_broken)
    words = 'are not finite: the first layer with an output that is not finite is blocks.1.mlp.fc2'
    with pytest.raises(UserError, match=words):
        train([*TINY, '--model-dtype', dtype, '--data-dir', images, '--output', str(tmp_path), '--epochs', '1'])
    assert not (tmp_path / 'best').exists() and not (tmp_path / 'model.safetensors').exists()


def test_a_validation_loss_that_is_not_finite_ends_the_run(images, tmp_path, monkeypatch):
    evaluate_shared = evaluation.evaluate_shared

    def evaluate_broken(run, model, advance=None):
        return dict(evaluate_shared(run, model, advance), loss=float('nan'))

    monkeypatch.setattr(evaluation, 'evaluate_shared', evaluate_broken)
    with pytest.raises(UserError, match='validation loss is nan after step 5, although all logits are finite'):
        train([*TINY, '--data-dir', images, '--output', str(tmp_path), '--epochs', '1'])
    assert not (tmp_path / 'best').exists() and not (tmp_path / 'model.safetensors').exists()


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_loss_that_is_not_finite_ends_the_run_with_its_cause(images, tmp_path, dtype):
    options = ['--lr', '1e30', '--model-dtype', dtype, '--epochs', '1']
    with pytest.raises(UserError, match=r'the loss is .* at step \d: the .* not finite'):
        train([*TINY, *options, '--data-dir', images, '--output', str(tmp_path)])
