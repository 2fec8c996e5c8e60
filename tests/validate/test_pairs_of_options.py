"""Every two values of two options of `vitzoo validate` in one evaluation, which gives the scores of a plain one."""

import csv
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from shlex import split

import pytest
import timm
import torch
from kinds_of_data import install_datasets, make_data
from pairs import Forbidden, allowed_pairs, covered_pairs, covering_array
from processes import start_processes
from timm.models import save_for_hf

import vitzoo  # noqa: F401  registers the models
from vitzoo.validate import evaluation

pytestmark = pytest.mark.slow

DEIT = dict(img_size=32, depth=2, embed_dim=24, num_heads=2, patch_size=8)
MODELS = {
    'deit_softmax': ('deit_softmax_tiny', DEIT),
    'deit_performer': ('deit_performer_tiny', DEIT),
    'deit_linformer': ('deit_linformer_tiny', DEIT),
    'deit_routing': ('deit_routing_tiny', DEIT),
    'aft_conv': ('aft_conv_tiny', DEIT | dict(num_heads=24)),
    'cvt_ls': ('cvt_ls_13', dict(img_size=32, depths=(1, 1, 1), embed_dims=(16, 16, 32), num_heads=(1, 2, 2))),
    'vil': (
        'vil_tiny',
        dict(img_size=32, depths=(1, 1, 1, 1), embed_dims=(16, 16, 16, 32), num_heads=(1, 2, 2, 2)),
    ),
    'distilled': ('deit_tiny_distilled_patch16_224', DEIT),
    'vit': ('test_vit', dict(img_size=32)),
    'resnet': ('test_resnet', {}),
}
OPTIONS = {
    'size': {'own': '', '48': '--img-size 48', '32 x 48': '--img-size 32x48'},
    'batch': {'64': '', '1': '--batch-size 1', '5': '--batch-size 5'},
    'precision': {'float32': '', 'bfloat16': '--amp-dtype bfloat16'},
    'workers': {'0': '--workers 0', '1': '--workers 1'},
    'results': {'json': '--results-file FOLDER/results.json', 'csv': '--results-file FOLDER/results.csv'},
    'measures': {'cosine': '', 'all': '--measures effective_rank,rank_one_residual,high_frequency_energy,head_similarity'},
    'sign': {'signed': '', 'absolute': '--absolute'},
    'self': {'no': '', 'yes': '--include-self'},
    'class token': {'no': '', 'yes': '--include-cls'},
    'plot': {'none': '', 'png': '--plot FOLDER/curves.png', 'svg': '--plot FOLDER/curves.svg'},
    'health': {'no': '', 'yes': '--health'},
    'predictions': {
        'none': '',
        'csv': '--save-predictions FOLDER/predictions.csv',
        'npz': '--save-predictions FOLDER/predictions.npz',
    },
    'errors': {'no': '', 'yes': '--errors FOLDER/errors'},
    'corrupt': {'no': '', 'yes': '--corrupt'},
    'images': {'labelled': '', 'unlabelled': '--ignore-labels', 'none': '--no-data'},
    'weights': {'own': '', 'random': '--random-weights'},
}
FACTORS = {
    'data': (
        'folder', 'folder undivided', 'grey undivided', 'tar', 'zip undivided', 'wds', 'wds undivided',
        'torch', 'hfds', 'hfds undivided', 'labels',
    ),
    'model': tuple(MODELS),
    'channels': ('color', 'grey'),
    'named': ('folder', 'file', 'twice', 'checkpoint'),
    'processes': ('1', '2'),
    **{name: tuple(values) for name, values in OPTIONS.items()},
}  # fmt: skip
NEEDS_LABELS = dict(health=('yes',), predictions=('csv', 'npz'), errors=('yes',), corrupt=('yes',))
FORBIDDEN = (
    *(Forbidden('images', ('unlabelled', 'none'), name, values, 'needs labels') for name, values in NEEDS_LABELS.items()),
    Forbidden('images', ('none',), 'plot', ('png', 'svg'), 'there is nothing to draw'),
    Forbidden('data', ('labels',), 'errors', ('yes',), 'an error analysis is of images with one label'),
    Forbidden('data', ('labels',), 'predictions', ('csv',), 'a row has one label'),
    Forbidden('named', ('twice',), 'errors', ('yes',), 'a folder is for one model'),
    Forbidden('named', ('twice',), 'predictions', ('csv', 'npz'), 'a file is for one model'),
    Forbidden(
        'named', ('checkpoint',), 'model', [name for name in MODELS if name not in ('vit', 'resnet')],
        'validate makes a model by its name only, without arguments',
    ),
    Forbidden('named', ('checkpoint',), 'channels', ('grey',), 'validate makes a model for color images'),
    Forbidden('named', ('checkpoint',), 'data', ('labels',), 'a file of weights names no labels'),
    Forbidden('images', ('unlabelled',), 'data', ('wds', 'wds undivided', 'torch', 'hfds', 'hfds undivided'), 'images are files'),
)  # fmt: skip
ROWS = covering_array(FACTORS, FORBIDDEN)
SCORES = ('n', 'top1', 'top5', 'loss', 'map')


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr('vitzoo.validate.evaluation.images_per_second', lambda *args: 1.0)


