"""The report: its page shows the numbers of the records and nothing else."""

import json
import math
import os
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path

import pytest
import timm
from classifiers import make_ten_images, save_classifier

from vitzoo.bench._results import append_rows
from vitzoo.errors import UserError
from vitzoo.metrics import count_macs
from vitzoo.metrics.oversmoothing import MEASURES, Measure
from vitzoo.report import main
from vitzoo.report.charts import Point, front_line
from vitzoo.report.command import make_report
from vitzoo.report.files import read_records
from vitzoo.report.gather import describe_model, find_origin, measure_scaling
from vitzoo.report.markup import tag, to_html
from vitzoo.report.page import render
from vitzoo.report.records import interval, short_names
from vitzoo.report.svg import Plot, Scale, fit_scale, place_labels, short_number, spread_out
from vitzoo.report.table import MODEL_COLUMNS
from vitzoo.report.timings import add_timings, read_timings
from vitzoo.report.transfers import read_transfer
from vitzoo.transfer.options import parse_args
from vitzoo.validate.options import parse_args as parse_eval_args
from vitzoo.validate.results import RECORD_KEYS

STYLE = (Path(__file__).parents[2] / 'vitzoo' / 'report' / 'style.css').read_text()
CLASSES = ['cat', 'dog', 'frog']
PIXEL = 'data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=='
CORRUPTIONS = ['gaussian_noise', 'fog', 'contrast']


def make_record(number: int, depth: int = 4) -> dict:
    """A record in which every number is another, with all that a report can show."""
    top1, gmacs = 40.0 - 1.9 * number, 0.1 * (number + 1)
    curve = [(i + 1) / (depth + 1 + number) for i in range(depth)]
    return dict(
        model=f'runs/model_{number}',
        weights='trained',
        top1=top1,
        top5=top1 + 41.5,
        loss=1.5 + 0.123 * number,
        n=500,
        oversmoothing=curve,
        token_statistics=dict(
            blocks=[f'blocks.{i}' for i in range(depth)],
            stages=[0] + [1] * (depth - 1),
            cosine=dict(mean=curve, std=[0.05] * depth),
            effective_rank=dict(mean=[20.0 - i for i in range(depth)], std=[1.0] * depth),
        ),
        params=1_234_567 * (number + 1),
        gmacs=gmacs,
        gflops=2 * gmacs,
        img_size=32,
        images_per_second=150.5 / (number + 1),
        peak_memory_mb=900.25 + number,
        measured_on='one machine',
        data='photos',
        architecture=f'model_{number}',
        commands=[f'vitzoo train --config runs/model_{number}/recipe.yaml'],
        ece=4.4 + number,
        health={f'blocks.{i}.attn': dict(softmax_error=0.1 * (i + 1), bad=0.0) for i in range(depth)},
        scaling=dict(gmacs={str(size): gmacs * (size / 32) ** 2 for size in (32, 64, 128)}),
        mistakes=dict(
            class_names=CLASSES,
            confusion=[[5, 2, 0], [1, 6 + number, 0], [0, 0, 4]],
            calibration=dict(counts=[0, 3, 15], confidence=[None, 0.5, 0.8], accuracy=[None, 0.4, 0.9]),
            pairs=[['cat', 'dog', 2], ['dog', 'cat', 1]],
        ),
        corrupt={name: [top1 - 2 * i - severity for severity in range(1, 6)] for i, name in enumerate(CORRUPTIONS)},
        corrupt_top1=top1 - 5.0,
        imagenet_a_top1=12.5 + number,
        imagenet_9_gap=7.5,
        explanations=[
            dict(file=f'{name}/0.jpg', label=name, prediction='cat', confidence=0.625, method='gradient')
            | dict(picture=PIXEL, overlay=PIXEL)
            for name in CLASSES
        ],
    )


def make_data(*records: dict, title: str = 'Three models') -> dict:
    return dict(title=title, made='1 May 2026, 10:00 UTC', command='vitzoo report runs/*', records=list(records))


BARE = dict(model='resnet50', params=25_557_032, gmacs=4.0892)


class Page(HTMLParser):
    """The parts of a page that the tests look at."""

    def __init__(self, text: str):
        super().__init__()
        self.sections, self.charts, self.rows, self.addresses, self.text = [], {}, [], [], []
        self.images, self._chart, self._cell, self._hidden = [], None, None, None
        self.feed(text)

    def handle_starttag(self, name, attrs):
        attrs = dict(attrs)
        self.addresses += [attrs[key] for key in ('src', 'href') if key in attrs]
        if name == 'section':
            self.sections.append(attrs['id'])
        elif name == 'svg' and 'aria-label' in attrs:
            self._chart = self.charts.setdefault(attrs['aria-label'], [])
        elif name == 'svg':
            self._chart = None
        elif name == 'tr':
            self.rows.append([])
        elif name in ('td', 'th'):
            self._cell = [attrs.get('data-value'), '']
            self.rows[-1].append(self._cell)
        elif name == 'img':
            self.images.append(attrs)
        elif name in ('style', 'script'):
            self._hidden = name
        if 'mark' in attrs.get('class', '').split() and self._chart is not None and 'data-tip' in attrs:
            self._chart.append(attrs['data-tip'])

    def handle_endtag(self, name):
        if name in ('td', 'th'):
            self._cell = None
        elif name == self._hidden:
            self._hidden = None

    def handle_data(self, text):
        if self._hidden is None:
            self.text.append(text)
        if self._cell is not None:
            self._cell[1] += text

    def row(self, name: str) -> list[list]:
        return next(row for row in self.rows if row and row[0][1] == name)


