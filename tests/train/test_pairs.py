"""Every two values of two options of training in one tiny run, which survives a kill, loads, and is validated."""

import json
import math
import os
import signal
from pathlib import Path
from shlex import split

import pytest
import timm
import torch
from pairs import Forbidden, assert_covered, covering_array, refused_row
from processes import assert_ended, at_free_ports, run_in_turn, start_processes
from safetensors.torch import load_file
from tiny import CLASSES, MODELS, MakeOnce, install_datasets, make_data, make_model, validate_tiny
from toys import read_metrics

from vitzoo.errors import UserError
from vitzoo.train.loop import train

pytestmark = pytest.mark.slow

# 28 images in batches of 8 make 3 steps an epoch
BASE = split('--batch-size 8 --epochs 2 --warmup-epochs 1 --lr 1e-3 --log-interval 100')
OPTIONS = {
    'size': {'32': '--img-size 32', '48': '--img-size 48', '32 x 48': '--img-size 32 48'},
    'channels': {'color': '', 'grey': '--in-chans 1'},
    'outputs': {'classes': '', 'more': '--num-classes 6'},
    'accumulation': {'1': '', '2': '--grad-accum-steps 2'},
    'precision': {'float32': '', 'bfloat16': '--amp'},
    'format': {'plain': '', 'bfloat16': '--model-dtype bfloat16', 'channels last': '--channels-last'},
    'statistics': {'reduce': '', 'broadcast': '--dist-bn broadcast', 'none': '--dist-bn none'},
    'average': {'none': '', 'ema': '--model-ema --model-ema-decay 0.9', 'warmup': '--model-ema --model-ema-warmup'},
    'freeze': {'none': '', 'backbone': '--freeze backbone', 'stem': '--freeze STEM'},
    'checkpointing': {'no': '', 'yes': '--grad-checkpointing'},
    'distillation': {
        'none': '',
        'logit': '--kd-model-name TEACHER --kd-temperature 2',
        'hard': '--kd-model-name TEACHER --kd-distill-type hard --task-loss-weight 0.5',
        'token': '--kd-model-name TEACHER --kd-distill-type token --kd-token-distill-type hard',
    },
    'balance': {'none': '', 'loss': '--balance loss', 'sampler': '--balance sampler'},
    'loss': {'ce': '', 'bce': '--bce-loss --smoothing 0', 'threshold': '--bce-loss --bce-target-thresh 0.2'},
    'look': {'jitter': '', 'policy': '--aa rand-m9-mstd0.5-inc1', 'pipeline': '--aug albumentations'},
    'crop': {'rrc': '', 'rkrc': '--train-crop-mode rkrc', 'rkrr': '--train-crop-mode rkrr', 'none': '--no-aug'},
    'colors': {'plain': '', 'grey': '--grayscale-prob 0.5', 'blur': '--gaussian-blur-prob 0.5 --color-jitter-prob 0.5'},
    'mixing': {
        'none': '',
        'batch': '--mixup 0.4 --cutmix 1',
        'pair': '--mixup 0.8 --mixup-mode pair --mixup-prob 0.5',
        'elem': '--cutmix 1 --mixup-mode elem',
        'box until epoch 1': '--cutmix-minmax 0.2 0.8 --mixup-off-epoch 1',
    },
    'erasing': {'none': '', 'pixel': '--reprob 0.5 --recount 2', 'const': '--reprob 0.9 --remode const'},
    'repeats': {'1': '', '2': '--aug-repeats 2'},
    'drop': {'none': '', 'drop': '--drop 0.5', 'path': '--drop-path 0.5'},
    'clipping': {
        'none': '',
        'norm': '--clip-grad 1',
        'value': '--clip-grad 0.1 --clip-mode value',
        'agc': '--clip-grad 0.02 --clip-mode agc',
    },
    'optimizer': {'adamw': '', 'sgd': '--opt sgd', 'lamb': '--opt lamb', 'lion': '--opt lion --opt-betas 0.9 0.95'},
    'decay': {'none': '', 'layers': '--layer-decay 0.75'},
    'schedule': {
        'cosine': '',
        'step': '--sched step --decay-epochs 1',
        'wsd': '--sched wsd --decay-epochs 1 --warmup-epochs 0',
        'cooldown': '--sched poly --epochs 1 --warmup-epochs 0 --cooldown-epochs 1',
    },
    'workers': {'0': '--workers 0', '1': '--workers 1'},
    'validation': {'top-1': '', 'loss': '--eval-metric loss', 'last': '--eval-metric top5 --val-interval 2'},
    'evaluation': {'model': '', 'own': '--validation-batch-size 5 --crop-pct 1'},
    'checkpoints': {'epoch': '', '1': '--checkpoint-every 1 --checkpoint-hist 1', '2': '--checkpoint-every 2'},
}
FACTORS = {
    'data': (
        'folder', 'folder undivided', 'grey undivided', 'tar', 'zip undivided', 'wds', 'wds undivided',
        'torch', 'torch undivided', 'hfds', 'hfds undivided', 'labels', 'labels undivided',
    ),
    'model': tuple(MODELS),
    # of a folder that training wrote, or its file, for the classes of the data or for others
    'weights': ('random', 'folder', 'folder of others', 'file', 'file of others'),
    'processes': ('1', '2'),
    'killed': ('2', '3', '5'),
    **{name: tuple(values) for name, values in OPTIONS.items()},
}  # fmt: skip
STEMS = dict(cvt='stages.0', cvt_ls='stages.0,stages.1', vil='stages.0', resnet='conv1,bn1', vit='patch_embed')
SEVERAL_LABELS, WITH_TEACHER = ('labels', 'labels undivided'), ('logit', 'hard', 'token')
NO_TOKEN = [name for name in MODELS if name != 'distilled']
FORBIDDEN = (
    Forbidden('data', SEVERAL_LABELS, 'distillation', WITH_TEACHER, 'kd_model_name does not work with multi_label'),
    Forbidden('data', SEVERAL_LABELS, 'balance', ['sampler'], 'balance: sampler needs one class per image'),
    Forbidden('data', SEVERAL_LABELS, 'outputs', ['more'], 'num_classes is 6, but'),
    Forbidden('distillation', ['token'], 'model', NO_TOKEN, 'has no distillation token'),
    Forbidden('distillation', WITH_TEACHER, 'outputs', ['more'], 'the teacher'),
    Forbidden('format', ['bfloat16'], 'precision', ['bfloat16'], 'model_dtype bfloat16 leaves nothing to amp'),
    Forbidden('weights', ['file', 'file of others'], 'channels', ['grey'], 'does not fit'),
)
ROWS = covering_array(FACTORS, FORBIDDEN)


