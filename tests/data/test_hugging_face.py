"""Hugging Face datasets: splits, columns and labels of any name and type."""

import sys
from collections import Counter
from io import BytesIO

import pytest
from hub import ClassLabel, ImageFeature, ListOf, Table, make_package, unknown_split
from PIL import Image

from vitzoo.data import open_dataset
from vitzoo.data.options import DataOptions
from vitzoo.errors import UserError


def picture(number: int) -> dict:
    file = BytesIO()
    Image.new('RGB', (8, 6), (number % 256, 0, 0)).save(file, 'PNG')
    return dict(bytes=file.getvalue(), path=f'{number}.png')


CIFAR = dict(img=ImageFeature(), label=ClassLabel('cat', 'dog'))


@pytest.fixture
def hub(monkeypatch):
    """A function that fills the Hub with one dataset: its features and, for each split, rows without images."""

    def fill(features: dict, **splits: list[dict]) -> None:
        image_columns = [name for name, feature in features.items() if isinstance(feature, ImageFeature)]

        def load_dataset(path, name, split, cache_dir):
            if name not in (None, 'plain'):
                raise ValueError(f"BuilderConfig '{name}' not found.")
            if split not in splits:
                raise unknown_split(split, list(splits))
            rows = [dict.fromkeys(image_columns, picture(i)) | row for i, row in enumerate(splits[split])]
            return Table(features, rows)

        monkeypatch.setitem(sys.modules, 'datasets', make_package(load_dataset))

    return fill


def labels(*values) -> list[dict]:
    return [dict(label=value) for value in values]


def test_images_named_by_index_have_another_fingerprint_in_another_dataset_split_or_subset(hub):
    hub(CIFAR, train=labels(0, 1), val=labels(0, 1), test=labels(0, 1))

    def fingerprint(data_dir: str, **options) -> str:
        options = DataOptions(**options)
        whole = open_dataset(data_dir, 'val', options=options).fingerprint
        assert whole == open_dataset(f'{data_dir}:cache', 'val', options=options).fingerprint
        return whole

    found = [fingerprint('hfds/me/pets', **options) for options in ({}, dict(val_split='test'))]
    found += [fingerprint('hfds/me/pets', data_subset='plain'), fingerprint('hfds/you/pets')]
    assert len(set(found)) == 4


@pytest.mark.parametrize(('splits', 'sizes'), [(('train',), (8, 2)), (('train', 'test'), (10, 10))])
def test_a_dataset_without_a_validation_split_is_divided(hub, splits, sizes):
    hub(CIFAR, **{split: labels(*[0, 1] * 5) for split in splits})
    parts = [open_dataset('hfds/me/pets', split, val_fraction=0.2) for split in ('train', 'val')]
    assert tuple(map(len, parts)) == sizes
    assert parts[1][0][0].size == (8, 6) and parts[1].class_names == ['cat', 'dog']
    if len(splits) == 1:
        with pytest.raises(UserError, match='has a train split but no split named val, validation'):
            open_dataset('hfds/me/pets', 'val')


@pytest.mark.parametrize(
    ('column', 'values', 'names', 'targets'),
    [
        (dict(label=ClassLabel('cat', 'dog', 'cow')), [1, 0], ['cat', 'dog', 'cow'], [1, 0]),
        (dict(fine=ClassLabel('cat', 'dog')), [1, 0], ['cat', 'dog'], [1, 0]),
        (dict(label='int64'), [10, 2, 10], ['2', '10'], [1, 0, 1]),
        (dict(label='string'), ['dog', 'cat'], ['cat', 'dog'], [1, 0]),
        (dict(label='bool'), [True, False], ['False', 'True'], [1, 0]),
    ],
)
@pytest.mark.parametrize('image', ['image', 'img'])
def test_columns_and_labels_have_any_name_and_type(hub, image, column, values, names, targets):
    (name,) = column
    hub({'id': 'int64', image: ImageFeature(), **column}, train=[{name: value, 'id': 7} for value in values])
    dataset = open_dataset('hfds/me/pets', 'train')
    assert (dataset.class_names, dataset.targets) == (names, targets)
    assert dataset[1][0].getpixel((0, 0)) == (1, 0, 0) and dataset[1][1] == targets[1]


@pytest.mark.parametrize('feature', [ListOf(ClassLabel('cat', 'dog')), ListOf('string')])
def test_images_may_have_several_labels(hub, feature):
    lists = [[0], [], [1, 0]] if isinstance(feature.feature, ClassLabel) else [['cat'], [], ['dog', 'cat']]
    hub(dict(image=ImageFeature(), label=feature), train=labels(*lists))
    dataset = open_dataset('hfds/me/pets', 'train', multi_label=True)
    assert (dataset.class_names, dataset.targets) == (['cat', 'dog'], [[0], [], [1, 0]])
    assert dataset[2][1].tolist() == [1, 1]
    with pytest.raises(UserError, match='has several labels per image; add --multi-label, or take a model that was'):
        open_dataset('hfds/me/pets', 'train')
    hub(dict(img=ImageFeature(), label=feature), train=labels([], []))
    with pytest.raises(UserError, match='train.* gives no image a label; add labels, or choose another column'):
        open_dataset('hfds/me/pets', 'train', multi_label=True)
    hub(CIFAR, train=labels(0))
    with pytest.raises(UserError, match='one label per image; remove --multi-label, or take a model that was trained'):
        open_dataset('hfds/me/pets', 'train', multi_label=True)


