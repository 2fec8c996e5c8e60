"""The tables of a study: means, intervals, differences, ranks, and their formats."""

import csv
import json

import pytest
from processes import limited_files
from studies import STUDY, Executor, write_study

from vitzoo.errors import UserError
from vitzoo.study.command import run_study
from vitzoo.study.intervals import Estimate
from vitzoo.study.page import render_study
from vitzoo.study.plan import Study, read_study
from vitzoo.study.results import ResultColumn, Row, collect, pareto_front, sides
from vitzoo.study.tables import format_latex, format_markdown, format_notes, write_cells, write_csv
from vitzoo.study.worker import Worker

# accuracies of the seeds 0, 1 and 2
SCORES = {
    'deit_softmax_nano': (80.0, 82.0, 81.0),
    'deit_ls_nano': (82.0, 84.2, 83.1),
    'vit_tiny_patch16_224': (79.0, 80.0, 81.0),
    'vit_tiny_patch16_224_to_ls': (78.0, 78.9, 79.8),
    'vit_tiny_patch16_224_to_performer': (79.5, 78.0, 82.5),
}


@pytest.fixture
def path(tmp_path) -> str:
    path = write_study(tmp_path)
    study = read_study(path)
    Worker(study, execute=Executor()).run()
    for cell in study.cells:
        for name in study.evaluations:
            record = cell.record.results(name)
            record |= dict(top1=SCORES[cell.model][cell.seed], images='12345678')
            cell.record.results_file(name).write_text(json.dumps([record]))
    return path


@pytest.fixture
def study(path) -> Study:
    return read_study(path)


def test_rows_are_ranked_and_judged_by_paired_differences(study):
    rows = {row.model: row for row in collect(study)}
    column = ResultColumn('clean', 'top1')
    assert [rows[name].rank for name in ('deit_ls_nano', 'deit_softmax_nano')] == [1, 2]
    assert rows['deit_softmax_nano'].is_baseline and not rows['deit_softmax_nano'].differences
    # the intervals of the two means overlap, but that of the difference excludes zero
    ls, softmax = rows['deit_ls_nano'], rows['deit_softmax_nano']
    assert ls.values[column].low < softmax.values[column].high
    assert ls.differences[column].mean == pytest.approx(2.1)
    assert ls.verdicts[column] == 'better'
    assert rows['vit_tiny_patch16_224_to_ls'].verdicts[column] == 'worse'
    assert rows['vit_tiny_patch16_224_to_performer'].verdicts[column] == ''


def test_the_markdown_table_has_one_column_for_each_number(study):
    text = format_markdown(study, collect(study))
    first = text.split('\n\n')[1].splitlines()
    assert first[0] == (
        '| rank | model | seeds | top-1 % | difference | params M | GMACs | images/s | peak MB | last cosine'
        ' | corrupted top-1 %, corrupt | difference |'
    )
    assert first[2].startswith('| 1 | deit_ls_nano | 3 | 83.10 ± 2.73 | +2.10 ± 0.25 better | 2.00 | 0.500 | 100 ± 0')
    assert first[3].startswith('| 2 | deit_softmax_nano (baseline) | 3 | 81.00 ± 2.48 | – |')
    assert all(line.count('|') == first[0].count('|') for line in first)
    # as fast and as large as the other
    assert (
        'Pareto front of top-1 % and GMACs: deit_ls_nano. Pareto front of top-1 % and images/s: deit_ls_nano.' in text
    )
    assert '15 of 15 cells are finished' in text
    # three models with a baseline, two accuracies each
    assert 'comparisons, here 6' in text