@pytest.fixture(scope='module')
def report() -> dict:
    return make_data(*(make_record(number) for number in range(3)))


@pytest.fixture(scope='module')
def page(report) -> Page:
    return Page(render(report))


def test_the_table_has_every_number_of_the_records(report, page):
    for record in report['records']:
        _, *cells = page.row(Path(record['model']).name)
        shown = {column.heading + column.unit: column.read(record) for column in MODEL_COLUMNS}
        shown = {heading: value for heading, value in shown.items() if value is not None}
        assert len(shown) == len(MODEL_COLUMNS) - 1  # the mean average precision is for several labels
        for (value, text), number, column in zip(
            cells, shown.values(), [c for c in MODEL_COLUMNS if c.heading != 'mAP']
        ):
            assert value == repr(number)
            assert text.partition(' ±')[0] == format(number, column.form)
        assert [text for _, text in cells[len(shown) :]] == ['32', 'trained']


def test_columns_read_what_they_say():
    record = make_record(1)
    read = {f'{column.heading} {column.unit}'.strip(): column.read(record) for column in MODEL_COLUMNS}
    assert read['top-1 %'] == record['top1'] and read['cosine last block'] == record['oversmoothing'][-1]
    assert read['parameters M'] == pytest.approx(2.469134)
    assert read['cost GFLOPs'] == 2 * read['cost GMACs'] == record['gflops']
    assert read['memory MB'] == record['peak_memory_mb'] and read['corrupted %'] == record['corrupt_top1']


def test_the_best_accuracy_comes_first_and_keeps_its_colour(report):
    page = Page(render({**report, 'records': report['records'][::-1]}))
    names = [row[0][1] for row in page.rows if row and row[0][0]]
    assert names == ['model_0', 'model_1', 'model_2']
    assert [tip.partition(':')[0] for tip in page.charts['top-1 against GMACs']] == names


def test_every_chart_has_a_mark_for_each_number(page):
    marks = {label: len(tips) for label, tips in page.charts.items()}
    assert marks == {
        'top-1 against GMACs': 3,
        'top-1 against million parameters': 3,
        'top-1 against milliseconds per image': 3,
        'Mean cosine similarity after each block': 3 * 4,
        'Effective rank after each block': 3 * 4,
        'error of approximate softmax attention': 3 * 4,
        'Multiply-accumulates against image size': 3 * 3,
        'Multiply-accumulates per pixel against image size': 3 * 3,
        'top-1 accuracy on variants of ImageNet': 3,
        'The same images, corrupted: mean top-1': 3,
        'The same images, corrupted: top-1 under each corruption': 3 * 3,
        'The same images, corrupted: top-1 by severity': 3 * 5,
        'accuracy against confidence': 3 * 2,
        **{f'confusion matrix of model_{number}': 9 for number in range(3)},
    }


def test_marks_say_the_numbers_of_their_records(page):
    assert 'model_1: 38.10 %, 0.2 GMACs' in page.charts['top-1 against GMACs']
    assert 'model_0: 40.00 %, 6.645 milliseconds per image' in page.charts['top-1 against milliseconds per image']
    assert 'model_2, blocks.3: 0.571' in page.charts['Mean cosine similarity after each block']
    assert 'model_0 at 128 px: 1.6 GMACs' in page.charts['Multiply-accumulates against image size']
    assert 'model_1 at 32 px: 195.3 thousand MACs' in page.charts['Multiply-accumulates per pixel against image size']
    assert 'model_0: 35.0, clean 40.0' in page.charts['The same images, corrupted: mean top-1']
    assert 'model_0, fog: 35.0' in page.charts['The same images, corrupted: top-1 under each corruption']
    assert 'model_0, severity 5: 33.0 %' in page.charts['The same images, corrupted: top-1 by severity']
    assert '2 of 7 images of cat predicted as dog' in page.charts['confusion matrix of model_1']
    assert 'model_0: 90% of 15 images correct at 80% confidence' in page.charts['accuracy against confidence']


def test_every_chart_has_its_numbers_in_a_table(page):
    texts = [[text for _, text in row] for row in page.rows]
    assert ['model_0', '0.1', '40', *(f'{v:.4g}' for v in interval(40.0, 500))] in texts
    assert ['model_2', *(f'{(i + 1) / 7:.4g}' for i in range(4))] in texts
    assert ['model_1', '0.2', '0.8', '3.2'] in texts
    assert ['gaussian noise', '37', '35.1', '33.2'] in texts
    assert ['cat', '5', '2', '0'] in texts
    assert ['ImageNet-A', '12.5', '13.5', '14.5'] in texts and [
        'ImageNet-9 gap, in points',
        '7.5',
        '7.5',
        '7.5',
    ] in texts