def test_options_choose_splits_columns_and_the_subset(hub):
    features = dict(left=ImageFeature(), right=ImageFeature(), coarse=ClassLabel('x', 'y'), fine=ClassLabel('a', 'b'))
    row = dict(left=picture(1), right=picture(2), coarse=1, fine=0)
    hub(features, train=[row], day=[row, row], night=[row] * 3)
    options = DataOptions('day', 'night', 'right', 'fine', 'plain')
    train_set, val_set = (open_dataset('hfds/me/pets', split, options=options) for split in ('train', 'val'))
    assert (len(train_set), len(val_set), train_set.class_names) == (2, 3, ['a', 'b'])
    assert val_set[0][0].getpixel((0, 0)) == (2, 0, 0)


TWO_IMAGES = dict(left=ImageFeature(), right=ImageFeature(), label=ClassLabel('a'))


@pytest.mark.parametrize(
    ('features', 'rows', 'options', 'sentence'),
    [
        (TWO_IMAGES, labels(0), {}, "no column 'image', but left, right, label; choose one .* --input-key"),
        (dict(image=ImageFeature(), a='int64', b='int64'), [dict(a=1, b=1)], {}, "no column 'label', .* --target-key"),
        (CIFAR, labels(0), dict(input_key='imga'), "no column 'imga', did you mean img\\?; correct --input-key"),
        (CIFAR, labels(0), dict(input_key='label'), "the column 'label' of .* has no images: not an image"),
        (CIFAR, labels(0), dict(data_subset='fancy'), "BuilderConfig 'fancy' not found"),
        (CIFAR, labels(0), dict(train_split='trian'), 'Unknown split "trian"'),
        (CIFAR, labels(0), dict(train_split='.'), "has named splits, not '.'; remove --train-split"),
        (CIFAR, labels(0, -1), {}, 'row 1 of hfds/me/pets \\(train\\) has the label -1, which is not a class'),
        (CIFAR, [], {}, 'hfds/me/pets \\(train\\) contains no images; choose another split, or add some'),
        (dict(img=ImageFeature(), label='int64'), labels(1, None), {}, 'row 1 .* has the label None'),
        (dict(img=ImageFeature(), label='float32'), labels(0.5), {}, 'has values such as 0.5, which are not classes'),
    ],
)
def test_columns_that_cannot_be_used_get_one_sentence(hub, features, rows, options, sentence):
    hub(features, train=rows)
    with pytest.raises(UserError, match=sentence):
        open_dataset('hfds/me/pets', 'train', options=DataOptions(**options))


def test_a_row_without_an_image_is_named(hub):
    hub(CIFAR, train=[dict(img=None, label=0)])
    with pytest.raises(UserError, match='cannot read the image 00000000 of .* has no image in this row'):
        open_dataset('hfds/me/pets', 'train')[0]


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'datasets', None)
    with pytest.raises(UserError, match='needs the package datasets: pip install datasets'):
        open_dataset('hfds/me/pets', 'train')


def test_a_real_parquet_file_is_read(tmp_path, monkeypatch):
    # another test may have put its own package there
    monkeypatch.delitem(sys.modules, 'datasets', raising=False)
    datasets = pytest.importorskip('datasets')
    features = datasets.Features(
        img=datasets.Image(), label=datasets.ClassLabel(names=['cat', 'dog']), tag=datasets.Value('string')
    )
    arrow, parquet = pytest.importorskip('pyarrow'), pytest.importorskip('pyarrow.parquet')
    columns = dict(img=[picture(i) for i in range(10)], label=[0, 1] * 5, tag=['x', 'y'] * 5)
    (tmp_path / 'data').mkdir()
    parquet.write_table(arrow.table(columns, features.arrow_schema), tmp_path / 'data' / 'train-00000.parquet')
    data_dir = f'hfds/{tmp_path / "data"}:{tmp_path / "cache"}'
    parts = [open_dataset(data_dir, split, val_fraction=0.2) for split in ('train', 'val')]
    assert [Counter(part.targets) for part in parts] == [{0: 4, 1: 4}, {0: 1, 1: 1}]
    assert parts[0][2][0].getpixel((0, 0)) == (int(parts[0].filename(2)), 0, 0)
    by_tag = open_dataset(data_dir, 'train', options=DataOptions(target_key='tag', train_split='train[:3]'))
    assert (by_tag.class_names, by_tag.targets) == (['x', 'y'], [0, 1, 0])
    with pytest.raises(UserError, match="no column 'nose', only img, label, tag"):
        open_dataset(data_dir, 'train', options=DataOptions(input_key='nose'))
    with pytest.raises(UserError, match='Unknown split "trian"'):
        open_dataset(data_dir, 'train', options=DataOptions(train_split='trian'))
