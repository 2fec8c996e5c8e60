"""Every two values of two options of training in one tiny run: it ends, survives a kill, loads, and is validated."""

import json
import math
import os
import signal
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from shlex import split

import pytest
import timm
import torch
from kinds_of_data import COUNTS, install_datasets, make_data
from pairs import Forbidden, allowed_pairs, covered_pairs, covering_array
from processes import start_processes
from safetensors.torch import load_file
from timm.models import save_for_hf
from toys import read_metrics

import vitzoo  # noqa: F401  registers the models

pytestmark = pytest.mark.slow

# 28 images in batches of 8 make 3 steps an epoch
BASE = '--batch-size 8 --epochs 2 --warmup-epochs 1 --lr 1e-3 --log-interval 100'
DEIT = 'depth: 2, embed_dim: 24, num_heads: 2, patch_size: 8'
CVT = 'depths: [1, 1, 1], embed_dims: [16, 16, 32], num_heads: [1, 2, 2]'
VIL = 'depths: [1, 1, 1, 1], embed_dims: [16, 16, 16, 32], num_heads: [1, 2, 2, 2]'
SHIFT = 'mixer_kwargs: [{random_shift: true, shift_steps: 3}, {random_shift: true}, {}, {}]'
# name, arguments, and what is frozen as its stem
MODELS = {
    'deit_softmax': ('deit_softmax_tiny', DEIT, 'patch_embed,pos_embed,cls_token'),
    'deit_linformer': ('deit_linformer_tiny', DEIT, 'patch_embed,blocks.0'),
    'deit_performer': ('deit_performer_tiny', f'{DEIT}, mixer_kwargs: {{redraw_every: 2}}', 'patch_embed'),
    'deit_routing': ('deit_routing_tiny', DEIT, 'patch_embed'),
    'deit_sinkhorn': ('deit_sinkhorn_tiny', DEIT, 'blocks.1'),
    'deit_reformer': ('deit_reformer_tiny', DEIT, 'patch_embed'),
    'aft_full': ('aft_full_tiny', DEIT, 'patch_embed'),
    'cvt': ('cvt_13', CVT, 'stages.0'),
    'cvt_ls': ('cvt_ls_13', CVT, 'stages.0,stages.1'),
    'vil': ('vil_tiny', f'{VIL}, {SHIFT}', 'stages.0'),
    'vit': ('test_vit', '', 'patch_embed'),
    'resnet': ('test_resnet', '', 'conv1,bn1'),
    'distilled': ('deit_tiny_distilled_patch16_224', DEIT, 'patch_embed'),
}
OPTIONS = {
    'size': {'32': '--img-size 32', '48': '--img-size 48', '32 x 48': '--img-size 32 48'},
    'channels': {'color': '', 'grey': '--in-chans 1'},
    'accumulation': {'1': '', '2': '--grad-accum-steps 2'},
    'precision': {'float32': '', 'bfloat16': '--amp'},
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
    'look': {'jitter': '', 'policy': '--aa rand-m9-mstd0.5-inc1 --color-jitter 0', 'pipeline': '--aug albumentations'},
    'mixing': {
        'none': '',
        'batch': '--mixup 0.4 --cutmix 1',
        'pair': '--mixup 0.8 --mixup-mode pair --mixup-prob 0.5',
        'elem': '--cutmix 1 --mixup-mode elem',
    },
    'erasing': {'none': '', 'pixel': '--reprob 0.5 --recount 2', 'const': '--reprob 0.9 --remode const'},
    'repeats': {'1': '', '2': '--aug-repeats 2'},
    'drop': {'none': '', 'drop': '--drop 0.5', 'path': '--drop-path 0.5'},
    'clipping': {'none': '', 'norm': '--clip-grad 1', 'value': '--clip-grad 0.1 --clip-mode value',
                 'agc': '--clip-grad 0.02 --clip-mode agc'},
    'optimizer': {'adamw': '', 'sgd': '--opt sgd', 'lamb': '--opt lamb', 'lion': '--opt lion --opt-betas 0.9 0.95'},
    'decay': {'none': '', 'layers': '--layer-decay 0.75'},
    'schedule': {'cosine': '', 'step': '--sched step --decay-epochs 1', 'wsd': '--sched wsd --decay-epochs 1 --warmup-epochs 0',
                 'cooldown': '--sched poly --epochs 1 --warmup-epochs 0 --cooldown-epochs 1'},
    'workers': {'0': '--workers 0', '1': '--workers 1'},
    'evaluation': {'model': '', 'own': '--validation-batch-size 5 --crop-pct 1'},
    'checkpoints': {'epoch': '', '1': '--checkpoint-every 1 --checkpoint-hist 1', '2': '--checkpoint-every 2'},
}
FACTORS = {
    'data': (
        'folder', 'folder undivided', 'grey undivided', 'tar', 'zip undivided', 'wds', 'wds undivided',
        'torch', 'hfds', 'hfds undivided', 'labels', 'labels undivided',
    ),
    'model': tuple(MODELS),
    'weights': ('random', 'run', 'run of others', 'file', 'file of others'),
    'processes': ('1', '2'),
    'killed': ('2', '3', '5'),
    **{name: tuple(values) for name, values in OPTIONS.items()},
}  # fmt: skip
SEVERAL_LABELS = ('labels', 'labels undivided')
FORBIDDEN = (
    Forbidden('data', SEVERAL_LABELS, 'distillation', ('logit', 'hard', 'token'), 'a teacher names one class'),
    Forbidden('data', SEVERAL_LABELS, 'balance', ('sampler',), 'it draws by class, and an image has several'),
    Forbidden('distillation', ('token',), 'model', [name for name in MODELS if name != 'distilled'], 'it takes a distillation token'),
    Forbidden('weights', ('file', 'file of others'), 'channels', ('grey',), 'the file has to fit the model'),
)
ROWS = covering_array(FACTORS, FORBIDDEN)