def test_explained_images_are_shown_once_and_their_maps_for_each_model(page):
    assert len(page.images) == 3 + 3 * 3
    assert all(image['src'] == PIXEL and image['alt'] for image in page.images)
    assert page.text.count('✓ ') == 3 and page.text.count('✗ ') == 6


def test_the_interval_of_top1_is_of_the_images_with_a_label():
    page = Page(render(make_data(make_record(0) | dict(top1=50.0, n=500, labelled=100))))
    assert page.row('model_0')[1][1] == '50.00 ±9.6'


@pytest.mark.parametrize('images', [('0a', '0a'), ('0a', None), ('0a', '1b')])
def test_models_of_different_images_are_marked(images):
    records = [make_record(number) | dict(images=name) for number, name in enumerate(images)]
    is_marked = any('evaluated on different images' in text for text in Page(render(make_data(*records))).text)
    assert is_marked == (images == ('0a', '1b'))


def test_what_was_not_measured_is_left_out():
    page = Page(render(make_data(BARE)))
    assert page.sections == ['models', 'provenance'] and page.charts == {}
    (row,) = (row for row in page.rows if row and row[0][0] == 'resnet50')
    assert [cell[1] for cell in row] == ['resnet50', '25.56', '4.089', '8.178', '', 'not recorded']
    text = ' '.join(page.text)
    assert not re.search(r'\b(nan|None|null|inf)\b', text)


@pytest.mark.parametrize(
    ('missing', 'section'),
    [
        ('scaling', 'scaling'),
        ('mistakes', 'errors'),
        ('explanations', 'explanations'),
        ('health', 'health'),
    ],
)
def test_a_part_is_there_with_its_numbers_only(report, missing, section):
    some = [{key: value for key, value in record.items() if key != missing} for record in report['records']]
    assert section not in Page(render(make_data(*some))).sections
    assert section in Page(render(make_data(some[0], some[1], report['records'][2]))).sections


def test_records_without_token_statistics_still_have_their_curve():
    records = [{**make_record(number), 'token_statistics': None} for number in range(2)]
    records[1]['oversmoothing'] = [0.1, None, 0.3]
    charts = Page(render(make_data(*records))).charts
    assert len(charts['Mean cosine similarity after each block']) == 4 + 2
    assert 'Effective rank after each block' not in charts


def test_every_measure_of_the_table_has_a_chart(monkeypatch):
    monkeypatch.setitem(MEASURES, 'mean_norm', Measure(abs, 'Mean norm', 'of the tokens.'))
    statistics = {name: dict(mean=[0.5, 0.25], std=[0.1, 0.1]) for name in MEASURES}
    charts = Page(render(make_data({**make_record(0), 'token_statistics': statistics}))).charts
    assert len(charts['Mean norm after each block']) == 2
    assert {f'{measure.label} after each block' for measure in MEASURES.values()} <= charts.keys()


def test_incomplete_tables_have_no_means():
    table = {'fog': [30.0, None, 20.0, 10.0, 5.0], 'contrast': [30.0, 25.0, 20.0, 10.0, 5.0]}
    records = [{**make_record(0), 'corrupt': table}, {**make_record(1), 'corrupt': {'fog': [None] * 5}}]
    charts = Page(render(make_data(*records))).charts
    found = {label: tips for label, tips in charts.items() if label.startswith('The same images')}
    assert found == {'The same images, corrupted: top-1 under each corruption': ['model_0, contrast: 18.0']}
    assert 'robustness' not in Page(render(make_data({**BARE, 'corrupt': {'fog': [None] * 5}}))).sections


def test_a_single_size_is_no_scaling():
    record = {**make_record(0), 'scaling': dict(gmacs={'224': 1.0})}
    assert 'scaling' not in Page(render(make_data(record))).sections


def test_images_of_several_labels_are_ranked_by_their_precision():
    # validation gives both scores, which here disagree
    scores = (('a', 60.5, 90.0), ('b', 71.25, 80.0))
    records = [
        {**BARE, 'model': name, 'map': value, 'top1': top1, 'n': 50, 'loss': 0.3} for name, value, top1 in scores
    ]
    html = render(make_data(*records))
    page = Page(html)
    assert re.findall(r'aria-sort="descending".*?<span>(.*?)</span>', html) == ['mAP']
    assert 'mean cross-entropy in nats, which is binary for multi-label data' in html
    assert [row[0][1] for row in page.rows if row and row[0][0]] == ['b', 'a']
    assert len(page.charts['mAP against GMACs']) == 2
    assert ['71.25', '71.25'] in page.row('b')


