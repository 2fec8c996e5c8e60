"""The HTML page of a study."""

import csv
import json

import pytest
import timm
from studies import STUDY, Executor, write_study
from timm.models import save_for_hf

from vitzoo.report.transfers import read_transfer
from vitzoo.study.page import render_study
from vitzoo.study.plan import Study, StudyCell, read_study
from vitzoo.study.report import write_study_report
from vitzoo.study.results import ResultColumn, average, collect, merge_records
from vitzoo.study.retention import KeptAccuracy, find_kept
from vitzoo.study.tables import format_fronts, format_latex, format_markdown, format_notes
from vitzoo.study.worker import Worker

EVALUATIONS = dict(clean={}, larger=dict(img_size=160), corrupt=dict(corrupt=True))
TOP1 = dict(
    scratch={'deit_softmax_nano': 80.0, 'deit_ls_nano': 84.0},
    converted={'deit_softmax_nano_to_ls': 79.0, 'deit_softmax_nano_to_performer': 76.0},
)
# stages and blocks of vil_softmax_nano that have softmax attention in vil_ls_nano, too
VIL_LAST = ((2, 0), (2, 1), (3, 0))
STAGES = ('start', 'matched', 'hybrid', 'student')


@pytest.fixture
def study(tmp_path) -> Study:
    ways = dict(
        scratch=STUDY['ways']['scratch'],
        converted=dict(
            transfer=dict(steps=2),
            teacher='deit_softmax_nano',
            teacher_way='scratch',
            mixers=['ls', 'performer'],
            evaluations=['clean', 'larger'],
        ),
    )
    return read_study(write_study(tmp_path, ways=ways, evaluations=EVALUATIONS))


def read(cell: StudyCell, evaluation: str) -> dict:
    """The record of a cell, whose accuracy rises with the seed, and more so that of ls."""
    top1 = TOP1[cell.way][cell.model] + cell.seed * (2 if 'ls' in cell.model else 1)
    record = dict(top1=top1 + (evaluation == 'larger'), params=1_000_000, gmacs=0.5, n=500, images_per_second=10.0)
    record |= dict(health=dict(performer=dict(softmax_error=0.1 + cell.seed / 10)))
    record |= dict(img_size=160 if evaluation == 'larger' else 128, oversmoothing=[0.1, 0.2 + cell.seed / 10])
    if evaluation == 'corrupt':
        record |= dict(corrupt_top1=top1 / 2, corrupt=dict(fog=[40.0 + cell.seed] * 5))
    if cell.teacher is not None:
        scores = {name: dict(top1=60.0 + cell.seed) for name in ('teacher', *STAGES)}
        record |= dict(transfer=dict(kind='top1', controls={}, seconds=dict(network=60), **scores))
    return record


def figures(page: str) -> dict[str, str]:
    """The figures by their captions."""
    parts = page.split('<figure')[1:]
    return {part.partition('<strong>')[2].partition('</strong>')[0]: part.partition('</figure>')[0] for part in parts}


def test_each_way_has_a_table_with_intervals_and_verdicts(study):
    rows = collect(study, read)
    page = render_study(study, rows, ['3 of 12 cells are finished'], format_notes(study, rows))
    assert [page.count(f'id="way-{way}"') for way in ('scratch', 'converted')] == [1, 1]
    # 84, 86 and 88 against 80, 81 and 82: 5 points, and 1 for each seed
    assert '86.00 ± 4.97' in page and '+5.00 ± 2.48 better' in page
    assert '<td class="right" data-value="5.0">+5.00 ± 2.48 better</td>' in page
    assert '3 of 12 cells are finished · 500 images' in page and 'excludes zero' in page
    assert f'vitzoo study run {study.path}' in page


def test_charts_show_means_over_the_seeds_and_the_teacher_of_conversions(study):
    page = render_study(study, collect(study, read), [], [])
    scratch, converted = page.split('id="way-converted"')
    sizes = figures(scratch)['top-1 against image size']
    assert 'deit_ls_nano at 128 px: 86.00 %' in sizes and 'deit_ls_nano at 160 px: 87.00 %' in sizes
    assert 'deit_ls_nano, block 2: 0.300' in figures(scratch)['Mean cosine similarity']
    assert 'deit_ls_nano, performer: 0.200' in figures(scratch)['Error of the attention']
    assert 'deit_ls_nano, fog: 41.0' in figures(scratch)['By corruption']
    assert 'Stages of the conversions' not in scratch and '61.00 %' in converted.partition('Stages of')[2]
    # conversions are named after their mixers, and the teacher keeps the symbol of its own row
    cost = figures(converted)['top-1 against GMACs']
    assert 'performer: 77.00 %' in cost and 'deit_softmax_nano: 81.00 %' in cost
    (row,) = [line for line in scratch.split('<tr') if 'data-value="deit_softmax_nano"' in line]
    symbol = row.partition('data-model="')[2].partition('"')[0]
    assert f'data-model="{symbol}" data-tip="deit_softmax_nano: 81.00 %' in cost


