"""Validation at intervals, and the metric that selects the best epoch."""

import csv
import json
import math
from pathlib import Path
from shlex import split

import pytest
from toys import make_images

from vitzoo.errors import UserError
from vitzoo.figures import draw_history
from vitzoo.train import loop as train_module
from vitzoo.train.evaluation import selection_score
from vitzoo.train.loop import train
from vitzoo.train.recipe import make_recipe

pytestmark = pytest.mark.usefixtures('fresh_accelerate')
TINY = split('--model test_vit --img-size 32 --workers 0 --batch-size 8 --lr 1e-3 --warmup-epochs 0 --crop-pct 1')


def epochs_of(folder: Path) -> int:
    return json.loads((folder / 'config.json').read_text())['vitzoo']['epochs']


def weights_of(folder: Path) -> str:
    return json.loads((folder / 'config.json').read_text())['vitzoo']['weights']


def rows_of(folder: Path) -> list[dict]:
    with (folder / 'metrics.csv').open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def scores(monkeypatch) -> list[dict]:
    """Scores that replace those of the next validations."""
    found, evaluate_epoch = [], train_module.evaluate_epoch
    monkeypatch.setattr(train_module, 'evaluate_epoch', lambda *args: evaluate_epoch(*args) | found.pop(0))
    return found


@pytest.mark.parametrize(
    ('metric', 'best', 'weights'), [(None, 1, 'ema'), ('top1', 1, 'ema'), ('top5', 2, 'raw'), ('loss', 3, 'raw')]
)
def test_the_best_epoch_and_weights_follow_the_metric(images, tmp_path, scores, metric, best, weights):
    scores += [
        dict(top1=70.0, top5=80.0, eval_loss=0.5, ema_top1=71.0, ema_top5=70.0, ema_eval_loss=0.9),
        dict(top1=60.0, top5=90.0, eval_loss=0.6, ema_top1=50.0, ema_top5=70.0, ema_eval_loss=0.7),
        dict(top1=60.0, top5=90.0, eval_loss=0.4, ema_top1=50.0, ema_top5=70.0, ema_eval_loss=0.7),
    ]
    metric = [] if metric is None else ['--eval-metric', metric]
    train([*TINY, '--model-ema', '--epochs', '3', '--data-dir', images, '--output', str(tmp_path), *metric])
    assert (epochs_of(tmp_path / 'best'), weights_of(tmp_path / 'best')) == (best, weights)


def test_several_labels_are_rated_by_the_mean_average_precision(tmp_path, scores):
    images = make_images(tmp_path / 'images', train_red=4, train_blue=4, val_red=2, val_blue=2)
    for part in ('train', 'val'):
        files = [f'{path.relative_to(images / part)},{path.parent.name}' for path in (images / part).rglob('*.jpg')]
        (images / part / 'labels.csv').write_text('\n'.join(['file,labels', *files]))
    scores += [dict(map=50.0, top1=90.0), dict(map=60.0, top1=80.0)]
    arguments = [*TINY, '--multi-label', '--data-dir', str(images), '--output', str(tmp_path / 'run')]
    train([*arguments, '--epochs', '2'])
    assert epochs_of(tmp_path / 'run' / 'best') == 2


def test_the_mean_average_precision_of_one_label_is_refused(images, tmp_path):
    with pytest.raises(UserError, match='eval_metric map is measured with multi_label only'):
        train([*TINY, '--eval-metric', 'map', '--data-dir', images, '--output', str(tmp_path / 'run')])
    assert not (tmp_path / 'run').exists()


def test_a_score_that_is_not_a_number_is_the_worst():
    recipe = make_recipe(dict(multi_label=True))
    assert selection_score(dict(map=math.nan), recipe) == -math.inf < selection_score(dict(map=0.0), recipe)
    assert selection_score(dict(eval_loss=2.0), make_recipe(dict(eval_metric='loss'))) == -2


def test_epochs_are_validated_at_intervals_and_at_the_end(images, tmp_path, capsys, monkeypatch):
    arguments = [*TINY, '--val-interval', '2', '--data-dir', images, '--output']
    with monkeypatch.context() as patch:
        patch.setattr('vitzoo.figures.draw_history', draw_history)
        train([*arguments, str(tmp_path / 'run'), '--epochs', '5'])
    assert [bool(row['top1']) for row in rows_of(tmp_path / 'run')] == [False, True, False, True, True]
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith('epoch ')]
    assert ['top-1' in line for line in printed] == [False, True, False, True, True]
    assert epochs_of(tmp_path / 'run' / 'best') in (2, 4, 5)
    assert (tmp_path / 'run' / 'curves.png').read_bytes().startswith(b'\x89PNG')
    # the interval does not change the training, not even of a run that resumes with another
    train([*arguments, str(tmp_path / 'again'), '--epochs', '3', '--sched', 'constant'])
    resumed = ['--resume', str(tmp_path / 'again'), '--epochs', '5', '--val-interval', '1', '--sched', 'cosine']
    train(resumed)
    assert [bool(row['top1']) for row in rows_of(tmp_path / 'again')] == [False, True, True, True, True]


@pytest.mark.parametrize('options', ['', '--val-interval 3'])
def test_the_result_of_a_last_epoch_is_kept_if_the_run_is_extended(images, tmp_path, scores, options):
    run = str(tmp_path / 'run')
    # the first epoch is validated again when the run resumes at its end
    scores += [dict(top1=90.0), dict(top1=90.0), dict(top1=80.0)]
    train([*TINY, '--data-dir', images, '--output', run, '--val-interval', '2', '--sched', 'constant', '--epochs', '1'])
    train(['--resume', run, '--epochs', '2', *options.split()])
    assert [row['top1'] for row in rows_of(tmp_path / 'run')] == ['90.0', '80.0']
    assert epochs_of(tmp_path / 'run' / 'best') == 1