def test_long_names_leave_room_for_the_marks():
    long = [{**make_record(number), 'model': f'{number}' * 80} for number in range(2)]
    root = render(make_data(*long))
    for chart in ('Mean cosine similarity after each block', 'The same images, corrupted: mean top-1'):
        found = re.search(rf'aria-label="{chart}".*?</svg>', root, re.DOTALL | re.IGNORECASE)[0]
        assert f'{"0" * 15}…{"0" * 16}</text>' in found
        assert all(float(width) > 100 for width in re.findall(r'<rect[^>]*[^-]width="([^"]+)"', found))
        ends = re.findall(r'<line[^>]*x1="([^"]+)" x2="([^"]+)"', found)
        assert all(float(a) <= float(b) for a, b in ends)


def test_long_names_of_classes_leave_room_for_the_confusion_matrix():
    record = make_record(0)
    record['mistakes']['class_names'] = ['cat', 'dog', 'x' * 150]
    found = re.search(r'<svg[^>]*aria-label="confusion matrix of .*?</svg>', render(make_data(record)), re.DOTALL)[0]
    assert float(re.search(r' width="(\d+)"', found)[1]) < 400
    assert f'{"x" * 15}…{"x" * 16}</text>' in found
    # the mark of a cell has the whole name
    assert f'images of {"x" * 150} predicted as' in found


def test_the_last_cosine_is_that_of_the_last_block():
    (column,) = (column for column in MODEL_COLUMNS if column.heading == 'cosine')
    assert column.read(dict(oversmoothing=[0.1, 0.2])) == 0.2
    assert column.read(dict(oversmoothing=[0.1, None])) is column.read(dict(oversmoothing=[0.1, math.nan])) is None
    assert column.read(dict(oversmoothing=[])) is column.read({}) is None


def test_records_of_predictions_alone_are_shown():
    record = dict.fromkeys(RECORD_KEYS) | dict(model='a.csv', top1=50.0, top5=90.0, n=100, weights='predictions')
    page = Page(render(make_data(record, make_record(0))))
    assert [cell[1] for cell in page.row('a.csv')[1:4]] == ['50.00 ±9.6', '90.00', '–']
    assert page.sections == Page(render(make_data(make_record(0)))).sections


def test_times_of_different_machines_are_not_compared(report):
    records = [dict(record) for record in report['records']]
    records[1]['measured_on'] = 'another machine'
    page = Page(render(make_data(*records)))
    assert 'top-1 against milliseconds per image' not in page.charts
    assert any('timed on different or unknown machines' in text for text in page.text)
    assert 'top-1 against milliseconds per image' in Page(render(report)).charts


def test_times_of_a_busy_machine_are_too_low(report):
    records = [{**record, 'cores': 4, 'load': load} for record, load in zip(report['records'], (6.1, None, 5.9))]
    text = render(make_data(*records))
    page = Page(text)
    assert any(text == 'These images/s are unreliable: model_0 (busy machine).' for text in page.text)
    assert 'top-1 against milliseconds per image' not in page.charts
    # the fastest of such times is not the best
    assert render(report).count('class="best"') == text.count('class="best"') + 1
    records[0]['cores'] = None
    assert 'top-1 against milliseconds per image' in Page(render(make_data(*records))).charts


@pytest.mark.parametrize(
    ('options', 'said'),
    [
        (([], []), None),
        ((['absolute', 'include_cls'],) * 2, ' Measured with --absolute --include-cls.'),
        ((['include_self'], []), ' The options differ, so the values are not comparable: model_0 with --include-self.'),
    ],
)
def test_other_ways_to_count_tokens_are_said(options, said):
    records = [make_record(0), make_record(1), {**BARE}]
    for record, names in zip(records, options):
        record['token_statistics']['options'] = names
    text = ' '.join(Page(render(make_data(*records))).text)
    assert (said or 'Bands are one standard deviation over images.') in text
    assert said or ('Measured with' not in text and 'not comparable' not in text)


def test_a_page_needs_nothing_else(report, page):
    text = render(report)
    for address in page.addresses:
        assert address.startswith(('#', 'data:')), address
    assert "default-src 'none'" in text and not re.search(r'@import|url\(', text)
    assert set(re.findall(r'https?://[^"\s]+', text)) == set()
    assert {address[1:] for address in page.addresses if address.startswith('#')} == set(page.sections)


def test_names_cannot_break_the_page():
    name = '<script>alert("1")</script>&\'"'
    text = render(make_data({**make_record(0), 'model': name}, make_record(1), title=name))
    assert '<script>alert' not in text and text.count('<script>') == 1
    assert Page(text).row('script>&\'"')[0][0] == 'script>&\'"'


def test_twenty_models_have_different_signs():
    page = render(make_data(*(make_record(number) for number in range(20))))
    found = re.search(r'aria-label="top-1 against GMACs".*?</svg>', page, re.DOTALL)[0]
    signs = re.findall(r'd="([^"]+)"[^>]*class="mark (m\d)"', found)
    assert len(signs) == len(set(signs)) == 20