def test_conversion_is_compared_with_the_teacher_and_with_the_same_mixer_from_scratch(study):
    page = render_study(study, collect(study, read), [], [])
    kept = figures(page)['Mixers in deit_softmax_nano']
    assert 'teacher, ls: 81.0' in kept and 'converted, ls: 81.0' in kept and 'from scratch, ls: 86.0' in kept
    # no cell trains performer from scratch
    assert 'converted, performer: 77.0' in kept and 'from scratch, performer' not in kept
    assert '<th scope="row">performer</th><td>77</td><td>–</td><td>95.06</td>' in kept


def test_a_mixer_that_is_named_after_its_body_is_found_from_scratch(tmp_path):
    way = dict(train=dict(epochs=1), models=['aft_softmax_nano', 'aft_conv_nano'])
    mixers = dict(transfer=dict(steps=2), teacher='aft_softmax_nano', teacher_way='scratch', mixers=['aft_conv', 'ls'])
    study = read_study(write_study(tmp_path, baseline='aft_softmax_nano', ways=dict(scratch=way, converted=mixers)))
    rows = collect(study, lambda cell, evaluation: dict(top1=70.0 if cell.model == 'aft_conv_nano' else 60.0))
    found = find_kept(study, [row for row in rows if row.is_converted], rows)
    assert [(kept.mixer, kept.scratch, kept.share) for kept in found] == [('aft_conv', 70, 100), ('ls', None, 100)]


@pytest.mark.parametrize(
    ('teacher', 'scratch', 'mixer', 'mixer_kwargs', 'marks'),
    [
        ('deit_softmax_nano', 'deit_sparse_nano', 'sparse', {}, ''),
        ('cvt_13', 'cvt_sparse_13', 'sparse', {}, ''),
        # a conversion to ls starts without its norms, and one to inline with another convolution
        ('deit_softmax_nano', 'deit_ls_nano', 'ls', {}, '†'),
        ('deit_softmax_nano', 'deit_ls_nano', 'ls', {'dual_norm': True}, ''),
        ('deit_softmax_nano', 'deit_ls_nano', 'ls', ['dual_norm=true', 'rank=3'], '†'),
        ('deit_softmax_nano', 'deit_inline_nano', 'inline', {}, '†'),
        # ViL with a mixer has it in its first two stages, and AFT-conv has many heads
        ('vil_softmax_nano', 'vil_sparse_nano', 'sparse', {}, '*'),
        ('vil_softmax_nano', 'vil_ls_nano', 'ls', {}, '*†'),
        ('aft_softmax_nano', 'aft_conv_nano', 'aft_conv', {}, '*'),
    ],
)
def test_models_with_the_mixer_elsewhere_or_with_other_heads_or_options_are_marked(
    tmp_path, teacher, scratch, mixer, mixer_kwargs, marks
):
    way = dict(train=dict(epochs=1), models=[teacher, scratch])
    transfer = dict(mixer_kwargs=mixer_kwargs)
    converted = dict(transfer=transfer, teacher=teacher, teacher_way='scratch', mixers=[mixer])
    study = read_study(write_study(tmp_path, baseline=teacher, seeds=[0], ways=dict(scratch=way, converted=converted)))
    rows = collect(study, lambda cell, evaluation: dict(top1=70.0 if cell.model == scratch else 60.0))
    (kept,) = find_kept(study, [row for row in rows if row.is_converted], rows)
    assert (kept.is_alike, kept.has_same_options) == ('*' not in marks, '†' not in marks)
    for text in (format_markdown(study, rows), format_latex(study, rows)):
        assert all((f'"{mark}" marks models' in text) is (mark in marks) for mark in '*†')
    assert f'| {mixer} | 60.00 | 100.0 | 70.00{marks} | – | – | – |' in format_markdown(study, rows).splitlines()
    # only the same mixer is drawn beside it
    page = render_study(study, rows, [], [])
    assert (f'from scratch, {mixer}' in figures(page)[f'Mixers in {teacher}']) is ('*' not in marks)
    assert ('"†" marks models' in page.replace('&quot;', '"')) is (marks == '†')