def test_the_table_of_a_conversion_is_followed_by_what_it_keeps(study):
    stages = dict(start=dict(top1=50.0), matched=dict(top1=70.0))
    transfer = dict(kind='top1', **stages, controls=dict(zero=dict(top1=10.0)))

    def read(cell, evaluation):
        record = cell.record.results(evaluation)
        return record | dict(transfer=transfer) if cell.model.endswith('_to_ls') else record

    parts = format_markdown(study, collect(study, read)).split('\n\n')
    (number,) = [number for number, part in enumerate(parts) if part == '### converted']
    lines = parts[number + 3].splitlines()
    headings = ['mixer', 'converted', '% of the teacher', 'from scratch']
    headings += ['before training', 'after matching', 'without attention']
    assert lines[:2] == [f'| {" | ".join(headings)} |', '| --- | ---: | ---: | ---: | ---: | ---: | ---: |']
    # 78.9 and 80 of a teacher with 80
    assert lines[2:] == [
        '| performer | 80.00 | 100.0 | – | – | – | – |',
        '| ls | 78.90 | 98.6 | – | 50.00 | 70.00 | 10.00 |',
    ]


def test_image_sizes_have_a_column_if_they_differ(study):
    def read(cell, evaluation):
        return dict(top1=70.0, img_size='80x80' if cell.model.endswith('_to_ls') else '64x64')

    for line in format_markdown(study, collect(study, read)).splitlines():
        if '_to_ls' in line or '_to_performer' in line:
            assert f'| 3 | {80 if "_to_ls" in line else 64} | 70.00' in line
    same = format_markdown(study, collect(study, lambda cell, evaluation: dict(top1=70.0, img_size='64x64')))
    assert '| image |' not in same


def test_costs_have_an_interval_only_if_the_models_of_the_seeds_differ(study, tmp_path):
    def read(cell, evaluation):
        # as of students that keep softmax attention in other numbers of blocks
        return dict(top1=70.0, params=1e6, gmacs=1.0 + cell.seed if cell.model.endswith('_to_ls') else 2.0)

    rows = collect(study, read)
    lines = format_markdown(study, rows).splitlines()
    assert [line.split('| 1.00 | ')[1] for line in lines if '_to_' in line and line.startswith('| 1')] == [
        '2.000 ± 2.484 |',
        '2.000 |',
    ]
    write_csv(tmp_path / 'table.csv', rows)
    with (tmp_path / 'table.csv').open() as file:
        ends = {x['model']: x['high'] for x in csv.DictReader(file) if x['metric'] == 'gmacs'}
    assert {name for name, high in ends.items() if high} == {'vit_tiny_patch16_224_to_ls'}


@pytest.mark.parametrize(('size', 'is_compared'), [('64x64', True), ('128x128', False), (None, True)])
def test_a_conversion_is_compared_with_its_teacher_only_at_the_same_image_size(study, size, is_compared):
    def read(cell, evaluation):
        return dict(top1=SCORES[cell.model][cell.seed], img_size=size if cell.teacher else '64x64')

    rows = collect(study, read)
    lines = format_markdown(study, rows).splitlines()
    assert f'| ls | 78.90 | {"98.6" if is_compared else "–"} | – | – | – | – |' in lines
    (line,) = [line for line in lines if '_to_ls |' in line]
    assert ('worse' in line) is is_compared
    page = render_study(study, rows, [], [])
    assert ('teacher, ls: 80.0' in page) is is_compared and 'converted, ls: 78.9' in page


def test_models_with_the_same_number_of_correct_images_share_a_rank_and_the_front_has_the_cheaper(study):
    # of 500 images, 301 on average; their floats differ
    scores = {'deit_softmax_nano': (60.2, 60.2, 60.2), 'deit_ls_nano': (60.0, 60.2, 60.4)}

    def read(cell, evaluation):
        if cell.way != 'scratch':
            return None
        return dict(top1=scores[cell.model][cell.seed], gmacs=1.0 if cell.model == 'deit_ls_nano' else 2.0)

    rows = collect(study, read)
    score, cost = ResultColumn('clean', 'top1'), ResultColumn('clean', 'gmacs')
    assert len({row.values[score].mean for row in rows}) == 2
    assert [row.rank for row in rows] == [1, 1]
    assert [row.model for row in pareto_front(rows, score, cost, -1)] == ['deit_ls_nano']


def test_the_similarity_of_tokens_is_that_after_the_last_block(study):
    column = ResultColumn('clean', 'oversmoothing')
    assert all(row.values[column].mean == pytest.approx(0.2) for row in collect(study))