@pytest.fixture(scope='module')
def make_once(tmp_path_factory) -> MakeOnce:
    return MakeOnce(tmp_path_factory.mktemp('made'))


def command_line(row: dict[str, str], make_once: MakeOnce) -> list[str]:
    """The options of `vitzoo train` that a row stands for, but for --output."""
    kind, _, others = row['weights'].partition(' of ')
    name, kwargs = MODELS[row['model']]
    source = make_once(make_model, row['model'], (*CLASSES, 'black', 'white') if others else tuple(CLASSES), 3, False)
    arguments = [*BASE, '--data-dir', make_once(make_data, row['data'])]
    arguments += (
        ['--model', str(source)] if kind == 'folder' else ['--model', name, '--model-kwargs', json.dumps(kwargs)]
    )
    if kind == 'file':
        arguments += ['--initial-checkpoint', str(source / 'model.safetensors')]
    if row['data'] in SEVERAL_LABELS:
        arguments.append('--multi-label')
    options = ' '.join(values[row[option]] for option, values in OPTIONS.items())
    if 'TEACHER' in options:
        # one takes images of its own size only
        teacher = 'deit_softmax' if row['distillation'] == 'hard' else 'vit'
        in_chans = 1 if row['channels'] == 'grey' else 3
        options = options.replace('TEACHER', str(make_once(make_model, teacher, tuple(CLASSES), in_chans, False)))
    return arguments + split(options.replace('STEM', STEMS.get(row['model'], 'patch_embed,blocks.0')))