@pytest.mark.parametrize(
    ('teacher', 'scratch', 'keep_softmax', 'kept', 'is_alike'),
    [
        ('deit_softmax_nano', 'deit_ls_nano', 1, [['blocks.3.attn'], ['blocks.5.attn']], False),
        ('deit_softmax_nano', 'deit_ls_nano', 'auto', [[], ['blocks.5.attn']], False),
        ('deit_softmax_nano', 'deit_ls_nano', 'auto', [[], []], True),
        # a transfer of which there is no record
        ('deit_softmax_nano', 'deit_ls_nano', 'auto', [[], None], False),
        ('deit_softmax_nano', 'deit_ls_nano', '0', [None, None], True),
        # ViL with a mixer has softmax attention in its last three blocks, too
        ('vil_softmax_nano', 'vil_ls_nano', 3, [[f'stages.{i}.blocks.{j}.attn' for i, j in VIL_LAST]] * 2, True),
    ],
)
def test_models_from_scratch_are_compared_with_the_blocks_that_students_converted(
    tmp_path, teacher, scratch, keep_softmax, kept, is_alike
):
    way = dict(train=dict(epochs=1), models=[teacher, scratch])
    converted = dict(transfer=dict(keep_softmax=keep_softmax), teacher=teacher, teacher_way='scratch', mixers=['ls'])
    ways = dict(scratch=way, converted=converted)
    study = read_study(write_study(tmp_path, baseline=teacher, seeds=[0, 1], ways=ways))

    def read(cell, evaluation):
        blocks = kept[cell.seed] if cell.teacher else None
        rounds = [] if blocks is None else [dict(kept=[]), dict(kept=blocks)]
        return dict(top1=70.0, transfer=dict(keep_softmax=rounds) if rounds else {})

    rows = collect(study, read)
    (found,) = find_kept(study, [row for row in rows if row.is_converted], rows)
    assert (found.scratch, found.is_alike) == (70, is_alike)


def test_models_that_are_folders_are_compared_with_the_same_mixer_from_scratch(tmp_path):
    folders = {name: tmp_path / name for name in ('deit_softmax_nano', 'deit_ls_nano')}
    for name, folder in folders.items():
        save_for_hf(timm.create_model(name, depth=2), folder, safe_serialization=True)
    teacher, scratch = map(str, folders.values())
    way = dict(train=dict(epochs=1), models=[teacher, scratch])
    converted = dict(transfer={}, teacher=teacher, teacher_way='tuned', mixers=['ls'])
    study = read_study(write_study(tmp_path, baseline=teacher, seeds=[0], ways=dict(tuned=way, converted=converted)))
    rows = collect(study, lambda cell, evaluation: dict(top1=70.0 if cell.model == scratch else 60.0))
    (kept,) = find_kept(study, [row for row in rows if row.is_converted], rows)
    assert (kept.scratch, kept.is_alike) == (70, True)


def test_a_conversion_is_compared_with_the_same_seeds_of_its_teacher(tmp_path):
    way = dict(train=dict(epochs=1), models=['deit_softmax_nano', 'deit_ls_nano'])
    mixers = dict(transfer=dict(steps=2), teacher='deit_softmax_nano', teacher_way='scratch', mixers=['ls'])
    ways = dict(scratch=way, converted=mixers)
    study = read_study(write_study(tmp_path, baseline='deit_softmax_nano', seeds=[0, 1], ways=ways))
    scores = {'deit_softmax_nano': (78.0, 79.0), 'deit_ls_nano': (80.0, 82.0), 'deit_softmax_nano_to_ls': (70.0, None)}
    transfers = [
        dict(start=dict(top1=50.0), matched=dict(top1=55.0)),
        dict(start=dict(top1=60.0), controls=dict(zero=dict(top1=10.0))),
    ]

    def read(cell, evaluation):
        score = scores[cell.model][cell.seed]
        return None if score is None else dict(top1=score, transfer=transfers[cell.seed])

    def find() -> KeptAccuracy:
        rows = collect(study, read)
        (kept,) = find_kept(study, [row for row in rows if row.is_converted], rows)
        return kept

    kept = find()
    assert (kept.teacher, kept.student, kept.scratch) == (78, 70, 80)
    assert (kept.start, kept.matched, kept.zero) == (50, 55, None)
    # a mean of other seeds could not be compared
    scores |= {'deit_ls_nano': (80.0, None), 'deit_softmax_nano_to_ls': (70.0, 72.0)}
    kept = find()
    assert (kept.teacher, kept.student, kept.scratch) == (78.5, 71, None)
    assert (kept.start, kept.matched, kept.zero) == (55, None, None)


