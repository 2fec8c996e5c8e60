"""The robustness suite: small sets in each published layout, a model with known answers, and sums by hand."""

import csv
import json
import shutil
from functools import partial
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import ImageNetInfo, create_transform
from timm.models import save_for_hf
from torch import nn

from vitzoo.data import eval_transform, open_dataset
from vitzoo.data.held_out import Subset
from vitzoo.data.variants import SUITE, find_suite
from vitzoo.data.variants.base import Readout, VariantImages, normalize_name
from vitzoo.data.variants.imagenet import IMAGENET_C_CONDITIONS
from vitzoo.data.variants.imagenet9 import CLASS_NAMES
from vitzoo.errors import UserError
from vitzoo.load import LoadedModel
from vitzoo.metrics.robustness import ALEXNET_ERRORS, corruption_errors, score_allowed, summarize_allowed
from vitzoo.validate import main
from vitzoo.validate.command import validate
from vitzoo.validate.options import EvalOptions
from vitzoo.validate.results import write_results
from vitzoo.validate.robustness import evaluate_suite, score_readouts
from vitzoo.validate.scoring import Evaluation

WNIDS = ImageNetInfo().label_names()
REAL = json.loads((files('timm.data') / '_info' / 'imagenet_real_labels.json').read_text())
DATA_CONFIG = dict(
    input_size=(3, 32, 32), interpolation='bicubic', mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.9, crop_mode='center'
)


def subset(letter: str) -> list[int]:
    wnids = (files('timm.data') / '_info' / f'imagenet_{letter}_synsets.txt').read_text().split()
    return [WNIDS.index(wnid) for wnid in wnids]


