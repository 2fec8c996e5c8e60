"""Every two values of two options of `vitzoo validate` in one evaluation, which gives the scores of a plain one."""

import csv
import json
import shutil
from pathlib import Path
from shlex import split

import pytest
from pairs import Forbidden, assert_covered, covering_array, for_each_sentence, refused_row
from processes import assert_ended, start_processes
from tiny import CLASSES, MODELS, MakeOnce, install_datasets, make_data, make_model, validate_tiny

from vitzoo.data import open_dataset
from vitzoo.data.held_out import HELD_OUT, write_held_out
from vitzoo.validate import evaluation, main
from vitzoo.validate.command import validate

pytestmark = pytest.mark.slow

MEASURES = 'effective_rank,rank_one_residual,high_frequency_energy,head_similarity'
OPTIONS = {
    'size': {'own': '', '48': '--img-size 48', '32 x 48': '--img-size 32x48'},
    'crop': {'own': '', '0.7': '--crop-pct 0.7'},
    'arguments': {'own': '', 'drop': '--model-kwargs drop_rate=0.1'},
    'batch': {'64': '', '1': '--batch-size 1', '5': '--batch-size 5'},
    'precision': {'float32': '', 'bfloat16': '--amp-dtype bfloat16'},
    'workers': {'0': '--workers 0', '1': '--workers 1'},
    'results': {'json': '--results-file FOLDER/results.json', 'csv': '--results-file FOLDER/results.csv'},
    'measures': {'cosine': '', 'all': f'--measures {MEASURES}'},
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
NAMED = ('wds', 'wds undivided', 'torch', 'torch undivided', 'hfds', 'hfds undivided')
FACTORS = {
    'data': ('folder', 'folder undivided', 'grey undivided', 'tar', 'zip undivided', 'labels', *NAMED),
    'model': tuple(MODELS),
    'channels': ('color', 'grey'),
    # a folder that training wrote, a file in it, the folder and its copy, a name with the file as its --checkpoint
    'given': ('folder', 'file', 'twice', 'checkpoint'),
    'processes': ('1', '2'),
    **{name: tuple(values) for name, values in OPTIONS.items()},
}
MADE_BY_ARGUMENTS = [name for name, (_, kwargs) in MODELS.items() if kwargs]
FORBIDDEN = (
    Forbidden('images', ('unlabelled',), 'health', ['yes'], '--health needs labels'),
    Forbidden('images', ('unlabelled',), 'predictions', ['csv', 'npz'], '--save-predictions needs labels'),
    Forbidden('images', ('unlabelled',), 'errors', ['yes'], '--errors needs labels'),
    Forbidden('images', ('unlabelled',), 'corrupt', ['yes'], '--corrupt needs labels'),
    Forbidden('images', ('none',), 'plot', ['png', 'svg'], '--plot needs images'),
    Forbidden('images', ('none',), 'health', ['yes'], '--health needs images'),
    Forbidden('images', ('none',), 'predictions', ['csv', 'npz'], '--save-predictions needs images'),
    Forbidden('images', ('none',), 'errors', ['yes'], '--errors needs images'),
    Forbidden('images', ('none',), 'corrupt', ['yes'], '--corrupt needs images'),
    Forbidden('images', ('unlabelled',), 'data', NAMED, ''),
    Forbidden('data', ('labels',), 'errors', ['yes'], '--errors needs one label per image'),
    Forbidden('data', ('labels',), 'predictions', ['csv'], 'several labels per image'),
    Forbidden('given', ('twice',), 'errors', ['yes'], 'is for one model'),
    Forbidden('given', ('twice',), 'predictions', ['csv', 'npz'], 'is for one model'),
    # a name stands for a model of its own arguments, for colour images with one label
    Forbidden('given', ('checkpoint',), 'model', MADE_BY_ARGUMENTS, 'does not fit'),
    Forbidden('given', ('checkpoint',), 'channels', ['grey'], 'does not fit'),
    Forbidden('given', ('checkpoint',), 'data', ['labels'], ''),
)
ROWS = covering_array(FACTORS, FORBIDDEN)
SCORES = ('n', 'top1', 'top5', 'loss', 'map')


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr('vitzoo.validate.evaluation.measure_throughput', lambda *args: evaluation.Speed(1.0))


@pytest.fixture(scope='module')
def make_once(tmp_path_factory) -> MakeOnce:
    return MakeOnce(tmp_path_factory.mktemp('made'))


def make_run(model: str, channels: str, data: str, data_dir: str, folder: Path) -> Path:
    """A trained model, with the list of what it held out of undivided data."""
    names = ('blue', 'first', 'green', 'red') if data == 'labels' else tuple(CLASSES)
    make_model(model, names, 1 if channels == 'grey' else 3, data == 'labels', folder)
    images = open_dataset(data_dir, 'val', multi_label=data == 'labels', val_fraction=0.2)
    if images.is_held_out:
        write_held_out(folder / HELD_OUT, images.reader)
    return folder


def make_plain(run: Path, data_dir: str, options: str, folder: Path) -> dict:
    """The record of a model with no more options than those that change its scores."""
    (record,) = validate([str(run), '--data-dir', data_dir, '--workers', '0', *split(options)])
    return record


def command_line(row: dict[str, str], run: Path, data_dir: str, folder: Path) -> list[str]:
    """The options of `vitzoo validate` that a row stands for."""
    if row['given'] == 'twice':
        shutil.copytree(run, folder / 'copy')
    arguments = {
        'folder': [str(run)],
        'file': [str(run / 'model.safetensors')],
        'twice': [str(run), str(folder / 'copy')],
        'checkpoint': [MODELS[row['model']][0], '--num-classes', '3', '--checkpoint', str(run / 'model.safetensors')],
    }[row['given']]
    if row['given'] == 'checkpoint' and row['size'] == 'own':
        arguments += ['--img-size', '32']
    options = ' '.join(values[row[name]] for name, values in OPTIONS.items())
    return [*arguments, '--data-dir', data_dir, *split(options.replace('FOLDER', str(folder)))]


def read_results(folder: Path, kind: str) -> list[dict]:
    if kind == 'json':
        return json.loads((folder / 'results.json').read_text())
    with (folder / 'results.csv').open(newline='') as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row |= {name: None if row[name] == '' else float(row[name]) for name in (*SCORES, 'params', 'gmacs')}
        row |= {name: json.loads(row[name] or 'null') for name in ('oversmoothing', 'token_statistics', 'health')}
    return rows


def scores_of(record: dict) -> dict:
    return {name: record[name] for name in SCORES if record[name] is not None}


@pytest.mark.parametrize('row', ROWS, ids=lambda row: f'{row["data"]}-{row["model"]}'.replace(' ', '_'))
def test_a_pair_of_options_gives_the_scores_of_a_plain_evaluation(row, make_once, tmp_path):
    install_datasets()
    data_dir = make_once(make_data, row['data'])
    run = make_once(make_run, row['model'], row['channels'], row['data'], data_dir)
    arguments = command_line(row, run, data_dir, tmp_path)
    if row['processes'] == '1':
        validate(arguments)
    else:
        assert_ended(start_processes(2, validate_tiny, arguments))

    records = read_results(tmp_path, row['results'])
    assert len(records) == (2 if row['given'] == 'twice' else 1)
    scoring = ' '.join(OPTIONS[name][row[name]] for name in ('size', 'crop', 'batch', 'precision'))
    plain = make_once(make_plain, run, data_dir, scoring)
    for record in records:
        assert [record['params'], record['gmacs']] == [plain['params'], plain['gmacs']]
        # without the folder's own mean and standard deviation a checkpoint scores otherwise
        if row['images'] == 'labelled' and row['given'] != 'checkpoint':
            assert scores_of(record) == pytest.approx(scores_of(plain), rel=1e-5)
        if row['images'] != 'labelled':
            assert record['top1'] is None and (record['n'] is None) == (row['images'] == 'none')
        if row['measures'] == 'all' and record['token_statistics']:
            assert {'cosine', *MEASURES.split(',')} <= record['token_statistics'].keys()
        if row['health'] == 'no':
            assert record['health'] is None
    assert_files(row, records[0], tmp_path)


def assert_files(row: dict[str, str], record: dict, folder: Path) -> None:
    """Every file that was asked for exists and fits the record."""
    if row['plot'] != 'none' and record['oversmoothing']:
        assert (folder / f'curves.{row["plot"]}').stat().st_size > 1000
    if row['errors'] == 'yes':
        with (folder / 'errors' / 'per_class.csv').open(newline='') as file:
            assert sum(int(line['images']) for line in csv.DictReader(file)) == record['n']
    if row['predictions'] != 'none':
        (again,) = validate(['--from-predictions', str(folder / f'predictions.{row["predictions"]}')])
        assert scores_of(again) == pytest.approx(scores_of(record), rel=1e-4)


@for_each_sentence(FORBIDDEN)
def test_a_pair_that_is_refused_gets_one_sentence(rule, make_once, tmp_path, capsys):
    row = refused_row(FACTORS, rule)
    data_dir = make_once(make_data, row['data'])
    run = make_once(make_run, row['model'], row['channels'], row['data'], data_dir)
    with pytest.raises(SystemExit) as end:
        main(command_line(row, run, data_dir, tmp_path))
    assert end.value.code == 2 and rule.sentence in capsys.readouterr().err


def test_the_evaluations_cover_every_pair_that_is_not_refused(capsys):
    number = assert_covered(FACTORS, FORBIDDEN, ROWS)
    with capsys.disabled():
        print(f'\n{len(FACTORS)} options of validate, {number} pairs of values, {len(ROWS)} evaluations')