@pytest.fixture(scope='module')
def make_once(tmp_path_factory) -> Callable:
    """Data, trained models and plain evaluations, each made when a row first asks for it."""
    made = {}

    def make(maker: Callable, *args):
        if (maker, *args) not in made:
            made[maker, *args] = maker(*args, tmp_path_factory.mktemp(maker.__name__))
        return made[maker, *args]

    return make


def make_run(model: str, channels: str, data: str, data_dir: str, folder: Path) -> Path:
    """A model as training leaves it, with the list of what it held out of undivided class folders."""
    name, kwargs = MODELS[model]
    torch.manual_seed(0)
    names = ['blue', 'first', 'green', 'red'] if data == 'labels' else ['blue', 'green', 'red']
    in_chans = 1 if channels == 'grey' else 3
    trained = timm.create_model(name, num_classes=len(names), in_chans=in_chans, **kwargs)
    for head in trained.get_classifier() if model == 'distilled' else [trained.get_classifier()]:
        torch.nn.init.normal_(head.weight)
    about = dict(label_names=names, vitzoo=dict(multi_label=data == 'labels'))
    config = dict(input_size=(in_chans, 32, 32), mean=(0.5,) * in_chans, std=(0.3,) * in_chans, crop_pct=0.9)
    save_for_hf(trained, folder, model_config=about, safe_serialization=True, data_config=config)
    if data == 'folder undivided':
        files = sorted(Path(data_dir).rglob('*.jpg'))[::4]
        rows = [[path.relative_to(data_dir), hashlib.sha256(path.read_bytes()).hexdigest()] for path in files]
        with (folder / 'held_out.csv').open('w', newline='') as file:
            csv.writer(file).writerows([['file', 'sha256'], *rows])
    return folder


def make_plain(run: str, data_dir: str, options: str, folder: Path) -> dict:
    """The record of a model with no more options than those that change its scores."""
    (record,) = evaluation.validate([run, '--data-dir', data_dir, '--workers', '0', *split(options)])
    return record


def validate_tiny(arguments: list[str]) -> None:
    evaluation.images_per_second = lambda *args: 1.0
    install_datasets()
    evaluation.validate(arguments)


def read_results(folder: Path, kind: str) -> list[dict]:
    if kind == 'json':
        return json.loads((folder / 'results.json').read_text())
    with (folder / 'results.csv').open(newline='') as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row |= {name: None if row[name] == '' else float(row[name]) for name in (*SCORES, 'params', 'gmacs')}
        row |= {name: json.loads(row[name] or 'null') for name in ('oversmoothing', 'token_statistics', 'health')}
    return rows


@pytest.mark.parametrize('row', ROWS, ids=lambda row: '-'.join(list(row.values())[:2]).replace(' ', '_'))
def test_options_of_an_evaluation_do_not_change_its_scores(row, make_once, tmp_path):
    install_datasets()
    data_dir = make_once(make_data, row['data'])
    run = make_once(make_run, row['model'], row['channels'], row['data'], data_dir)
    models = {
        'folder': [str(run)],
        'file': [str(run / 'model.safetensors')],
        'twice': [str(run), str(tmp_path / 'copy')],
        'checkpoint': [MODELS[row['model']][0], '--num-classes', '3', '--checkpoint', str(run / 'model.safetensors')],
    }[row['named']]
    if row['named'] == 'twice':
        shutil.copytree(run, tmp_path / 'copy')
    options = split(' '.join(values[row[name]] for name, values in OPTIONS.items()).replace('FOLDER', str(tmp_path)))
    arguments = [*models, '--data-dir', data_dir, *options]
    if row['named'] == 'checkpoint' and row['size'] == 'own':
        arguments += ['--img-size', '32']
    if row['processes'] == '1':
        evaluation.validate(arguments)
    else:
        outcome = start_processes(2, validate_tiny, arguments)
        assert outcome.codes == [0, 0], outcome.err[-3000:]

    records = read_results(tmp_path, row['results'])
    assert len(records) == (2 if row['named'] == 'twice' else 1)
    scoring = ' '.join(OPTIONS[name][row[name]] for name in ('size', 'batch', 'precision'))
    plain = make_once(make_plain, str(run), data_dir, scoring)
    for record in records:
        assert [record['params'], record['gmacs']] == [plain['params'], plain['gmacs']]
        if row['images'] == 'labelled' and row['named'] != 'checkpoint':
            assert {name: record[name] for name in SCORES} == pytest.approx({name: plain[name] for name in SCORES}, rel=1e-5)
        if row['images'] == 'none':
            assert record['n'] is None and record['oversmoothing'] is None
        elif row['measures'] == 'all' and record['oversmoothing']:
            assert len(record['token_statistics']) == 7
        if row['health'] == 'yes':
            assert bool(record['health']) == (row['model'] in ('deit_performer', 'deit_linformer', 'cvt_ls'))
    if row['plot'] != 'none' and records[0]['oversmoothing']:
        assert (tmp_path / f'curves.{row["plot"]}').stat().st_size > 1000
    if row['errors'] == 'yes':
        with (tmp_path / 'errors' / 'per_class.csv').open(newline='') as file:
            assert sum(int(line['images']) for line in csv.DictReader(file)) == records[0]['n']
    if row['predictions'] != 'none':
        (again,) = evaluation.validate(['--from-predictions', str(tmp_path / f'predictions.{row["predictions"]}')])
        assert {name: again[name] for name in SCORES} == pytest.approx({name: records[0][name] for name in SCORES}, rel=1e-4)