@pytest.mark.parametrize(
    ('names', 'short'),
    [
        (['resnet50', 'runs/a'], ['resnet50', 'a']),
        (['runs/1/best', 'runs/2/best'], ['1/best', '2/best']),
        (['x/a', 'a'], ['x/a', 'a']),
        (['cvt_13', 'cvt_13'], ['cvt_13 (1)', 'cvt_13 (2)']),
        (['/runs/a'], ['a']),
        (['runs/a', 'runs/a/'], ['a (1)', 'a (2)']),
        (['.'], [Path.cwd().name]),
        (['..', 'a'], [Path.cwd().parent.name, 'a']),
    ],
)
def test_short_names_tell_models_apart(names, short):
    assert short_names(names) == short


def test_intervals_are_wilsons():
    # of https://en.wikipedia.org/wiki/Binomial_proportion_confidence_interval, p = 1/2 and p = 0
    assert interval(50.0, 100) == pytest.approx((40.383, 59.617), abs=1e-3)
    assert interval(0.0, 10) == pytest.approx((0, 27.753), abs=1e-2)
    assert interval(40.0, None) == (40.0, 40.0)
    # without rounding errors beyond the ends
    assert f'{interval(0.0, 5)[0]:.2f}' == '0.00' and interval(100.0, 5)[1] <= 100


def test_the_front_is_what_nobody_beats():
    points = [Point(i, str(i), x, y, y, y, '') for i, (x, y) in enumerate([(2, 5), (1, 3), (3, 4), (2, 1), (4, 6)])]
    assert [point.index for point in front_line(points)] == [1, 0, 4]
    # speed is not a cost
    assert [point.index for point in front_line(points, is_cost=False)] == [4]
    assert [point.index for point in front_line(points[:4], is_cost=False)] == [2, 0]


LINEAR = [[1, 2, 3], [5.0], [0.001, 0.0011], [10, 1e6], [-1, 1], [0, 0]]


@pytest.mark.parametrize(('values', 'log'), [*((v, False) for v in LINEAR), *((v, True) for v in LINEAR[:4])])
def test_scales_hold_their_values_and_have_ticks(values, log):
    scale = fit_scale(values, 100, 300, log)
    assert all(100 < scale(value) < 300 for value in values)
    assert len(scale.ticks) >= 1 and all(100 <= scale(tick) <= 300 for tick in scale.ticks)
    assert scale(scale.low) == pytest.approx(100) and scale(scale.high) == pytest.approx(300)


def test_numbers_of_ticks_are_short():
    assert [short_number(value) for value in (0, 0.25, 100, 1000, 20_000, 3e6, -1.5)] == [
        *('0', '0.25', '100', '1000', '20k', '3M', '−1.5')
    ]


@pytest.mark.parametrize(('spacing', 'numbers'), [(40, ['384', '512', '640']), (15, ['384', '640'])])
def test_numbers_that_would_touch_are_left_out(spacing, numbers):
    scale = Scale(384, 640, 100, 100 + 2 * spacing, ticks=[384, 512, 640])
    root = Plot('chart', (480, 300), scale, Scale(0, 1, 200, 20), '', '').root
    texts = [element.text for element in root.iter('text') if element.get('class') == 'tick middle']
    assert texts == numbers and sum(element.get('class') == 'axis' for element in root.iter('line')) == 4


def test_labels_keep_out_of_each_others_way():
    assert spread_out([10, 11, 50], 0, 100, gap=10) == [10, 20, 50]
    assert spread_out([99, 99], 0, 100, gap=10) == [90, 100]
    points = [(50.0, 50.0), (52.0, 50.0), (54.0, 51.0)]
    places = place_labels(points, ['one', 'two', 'three'], lambda box: box[0] > 0 and box[2] < 200)
    assert None not in places and len({place[:2] for place in places}) == 3
    # in a column, closer than a line
    column = place_labels([(50.0, 50 + 12.0 * i) for i in range(4)], ['name'] * 4, lambda box: True)
    assert None not in column
    crowd = place_labels([(50.0, 50.0)] * 40, ['name'] * 40, lambda box: True)
    assert None in crowd and crowd[0] is not None


def test_markup_escapes_text_and_attributes():
    element = tag('p', 'a<b', tag('b', '&'), 'c', None, title='"<&', class_='x', data_value=1.0, hidden=None)
    assert to_html(element) == '<p title="&quot;<&amp;" class="x" data-value="1.00">a&lt;b<b>&amp;</b>c</p>'


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize('theme', [0, 1], ids=['light', 'dark'])
def test_colours_can_be_seen(theme):
    colours = {name: pair[theme] for name, *pair in re.findall(r'--(\w+): light-dark\((#\w+), (#\w+)\)', STYLE)}
    marks = [colours[f'm{i}'] for i in range(8)]
    assert len(set(marks)) == 8
    for name in ('ink', 'soft', 'heat', 'wrong'):
        assert contrast(colours[name], colours['paper']) >= 4.5, name
    # the contrast that WCAG requires of graphics
    assert all(contrast(mark, colours['paper']) >= 3 for mark in marks)
    assert contrast(colours['ink'], colours['raised']) >= 4.5


