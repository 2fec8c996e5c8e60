"""Every two settings of a study's file, and of its runs, in one tiny study, which ends like one that was left alone."""

import csv
import json
import os
import shutil
import time
from pathlib import Path

import pytest
from pairs import Forbidden, assert_covered, covering_array, refused_row
from study_runs import ENDS, MOMENTS, STALE_SECONDS, Interruption, run_workers
from tiny import MakeOnce, install_datasets, make_data
from tiny_studies import EVALUATIONS, TINY, link_name, make_earlier, make_study, write_folder

from vitzoo.report.command import make_report
from vitzoo.study import main
from vitzoo.study.command import run_study
from vitzoo.study.plan import Study, StudyCell, read_study
from vitzoo.study.status import CellState, find_state
from vitzoo.train.recipe import read_recipe_file
from vitzoo.validate.command import validate

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures('quick_timing')]

FACTORS = {
    'ways': ('one model', 'two models', 'converted', 'shared teacher', 'distilled'),
    'names': ('listed', 'wildcard', 'own'),
    'seeds': ('one', 'two'),
    'baseline': ('none', 'name', 'wildcards'),
    'overrides': ('none', 'option', 'kwargs'),
    'sizes': ('same', 'different'),
    'config': ('no', 'yes'),
    'evaluations': tuple(EVALUATIONS),
    'data': ('folder', 'folder undivided', 'grey', 'tar', 'wds undivided', 'labels'),
    'channels': ('color', 'grey'),
    'data of': ('study', 'steps'),
    'cells': ('all', 'some at first'),
    'workers': ('one', 'two', 'launched', 'slurm'),
    'end': tuple(ENDS),
    'moment': tuple(MOMENTS),
    'call': ('1', '2', '4'),
    'damage': ('none', 'cell.json', 'results', 'folder', 'moved', 'late data'),
    'change': ('none', 'seed', 'model', 'evaluation', 'way', 'option'),
}
FORBIDDEN = (Forbidden('ways', ['distilled'], 'data', ['labels'], 'kd_model_name does not work with multi_label'),)
ROWS = covering_array(FACTORS, FORBIDDEN)
# in which the worker itself is interrupted
WORKERS_MOMENTS = ('lock', 'cell.json', 'process.json', 'results')
# of rows and records, without the machine, which is unknown behind a launcher
TIMES = ('seconds', 'load', 'measured_on', 'cores', 'transfer')


@pytest.fixture(scope='module')
def make_once(tmp_path_factory) -> MakeOnce:
    return MakeOnce(tmp_path_factory.mktemp('made'))


def run_undisturbed(text: str, data: str, other: str, folder: Path) -> Path:
    """The folder of a study that one worker has computed at once, with its report."""
    write_folder(json.loads(text), folder, data, other)
    (outcome,) = run_workers(folder, ['run', 'study.yaml'], 1, None)
    assert outcome.codes == [0], outcome.out + outcome.err
    return folder


def run_once(row: dict[str, str], folder: Path, words: list[str], interruption: Interruption) -> list[int | None]:
    """Run the workers of a row, and return their exit codes; none may end with a traceback."""
    number = 2 if row['workers'] == 'two' else 1
    options = dict(launched=['--launch', 'env A=1 python'], slurm=['--slurm', 'cluster=debug,minutes=9'])
    arguments = ['run', 'study.yaml', *options.get(row['workers'], []), *words]
    outcomes = run_workers(folder, arguments, number, interruption)
    for outcome in outcomes:
        print(outcome.out, outcome.err)
        assert 'Traceback' not in outcome.out + outcome.err
    return [outcome.codes[0] for outcome in outcomes]


def first_words(row: dict[str, str], study: dict) -> list[str]:
    """Options of the first run: of the earlier study, all cells or those of the last way and the first seed."""
    seed = study['seeds'] if isinstance(study['seeds'], int) else study['seeds'][0]
    return ['--cells', f'{[*study["ways"]][-1]}/*/seed-{seed}'] if row['cells'] == 'some at first' else []


def damage(row: dict[str, str], folder: Path) -> Path:
    """Do to the folder of a study what its row says, and return where it is then."""
    study, deadline = read_study('study.yaml'), time.monotonic() + 60
    while any(find_state(cell) is CellState.RUNNING for cell in study.cells) and time.monotonic() < deadline:
        # only the worker was killed
        time.sleep(0.1)
    finished = [cell for cell in study.cells if cell.record.is_finished]
    if row['damage'] == 'moved':
        os.chdir(folder.rename(folder.with_name('moved')))
    elif finished and row['damage'] == 'folder':
        shutil.rmtree(finished[0].folder)
    elif finished and row['damage'] in ('cell.json', 'results'):
        if row['damage'] == 'results':
            next((finished[0].folder / 'evaluations').iterdir()).unlink()
        finished[0].record.path.unlink()
    return Path.cwd()


