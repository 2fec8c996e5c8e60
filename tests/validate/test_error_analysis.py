"""The folder of the error analysis: what is in its tables, and that its figures are drawn."""

import csv
from pathlib import Path

import pytest
import torch
from matplotlib import rcParams
from PIL import Image

import vitzoo.figures
from vitzoo.errors import UserError
from vitzoo.figures import draw_confusion, draw_explanation, draw_mistakes, draw_token_statistics
from vitzoo.validate.error_analysis import count_confusions, write_error_analysis
from vitzoo.validate.predictions import Predictions

NAMES = ['cat', 'dog', 'owl', 'yak', 'ant']
#                       cat x 4     dog x 3  owl x 1; there are no yaks, but one is seen, and no ants
LABEL = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])
GUESS = torch.tensor([0, 1, 1, 3, 1, 0, 1, 0])
CONFIDENCE = torch.tensor([0.9, 0.4, 0.8, 0.5, 0.7, 0.6, 0.3, 1.0])


def write(folder: Path, guess: torch.Tensor = GUESS) -> tuple[dict, list[int]]:
    shown = []

    def load_image(index: int) -> Image.Image:
        shown.append(index)
        return Image.new('RGB', (20, 10 + index), 'red')

    files = [f'{NAMES[label]}/{i}.jpg' for i, label in enumerate(LABEL.tolist())]
    columns = dict(label=LABEL, top=guess[:, None], prob=CONFIDENCE[:, None])
    return write_error_analysis(str(folder), Predictions(files, dict(enumerate(NAMES)), columns), load_image), shown


def read(path: Path) -> list[list[str]]:
    with open(path, newline='') as file:
        return list(csv.reader(file))


def test_the_tables_say_what_was_counted_by_hand(tmp_path):
    found, _ = write(tmp_path / 'new' / 'folder')
    folder = tmp_path / 'new' / 'folder'
    assert read(folder / 'per_class.csv') == [
        ['class', 'images', 'accuracy', 'precision', 'taken_for', 'times'],
        ['owl', '1', '0.00', '', 'cat', '1'],
        ['cat', '4', '25.00', '33.33', 'dog', '2'],
        ['dog', '3', '66.67', '50.00', 'cat', '1'],
    ]
    assert read(folder / 'confusion.csv') == [
        ['', 'cat', 'dog', 'owl', 'yak'],
        ['cat', '1', '2', '0', '1'],
        ['dog', '1', '2', '0', '0'],
        ['owl', '1', '0', '0', '0'],
        ['yak', '0', '0', '0', '0'],
    ]
    assert read(folder / 'confused.csv') == [
        ['class', 'taken_for', 'times', 'examples'],
        ['cat', 'dog', '2', 'cat/2.jpg', 'cat/1.jpg'],
        ['owl', 'cat', '1', 'owl/7.jpg'],
        ['dog', 'cat', '1', 'dog/5.jpg'],
        ['cat', 'yak', '1', 'cat/3.jpg'],
    ]
    bins = read(folder / 'calibration.csv')
    assert len(bins) == 16 and sum(int(row[2]) for row in bins[1:]) == 8
    assert bins[-1] == ['0.9333', '1.0000', '1', '1.0000', '0.0000'] and bins[1][2:] == ['0', '', '']
    # every image is alone in its bin but those of 0.8 and 0.7, 0.5 and 0.4, 0.6, 0.3 and 0.9, which are too
    gaps = (CONFIDENCE - (LABEL == GUESS).float()).abs()
    assert found == {'ece': pytest.approx(100 * gaps.mean().item())}


def test_the_surest_mistakes_are_shown(tmp_path):
    _, shown = write(tmp_path)
    assert shown == [2, 1, 7, 5, 3]
    for name in ('confusion.png', 'reliability.png', 'confused.png'):
        with Image.open(tmp_path / name) as image:
            assert len(image.convert('RGB').getcolors(1 << 20)) > 5


def test_who_never_errs_has_no_confused_pairs(tmp_path):
    found, shown = write(tmp_path, guess=LABEL)
    assert shown == [] and not (tmp_path / 'confused.png').exists()
    assert read(tmp_path / 'confused.csv') == [['class', 'taken_for', 'times', 'examples']]
    assert [row[2] for row in read(tmp_path / 'per_class.csv')[1:]] == ['100.00'] * 3
    assert found['ece'] == pytest.approx(100 * (1 - CONFIDENCE).mean().item())


def test_classes_of_imagenet_are_called_by_their_words():
    # a bird, a machine, and a class that nothing was taken for
    names = {134: 'n02012849', 517: 'n03126707', 999: 'n15075141'}
    columns = dict(label=torch.tensor([134, 517]), top=torch.tensor([[517], [517]]))
    matrix, words, present = count_confusions(Predictions(['a', 'b'], names, columns))
    assert words == ['crane (n02012849)', 'crane (n03126707)'] and present == [134, 517]
    assert matrix.tolist() == [[0, 1], [0, 1]]


def test_a_confusion_matrix_has_no_room_for_classes_that_do_not_occur():
    # one of all classes would take 8 TB
    columns = dict(label=torch.tensor([7, 7, 999_999]), top=torch.tensor([[7], [999_999], [7]]))
    matrix, names, _ = count_confusions(Predictions(['a', 'b', 'c'], {7: 'ant', 999_999: 'bee'}, columns))
    assert names == ['ant', 'bee'] and matrix.tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize('num_classes', (1, 10, 200))