def fails(capsys, *argv: str) -> str:
    with pytest.raises(SystemExit) as end:
        main([*map(str, argv)])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def out(tmp_path, quick_timing) -> Path:
    return tmp_path / 'report'


def test_a_report_of_a_trained_model(out, tmp_path):
    data, trained = make_ten_images(tmp_path / 'data'), save_classifier(tmp_path / 'deit')
    other = save_classifier(tmp_path / 'other', answer='blue')
    make_report([str(trained), str(other), '--data-dir', str(data), '--workers', '0', '--out', str(out)])
    found = json.loads((out / 'report.json').read_text())
    always_blue = found['records'][1]
    assert (always_blue['top1'], always_blue['n'], always_blue['data']) == (50, 10, str(data))
    assert always_blue['mistakes']['class_names'] == ['blue', 'green', 'red']
    assert always_blue['mistakes']['confusion'] == [[5, 0, 0], [3, 0, 0], [2, 0, 0]]
    assert sum(always_blue['mistakes']['calibration']['counts']) == 10
    assert always_blue['mistakes']['pairs'] == [['green', 'blue', 3], ['red', 'blue', 2]]
    assert always_blue['ece'] == pytest.approx(100 * (math.e / (math.e + 2) - 0.5), abs=0.01)
    assert [item['label'] for item in always_blue['explanations']] == ['blue', 'blue', 'green', 'red']
    assert {item['prediction'] for item in always_blue['explanations']} == {'blue'}
    assert always_blue['architecture'] == 'deit_softmax_tiny'
    assert always_blue['cores'] == os.cpu_count() and always_blue['load'] >= 0
    page = Page((out / 'index.html').read_text())
    assert page.sections == ['models', 'cost', 'oversmoothing', 'scaling', 'errors', 'explanations', 'provenance']
    assert page.row('other')[1][0] == '50.0'
    assert len(page.charts['Multiply-accumulates against image size']) == 2 * 6


def test_a_report_without_labels_needs_no_classes(out, tmp_path):
    data, trained = make_ten_images(tmp_path / 'data'), save_classifier(tmp_path / 'deit')
    make_report(
        [
            str(trained),
            '--ignore-labels',
            '--data-dir',
            str(next(data.rglob('blue'))),
            '--workers',
            '0',
            '--out',
            str(out),
        ]
    )
    (record,) = json.loads((out / 'report.json').read_text())['records']
    assert (record['n'], record['top1']) == (5, None) and 0 < record['oversmoothing'][-1] <= 1
    assert 'explanations' not in record


def test_a_report_is_made_again_from_its_data(out, tmp_path):
    out.mkdir()
    (out / 'report.json').write_text(json.dumps(make_data(make_record(0), make_record(1))))
    bare = tmp_path / 'bare.json'
    bare.write_text(json.dumps([{**BARE, 'images_per_second': 10.0}]))
    make_report(['--results', str(out / 'report.json'), str(bare), '--out', str(out), '--title', 'Again'])
    page = Page((out / 'index.html').read_text())
    assert [row[0][1] for row in page.rows if row and row[0][0]] == ['model_0', 'model_1', 'resnet50']
    # the command that evaluated them stays on the page, behind what trained them and before what made it again
    (commands,) = (text for text in page.text if 'vitzoo report --results' in text)
    assert commands.splitlines()[:3] == [
        'vitzoo train --config runs/model_0/recipe.yaml',
        'vitzoo train --config runs/model_1/recipe.yaml',
        'vitzoo report runs/*',
    ]
    assert 'Again' in page.text and any('timed on different or unknown machines' in text for text in page.text)
    assert read_records(str(out / 'report.json'))[2]['measured_on'] == f'not recorded in {bare}'


def make_folder(folder: Path, **about) -> Path:
    folder.mkdir()
    (folder / 'config.json').write_text(json.dumps(dict(architecture='vit', vitzoo=about)))
    return folder


def test_the_command_of_a_run_is_that_which_made_it(tmp_path):
    trained, moved = make_folder(tmp_path / 'a run', epochs=2), make_folder(tmp_path / 'moved', teacher='runs/vit')
    (trained / 'recipe.yaml').write_text('model: deit_ls_tiny\nmixer: null\ndata_dir: photos\n')
    (moved / 'recipe.yaml').write_text('data_dir: photos\nsteps: 3\nmixer: ls\n')
    expected = {
        trained: f"vitzoo train --config '{trained}/recipe.yaml' --output '{trained}'",
        moved: f'vitzoo transfer runs/vit --config {moved}/recipe.yaml --output {moved}',
    }
    for folder, command in expected.items():
        assert find_origin(str(folder))['commands'] == [command]


