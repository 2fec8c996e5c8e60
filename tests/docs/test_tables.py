"""The counts in weights/results.csv are right, and the tables made from it are current."""

import json
import re
from pathlib import Path

import docs_models
import pages
import pytest
import timm
from helpers import one_in

ROOT = Path(__file__).parents[2]


ROWS = docs_models.read_rows()
COLUMNS = list(ROWS[0])


def name_of(row: dict) -> str:
    return f'{row["model"]}-{row["img_size"]}-{ROWS.index(row)}'


# small models first, because those of many MACs take seconds
@pytest.mark.parametrize(
    'row', one_in(20, [pytest.param(row, id=name_of(row)) for row in sorted(ROWS, key=lambda row: float(row['gmacs']))])
)
def test_parameters_and_macs_of_every_row_are_those_of_the_model(row):
    params, macs = docs_models.measure(row)
    assert int(row['params']) == params, 'run `python tools/docs_models.py --measure`'
    assert float(row['gmacs']) == pytest.approx(macs / 1e9, rel=1e-4, abs=5e-5), (
        'run `python tools/docs_models.py --measure`'
    )


def test_every_row_is_whole():
    assert len(ROWS) > 40
    for row in ROWS:
        assert None not in row and None not in row.values(), name_of(row)
        has_accuracy = bool(row['top1'])
        assert row['source'] in (('reproduced', 'converted', 'paper') if has_accuracy else ('',))
        for key in ('trained_on', 'data', 'reference'):
            assert bool(row[key]) == has_accuracy, (name_of(row), key)
        assert not row['top5'] or 100 > float(row['top5']) > float(row['top1']) > 0
        assert not row['oversmoothing'] or -1 <= float(row['oversmoothing']) <= 1
        assert bool(row['images_per_second'] or row['peak_memory_mb']) <= bool(row['device'])
        assert row['versions'].startswith('torch ')


def test_every_column_is_explained():
    lines = re.findall(r'^\| (`[^|]*`) \|', (ROOT / 'weights' / 'README.md').read_text(), re.MULTILINE)
    assert re.findall('`(\\w+)`', ' '.join(lines)) == COLUMNS


def test_published_results_have_a_source():
    for row in ROWS:
        if row['source'] == 'paper':
            assert row['reference'].startswith('https://') and row['data'] == 'ImageNet-1k', name_of(row)
        elif row['source']:
            assert re.search('`vitzoo (validate|study run) ', row['reference']), name_of(row)


def test_no_model_has_two_rows_of_the_same_kind():
    keys = ('model', 'kwargs', 'img_size', 'trained_on', 'data')
    # the cells of a study differ in their seeds
    cells = [row['reference'] if ' cell ' in row['reference'] else '' for row in ROWS]
    kinds = [(cell, *(row[key] for key in keys)) for cell, row in zip(cells, ROWS)]
    assert len(set(kinds)) == len(kinds)


def test_the_tags_of_models_exist():
    for row in ROWS:
        name, _, tag = row['model'].partition('.')
        assert timm.is_model(name)
        assert not tag or row['model'] in timm.list_models(f'{name}.*', include_tags=True)


def test_all_published_weights_of_others_have_a_row():
    names = [name for name in timm.list_pretrained() if re.search(r'^(cvt|vil)_.*\.(msft|nvidia)_', name)]
    assert len(names) > 20 and {*names} <= {row['model'] for row in ROWS}


def test_the_tables_are_current():
    text = docs_models.PAGE.read_text()
    assert pages.fill(text, docs_models.page_tables(ROWS)) == text, 'run `make docs`'


def test_every_row_is_in_a_table():
    page = ''.join(docs_models.page_tables(ROWS).values())
    study = (ROOT / 'docs' / 'study.md').read_text()
    for row in ROWS:
        cells = docs_models.numbers(row)
        if docs_models.is_cell(row):
            assert f'| 1 | {cells["top1"]} | ' in study, name_of(row)
            continue
        shown = f'| {cells["params"]} | {cells["gmacs"]} | {cells["gflops"]} | {cells["top1"]} | {cells["top5"]} |'
        if row['source'] in ('reproduced', 'converted'):
            shown = f'| {cells["data"]} | {cells["img_size"]} | {cells["top1"]} | {cells["top5"]} |'
        assert shown in page, name_of(row)


def test_the_overview_has_a_row_for_each_model_at_224():
    table = docs_models.overview_table(ROWS)
    names = {row['model'].partition('.')[0] for row in ROWS if row['img_size'] == '224' and not row['kwargs']}
    assert [line.split('`')[1] for line in table.splitlines()[2:]] == list(
        dict.fromkeys(row['model'].partition('.')[0] for row in ROWS if row['model'].partition('.')[0] in names)
    )


def test_published_digits_are_kept():
    assert [docs_models.accuracy(cell) for cell in ('', '81.6', '76.65', '83.816', '84.098', '83.0')] == [
        *('', '81.6', '76.65', '83.82', '84.10', '83.0')
    ]


def test_numbers_have_few_digits():
    row = dict.fromkeys(COLUMNS, '') | dict(params='1234567', gmacs='0.3852', oversmoothing='0.46871')
    shown = docs_models.numbers(row)
    assert (shown['params'], shown['gmacs'], shown['gflops']) == ('1,234,567', '0.385', '0.770')
    assert shown['oversmoothing'] == '0.469'


@pytest.mark.parametrize('text', ['', '<!-- a: made by `make docs` -->\n', '<!-- end of a -->\n' * 2])
def test_a_page_without_the_markers_of_a_table_is_refused(text):
    with pytest.raises(ValueError, match='expected one'):
        pages.fill(text, {'a': '| 1 |'})


def test_the_table_of_swapped_mixers_has_their_keywords():
    page = docs_models.page_tables(ROWS)['swapped']
    for row in ROWS:
        if row['model'] == docs_models.SWAPPED:
            rest = [value for key, value in json.loads(row['kwargs'] or '{}').items() if key != 'mixer']
            assert all(str(value) in page for value in rest), name_of(row)
    assert '| `longformer` | 1–2 |' in page and '| `softmax` | 1–4 |' in page