def train_tiny(runs: list[list[str]], scores: str, kill_at: int) -> None:
    """Train one run after the other and write down their scores; `kill_at` is the step during which to be killed."""
    from accelerate.state import AcceleratorState
    from matplotlib.figure import Figure
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from vitzoo.train.loop import train

    def count_step(*_) -> None:
        nonlocal steps
        steps += 1
        if steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    # a picture takes longer than a run
    Figure.savefig = lambda figure, path, **kwargs: Path(path).touch()
    install_datasets()
    steps = 0
    register_optimizer_step_post_hook(count_step)
    results = []
    for arguments in runs:
        results.append(train(arguments))
        AcceleratorState._reset_state(reset_partial_state=True)
    if os.environ.get('RANK', '0') == '0':
        Path(scores).write_text(json.dumps(results))


def validate_tiny(arguments: list[str]) -> None:
    from vitzoo.validate import evaluation

    evaluation.images_per_second = lambda *args: 1.0
    install_datasets()
    evaluation.validate(arguments)


def run_processes(world: int, target: Callable, *args) -> list[int | None]:
    outcome = start_processes(world, target, *args)
    assert outcome.codes == [0] * world or -signal.SIGKILL in outcome.codes, outcome.err[-3000:]
    return outcome.codes


@pytest.fixture(scope='session')
def make_once(tmp_path_factory) -> Callable:
    """Data, trained models and teachers, each made when a run first asks for it."""
    made = {}

    def make(maker: Callable, *args):
        if (maker, *args) not in made:
            made[maker, *args] = maker(*args, tmp_path_factory.mktemp(maker.__name__))
        return made[maker, *args]

    return make


def make_source(model: str, num_classes: int, in_chans: int, folder: Path) -> Path:
    """A model as training writes it, for color or grey images of 32 x 32."""
    name, arguments, _ = MODELS[model]
    torch.manual_seed(0)
    kwargs = split_yaml(arguments) | ({} if model == 'resnet' else dict(img_size=32))
    source = timm.create_model(name, num_classes=num_classes, in_chans=in_chans, **kwargs)
    names = sorted({part.partition('_')[2] for part in COUNTS}) + ['black', 'white']
    config = dict(input_size=(in_chans, 32, 32), mean=(0.5,) * in_chans, std=(0.3,) * in_chans, crop_pct=0.9)
    save_for_hf(source, folder, model_config=dict(label_names=names[:num_classes]), safe_serialization=True, data_config=config)
    return folder