@pytest.mark.parametrize(('sign', 'front'), [(1, ['a', 'c', 'd']), (-1, ['a', 'b'])])
def test_a_front_has_the_models_that_no_other_dominates(sign, front):
    score, cost = ResultColumn('clean', 'top1'), ResultColumn('clean', 'gmacs')
    points = dict(a=(90.0, 2.0), b=(80.0, 1.0), c=(80.0, 3.0), d=(80.0, 3.0), e=(70.0, 2.0), f=(85.0, 2.0))
    rows = [Row('way', name, None, {score: Estimate(1, y), cost: Estimate(1, x)}) for name, (y, x) in points.items()]
    assert [row.model for row in pareto_front(rows, score, cost, sign)] == front


def test_the_words_need_more_than_one_seed(tmp_path):
    study = read_study(write_study(tmp_path, seeds=[0]))
    Worker(study, execute=Executor()).run()
    tables, _, notes = format_markdown(study, collect(study)).partition('5 of 5 cells')
    assert notes and 'difference' in tables
    assert [word for word in ('±', 'better', 'worse') if word in tables] == []


def test_unfinished_cells_are_left_out(study, path, capsys):
    (study.cells[0].folder / 'cell.json').unlink()
    rows = {row.model: row for row in collect(study)}
    column = ResultColumn('clean', 'top1')
    assert rows['deit_softmax_nano'].values[column].n == 2
    assert rows['deit_ls_nano'].values[column].n == 3
    assert rows['deit_ls_nano'].differences[column].n == 2
    assert '(2 of 3 seeds)' in format_markdown(study, list(rows.values()))
    run_study(['status', path])
    out = capsys.readouterr().out
    assert '15 cells: 14 finished, 1 to do, about' in out and '14 of 15 cells are finished' in out


def test_speeds_of_a_busy_machine_are_marked(study):
    file = study.cells[0].record.results_file('clean')
    file.write_text(json.dumps([json.loads(file.read_text())[0] | dict(speed_doubt='busy machine')]))
    text = format_markdown(study, collect(study))
    assert text.count('100 ± 0?') == 1 and '? marks speeds' in text
    # of the way in which one is doubtful
    assert text.count('Pareto front of top-1 % and images/s') == 1 < text.count('Pareto front of top-1 % and GMACs')


@pytest.mark.parametrize(
    ('images', 'is_noted'),
    [
        # the images that runs of other seeds hold out
        (lambda cell: f'seed{cell.seed}', False),
        (lambda cell: 'after' if cell.model == 'deit_ls_nano' else 'before', True),
        # records of earlier versions have none
        (lambda cell: 'after' if cell.model == 'deit_ls_nano' else None, False),
    ],
)
def test_a_note_names_the_evaluations_whose_models_had_different_images(study, images, is_noted):
    def read(cell, evaluation):
        return dict(top1=70.0, images=images(cell) if evaluation == 'clean' else 'same')

    text = format_markdown(study, collect(study, read))
    assert ('In clean the models were evaluated on different images' in text) == is_noted


def test_a_note_names_the_models_that_have_options_of_their_own(tmp_path):
    ways = {name: dict(way) for name, way in STUDY['ways'].items()}
    ways['scratch']['overrides'] = {'deit_ls_nano': dict(amp=False, lr=0.1, epochs=3)}
    study = read_study(write_study(tmp_path, ways=ways))
    Worker(study, execute=Executor()).run()
    note = 'In scratch, options differ from those of the other models: amp = False, lr = 0.1 for deit_ls_nano.'
    rows = collect(study)
    assert note in format_notes(study, rows)
    assert note not in format_notes(study, [row for row in rows if row.model != 'deit_ls_nano'])