def test_speeds_of_several_machines_are_not_compared(study):
    column = ResultColumn('clean', 'images_per_second')
    assert all(not row.doubts for row in collect(study, read))
    assert 'top-1 against images/s' in figures(render_study(study, collect(study, read), [], []))
    machines = {0: 'a laptop', 1: 'a server', 2: 'a laptop'}
    rows = collect(study, lambda cell, evaluation: read(cell, evaluation) | dict(measured_on=machines[cell.seed]))
    assert all(column in row.doubts and row.machines == {'a laptop', 'a server'} for row in rows)
    # nor is memory, of a process or of an accelerator
    memory = ResultColumn('clean', 'peak_memory_mb')
    assert all((memory in row.doubts) is (memory in row.values) for row in rows) and any(row.values for row in rows)
    page = render_study(study, rows, [], [])
    assert 'top-1 against images/s' not in figures(page) and '<li>a laptop</li><li>a server</li>' in page


def test_a_study_without_accuracy_has_its_tables(study):
    rows = collect(study, lambda cell, evaluation: dict(params=1_000_000))
    page = render_study(study, rows, [], [])
    assert figures(page) == {} and '1.00' in page and 'What conversion keeps' not in page


@pytest.mark.parametrize(
    ('values', 'mean'),
    [
        ([1, 2, 6], 3),
        ([128, 128], 128),
        (['a', 'b'], 'a'),
        ([None, 2.0, 4.0], 3),
        ([[1, 2], None, [3, 4]], [2, 3]),
        ([None, None], None),
        ([True, True], True),
        ([dict(a=[1, 2], b='x'), dict(a=[3, 6])], dict(a=[2, 4], b='x')),
        ([[1, 2], [3]], [1, 2]),
    ],
)
def test_records_are_averaged_number_by_number(values, mean):
    assert average(values) == mean


@pytest.mark.parametrize('order', [1, -1])
def test_means_are_of_what_all_seeds_have_and_keep_the_doubt_of_one(order):
    a = dict(health={'blocks.1.attn': dict(error=1.0)}, speed=dict(student=2.0))
    b = dict(health={'blocks.0.attn': dict(error=9.0), 'blocks.1.attn': dict(error=3.0)})
    b['speed'] = dict(student=4.0, doubt='busy')
    expected = dict(health={'blocks.1.attn': dict(error=2.0)}, speed=dict(student=3.0, doubt='busy'))
    assert average([a, b][::order]) == expected


def test_cells_have_the_curves_and_the_stages(study, tmp_path):
    Worker(study, execute=Executor()).run()
    cell = next(cell for cell in study.cells if cell.teacher is not None)
    file = cell.record.results_file('clean')
    # the cosine of a single token is not defined
    statistics = dict(cosine=dict(mean=[1 / 3, None], std=[0, None]), stages=[0, 0], blocks=['blocks.0', 'blocks.1'])
    file.write_text(json.dumps([json.loads(file.read_text())[0] | dict(token_statistics=statistics)]))
    scores = {name: dict(top1=70.0, score=70.0, cosine=99.0) for name in ('teacher', *STAGES)}
    settings = dict(teacher='teacher', mixer='ls')
    transfer = dict(kind='top1', controls=dict(zero=dict(top1=10.0)), seconds=dict(network=60.0), settings=settings)
    (cell.folder / 'transfer.json').write_text(json.dumps(transfer | scores | dict(verdict='good')))
    assert read_transfer(str(cell.folder))
    write_study_report(tmp_path / 'report', study, collect(study))
    with (tmp_path / 'report' / 'cells.csv').open(newline='') as lines:
        first, *others = [line for line in csv.DictReader(lines) if line['transfer']]
    assert others == [] and (first['model'], first['seed'], first['evaluation']) == (cell.model, '0', 'clean')
    assert json.loads(first['token_statistics']) == dict(cosine=dict(mean=[0.333333, None]), stages=[0, 0])
    found = json.loads(first['transfer'])
    assert found['student'] == dict(top1=70.0) and found['controls'] == dict(zero=dict(top1=10.0))
    assert (first['img_size'], first['n']) == ('128', '500')
    page = (tmp_path / 'report' / 'index.html').read_text()
    assert f'{cell.options["mixer"]}, blocks.0: 0.333' in page and 'blocks.1' not in page