@pytest.mark.parametrize('is_own', [True, False])
def test_other_weights_than_those_of_a_folder_have_neither_its_command_nor_its_transfer(is_own, out, tmp_path):
    trained, other = save_classifier(tmp_path / 'deit'), save_classifier(tmp_path / 'other')
    settings = dict(teacher='vit', mixer='ls', data_options={}, random_control=True)
    (trained / 'transfer.json').write_text(json.dumps(dict(verdict='as good', settings=settings)))
    checkpoint = [] if is_own else ['--checkpoint', str(other / 'model.safetensors')]
    about = describe_model(str(trained), parse_eval_args([str(trained), '--no-data', *checkpoint]))
    assert bool(about['commands']) == ('transfer' in about) == is_own


def test_a_damaged_transfer_is_named(tmp_path):
    (tmp_path / 'transfer.json').write_text('{"verdict"')
    with pytest.raises(UserError, match=f"cannot read '{tmp_path / 'transfer.json'}'"):
        read_transfer(str(tmp_path))


def test_the_command_of_a_transfer_has_its_options(tmp_path):
    folder = make_folder(tmp_path / 'ls', teacher='runs/vit')
    words = ['runs/vit', '--mixer', 'ls', '--mixer-kwargs', 'rank=2', '--data-dir', 'my photos', '--img-size', '64']
    options = parse_args([*words, '--steps', '3', '--no-random-control', '--workers', '0', '--output', str(folder)])
    settings = options.settings | dict(mixer='ls', mixer_kwargs=dict(rank=2), training_images=9, validation_images=3)
    (folder / 'transfer.json').write_text(json.dumps(dict(settings=settings)))
    (command,) = find_origin(str(folder))['commands']
    program, name, *found = shlex.split(command)
    assert (program, name) == ('vitzoo', 'transfer')
    assert parse_args([*found, '--workers', '0']) == options


@pytest.mark.parametrize('recipe', [None, '', '{}'])
def test_a_converted_model_has_no_command_of_a_run(tmp_path, recipe):
    folder = make_folder(tmp_path / 'converted', parent='vit')
    if recipe is not None:
        (folder / 'recipe.yaml').write_text(recipe)
    assert find_origin(str(folder)) == dict(architecture='vit', arguments=[], commands=[])


@pytest.mark.parametrize(
    'text',
    [
        *('', '[1]', '{"records": {}}', '[{"name": "a"}]', '[]', '[{"model": 5}]', 'model,top1\n'),
        *('[{"model": "a", "top1": "50"}]', '[{"model": "a", "oversmoothing": 0.5}]'),
    ],
)
def test_a_file_of_something_else_is_refused(text, tmp_path, capsys):
    (tmp_path / 'a.json').write_text(text)
    assert '--results-file' in fails(capsys, '--results', tmp_path / 'a.json', '--out', tmp_path)


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        ([], 'name at least one MODEL'),
        (['--results', 'nowhere.json'], "cannot read the results 'nowhere.json'"),
        (['cvt_31'], "unknown model 'cvt_31'"),
        (['test_vit', '--plot', 'a.png'], '--plot is for `vitzoo validate`'),
        (['test_vit', '--data-dri', 'x'], 'unrecognized arguments'),
        (['test_vit', 'test_resnet', '--checkpoint', 'a.pth'], '--checkpoint a.pth is for one model'),
    ],
)
def test_mistakes_are_one_sentence(argv, message, tmp_path, capsys):
    assert message in fails(capsys, *argv, '--out', tmp_path)


def test_records_with_little_or_odd_content_make_a_page(tmp_path):
    records = '[{"model": "a"}, {"model": "b\\udcff"}, {"model": ".", "top1": 5.0, "loss": Infinity}]'
    (tmp_path / 'a.json').write_text(records)
    page = Page(make_report(['--results', str(tmp_path / 'a.json'), '--out', str(tmp_path)]).read_text('utf-8'))
    assert page.row('b\ufffd') and [row[1] for row in page.row(Path.cwd().name)[1:2]] == ['5.00']
    (tmp_path / 'a.json').write_text('[{"model": "a"}]')
    make_report(['--results', str(tmp_path / 'a.json'), '--out', str(tmp_path)])


def test_options_of_an_evaluation_need_a_model(tmp_path, capsys):
    error = fails(capsys, '--results', tmp_path / 'a.json', '--data-dir', tmp_path)
    assert '--data-dir needs a MODEL' in error and '--from-predictions' not in error


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, capsys):
    (tmp_path / 'file').touch()
    assert "cannot create the report's folder" in fails(capsys, 'test_vit', '--out', tmp_path / 'file' / 'report')