def test_a_note_names_all_models_if_each_has_options_of_its_own(tmp_path):
    ways = {name: dict(way) for name, way in STUDY['ways'].items()}
    ways['scratch']['overrides'] = {'*_softmax_*': dict(lr=0.1, epochs=9), '*_ls_*': dict(lr=0.2, epochs=9)}
    study = read_study(write_study(tmp_path, ways=ways))
    Worker(study, execute=Executor()).run()
    assert [note for note in format_notes(study, collect(study)) if note.startswith('In scratch')] == [
        f'In scratch, options differ from those of the other models: lr = {lr} for deit_{mixer}_nano.'
        for mixer, lr in (('softmax', 0.1), ('ls', 0.2))
    ]


def test_a_way_is_ranked_by_the_first_of_its_own_evaluations(tmp_path):
    ways = dict(
        easy=dict(train=dict(epochs=3), evaluations=['clean']), hard=dict(train=dict(epochs=4), evaluations=['corrupt'])
    )
    study = read_study(write_study(tmp_path, ways=ways, seeds=[0]))
    executor = Executor()
    Worker(study, execute=executor).run()
    assert len(executor.commands) == 2 * len(study.cells)
    rows = collect(study)
    assert [(row.way, row.rank) for row in rows] == [('easy', 1), ('easy', 2), ('hard', 1), ('hard', 2)]
    easy, hard = (line for line in format_markdown(study, rows).splitlines() if line.startswith('| rank'))
    assert 'corrupted top-1 %' in hard and 'corrupted' not in easy
    assert {tuple(column.evaluation for column in row.values) for row in rows if row.way == 'hard'} == {
        ('corrupt',) * len(rows[-1].values)
    }


def test_latex_is_escaped(study):
    text = format_latex(study, collect(study))
    assert r'deit\_ls\_nano & 3 & 83.10 $\pm$ 2.73 & +2.10 $\pm$ 0.25 better' in text
    # three ways, and what the conversions of the third keep
    assert text.count(r'\begin{tabular}{rl') == 3 and text.count(r'\begin{tabular}{lrrrrrr}') == 1
    assert text.count(r'\end{tabular}') == 4
    assert r'mixer & converted & \% of the teacher' in text and r'ls & 78.90 & 98.6 & – & – & –' in text
    assert r'top-1 \%' in text


def test_names_of_models_that_are_paths_are_escaped_in_latex(study):
    rows = collect(study)
    rows[0].model = r'runs\a^b~'
    assert r'& runs\textbackslash{}a\textasciicircum{}b\textasciitilde{} & 3' in format_latex(study, rows)


def test_the_report_writes_all_files(path, study, tmp_path):
    run_study(['report', path, '--out', str(tmp_path / 'tables')])
    with (tmp_path / 'tables' / 'table.csv').open() as file:
        lines = list(csv.DictReader(file))
    line = next(x for x in lines if (x['model'], x['evaluation'], x['metric']) == ('deit_ls_nano', 'clean', 'top1'))
    assert (line['seeds'], line['baseline'], line['pairs'], line['verdict']) == (
        '3',
        'deit_softmax_nano',
        '3',
        'better',
    )
    assert float(line['difference_low']) > 0
    with (tmp_path / 'tables' / 'cells.csv').open() as file:
        cells = list(csv.DictReader(file))
    assert len(cells) == 2 * len(study.cells)
    assert cells[0]['images'] == '12345678'
    assert cells[0]['command'].startswith('vitzoo train --config') and cells[0]['oversmoothing'] == '0.2'
    page = (tmp_path / 'tables' / 'index.html').read_text()
    assert 'deit_ls_nano' in page and 'vitzoo study run' in page
    records = json.loads((tmp_path / 'tables' / 'report.json').read_text())['records']
    assert len(records) == len(study.cells) and records[0]['commands'][0].startswith('vitzoo train --config')