@pytest.mark.parametrize('row', ROWS, ids=lambda row: f'{row["ways"]}-{row["end"]}-{row["moment"]}'.replace(' ', '_'))
def test_a_study_of_a_pair_ends_like_one_that_was_left_alone(row, make_once, tmp_path, monkeypatch, capsys):
    install_datasets()
    data = make_once(make_data, row['data'])
    study = make_study(row, link_name(data), make_once)
    other = make_once(make_data, 'labels' if row['data'] == 'labels' else 'folder')
    twin = make_once(run_undisturbed, json.dumps(study), data, other)
    folder, interruption = tmp_path / 'study', Interruption(tmp_path, row['moment'], int(row['call']), row['end'])
    earlier = make_earlier(row, study)
    write_folder(earlier, folder, '' if row['damage'] == 'late data' else data, other)
    monkeypatch.chdir(folder)
    codes = run_once(row, folder, first_words(row, earlier), interruption)
    assert_codes(row, codes, interruption.has_happened)
    # the worker of a lock that cannot be read may be on another machine
    monkeypatch.setattr('vitzoo.train.lock.STALE_SECONDS', STALE_SECONDS)
    folder = damage(row, folder)
    write_folder(study, folder, data, other)
    if row['change'] == 'option':
        assert_refuses_another_option(study, folder, capsys)
    for _ in range(3):
        was_interrupted = interruption.has_happened
        codes = run_once(row, folder, ['--retry'], interruption)
        if was_interrupted or not interruption.has_happened:
            break
    assert set(codes) == {0} and (interruption.has_happened or not must_be_reached(row))
    assert_same_models(folder, twin)
    assert_same_report(row, folder, twin, monkeypatch, capsys)
    assert_settings(row, read_study('study.yaml'), link_name(data))


def must_be_reached(row: dict[str, str]) -> bool:
    """True if a study certainly comes to the moment of its interruption."""
    if row['moment'] == 'matching':
        return row['call'] == '1' and row['ways'] in ('converted', 'shared teacher')
    return row['call'] == '1' or (row['call'] == '2' and row['moment'] not in ('evaluation', 'results'))


def assert_codes(row: dict[str, str], codes: list[int | None], is_interrupted: bool) -> None:
    """The exit codes of the first workers, during whose work the moment of the row may have come."""
    errors = {0, 2}
    if not is_interrupted:
        assert set(codes) <= errors and (row['damage'] != 'late data' or set(codes) == {2})
        return
    number = {'sigint': 130, 'ctrl-c': 130, 'sigkill': -9, 'sigkill of both': -9}.get(row['end'])
    allowed = {0} if row['end'] == 'sigterm' else errors if number is None else {number}
    if row['end'].endswith('step') and row['moment'] in WORKERS_MOMENTS:
        # no step runs, or it is the worker that is interrupted
        allowed = errors | ({-9} if row['end'].startswith('sigkill') else set())
    assert any(code in allowed for code in codes) and set(codes) <= allowed | errors


def assert_refuses_another_option(study: dict, folder: Path, capsys) -> None:
    """A training that has begun refuses another option, in one sentence."""
    changed = json.loads(json.dumps(study))
    next(iter(changed['ways'].values()))['train']['weight_decay'] = 0.2
    way = next(iter(changed['ways']))
    has_begun = any(
        (path / 'checkpoints').exists() or (path / 'model.safetensors').exists()
        for path in Path('out', way).glob('*/*')
    )
    write_folder(changed, folder)
    if has_begun:
        with pytest.raises(SystemExit) as end:
            main(['run', 'study.yaml'])
        assert end.value.code == 2 and 'train weight_decay = ' in capsys.readouterr().err
    else:
        run_study(['status', 'study.yaml'])
    write_folder(study, folder)


def assert_same_models(folder: Path, twin: Path) -> None:
    """Two studies have the same weights, bit for bit."""
    cells = [path.parent.relative_to(twin) for path in twin.glob('out/*/*/*/model.safetensors')]
    assert cells
    for cell in cells:
        for name in ('model.safetensors', 'config.json'):
            assert (folder / cell / name).read_bytes() == (twin / cell / name).read_bytes(), (cell, name)