def split_yaml(arguments: str) -> dict:
    import yaml

    return yaml.safe_load(f'{{{arguments}}}')


def command_line(row: dict[str, str], make: Callable) -> list[str]:
    """The options of `vitzoo train` that a row stands for, but for --output."""
    name, arguments, stem = MODELS[row['model']]
    kind, _, others = row['weights'].partition(' of ')
    arguments = split(BASE) + ['--data-dir', make(make_data, row['data'])] + ['--multi-label'] * row['data'].startswith('labels')
    source = make(make_source, row['model'], 5 if others else 3, 3)
    if kind == 'run':
        arguments += ['--model', str(source)]
    else:
        arguments += ['--model', name, '--model-kwargs', f'{{{MODELS[row["model"]][1]}}}']
    if kind == 'file':
        arguments += ['--initial-checkpoint', str(source / 'model.safetensors')]
    options = ' '.join(values[row[name]] for name, values in OPTIONS.items())
    if 'TEACHER' in options:
        options = options.replace('TEACHER', str(make(make_source, 'vit', 3, 1 if row['channels'] == 'grey' else 3)))
    return arguments + split(options.replace('STEM', stem))


def assert_same_files(one: Path, other: Path) -> None:
    assert read_metrics(one) == read_metrics(other)
    for folder in ('', 'best'):
        left, right = (load_file(run / folder / 'model.safetensors') for run in (one, other))
        assert left.keys() == right.keys()
        assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize('row', ROWS, ids=lambda row: '-'.join(list(row.values())[:3]).replace(' ', '_'))
def test_two_options_together_train_as_each_alone(row, make_once, tmp_path):
    world, scores = int(row['processes']), tmp_path / 'scores.json'
    arguments, run = command_line(row, make_once), tmp_path / 'run'
    killed = run_processes(world, train_tiny, [[*arguments, '--output', str(run)]], str(scores), int(row['killed']))
    assert -signal.SIGKILL in killed and not scores.exists()
    again = ['--resume', 'auto', '--output', str(run)]
    twin = [*arguments, '--output', str(tmp_path / 'twin')]
    assert run_processes(world, train_tiny, [again, twin], str(scores), 0) == [0] * world
    resumed, uninterrupted = json.loads(scores.read_text())
    assert math.isfinite(resumed['loss']) and resumed | dict(folder='') == uninterrupted | dict(folder='')
    assert_same_files(run, tmp_path / 'twin')

    model = timm.create_model(f'local-dir:{run}', pretrained=True).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, *model.pretrained_cfg['input_size'])).isfinite().all()

    data = arguments[arguments.index('--data-dir') + 1]
    records = tmp_path / 'records.json'
    run_processes(1, validate_tiny, [str(run), '--data-dir', data, '--workers', '0', '--results-file', str(records)])
    (record,) = json.loads(records.read_text())
    assert [record[name] for name in ('n', 'top1', 'top5')] == [resumed[name] for name in ('n', 'top1', 'top5')]
    assert record['loss'] == pytest.approx(resumed['loss'], rel=1e-5)
    assert record['map'] == pytest.approx(resumed.get('map'))


def test_the_rows_cover_every_pair_that_is_allowed(capsys):
    allowed, covered = set(allowed_pairs(FACTORS, FORBIDDEN)), covered_pairs(ROWS)
    assert allowed <= covered
    refused = {
        frozenset({(rule.factor, value), (rule.other, other)})
        for rule in FORBIDDEN
        for value, other in product(rule.values, rule.other_values)
    }
    assert not refused & covered
    with capsys.disabled():
        print(f'\n{len(FACTORS)} options, {len(allowed)} pairs of values, {len(ROWS)} runs')