@pytest.mark.parametrize('name', ['table.csv', 'cells.csv'])
def test_a_table_that_cannot_be_written_leaves_the_old_one(path, study, tmp_path, name):
    run_study(['report', path, '--out', str(tmp_path)])
    before = (tmp_path / name).read_bytes()
    rows = collect(study)
    write = {
        'table.csv': lambda: write_csv(tmp_path / name, rows),
        'cells.csv': lambda: write_cells(tmp_path / name, study),
    }
    with pytest.raises(OSError), limited_files(len(before) // 2):
        write[name]()
    assert (tmp_path / name).read_bytes() == before
    assert not (tmp_path / f'.{name}').exists()


def test_a_report_in_place_of_a_file_is_refused(path, tmp_path):
    (tmp_path / 'tables').write_text('')
    with pytest.raises(UserError, match="cannot create the report's folder '.*tables': File exists"):
        run_study(['report', path, '--out', str(tmp_path / 'tables')])


def test_a_report_without_results_is_refused(tmp_path):
    with pytest.raises(UserError, match='no cell of .* has results yet'):
        run_study(['report', write_study(tmp_path)])


def test_the_seeds_are_those_of_the_accuracy_that_ranks(study):
    def read(cell, evaluation):
        return dict(top1=70.0, corrupt_top1=50.0) if evaluation == 'corrupt' or cell.seed == 0 else None

    text = format_markdown(study, collect(study, read))
    assert '| 1 | deit_ls_nano | 1 | 70.00 |' in text and '50.00 ± 0.00 (3 seeds)' in text
    text = format_markdown(study, collect(study, lambda c, e: read(c, dict(clean='corrupt', corrupt='clean')[e])))
    assert '| 1 | deit_ls_nano | 3 | 70.00 ± 0.00 |' in text and '50.00 (1 of 3 seeds)' in text


def test_models_for_several_labels_are_ranked_by_map_which_selects_their_weights(study):
    def read(cell, evaluation):
        return dict(top1=60.0, map=40.0) if 'softmax' in cell.model else dict(top1=50.0, map=70.0)

    text = format_markdown(study, collect(study, read))
    assert '| 1 | deit_ls_nano | 3 | 70.00' in text and '| 2 | deit_softmax_nano (baseline) | 3 | 40.00' in text
    assert '| rank | model | seeds | mAP % | difference | top-1 % |' in text


def test_accuracies_that_a_transfer_recorded_are_of_the_inputs_and_seeds_of_the_others(tmp_path):
    def read(cell, evaluation):
        if cell.seed == 2 and cell.way == 'teacher':
            return None
        start = dict(top1=50.0 + cell.seed)
        return dict(top1=80.0, transfer=dict(kind='top1', start=start, controls={}) if cell.teacher else None)

    others = (dict(img_size=96), dict(data_dir='other'), dict(dataset='other'), dict(split='test'))
    for first, start in ((dict(), '50.50'), *((other, '–') for other in others)):
        study = read_study(write_study(tmp_path, evaluations=dict(first=first)))
        assert f'| ls | 80.00 | 100.0 | – | {start} | – |' in format_markdown(study, collect(study, read))


@pytest.mark.parametrize('size', [96, '96', '96x96', [96], [96, 96]])
def test_sizes_are_the_same_however_they_are_written(size):
    assert sides(size) == (96, 96)


def test_sizes_of_strips_have_height_and_width(study):
    def read(cell, evaluation):
        return dict(top1=70.0, img_size='1x1024' if cell.way == 'scratch' else 32)

    text = format_markdown(study, collect(study, read))
    assert '| deit_ls_nano | 3 | 1x1024 | 70.00' in text and '_to_ls | 3 | 32 | 70.00' in text


def test_a_note_on_options_compares_models_and_not_each_of_their_seeds(tmp_path):
    compared = []

    class Rate(float):
        def __ne__(self, other: object) -> bool:
            compared.append(other)
            return float(self) != float(other)

    ways = dict(scratch=dict(train=dict(epochs=3), overrides={'*': dict(lr=0.5)}))
    for seeds in (1, 20):
        study = read_study(write_study(tmp_path, ways=ways, seeds=list(range(seeds))))
        for cell in study.cells:
            cell.options['lr'] = Rate(0.5)
        rows = collect(study, lambda cell, evaluation: dict(top1=70.0))
        assert not [note for note in format_notes(study, rows) if note.startswith('In scratch')]
    # two models, each with both
    assert len(compared) == 2 * 4