def test_several_processes_are_sent_to_validate(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')
    assert 'accelerate launch validate.py' in fails(capsys, 'test_vit', '--out', tmp_path)


@pytest.mark.parametrize(
    ('name', 'options'),
    [
        ('cvt_ls_13', dict(depths=(1, 1, 1))),
        ('vil_tiny', dict(depths=(1, 1, 1, 1))),
        ('deit_linformer_tiny', dict(depth=1)),
        ('aft_full_tiny', dict(depth=1)),
        ('test_vit', {}),
    ],
)
def test_scaling_is_that_of_models_made_for_the_size(name, options):
    found = measure_scaling(name, timm.create_model(name, img_size=64, **options), 64)
    assert list(found) == [64, 128, 192, 256, 384, 512]
    assert found[192] == count_macs(timm.create_model(name, img_size=192, **options), 192) / 1e9


def test_scaling_of_a_cnn_needs_no_change_of_size():
    model = timm.create_model('test_resnet')
    found = measure_scaling('test_resnet', model, 64)
    assert list(found) == [64, 128, 192, 256, 384, 512] and found[192] == count_macs(model, 192) / 1e9


@pytest.fixture
def benchmarks(tmp_path) -> Path:
    path = tmp_path / 'benchmarks.csv'
    rows = [
        dict(name='model_0', img_size=size, seconds=size / 1000, peak_mb=float(size), batch_size=8, dtype=dtype)
        for dtype in ('float32', 'float16')
        for size in (224, 448)
        if (dtype, size) != ('float16', 448)
    ]
    machine = dict(cpu='fast, 2 cores', threads=1, device='cpu', load=9)
    append_rows(str(path), rows, table='models', what='forward', **machine)
    return path


def test_times_at_several_sizes_come_from_benchmarks(out, benchmarks):
    out.mkdir()
    (out / 'report.json').write_text(json.dumps(make_data(make_record(0), make_record(1))))
    argv = ['--results', str(out / 'report.json'), '--out', str(out)]
    make_report([*argv, '--benchmarks', str(benchmarks)])
    charts = Page((out / 'index.html').read_text()).charts
    assert charts['Time against image size'] == [
        'model_0 at 224 px: 28 milliseconds per image',
        'model_0 at 448 px: 56 milliseconds per image',
    ]
    assert charts['Peak memory against image size'] == ['model_0 at 224 px: 224 MB', 'model_0 at 448 px: 448 MB']
    conditions = 'fast, 2 cores, 1 threads, float32, batches of 8; benchmarks.csv (unreliable: busy machine)'
    assert conditions in (out / 'index.html').read_text()


def test_a_model_with_other_mixers_does_not_get_the_times_of_its_base(out, benchmarks, capsys):
    out.mkdir()
    names = 'model_0 with ls', 'model_0.in1k with ls in all blocks'
    others = [make_record(0) | dict(architecture=name) for name in names]
    (out / 'report.json').write_text(json.dumps(make_data(*others)))
    message = fails(capsys, '--results', out / 'report.json', '--out', out, '--benchmarks', benchmarks)
    assert 'has none of runs/model_0 at two sizes' in message


def test_a_model_with_its_own_arguments_has_the_times_of_its_folder_only(benchmarks):
    rows, other = read_timings(str(benchmarks)), make_record(0) | dict(arguments=['patch_size'])
    with pytest.raises(UserError, match='has none of runs/model_0 at two sizes'):
        add_timings([other], rows, 'b.csv')
    own = [row | dict(name='runs/model_0', seconds=1.0) for row in rows]
    add_timings([other], rows + own, 'b.csv')
    assert other['scaling']['milliseconds'] == {224: 125.0, 448: 125.0}


def test_the_arguments_of_a_run_are_those_that_its_architecture_does_not_imply(tmp_path):
    folder = make_folder(tmp_path / 'run')
    arguments = dict(num_classes=3, img_size=[64, 64], patch_size=16, global_pool='token')
    (folder / 'config.json').write_text(json.dumps(dict(architecture='vit', model_args=arguments)))
    assert find_origin(str(folder))['arguments'] == ['patch_size']


def test_benchmarks_without_the_models_are_refused_before_an_evaluation(out, benchmarks, capsys, monkeypatch):
    monkeypatch.setattr('vitzoo.report.gather.gather', lambda options: pytest.fail('evaluated'))
    message = fails(capsys, 'deit_ls_nano', '--out', out, '--benchmarks', benchmarks)
    assert 'none of deit_ls_nano at two sizes' in message


def test_benchmarks_of_other_models_are_refused(out, benchmarks, capsys):
    out.mkdir()
    (out / 'report.json').write_text(json.dumps(make_data(make_record(5))))
    argv = ['--results', out / 'report.json', '--out', out]
    assert 'none of model_5 at two sizes' in fails(capsys, *argv, '--benchmarks', benchmarks)
    assert "cannot read the benchmarks 'nowhere.csv'" in fails(capsys, *argv, '--benchmarks', 'nowhere.csv')
    (out / 'other.csv').write_text('a,b\n1,2\n')
    assert "has no column 'table'" in fails(capsys, *argv, '--benchmarks', out / 'other.csv')
    # before the evaluation of a model
    for content in (b'a,b\n1,2,3\n', b'table\n\xff\xfe'):
        (out / 'other.csv').write_bytes(content)
        message = fails(capsys, 'deit_ls_nano', '--out', out, '--benchmarks', out / 'other.csv')
        assert 'is not a file of `vitzoo bench`' in message