def picture(file: Path, answer: int, border: int = 0) -> None:
    """Write a picture whose colour says which class it shows; what it is saved as is a PNG whatever its name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    colour = (answer // 100 * 25, answer // 10 % 10 * 25, answer % 10 * 25)
    image = Image.new('RGB', (32 + 2 * border, 32 + 2 * border), (255, 0, 0))
    image.paste(colour, (border, border, 32 + border, 32 + border))
    image.save(file, 'PNG')


class Knowing(nn.Module):
    """Reads the class off a picture; `distracted`, a class that is outside of a subset seems even likelier to it."""

    num_classes = 1000

    def __init__(self, distraction: int | None = None):
        super().__init__()
        self.distraction = distraction

    def forward(self, x):
        digits = ((x * 0.5 + 0.5) * 255 / 25).flatten(2).amax(dim=2).round().long()  # (B, 3)
        logits = nn.functional.one_hot(digits @ torch.tensor([100, 10, 1]), 1000).float()
        if self.distraction is not None:
            logits[:, self.distraction] += 2
        return logits


def evaluate(root: Path, model: nn.Module | None = None, allow_partial: bool = True) -> dict:
    suite, _ = find_suite(str(root), allow_partial)
    options = EvalOptions(
        device=torch.device('cpu'), amp_dtype='float32', batch_size=64, workers=0, allow_partial=allow_partial
    )
    loaded = LoadedModel('knowing', model or Knowing(), 'trained')
    return evaluate_suite(Evaluation(loaded, DATA_CONFIG, options), suite)


def val_names(labels: list[int]) -> list[str]:
    """A name for an image of each class, of a validation image that the ReaL labels put into that class too."""
    numbers: dict[int, list[int]] = {}
    for number, real in enumerate(REAL, start=1):
        for label in real:
            numbers.setdefault(label, []).append(number)
    return [f'ILSVRC2012_val_{numbers[label].pop():08d}.JPEG' for label in labels]


def make_val(folder: Path, labels: list[int]) -> Path:
    for label, name in zip(labels, val_names(labels)):
        picture(folder / WNIDS[label] / name, label)
    return folder


def make_wnids(folder: Path, labels: list[int]) -> Path:
    for label in labels:
        picture(folder / WNIDS[label] / f'art_{label}.jpg', label)
    return folder


def make_v2(folder: Path, labels: list[int], name: str = '{}') -> Path:
    for label in labels:
        picture(folder / name.format(label) / f'{label:x}.jpeg', label)
    return folder


def make_c(folder: Path, labels: list[int], group: bool = False) -> Path:
    groups = dict(noise=3, blur=4, weather=4, digital=4)
    places = [name for name, size in groups.items() for _ in range(5 * size)]
    for (corruption, severity), place in zip(IMAGENET_C_CONDITIONS, places):
        make_val(folder / (place if group else '.') / corruption / str(severity), labels)
    return folder


def make_objectnet(folder: Path) -> Path:
    """Three folders of two pictures with a red border: a chair may be any of two classes, and a squeegee none."""
    mappings = dict(
        folder_to_objectnet_label={'chair': 'Chair', 'banana': 'Banana', 'squeegee': 'Squeegee'},
        objectnet_to_imagenet_1k={'Chair': 'barber chair; rocking chair, rocker', 'Banana': 'banana'},
        # lines of the file below, by class index
        pytorch_to_imagenet_2012_id={'423': 2, '765': 0, '954': 1},
    )
    (folder / 'mappings').mkdir(parents=True)
    for name, mapping in mappings.items():
        (folder / 'mappings' / f'{name}.json').write_text(json.dumps(mapping))
    lines = 'rocking chair, rocker\nbanana\nbarber chair\nkit fox\n'
    (folder / 'mappings' / 'imagenet_to_label_2012_v2').write_text(lines)
    for name, answers in dict(chair=(423, 765), banana=(954, 954), squeegee=(0, 1)).items():
        for number, answer in enumerate(answers):
            picture(folder / 'images' / name / f'{number}.png', answer, border=2)
    return folder


def make_in9(folder: Path, answers: dict[str, list[int]]) -> Path:
    """Of each variation a picture per kind; class c is of kind c below 9 and of kind c - 100 from 100 to 108."""
    kinds = {str(c): c if c < 9 else c - 100 if 100 <= c < 109 else -1 for c in range(1000)}
    for variation, classes in answers.items():
        for name, answer in zip(CLASS_NAMES, classes):
            picture(folder / variation / 'val' / name / 'fg.JPEG', answer)
    (folder / 'in_to_in9.json').write_text(json.dumps(kinds))
    return folder


KINDS = list(range(9))
# the sets to make, and the columns that must be 100 %
LAYOUTS = {
    'imagenet/val': (partial(make_val, labels=[1, 2, 300, 999]), ['imagenet', 'imagenet_real', 'imagenet_r_clean']),
    'val': (partial(make_val, labels=[6, 11]), ['imagenet', 'imagenet_a_clean', 'imagenet_r_clean']),
    'ILSVRC/Data/CLS-LOC/val': (partial(make_val, labels=[500]), ['imagenet', 'imagenet_real']),
    'imagenetv2-matched-frequency-format-val': (
        partial(make_v2, labels=[0, 2, 10, 100, 999]),
        ['imagenet_v2_matched_frequency'],
    ),
    'imagenetv2-threshold0.7-format-val': (
        partial(make_v2, labels=[0, 2, 10, 999], name='{:04d}'),
        ['imagenet_v2_threshold_07'],
    ),
    'ImageNetV2/imagenetv2-top-images': (partial(make_wnids, labels=[0, 2, 10, 999]), ['imagenet_v2_top_images']),
    'imagenet-a': (partial(make_wnids, labels=subset('a')[:7]), ['imagenet_a']),
    'ImageNet_R': (partial(make_wnids, labels=subset('r')[-7:]), ['imagenet_r']),
    'imagenet-sketch/sketch': (partial(make_wnids, labels=[0, 500, 999]), ['imagenet_sketch']),
    'imagenet-c': (partial(make_c, labels=[0, 999]), ['imagenet_c']),
    'ImageNet-C': (partial(make_c, labels=[5], group=True), ['imagenet_c']),
    'objectnet-1.0': (make_objectnet, ['objectnet']),
    'bg_challenge': (
        partial(make_in9, answers=dict(original=KINDS, mixed_same=KINDS, mixed_rand=KINDS)),
        ['imagenet_9_original', 'imagenet_9_mixed_same', 'imagenet_9_mixed_rand'],
    ),
    'stylized-imagenet/val': (partial(make_val, labels=[7, 8]), ['stylized_imagenet']),
}


@pytest.mark.parametrize('place', LAYOUTS)
def test_a_model_that_knows_the_answer_has_100_percent(place, tmp_path):
    make, columns = LAYOUTS[place]
    make(tmp_path / place)
    record = evaluate(tmp_path)
    assert {column: record[f'{column}_top1_partial'] for column in columns} == dict.fromkeys(columns, 100)
    assert all(key.endswith('_partial') for key in record)


def test_every_variant_has_a_layout_here():
    tested = {column for _, columns in LAYOUTS.values() for column in columns}
    assert tested == {key for variant in SUITE for key in variant.titles}


def test_the_documentation_says_where_every_variant_lies_and_what_its_columns_are():
    page = normalize_name((Path(__file__).parents[2] / 'docs' / 'robustness.md').read_text())
    for variant in SUITE:
        number = f'{variant.num_images[0]:,}'
        words = [variant.url, variant.folders[0].split('/')[0], number, *variant.titles]
        assert [word for word in words if normalize_name(word) not in page] == []


@pytest.fixture
def small_sets(monkeypatch):
    """Pretend that one picture of each class was published."""
    numbers = dict(imagenet=1000, imagenet_a=200, imagenet_r=200, imagenet_sketch=1000, objectnet=6, imagenet_9=9)
    for variant in SUITE:
        monkeypatch.setattr(variant, 'num_images', (numbers.get(variant.name, 1000),))
        monkeypatch.setattr(variant, 'per_class', variant.per_class and 1)


def test_complete_sets_need_no_permission_and_their_columns_say_nothing_of_parts(tmp_path, small_sets):
    make_wnids(tmp_path / 'imagenet-a', subset('a'))
    make_wnids(tmp_path / 'imagenet-r', subset('r'))
    make_v2(tmp_path / 'imagenetv2-matched-frequency-format-val', list(range(1000)))
    make_objectnet(tmp_path / 'objectnet-1.0')
    make_in9(tmp_path / 'bg_challenge', dict(mixed_same=KINDS, mixed_rand=KINDS, original=KINDS))
    record = evaluate(tmp_path, allow_partial=False)
    assert {key: record[key] for key in record if key.endswith('_n')} == dict(
        imagenet_v2_matched_frequency_n=1000,
        imagenet_a_n=200,
        imagenet_r_n=200,
        objectnet_n=4,
        imagenet_9_original_n=9,
        imagenet_9_mixed_same_n=9,
        imagenet_9_mixed_rand_n=9,
    )
    assert all(record[key] == 100 for key in record if key.endswith(('top1', 'top5')))
    assert record['imagenet_9_gap'] == 0


def test_a_set_may_have_more_images_than_the_model_has_classes():
    some = Subset(open_dataset('sample', 'val').reader, list(range(0, 500, 20)))
    images = VariantImages(some, eval_transform(DATA_CONFIG))
    labels = torch.tensor(images.reader.labels)
    options = EvalOptions(device=torch.device('cpu'), amp_dtype='float32', batch_size=64, workers=0)
    torch.manual_seed(0)
    loaded = LoadedModel('linear', nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10)), 'trained')
    evaluation = Evaluation(loaded, DATA_CONFIG, options)
    scores = score_readouts('sample', evaluation, images, {'sample': Readout(labels[:, None])})['sample']
    with torch.no_grad():
        hits = loaded.model(torch.stack([image for image, _ in images])).argmax(dim=1) == labels
    assert scores['n'] == len(images) == 25 and scores['top1'] == 4 * hits.sum()


def test_only_the_200_classes_may_be_answered(tmp_path):
    outside = next(label for label in range(1000) if label not in {*subset('a'), *subset('r')})
    make_wnids(tmp_path / 'imagenet-a', subset('a')[:5])
    make_wnids(tmp_path / 'imagenet-r', subset('r')[:5])
    (of_a, *_), (of_r, *_) = (sorted({*subset(one)} - {*subset(other)}) for one, other in ('ar', 'ra'))
    make_val(tmp_path / 'val', [of_a, of_r, outside])
    record = evaluate(tmp_path, Knowing(distraction=outside))
    # the distraction wins where all 1,000 may be answered, and the truth comes second
    assert record['imagenet_top1_partial'] == pytest.approx(100 / 3)
    assert record['imagenet_top5_partial'] == 100
    for column in ('imagenet_a', 'imagenet_r', 'imagenet_a_clean', 'imagenet_r_clean'):
        assert record[f'{column}_top1_partial'] == 100
    assert record['imagenet_a_clean_n_partial'] == 1
    inside = Knowing(distraction=subset('a')[9])
    assert evaluate(tmp_path, inside)['imagenet_a_top1_partial'] == 0


def test_real_labels_go_by_file_name_and_images_without_any_are_dropped(tmp_path):
    assert (REAL[0], REAL[1], REAL[2]) == ([], [970, 795], [230, 231])
    name = 'ILSVRC2012_val_{:08d}.JPEG'
    # the folder's class, what the picture shows
    picture(tmp_path / 'val' / WNIDS[65] / name.format(1), 65)
    picture(tmp_path / 'val' / WNIDS[970] / name.format(2), 795)
    picture(tmp_path / 'val' / WNIDS[230] / name.format(3), 0)
    picture(tmp_path / 'val' / WNIDS[0] / 'renamed.JPEG', 0)
    record = evaluate(tmp_path)
    assert (record['imagenet_n_partial'], record['imagenet_top1_partial']) == (4, 50)
    assert (record['imagenet_real_n_partial'], record['imagenet_real_top1_partial']) == (2, 50)
    assert record['imagenet_real_dropped_partial'] == 2


def test_all_of_the_real_labels_are_read():
    from vitzoo.data.variants.imagenet import real_labels

    assert sum(bool(labels) for labels in real_labels().values()) == 46_837
    assert set(real_labels()) == set(range(1, 50_001))


def test_imagenet_9_is_right_by_kind_and_the_gap_is_a_difference(tmp_path):
    same = [0, 101, 2, 103, 4, 5, 6, 7, 500]
    rand = [0, 101, 3, 104, 4, 5, 600, 700, 800]
    make_in9(tmp_path / 'bg_challenge', dict(mixed_same=same, mixed_rand=rand))
    record = evaluate(tmp_path)
    assert record['imagenet_9_mixed_same_top1_partial'] == pytest.approx(100 * 8 / 9)
    assert record['imagenet_9_mixed_rand_top1_partial'] == pytest.approx(100 * 4 / 9)
    assert record['imagenet_9_gap_partial'] == pytest.approx(100 * 4 / 9)


def test_any_class_of_an_object_is_right_and_objects_of_no_class_do_not_count(tmp_path):
    make_objectnet(tmp_path / 'objectnet-1.0')
    picture(tmp_path / 'objectnet-1.0/images/banana/1.png', 423, border=2)
    record = evaluate(tmp_path)
    assert (record['objectnet_n_partial'], record['objectnet_top1_partial']) == (4, 75)


# in the order of the paper: noise, blur, weather, digital
AUGMIX = (
    *(0.886428, 0.894468, 0.922640, 0.819880, 0.826268, 0.785948, 0.798360),
    *(0.866816, 0.826572, 0.819324, 0.564592, 0.853204, 0.646056, 0.717840, 0.606500),
)


@pytest.mark.parametrize(('corruption', 'error'), [*zip(dict(IMAGENET_C_CONDITIONS), AUGMIX)])
def test_each_corruption_error_is_divided_by_that_of_alexnet(corruption, error):
    even = {name: [50.0] * 5 for name in ALEXNET_ERRORS}
    worse = {**even, corruption: [20.0] * 5}
    assert corruption_errors(worse)['mce'] - corruption_errors(even)['mce'] == pytest.approx(30 / error / 15)


def test_corruption_errors_by_hand():
    even = {name: [50.0] * 5 for name in ALEXNET_ERRORS}
    errors = corruption_errors(even)
    assert errors['top1'] == errors['mce_unnormalized'] == 50
    assert errors['mce'] == pytest.approx(sum(50 / error for error in ALEXNET_ERRORS.values()) / 15)
    # AlexNet itself
    alexnet = {name: [100 - 100 * error] * 5 for name, error in ALEXNET_ERRORS.items()}
    assert corruption_errors(alexnet)['mce'] == pytest.approx(100)
    assert corruption_errors(alexnet)['mce_unnormalized'] == pytest.approx(78.8993, abs=1e-3)
    # one corruption, at one severity: an error of 100 there instead of 50 is 10 more on average
    worse = {**even, 'brightness': [50, 50, 0, 50, 50]}
    assert corruption_errors(worse)['mce_unnormalized'] == pytest.approx(50 + 10 / 15)
    assert corruption_errors(worse)['mce'] == pytest.approx(errors['mce'] + 10 / 0.564592 / 15)


@pytest.mark.parametrize('change', [lambda table: table.pop('fog'), lambda table: table['snow'].pop()])
def test_an_incomplete_table_has_no_corruption_error(change):
    table = {name: [50.0] * 5 for name in ALEXNET_ERRORS}
    change(table)
    with pytest.raises(UserError, match='incomplete: (fog|snow)'):
        corruption_errors(table)


def test_hits_by_hand():
    logits = torch.tensor([[5.0, 4, 3, 2, 1, 0, -1], [0, 1, 2, 3, 4, 5, 6], [9, 0, 0, 0, 0, 8, 7]])
    allowed = torch.tensor([[1, 0], [0, -1], [5, -1]])
    assert score_allowed(logits, allowed).tolist() == [[True, True], [False, False], [False, True]]
    only = torch.tensor([0, 5, 6])
    assert score_allowed(logits, allowed, only[1:]).tolist() == [[False, False], [False, False], [True, True]]
    hits = torch.tensor([[True, True], [False, True], [True, True]])
    none = torch.tensor([[1, 0], [0, -1], [-1, -1]])
    assert summarize_allowed(hits, none) == dict(top1=50, top5=100, n=2)
    assert summarize_allowed(hits, none.fill_(-1)) == dict(top1=None, top5=None, n=0)


def test_imagenet_c_has_its_table_and_errors(tmp_path):
    make_c(tmp_path / 'imagenet-c', [0, 999])
    folder = tmp_path / 'imagenet-c' / 'fog' / '3' / WNIDS[0]
    picture(next(folder.iterdir()), 1)
    record = evaluate(tmp_path)
    assert record['imagenet_c_partial']['fog'] == [100, 100, 50, 100, 100]
    assert record['imagenet_c_mce_unnormalized_partial'] == pytest.approx(50 / 75)
    assert record['imagenet_c_mce_partial'] == pytest.approx(10 / 0.819324 / 15)
    assert record['imagenet_c_n_partial'] == 150


def test_imagenet_c_without_a_severity_is_a_part_of_it_and_has_no_mce(tmp_path, monkeypatch):
    make_c(tmp_path / 'imagenet-c', [0])
    monkeypatch.setattr(SUITE[-1], 'num_images', (1,))
    monkeypatch.setattr(SUITE[-1], 'per_class', 1)
    assert evaluate(tmp_path)['imagenet_c_mce'] == 0
    shutil.rmtree(tmp_path / 'imagenet-c' / 'fog' / '3')
    record = evaluate(tmp_path)
    assert record['imagenet_c_partial']['fog'] == [100, 100, None, 100, 100]
    assert set(record) == {'imagenet_c_partial', 'imagenet_c_n_partial'}


@pytest.mark.parametrize('variant', SUITE, ids=lambda variant: variant.name)
def test_images_stored_at_224_pass_untouched_and_others_are_cropped_as_the_model_wants(variant):
    noise = np.random.default_rng(0).integers(256, size=(224, 224, 3), dtype=np.uint8)
    config = dict(DATA_CONFIG, input_size=(3, 224, 224))
    pixels = (variant.transform(config)(Image.fromarray(noise)) * 0.5 + 0.5) * 255
    untouched = torch.equal(pixels.round().byte(), torch.from_numpy(noise).permute(2, 0, 1))
    assert untouched == (variant.name in ('imagenet_c', 'stylized_imagenet', 'imagenet_9'))
    larger = variant.transform(dict(config, input_size=(3, 384, 384)))(Image.fromarray(noise))
    assert larger.shape == (3, 384, 384)
    if not untouched and variant.name != 'objectnet':
        expected = create_transform(**config, is_training=False)(Image.fromarray(noise))
        assert torch.equal(variant.transform(config)(Image.fromarray(noise)), expected)


def rename(folder: Path, old: str, new: str) -> None:
    (folder / old).rename(folder / new)


def rotate(folder: Path) -> None:
    """Name every class folder by the class after it."""
    names = sorted(path.name for path in folder.iterdir())
    for name in names:
        rename(folder, name, f'old {name}')
    for name, other in zip(names, [*names[1:], names[0]]):
        rename(folder, f'old {name}', other)


def number(folder: Path, first: int = 0) -> None:
    """Name the class folders by their place in the order."""
    for place, path in enumerate(sorted(folder.iterdir()), start=first):
        path.rename(folder / f'new {place}')
    for path in list(folder.iterdir()):
        rename(folder, path.name, path.name.removeprefix('new '))


def make_whole_in9(folder: Path) -> Path:
    return make_in9(folder, dict(original=KINDS, mixed_same=KINDS, mixed_rand=KINDS))


A200, R200, ALL = subset('a'), subset('r'), list(range(1000))
MISTAKES = {
    'A, a class renamed': (
        'imagenet-a',
        lambda root: rename(make_wnids(root, A200), WNIDS[A200[3]], 'stingray'),
        "'stingray' is not one of the 200 published classes",
    ),
    'A, numbered': ('imagenet-a', lambda root: number(make_wnids(root, A200)), 'its class folders are numbered'),
    'A, which is R': ('imagenet-a', lambda root: make_wnids(root, R200), 'is not one of the 200 published classes'),
    'A, a class missing': ('imagenet-a', lambda root: make_wnids(root, A200[1:]), '199 of 200 class folders'),
    'A, an image too many': (
        'imagenet-a',
        lambda root: picture(make_wnids(root, A200) / WNIDS[A200[0]] / 'more.jpg', 0),
        'expected 200 images, found 201',
    ),
    'V2, numbered from 1': (
        'imagenetv2-matched-frequency-format-val',
        lambda root: number(make_v2(root, ALL), 1),
        'numbered up to 1000 instead of 999',
    ),
    'V2, half renamed': (
        'imagenetv2-matched-frequency-format-val',
        lambda root: rename(make_v2(root, ALL), '0', WNIDS[0]),
        'some class folders are numbered and some',
    ),
    'V2, a class missing': (
        'imagenetv2-top-images-format-val',
        lambda root: make_v2(root, ALL[:-1]),
        '999 of the class folders 0 to 999; 999 is missing',
    ),
    'V2, a name twice': (
        'imagenetv2-top-images-format-val',
        lambda root: make_v2(make_v2(root, ALL), [7], '{:04d}'),
        'two of its class folders have the same number',
    ),
    'Sketch, two classes merged': (
        'sketch',
        lambda root: shutil.move(make_wnids(root, ALL) / WNIDS[1], root / WNIDS[0] / 'more'),
        '999 of 1000 class folders',
    ),
    'val, flat': (
        'val',
        lambda root: picture(root / 'ILSVRC2012_val_00000001.JPEG', 0),
        'valprep.sh',
    ),
    'val, shuffled': ('val', lambda root: rotate(make_val(root, ALL)), 'are in the folder of their class'),
    'val, images renamed': ('val', lambda root: make_wnids(root, ALL), 'was renamed'),
    'val, an image in the wrong folder': (
        'val',
        lambda root: shutil.move(next((make_val(root, ALL) / WNIDS[0]).iterdir()), root / WNIDS[1]),
        '999 of 1000 class folders',
    ),
    'C, a corruption missing': (
        'imagenet-c',
        lambda root: shutil.rmtree(make_c(root, [0]) / 'fog'),
        '70 of the 75 folders <corruption>/<severity> of ImageNet-C; fog/1 is missing',
    ),
    'C, something else': ('imagenet-c', lambda root: make_wnids(root, [0]), '0 of the 75 folders'),
    'C, images missing': ('imagenet-c', lambda root: make_c(root, [0]), '1 of 1000 class folders'),
    'IN-9, a kind renamed': (
        'bg_challenge',
        lambda root: rename(make_whole_in9(root) / 'mixed_rand/val', '00_dog', 'dog'),
        "its class folder 'dog' is not one of 00_dog",
    ),
    'IN-9, a part missing': (
        'bg_challenge',
        lambda root: make_in9(root, dict(original=KINDS)),
        'a part of ImageNet-9 is missing',
    ),
    'IN-9, no map': (
        'bg_challenge',
        lambda root: (make_whole_in9(root) / 'in_to_in9.json').unlink(),
        'needs its class mapping: download https://',
    ),
    'IN-9, a map of something else': (
        'bg_challenge',
        lambda root: (make_whole_in9(root) / 'in_to_in9.json').write_text('{"0": 1}'),
        'does not map 1,000 classes',
    ),
    'ObjectNet, a class renamed': (
        'objectnet-1.0',
        lambda root: rename(make_objectnet(root) / 'images', 'chair', 'seat'),
        "its class folder 'seat' is not in mappings",
    ),
    'ObjectNet, no mappings': (
        'objectnet-1.0',
        lambda root: shutil.rmtree(make_objectnet(root) / 'mappings'),
        'folder_to_objectnet_label.json',
    ),
    'ObjectNet, an image missing': (
        'objectnet-1.0',
        lambda root: (make_objectnet(root) / 'images/squeegee/0.png').unlink(),
        'expected 6 images, found 5',
    ),
    'an empty folder': ('imagenet-a', lambda root: root.mkdir(), 'is empty'),
    'another name': ('imagenet-adversarial', lambda root: make_wnids(root, A200), 'expected folders such as'),
}


@pytest.mark.parametrize('mistake', MISTAKES)
def test_what_was_not_published_is_refused_with_the_fix(mistake, tmp_path, small_sets):
    place, make, sentence = MISTAKES[mistake]
    make(tmp_path / place)
    with pytest.raises(UserError) as error:
        evaluate(tmp_path, allow_partial=False)
    assert sentence in str(error.value)
    assert place in str(error.value) or str(tmp_path) in str(error.value)


def test_shuffled_folders_are_refused_even_of_a_part(tmp_path):
    rotate(make_c(tmp_path / 'imagenet-c', list(range(0, 1000, 50))) / 'snow' / '2')
    with pytest.raises(UserError, match='snow/2. is not ImageNet-C: only 0 of 20 images'):
        evaluate(tmp_path)


def test_kinds_that_were_shuffled_are_refused_by_the_names_of_their_images(tmp_path):
    folder = make_whole_in9(tmp_path / 'bg_challenge') / 'mixed_rand' / 'val'
    for kind, name in enumerate(CLASS_NAMES):
        for image in range(2):
            picture(folder / name / f'fg_{WNIDS[kind]}_{image:05d}_bg_{WNIDS[100]}_00000.JPEG', kind)
    assert evaluate(tmp_path)['imagenet_9_mixed_rand_top1_partial'] == 100
    rotate(folder)
    with pytest.raises(UserError, match='mixed_rand/val. is not ImageNet-9: only 0 of 18 images'):
        evaluate(tmp_path)


def test_the_folder_of_one_set_is_not_the_data_root(tmp_path):
    make_wnids(tmp_path / 'imagenet-a', A200[:3])
    with pytest.raises(UserError, match=f'use its parent folder, {tmp_path}'):
        find_suite(str(tmp_path / 'imagenet-a'))
    with pytest.raises(UserError, match='nothing. is not a folder'):
        find_suite(str(tmp_path / 'nothing'))


def test_what_is_missing_and_what_was_not_recognised_is_said(tmp_path):
    make_wnids(tmp_path / 'imagenet-a', A200)
    (tmp_path / 'cifar10').mkdir()
    (tmp_path / 'imagenet-r.tar').write_bytes(b'')
    found, notes = find_suite(str(tmp_path))
    assert [entry.variant.name for entry in found] == ['imagenet_a']
    assert notes[0].startswith('not found: ImageNet, ImageNetV2 matched-frequency') and 'ImageNet-R' in notes[0]
    assert notes[1:] == ['not recognised: cifar10', 'not unpacked: imagenet-r.tar']


@pytest.mark.parametrize(('num_classes', 'label_names'), [(10, None), (1000, WNIDS[::-1])])
def test_a_model_of_other_classes_is_refused(num_classes, label_names, tmp_path):
    make_wnids(tmp_path / 'imagenet-a', A200[:3])
    model = Knowing()
    model.num_classes, model.pretrained_cfg = num_classes, dict(label_names=label_names)
    with pytest.raises(UserError, match='1,000 classes of ImageNet'):
        evaluate(tmp_path, model)


def test_the_command_writes_one_record_per_model_and_prints_the_tables(tmp_path, capsys, quick_timing):
    make_wnids(tmp_path / 'sets' / 'imagenet-a', A200[:5])
    make_val(tmp_path / 'sets' / 'val', [1, 6])
    make_c(tmp_path / 'sets' / 'imagenet-c', [3])
    for name in ('one', 'two'):
        save_for_hf(timm.create_model('test_resnet'), tmp_path / name, safe_serialization=True)
    argv = [str(tmp_path / 'one'), str(tmp_path / 'two'), '--suite', 'robust', '--data-root', str(tmp_path / 'sets')]
    argv += ['--allow-partial', '--img-size', '32', '--workers', '0', '--results-file']
    records = validate([*argv, str(tmp_path / 'results.json')])
    write_results(tmp_path / 'results.csv', records)
    printed = capsys.readouterr()
    assert 'found in' in printed.err and 'not found: ImageNetV2' in printed.err
    for words in ('ImageNet-A (part of it)', 'ImageNet-C mCE, unnormalized (part of it)', 'on a part of ImageNet-C'):
        assert words in printed.out
    assert json.loads((tmp_path / 'results.json').read_text())[1]['imagenet_a_n_partial'] == 5
    with open(tmp_path / 'results.csv', newline='') as file:
        rows = list(csv.DictReader(file))
    assert [row['model'] for row in rows] == [record['model'] for record in records]
    for row, record in zip(rows, records):
        assert float(row['imagenet_a_top1_partial']) == record['imagenet_a_top1_partial']
        assert json.loads(row['imagenet_c_partial']) == record['imagenet_c_partial']
        assert record['params'] > 0 and record['top1'] is None


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['--suite', 'robust'], '--suite robust and --data-root DIR go together'),
        (['--data-root', 'sets'], '--suite robust and --data-root DIR go together'),
        (['--suite', 'robust', '--data-root', 'sets', '--no-data'], '--suite needs images'),
        (
            ['--suite', 'robust', '--data-root', 'sets', '--corrupt'],
            '--corrupt needs images: give --data-dir',
        ),
        (['--suite', 'robust', '--data-root', 'sets'], "the data root 'sets' is not a folder"),
    ],
)
def test_a_mistake_on_the_command_line_gets_one_sentence(argv, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(['test_resnet', *argv])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