def train_tiny(runs: dict[int, list[str]], scores: str, kill_at: int) -> None:
    """Train one run after the other and write down their scores; be killed during step `kill_at` unless it is 0."""
    from matplotlib.figure import Figure
    from torch.optim.optimizer import register_optimizer_step_post_hook

    steps = 0

    def count_step(*_) -> None:
        nonlocal steps
        steps += 1
        if steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(count_step)
    # drawing the curves takes longer than training
    Figure.savefig = lambda figure, path, **kwargs: Path(path).touch()
    install_datasets()
    run_in_turn(train, runs, scores)


def assert_same_files(one: Path, other: Path) -> None:
    assert read_metrics(one) == read_metrics(other)
    for folder in ('', 'best'):
        left, right = (load_file(run / folder / 'model.safetensors') for run in (one, other))
        assert left.keys() == right.keys()
        assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize('row', ROWS, ids=lambda row: f'{row["data"]}-{row["model"]}'.replace(' ', '_'))
def test_a_pair_of_options_trains_resumes_loads_and_is_validated(row, make_once, tmp_path):
    world, scores = int(row['processes']), tmp_path / 'scores.json'
    arguments, run, twin = command_line(row, make_once), tmp_path / 'run', tmp_path / 'twin'
    first = at_free_ports([[*arguments, '--output', str(run)]])
    killed = start_processes(world, train_tiny, first, str(scores), int(row['killed']))
    assert -signal.SIGKILL in killed.codes, killed.err[-3000:]
    again, whole = ['--resume', 'auto', '--output', str(run)], [*arguments, '--output', str(twin)]
    assert_ended(start_processes(world, train_tiny, at_free_ports([again, whole]), str(scores), 0))
    resumed, uninterrupted = json.loads(scores.read_text())
    assert math.isfinite(resumed['loss'])
    assert resumed | dict(folder='') == uninterrupted | dict(folder='')
    assert_same_files(run, twin)
    # no more than a quarter of the images, which a model that saw them in training would do too well on
    assert 0 < resumed['n'] < 10

    model = timm.create_model(f'local-dir:{run}', pretrained=True).eval()
    assert model(torch.zeros(1, *model.pretrained_cfg['input_size'])).isfinite().all()

    data_dir, file = arguments[arguments.index('--data-dir') + 1], tmp_path / 'record.json'
    validation = [str(run), '--data-dir', data_dir, '--workers', '0', '--results-file', str(file)]
    assert_ended(start_processes(1, validate_tiny, validation))
    (record,) = json.loads(file.read_text())
    assert [record[name] for name in ('n', 'top1', 'top5')] == [resumed[name] for name in ('n', 'top1', 'top5')]
    assert record['loss'] == pytest.approx(resumed['loss'], rel=1e-5)
    assert record['map'] == pytest.approx(resumed.get('map'))


@pytest.mark.usefixtures('fresh_accelerate')
@pytest.mark.parametrize('rule', FORBIDDEN, ids=lambda rule: f'{rule.factor}-{rule.other}-{rule.other_values[0]}')
def test_a_pair_that_is_refused_gets_one_sentence(rule, make_once, tmp_path):
    row = refused_row(FACTORS, rule)
    with pytest.raises(UserError, match=rule.sentence):
        train([*command_line(row, make_once), '--output', str(tmp_path / 'run')])


def test_the_runs_cover_every_pair_that_is_not_refused(capsys):
    number = assert_covered(FACTORS, FORBIDDEN, ROWS)
    with capsys.disabled():
        print(f'\n{len(FACTORS)} options of training, {number} pairs of values, {len(ROWS)} runs')