def test_a_confusion_matrix_of_any_size_is_drawn(num_classes, tmp_path):
    matrix = torch.eye(num_classes, dtype=torch.long) * 3
    matrix[0, -1] += 1
    draw_confusion(tmp_path / 'confusion.png', matrix, [f'class {i}' for i in range(num_classes)])
    with Image.open(tmp_path / 'confusion.png') as image:
        assert image.width > 500


def test_an_explanation_is_as_hot_as_its_map(tmp_path):
    heat = torch.zeros(8, 16)
    heat[:, 8:] = 1
    draw_explanation(tmp_path / 'map.png', torch.full((3, 8, 16), 0.5), heat, 'half')
    with Image.open(tmp_path / 'map.png') as image:
        pixels, (width, height) = image.convert('RGB'), image.size
    plain, cold, hot = (pixels.getpixel((int(x * width), int(0.6 * height))) for x in (0.25, 0.6, 0.9))
    assert max(plain) - min(plain) <= 2
    assert hot[0] - hot[2] > 40 and abs(cold[0] - cold[2]) < 20


@pytest.mark.parametrize('name', ['$a_$', '$10-$20', 'US$'])
def test_dollar_signs_in_names_are_drawn_as_they_are(name, tmp_path, monkeypatch):
    image = Image.new('RGB', (8, 8), 'red')
    record = dict(model=f'runs/{name}', token_statistics=statistics(2, cosine=1))
    figures = {
        'confusion': lambda path: draw_confusion(path, torch.eye(2), [name, 'b']),
        'mistakes': lambda path: draw_mistakes(path, [(name, [(image, name)])]),
        'explanation': lambda path: draw_explanation(path, torch.zeros(3, 8, 8), torch.zeros(8, 8), name),
        'curves': lambda path: draw_token_statistics(path, [record]),
    }
    for kind, draw in figures.items():
        draw(tmp_path / f'{kind}.png')
    # without formulas, nothing needs to be escaped
    monkeypatch.setitem(rcParams, 'text.parse_math', False)
    monkeypatch.setattr(vitzoo.figures, 'literal', lambda text: text)
    for kind, draw in figures.items():
        draw(tmp_path / 'plain.png')
        with Image.open(tmp_path / f'{kind}.png') as drawn, Image.open(tmp_path / 'plain.png') as plain:
            assert drawn.tobytes() == plain.tobytes(), kind


def test_long_names_leave_room_for_the_end_of_a_title_and_for_the_next_image(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(vitzoo.figures, 'draw_mistakes', lambda path, rows: drawn.extend(rows))
    label, top = torch.tensor([0, 1]), torch.tensor([[1], [1]])
    files = [f'{"i" * 90}.jpg', 'b.jpg']
    columns = dict(label=label, top=top, prob=torch.tensor([[0.8], [0.9]]))
    predictions = Predictions(files, {0: 'c' * 90, 1: 'd' * 90}, columns)
    write_error_analysis(str(tmp_path), predictions, lambda index: Image.new('RGB', (8, 8)))
    ((title, ((_, caption),)),) = drawn
    assert title == f'{"c" * 29}… predicted as {"d" * 29}… once'
    assert caption == f'{"i" * 29}…\n80 % confident'
    # the tables have room
    assert read(tmp_path / 'confused.csv')[1] == ['c' * 90, 'd' * 90, '1', files[0]]


def statistics(depth: int, **measures: float) -> dict:
    curves = {name: dict(mean=[value] * depth, std=[0.1] * depth) for name, value in measures.items()}
    return dict(blocks=[f'blocks.{i}' for i in range(depth)], stages=[0] * depth, **curves)


def test_curves_of_several_models_and_measures_share_a_figure(tmp_path):
    shallow = dict(model='runs/a', token_statistics=statistics(2, cosine=0.5))
    deep = dict(
        model='runs/b', token_statistics=statistics(5, cosine=0.2, effective_rank=9, head_similarity=float('nan'))
    )
    draw_token_statistics(tmp_path / 'one.png', [shallow, dict(model='none', token_statistics=None)])
    draw_token_statistics(tmp_path / 'two.png', [shallow, deep])
    with Image.open(tmp_path / 'one.png') as one, Image.open(tmp_path / 'two.png') as two:
        assert two.width > 1.5 * one.width and len(two.convert('RGB').getcolors(1 << 20)) > 5
    with pytest.raises(UserError, match='no oversmoothing curve'):
        draw_token_statistics(tmp_path / 'none.png', [dict(model='none', token_statistics=None)])


def test_a_model_whose_name_begins_with_an_underscore_is_in_the_legend(tmp_path):
    records = [dict(model=f'runs/{name}', token_statistics=statistics(2, cosine=0.5)) for name in ('_a', 'b')]
    draw_token_statistics(tmp_path / 'curves.svg', records)
    # comments name the texts that are drawn as shapes
    text = (tmp_path / 'curves.svg').read_text()
    assert '<!--  _a -->' in text and '<!-- b -->' in text