def make_tables(folder: Path, monkeypatch, capsys) -> dict:
    """The files of the report of a study, and what `status` prints, without times."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr('vitzoo.study.report.format_now', lambda: 'today')
    run_study(['report', 'study.yaml', '--out', 'tables'])
    files = {path.name: path.read_text() for path in Path('tables').iterdir()}
    make_report(['--results', 'tables/report.json', '--out', 'page'])
    capsys.readouterr()
    run_study(['status', 'study.yaml'])
    with open('tables/cells.csv', newline='') as file:
        cells = [{key: value for key, value in line.items() if key not in TIMES} for line in csv.DictReader(file)]
    records = [strip(record) for record in json.loads(files['report.json'])['records']]
    return dict(files, **{'cells.csv': cells, 'report.json': records}, status=capsys.readouterr().out)


def strip(record: dict) -> dict:
    return {key: value for key, value in record.items() if key not in TIMES}


def assert_same_report(row: dict[str, str], folder: Path, twin: Path, monkeypatch, capsys) -> None:
    expected, found = make_tables(twin, monkeypatch, capsys), make_tables(folder, monkeypatch, capsys)
    number = len(read_study('study.yaml').cells)
    assert f': {number} finished' in found['status']
    assert found.keys() == expected.keys()
    # the page names the machine
    for name in expected.keys() - ({'index.html'} if row['workers'] == 'launched' else set()):
        assert found[name] == expected[name], name
    with open('tables/table.csv', newline='') as file:
        lines = [line for line in csv.DictReader(file) if line['way'] in ('converted', 'shorter')]
    for line in lines:
        if line['metric'] == 'top5':
            has_size = row['sizes'] == 'same' or line['evaluation'] == 'larger'
            assert bool(line['difference']) == (has_size and row['evaluations'] != 'apart'), line


def assert_settings(row: dict[str, str], study: Study, data_name: str) -> None:
    """A cell of each way has the options that the file gives it, and the results of a plain evaluation."""
    for way in dict.fromkeys(cell.way for cell in study.cells):
        cell = [cell for cell in study.cells if cell.way == way][-1]
        is_own = cell.teacher is not None or way != 'teacher'
        expected = dict(lr=3e-3 if row['overrides'] == 'option' and is_own and '_to_linf' not in cell.model else 1e-3)
        expected |= dict(seed=cell.seed, img_size=48 if row['sizes'] == 'different' and is_own else 32)
        if cell.teacher is None:
            assert_recipe(row, cell, expected, is_own)
        else:
            found = json.loads((cell.folder / 'transfer.json').read_text())['settings']
            expected |= dict(img_size=[expected['img_size']] * 2, mixer=cell.options['mixer'], network_steps=2)
            expected['steps'] = 1 if way == 'shorter' else 2
            if row['sizes'] == 'same':
                del expected['img_size']
            assert {key: found[key] for key in expected} == expected
        assert list(cell.evaluations) == expected_evaluations(row, way)
        for name in cell.evaluations:
            assert_scores(row, cell, name, data_name)


def assert_recipe(row: dict[str, str], cell: StudyCell, expected: dict, is_own: bool) -> None:
    """The recipe that a training wrote has the expected options."""
    found = read_recipe_file(str(cell.folder / 'recipe.yaml'))
    if row['config'] == 'yes' and expected['lr'] == 1e-3:
        expected['lr'] = 2e-3
    kwargs = dict(embed_dim=36, num_heads=3) if row['overrides'] == 'kwargs' and is_own else {}
    expected |= dict(model=cell.model, epochs=2, in_chans=1 if row['channels'] == 'grey' else 3)
    expected |= dict(model_kwargs=TINY | kwargs, multi_label=row['data'] == 'labels')
    assert {key: found[key] for key in expected} == expected


def expected_evaluations(row: dict[str, str], way: str) -> list[str]:
    is_first = way not in ('converted', 'shorter')
    names = {'chosen': ['larger', 'clean'] if is_first else ['larger'], 'apart': ['clean'] if is_first else ['larger']}
    return names.get(row['evaluations'], list(EVALUATIONS[row['evaluations']]))


def approximately(value):
    return pytest.approx(value, rel=1e-5) if isinstance(value, float) else value


def assert_scores(row: dict[str, str], cell: StudyCell, name: str, data_name: str) -> None:
    """The record of an evaluation has the scores of `vitzoo validate` with the options that the file gives it."""
    found, options = cell.record.results(name), EVALUATIONS[row['evaluations']][name]
    words = [str(cell.folder), '--data-dir', options.get('data_dir', data_name), '--batch-size', '8']
    size = options.get('img_size')
    words += ['--img-size', '48' if isinstance(size, list) else str(size)] if size else []
    words += ['--amp-dtype', options['amp_dtype']] if 'amp_dtype' in options else []
    (plain,) = validate([*words, '--workers', '0'])
    for key in ('n', 'img_size', 'top1', 'top5', 'loss', 'map', 'gmacs', 'params'):
        assert found[key] == approximately(plain[key]), key
    assert ('corrupt_top1' in found) == (name == 'corrupt')
    assert name == 'health' or found['health'] is None
    assert ('effective_rank' in found['token_statistics']) == ('measures' in options)


@pytest.mark.parametrize('rule', FORBIDDEN, ids=lambda rule: f'{rule.factor}-{rule.other}')
def test_a_pair_that_is_refused_gets_one_sentence(rule, make_once, tmp_path, monkeypatch, capsys):
    row = refused_row(FACTORS, rule)
    data = make_once(make_data, row['data'])
    write_folder(make_study(row, link_name(data), make_once), tmp_path, data, data)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(['run', 'study.yaml'])
    out, err = capsys.readouterr()
    # the sentence of the study follows that of the cell
    assert end.value.code == 2 and f'train failed with exit code 2: {rule.sentence}' in out
    assert err.startswith('vitzoo: error: 1 of 1 cell failed') and 'Traceback' not in out + err


def test_the_studies_cover_every_pair_that_is_not_refused(capsys):
    number = assert_covered(FACTORS, FORBIDDEN, ROWS)
    with capsys.disabled():
        print(f'\n{len(FACTORS)} settings of studies, {number} pairs of values, {len(ROWS)} studies')
