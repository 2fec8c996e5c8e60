"""Class maps: files, orders, and labels that are merged, renamed or left out."""

import json
import pickle
from pathlib import Path

import pytest
from torchvision.datasets import ImageFolder
from toys import make_images

from vitzoo.data import DataOptions, open_dataset
from vitzoo.data.class_map import ClassMapReader, read_class_map
from vitzoo.data.reader import LabelledReader
from vitzoo.data.third_party import TorchReader
from vitzoo.errors import UserError


class FewImages(LabelledReader):
    """A reader of labels."""

    root = 'photos'

    def __init__(self, class_names: list[str], labels: list):
        super().__init__()
        self.class_names, self.labels = class_names, labels
        self.is_multi_label = any(isinstance(label, list) for label in labels)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return f'image {index}', self.labels[index]

    def _filename(self, index, basename=False, absolute=False):
        return f'{index}.jpg'


class DecodedImages(list):
    """A dataset that does not list its targets, with the number of images that were decoded."""

    classes, num_decoded = ('dog', 'cat'), 0

    def __iter__(self):
        for item in super().__iter__():
            self.num_decoded += 1
            yield item


def test_images_are_decoded_once_for_their_labels():
    dataset = DecodedImages([('image', 0), ('image', 1), ('image', 0)])
    reader = ClassMapReader(TorchReader(dataset, 'photos'), {'cat': 'cat', 'dog': 'dog'})
    assert reader.labels == [1, 0, 1] and reader.reader.labels == [0, 1, 0]
    assert dataset.num_decoded == 3


@pytest.mark.parametrize(
    ('name', 'content', 'expected'),
    [
        ('a.txt', b'\xef\xbb\xbfdog\n\ncat \n', {'dog': 'dog', 'cat': 'cat'}),
        ('a.json', b'{"dog": 1, "cat": 0, "kitten": 0}', {'cat': 'cat', 'kitten': 'cat', 'dog': 'dog'}),
        ('a.json', b'{"n2": "dog", "n1": "cat", "n3": "cat"}', {'n1': 'cat', 'n3': 'cat', 'n2': 'dog'}),
        ('a.json', b'{"a": "class 10", "b": "class 9"}', {'b': 'class 9', 'a': 'class 10'}),
        ('a.pkl', pickle.dumps({7: 1, 3: 0}), {'3': '3', '7': '7'}),
    ],
)
def test_a_class_map_lists_names_in_label_order(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    found = read_class_map(str(tmp_path / name))
    assert list(found.items()) == list(expected.items())
    # as a run records it
    assert read_class_map(json.loads(json.dumps(found))) == found


@pytest.mark.parametrize(
    ('name', 'content', 'sentence'),
    [
        ('a.csv', b'', 'must be a .txt, .json or .pkl file'),
        ('a.txt', None, 'cannot read the class map .*No such file'),
        ('a.txt', b'', 'must map names of classes to labels'),
        ('a.txt', b'ant\ncrane\nbee\n crane\n', "several lines are 'crane'; leave one of them"),
        ('a.json', b'{"a": 0', 'cannot read the class map'),
        ('a.json', b'{"a": 0, "b": 1, "a": 1}', "the name 'a' is there several times; leave one of them"),
        ('a.json', b'["a"]', 'must map names of classes to labels'),
        ('a.json', b'{"a": true}', 'must map names of classes to labels'),
        ('a.json', b'{"a": 1, "b": 2}', 'must be 0, 1, 2, …, not 1, 2'),
        ('a.pkl', pickle.dumps(Path('a')), 'cannot read the class map .*not permitted'),
    ],
)
def test_a_class_map_that_cannot_be_used_gets_one_sentence(tmp_path, name, content, sentence):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        read_class_map(str(tmp_path / name))


@pytest.mark.parametrize(
    ('names', 'labels', 'new_labels', 'left_out'),
    [
        (['cat', 'cow', 'dog'], [0, 1, 2, 0], [1, 0, 1], ['cow']),
        (['cat', 'cow', 'kitten'], [[0, 2], [1], [], [2]], [[1], [], [], [1]], ['cow']),
        # numbers are positions in the map
        (['0', '1'], [0, 1, 1], [0, 1, 1], []),
        (['1', '5'], [0, 1, 0], [1, 1], ['5']),
    ],
)
def test_labels_are_those_of_the_map(names, labels, new_labels, left_out):
    reader = ClassMapReader(FewImages(names, labels), {'dog': 'dog', 'cat': 'cat', 'kitten': 'cat', 'emu': 'emu'})
    assert reader.class_names == ['dog', 'cat', 'emu']
    assert (reader.labels, reader.left_out) == (new_labels, left_out)
    assert [reader[i][1] for i in range(len(reader))] == new_labels
    kept = [i for i, label in enumerate(labels) if isinstance(label, list) or names[label] not in left_out]
    assert [reader[i][0] for i in range(len(reader))] == [f'image {i}' for i in kept]
    assert reader.filenames() == [f'{i}.jpg' for i in kept]


def test_a_class_of_the_map_may_have_its_own_name_in_the_data():
    renamed = {'n1': 'dog', 'n2': 'cat'}
    reader = ClassMapReader(FewImages(['cat', 'cow', 'dog', 'n1'], [0, 1, 2, 3]), renamed)
    assert (reader.class_names, reader.labels, reader.left_out) == (['dog', 'cat'], [1, 0, 0], ['cow'])
    # unless the map gives this name to another class
    swapped = {'cat': 'dog', 'dog': 'cat'}
    assert ClassMapReader(FewImages(['cat', 'dog'], [0, 1]), swapped).labels == [0, 1]
    assert ClassMapReader(FewImages(['7', '5'], [[0], [1, 0]]), {'n1': '5', 'n2': '7'}).labels == [[1], [0, 1]]


@pytest.mark.parametrize('labels', [[0, 0], [[0], []]])
def test_classes_without_images_do_not_count(labels):
    reader = ClassMapReader(FewImages(['cat', 'dog', 'cow'], labels), {'cat': 'cat'})
    assert reader.left_out == []
    with pytest.raises(UserError, match='none of the classes of photos \\(cat, …\\) is in the class map \\(dog, …\\)'):
        ClassMapReader(FewImages(['cat', 'dog'], labels), {'dog': 'dog'})


def test_a_map_without_any_class_of_the_data_gets_one_sentence():
    with pytest.raises(UserError, match='none of the classes of photos \\(cat, …\\) is in the class map \\(dog, …\\)'):
        ClassMapReader(FewImages(['cat'], [0]), {'dog': 'dog'})


def test_a_class_map_has_the_order_of_torchvisions_folders(tmp_path):
    names = ['apple', 'class1', 'class2', 'class10', 'Zoo']
    data = make_images(tmp_path, **{f'data_{name}': 2 for name in names}) / 'data'
    assert open_dataset(str(data), 'train').class_names == names
    theirs = ImageFolder(data).classes
    assert theirs == ['Zoo', 'apple', 'class1', 'class10', 'class2']
    (tmp_path / 'classes.txt').write_text('\n'.join(theirs))
    mapped = open_dataset(str(data), 'train', options=DataOptions(class_map=str(tmp_path / 'classes.txt')))
    assert mapped.class_names == theirs