def test_corruptions_are_shown_with_the_clean_accuracy_of_their_own_size(tmp_path):
    evaluations = dict(clean={}, c160=dict(img_size=160, corrupt=True), c96=dict(img_size=96, corrupt=True))
    ways = dict(scratch=STUDY['ways']['scratch'])
    study = read_study(write_study(tmp_path, ways=ways, seeds=[0], evaluations=evaluations))
    clean = dict(clean=80.0, c160=90.0, c96=50.0)

    def read(cell, evaluation):
        record = dict(top1=clean[evaluation], health=None, corrupt=None)
        return record if evaluation == 'clean' else record | dict(corrupt=dict(fog=[clean[evaluation] - 9] * 5))

    page = render_study(study, collect(study, read), [], [])
    larger, smaller = page.partition('Robustness, c160')[2].split('Robustness, c96')
    for part, numbers in ((larger, '<td>81</td><td>90</td>'), (smaller, '<td>41</td><td>50</td>')):
        assert numbers in part and '<td>80</td>' not in part
    assert '<h3>Robustness</h3>' not in page


def test_records_of_the_same_inputs_are_joined():
    first = dict(top1=80.0, health=None, token_statistics=dict(cosine=dict(mean=[0.1])), corrupt_top1=None)
    second = dict(top1=81.0, health=dict(a=1), token_statistics=dict(effective_rank=dict(mean=[3.0])))
    second |= dict(corrupt=dict(fog=[40.0]), corrupt_top1=40.0)
    merged = merge_records([first, second])
    assert (merged['top1'], merged['corrupt_top1'], merged['health']) == (81, 40, dict(a=1))
    assert list(merged['token_statistics']) == ['effective_rank', 'cosine']
    assert merge_records([second, first]) == second | dict(token_statistics=merged['token_statistics'])


def test_a_teacher_without_any_correct_image_has_no_share(study):
    rows = collect(study, lambda cell, evaluation: read(cell, evaluation) | dict(top1=0.0))
    assert '| ls | 0.00 | – |' in format_markdown(study, rows)
    assert '<th scope="row">ls</th><td>0</td><td>0†</td><td>–</td>' in render_study(study, rows, [], [])


def test_sizes_of_the_same_height_have_points_of_their_own(tmp_path):
    evaluations = {name: dict(img_size=name) for name in ('32x128', '32x64')}
    study = read_study(write_study(tmp_path, seeds=[0], evaluations=evaluations))
    page = render_study(study, collect(study, lambda cell, name: dict(top1=70.0, img_size=name)), [], [])
    chart = figures(page)['top-1 against image size']
    assert chart.index('at 32x64 px: 70.00 %') < chart.index('at 32x128 px: 70.00 %')
    assert 'pixels of the image' in chart and '>2048<' in chart.replace(',', '')


def test_a_mixer_from_scratch_is_found_beside_a_teacher_without_softmax_in_its_name(tmp_path):
    way = dict(train=dict(epochs=1), models=['cvt_13', 'cvt_ls_13'])
    converted = dict(transfer={}, teacher='cvt_13', teacher_way='scratch', mixers=['ls'])
    study = read_study(write_study(tmp_path, baseline='cvt_13', ways=dict(scratch=way, converted=converted)))
    rows = collect(study, lambda cell, evaluation: dict(top1=70.0 if cell.model == 'cvt_ls_13' else 60.0))
    (kept,) = find_kept(study, [row for row in rows if row.is_converted], rows)
    assert kept.scratch == 70


def test_the_front_of_conversions_has_their_teacher_in_the_sentence_and_in_the_chart(study):
    def better_teacher(cell, evaluation):
        is_teacher = cell.model == 'deit_softmax_nano'
        return read(cell, evaluation) | dict(top1=95.0 if is_teacher else 80.0, gmacs=0.1 if is_teacher else 0.5)

    rows = collect(study, better_teacher)
    way = [row for row in rows if row.is_converted]
    assert format_fronts(study, way, rows)[0].startswith('Pareto front of top-1 % and GMACs: deit_softmax_nano. Pareto')


def test_the_records_of_a_report_keep_corruptions_with_the_accuracy_of_their_own_size(tmp_path):
    evaluations = dict(clean={}, larger=dict(img_size=160), c96=dict(img_size=96, corrupt=True))
    study = read_study(
        write_study(tmp_path, ways=dict(scratch=STUDY['ways']['scratch']), seeds=[0], evaluations=evaluations)
    )
    Worker(study, execute=Executor()).run()
    cell = study.cells[0]
    file = cell.record.results_file('c96')
    file.write_text(json.dumps([json.loads(file.read_text())[0] | dict(top1=50.0, corrupt=dict(fog=[40.0] * 5))]))
    write_study_report(tmp_path / 'report', study, collect(study))
    records = json.loads((tmp_path / 'report' / 'report.json').read_text())['records']
    found = [record for record in records if record['model'] == str(cell.folder)]
    assert [(record['top1'] == 50, 'corrupt' in record) for record in found] == [(False, False), (True, True)]
