"""Reading images, class labels, and batches that do not depend on the number of workers or processes."""

import hashlib
import pickle
from collections import Counter
from itertools import chain
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image, ImageColor
from timm.data import create_transform
from torch.utils.data import DataLoader
from torchvision.datasets import QMNIST, FakeData
from torchvision.datasets.folder import default_loader

from vitzoo.data import eval_loader, eval_transform, open_dataset, resolve_data_config, train_loader, train_transform
from vitzoo.data.dataset import Images
from vitzoo.data.decode import read_rgb
from vitzoo.data.held_out import hash_file
from vitzoo.data.loader import EvalBatches, TrainBatches
from vitzoo.data.third_party import TorchReader
from vitzoo.data.transforms import PIPELINES, Albumentations
from vitzoo.errors import UserError
from vitzoo.train.recipe import make_recipe

RAMP = np.linspace(0, 1, 64 * 64).reshape(64, 64)


def save(path, image, **kwargs):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **kwargs)
    return path


def colour(name, size=(32, 32)):
    return Image.new('RGB', size, name)


@pytest.mark.parametrize(
    ('suffix', 'image'),
    [
        ('png', Image.fromarray((RAMP * 65535).astype(np.uint16))),
        ('tif', Image.fromarray((RAMP * 65535).astype(np.int32))),
        ('tif', Image.fromarray(RAMP.astype(np.float32))),
        ('tiff', Image.fromarray((RAMP * 255).astype(np.float32))),
        ('png', Image.fromarray((RAMP * 255).astype(np.uint8))),
    ],
    ids=['16-bit', '32-bit', 'float to 1', 'float to 255', '8-bit'],
)
def test_grey_of_any_depth_keeps_its_tones(tmp_path, suffix, image):
    pixels = np.asarray(read_rgb(save(tmp_path / f'image.{suffix}', image)))
    assert np.abs(pixels - RAMP[..., None] * 255).max() <= 1


@pytest.mark.parametrize('mode', ['RGBA', 'LA', 'P'])
def test_what_is_transparent_becomes_white(tmp_path, mode):
    image = Image.new('RGBA', (8, 8), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 4, 8))
    pixels = np.asarray(read_rgb(save(tmp_path / 'image.png', image.convert(mode))))
    assert (pixels[:, :4] == 0).all()
    assert (pixels[:, 4:] == 255).all()


STRIPES = (np.stack([RAMP, RAMP.T, 1 - RAMP], 2)[:, :40] * 255).astype(np.uint8)


@pytest.mark.parametrize('colours', ['red', 'lime', 'blue', 'white', 'black', '#804020'])
@pytest.mark.parametrize('suffix', ['jpg', 'tif'])
def test_cmyk_keeps_its_colours(tmp_path, suffix, colours):
    pixels = np.asarray(read_rgb(save(tmp_path / f'image.{suffix}', colour(colours).convert('CMYK'), quality=95)))
    assert np.abs(pixels.astype(int) - ImageColor.getrgb(colours)).max() < 8


# the inverse of each EXIF orientation: rotations by 90 degrees counterclockwise, then a horizontal flip
# (the table of https://exiftool.org/TagNames/EXIF.html#Orientation, in numpy)
ORIENTATIONS = {1: (0, False), 2: (0, True), 3: (2, False), 4: (2, True), 5: (3, True), 6: (3, False), 7: (1, True)}
ORIENTATIONS |= {8: (1, False)}


@pytest.mark.parametrize(('orientation', 'turns', 'flips'), [(key, *value) for key, value in ORIENTATIONS.items()])
@pytest.mark.parametrize('suffix', ['png', 'jpg', 'tif', 'webp'])
def test_exif_rotation_is_applied(tmp_path, suffix, orientation, turns, flips):
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = STRIPES[:, ::-1] if flips else STRIPES
    stored = np.rot90(stored, -turns)
    path = save(tmp_path / f'turned.{suffix}', Image.fromarray(np.ascontiguousarray(stored)), exif=exif, quality=100)
    pixels = np.asarray(read_rgb(path)).astype(int)
    assert pixels.shape == STRIPES.shape
    assert np.abs(pixels - STRIPES).mean() < 3
    # opencv rotates JPEG files as well
    if suffix == 'jpg':
        assert np.abs(pixels - cv2.imread(str(path))[..., ::-1]).mean() < 1


def test_a_few_colours_from_a_palette_stay_these_colours(tmp_path):
    colours = np.array([[255, 0, 0], [0, 128, 7], [12, 34, 56]], dtype=np.uint8)[np.arange(60).reshape(6, 10) % 3]
    for suffix in ('png', 'gif', 'bmp'):
        path = save(tmp_path / f'image.{suffix}', Image.fromarray(colours).convert('P', palette=Image.Palette.ADAPTIVE))
        assert Image.open(path).mode == 'P'
        assert (np.asarray(read_rgb(path)) == colours).all()


def test_black_and_white_is_black_and_white(tmp_path):
    pattern = np.arange(60).reshape(6, 10) % 2 == 0
    for suffix in ('png', 'tif', 'bmp'):
        path = save(tmp_path / f'image.{suffix}', Image.fromarray(pattern))
        assert Image.open(path).mode == '1'
        assert (np.asarray(read_rgb(path)) == pattern[..., None] * 255).all()


@pytest.mark.parametrize('suffix', ['gif', 'png', 'webp', 'tif'])
def test_of_an_animation_the_first_picture_counts(tmp_path, suffix):
    frames = [colour(name) for name in ('red', 'blue', 'lime')]
    options = dict(lossless=True) if suffix == 'webp' else {}
    path = save(tmp_path / f'image.{suffix}', frames[0], save_all=True, append_images=frames[1:], **options)
    assert Image.open(path).n_frames == 3
    assert (np.asarray(read_rgb(path)) == (255, 0, 0)).all()


@pytest.mark.parametrize('channels', [3, 4])
@pytest.mark.parametrize('suffix', ['png', 'tif'])
def test_colour_of_16_bits_keeps_its_tones(tmp_path, suffix, channels):
    values = np.stack([RAMP, RAMP.T, 1 - RAMP, np.ones_like(RAMP)], 2)[..., :channels] * 65535
    # opencv orders channels as BGR
    order = [2, 1, 0, 3][:channels]
    assert cv2.imwrite(str(tmp_path / f'image.{suffix}'), values.astype(np.uint16)[..., order])
    pixels = np.asarray(read_rgb(tmp_path / f'image.{suffix}'))
    assert np.abs(pixels - values[..., :3] / 257).max() <= 1


def test_digits_that_are_not_decimal_are_letters_of_a_name(tmp_path):
    names = ['2²', '10', '①', '②', '٣']
    for name in names:
        save(tmp_path / 'train' / name / 'x1²2.png', colour('red'))
    assert sorted(open_dataset(str(tmp_path), 'train').class_names) == sorted(names)


def test_an_empty_name_is_not_the_current_folder(tmp_path, monkeypatch):
    save(tmp_path / 'train' / 'cat' / 'a.png', colour('red'))
    monkeypatch.chdir(tmp_path)
    assert len(open_dataset('.', 'train')) == 1
    with pytest.raises(UserError, match='data folder is an empty text'):
        open_dataset('', 'train')


def test_class_folders_are_in_natural_order_and_hidden_or_empty_ones_do_not_count(tmp_path):
    for name in ('10', '9', '2', '.ipynb_checkpoints', '.git/objects'):
        save(tmp_path / 'train' / name / 'a.png', colour('red'))
    save(tmp_path / 'train' / '9' / 'deeper' / 'b.JPG', colour('red'), format='JPEG')
    (tmp_path / 'train' / '5').mkdir()
    (tmp_path / 'train' / '.DS_Store').write_bytes(b'x')
    (tmp_path / 'train' / '2' / '._a.png').write_bytes(b'x')
    (tmp_path / 'train' / '2' / 'notes.txt').write_text('x')
    dataset = open_dataset(str(tmp_path), 'train')
    assert dataset.class_names == ['2', '9', '10']
    assert [(dataset.filename(i), dataset[i][1]) for i in range(len(dataset))] == [
        ('2/a.png', 0),
        ('9/a.png', 1),
        ('9/deeper/b.JPG', 1),
        ('10/a.png', 2),
    ]


def test_labels_follow_the_training_classes(tmp_path):
    for name in ('train/ant', 'train/bee', 'train/cat', 'validation/cat'):
        save(tmp_path / name / 'a.png', colour('red'))
    train_set = open_dataset(str(tmp_path), 'train')
    val_set = open_dataset(str(tmp_path), 'val', class_to_idx=train_set.class_to_idx)
    assert val_set.class_names == train_set.class_names == ['ant', 'bee', 'cat']
    assert val_set[0][1] == 2


def make_nothing(root):
    return root / 'nowhere'


def make_empty(root):
    (root / '.hidden').mkdir()
    return root


def make_flat(root):
    save(root / 'a.png', colour('red'))
    return root


def make_imageless(root):
    (root / 'train' / 'ant').mkdir(parents=True)
    (root / 'train' / 'ant' / 'a.txt').write_text('x')
    return root


def make_no_train(root):
    save(root / 'val' / 'ant' / 'a.png', colour('red'))
    return root


def make_text_file(root):
    (root / 'data.csv').write_text('x')
    return root / 'data.csv'


def make_broken_tar(root):
    (root / 'train.tar').write_bytes(b'x' * 2000)
    return root


@pytest.mark.parametrize(
    ('make', 'sentence'),
    [
        (make_nothing, 'nowhere. does not exist'),
        (make_empty, 'is empty'),
        (make_flat, 'has 1 image but no class folders'),
        (make_imageless, 'there are no images'),
        (make_no_train, 'has a val split but no split named train'),
        (make_text_file, 'neither a folder nor a .tar or .zip file'),
        (make_broken_tar, 'cannot read the tar file'),
    ],
)
def test_data_that_is_not_there_gets_one_sentence(tmp_path, make, sentence):
    with pytest.raises(UserError, match=sentence):
        open_dataset(str(make(tmp_path)), 'train')


@pytest.mark.parametrize(
    ('data_dir', 'sentence'), [('torch/nonesuch', 'Unknown torchvision'), ('tfds/mnist', 'needs the package')]
)
def test_a_named_dataset_that_is_not_there_gets_one_sentence(data_dir, sentence):
    with pytest.raises(UserError, match=sentence):
        open_dataset(data_dir, 'train')


def test_a_class_that_was_not_trained_on_is_named(tmp_path):
    save(tmp_path / 'val' / 'wasp' / 'a.png', colour('red'))
    with pytest.raises(UserError, match="class 'wasp' of .* is not one of the 2 training classes"):
        open_dataset(str(tmp_path), 'val', class_to_idx={'ant': 0, 'bee': 1})


@pytest.mark.parametrize('damage', ['text', 'truncated', 'empty'])
def test_an_unreadable_image_is_named(tmp_path, damage):
    path = save(tmp_path / 'train' / 'ant' / 'noise.jpg', Image.effect_noise((64, 64), 50))
    whole = path.read_bytes()
    path.write_bytes({'text': b'not an image', 'truncated': whole[: len(whole) // 2], 'empty': b''}[damage])
    with pytest.raises(UserError, match='cannot read the image ant/noise.jpg of .*train'):
        open_dataset(str(tmp_path), 'train')[0]


def test_a_torchvision_dataset_reads_like_a_folder():
    dataset = Images(TorchReader(FakeData(size=12, image_size=(3, 8, 8), num_classes=3), 'fake'))
    assert dataset.class_names == ['0', '1', '2']
    assert dataset[0][0].size == (8, 8)
    assert {dataset[i][1] for i in range(12)} <= {0, 1, 2}


def test_the_classes_of_torchvisions_imagenet_are_wordnet_ids(tmp_path):
    words = {'n02012849': ('crane',), 'n03126707': ('crane',), 'n01440764': ('tench', 'Tinca tinca')}
    torch.save((words, []), tmp_path / 'meta.bin')
    for wnid in words:
        save(tmp_path / 'val' / wnid / '0.png', colour('red'))
    dataset = open_dataset(f'torch/imagenet:{tmp_path}', 'val')
    assert dataset.class_names == sorted(words) and dataset.targets == [0, 1, 2]


def test_two_classes_of_one_name_get_one_sentence():
    dataset = SimpleNamespace(classes=['crane', 'tench', 'crane'], targets=[0, 1, 2])
    with pytest.raises(UserError, match="birds has several classes called 'crane'; give them different names"):
        Images(TorchReader(dataset, 'birds'))


def test_of_several_targets_of_a_torchvision_dataset_the_first_is_the_label():
    dataset = QMNIST.__new__(QMNIST)
    dataset.targets = torch.arange(16).reshape(2, 8)
    assert Images(TorchReader(dataset, 'torch/qmnist')).targets == [0, 8]


@pytest.mark.parametrize('name', ['image_folder', 'folder'])
def test_torchvisions_folders_are_decoded_like_ours(tmp_path, name):
    images = {
        'deep.png': Image.fromarray((RAMP * 65535).astype(np.uint16)),
        'clear.png': Image.new('RGBA', (8, 8), (10, 20, 30, 0)),
        'noise.jpg': Image.effect_noise((64, 64), 50),
    }
    for file, image in images.items():
        save(tmp_path / 'ant' / file, image)
    for transform in (None, train_transform(make_recipe(dict(no_aug=True)), DATA_CONFIG)):
        ours = open_dataset(str(tmp_path), 'val', transform)
        theirs = open_dataset(f'torch/{name}:{tmp_path}', 'val', transform)
        for (image, _), (other, _) in zip(ours, theirs, strict=True):
            assert np.array_equal(image, other)
    # data without splits is divided
    sizes = [len(open_dataset(f'torch/{name}:{tmp_path}', split, val_fraction=0.4)) for split in ('train', 'val')]
    assert sizes == [2, 1]


def test_torchvisions_folders_have_the_hashes_of_held_out_images_that_they_had(tmp_path):
    paths = [save(tmp_path / 'ant' / f'{i}.png', Image.effect_noise((16, 16), 50)) for i in range(2)]
    reader = open_dataset(f'torch/image_folder:{tmp_path}', 'val').reader
    assert hash_file(reader, 0) == hashlib.sha256(default_loader(paths[0]).tobytes()).hexdigest()
    paths[1].write_bytes(paths[1].read_bytes()[:100])
    assert hash_file(reader, 1) == ''


def test_the_fingerprint_of_files_is_of_their_names_and_of_indices_also_of_their_dataset(images):
    names = open_dataset(images, 'val').reader.filenames()
    expected = hashlib.sha256('\0'.join(names).encode()).hexdigest()[:8]
    assert open_dataset(images, 'val').fingerprint == expected
    fake = FakeData(size=12, image_size=(3, 8, 8), num_classes=3)
    train, val = (Images(TorchReader(fake, 'torch/fake:here', f'torch/fake {split}')) for split in ('train', 'val'))
    assert train.fingerprint != val.fingerprint


def test_worker_processes_read_the_same_from_a_tar():
    batches = {}
    for workers in (0, 2):
        dataset = open_dataset('sample', 'val', lambda image: torch.tensor(np.asarray(image)))
        # opened in the parent first, where a shared file position would give other bytes
        dataset[0]
        batches[workers] = list(eval_loader(dataset, 64, workers))
    for (images, labels), (other_images, other_labels) in zip(batches[0], batches[2], strict=True):
        assert torch.equal(images, other_images) and torch.equal(labels, other_labels)


@pytest.mark.parametrize('num_images', [1, 3, 5, 10, 17, 22])
@pytest.mark.parametrize('batch_size', [1, 3, 4])
def test_processes_evaluate_every_image_once_in_the_same_batches(num_images, batch_size):
    alone = list(EvalBatches(num_images, batch_size))
    assert list(chain.from_iterable(alone)) == list(range(num_images))
    for world in (2, 3):
        shares = [list(EvalBatches(num_images, batch_size, rank=rank, world=world)) for rank in range(world)]
        assert sorted(chain.from_iterable(shares)) == alone
        assert [len(EvalBatches(num_images, batch_size, rank=r, world=world)) for r in range(world)] == [
            len(share) for share in shares
        ]


def steps_of(epoch=0, first_step=0, world=1, accum=1, num_images=50, batch_size=12, **kwargs):
    """The (index, seed numbers) of each optimizer step, over all processes."""
    steps = None
    for rank in range(world):
        batches = TrainBatches(num_images, batch_size, accum, rank, world, **kwargs)
        batches.start_at(epoch, first_step)
        micro = list(batches)
        assert len(micro) == len(batches)
        assert {len(keys) for keys in micro} == {batch_size // (world * accum)}
        steps = steps or [[] for _ in range(len(micro) // accum)]
        for number, keys in enumerate(micro):
            steps[number // accum] += keys
    return [sorted(step) for step in steps]


@pytest.mark.parametrize(('world', 'accum'), [(2, 1), (1, 2), (3, 2), (4, 1)])
def test_a_step_has_the_same_images_however_it_is_dealt_out(world, accum):
    assert steps_of(world=world, accum=accum) == steps_of()


def test_two_processes_make_the_same_micro_batches_as_two_accumulation_steps():
    processes = [list(TrainBatches(50, 12, rank=rank, world=2)) for rank in range(2)]
    assert list(chain.from_iterable(zip(*processes))) == list(TrainBatches(50, 12, accum=2))


def test_an_epoch_has_each_image_at_most_once_in_a_new_order():
    epochs = [[index for index, _ in chain.from_iterable(steps_of(epoch))] for epoch in range(3)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == 48
    assert epochs[0] != epochs[1]
    assert set(epochs[0]) | set(epochs[1]) | set(epochs[2]) == set(range(50))
    assert steps_of(seed=1) != steps_of(seed=2)


def test_an_epoch_is_taken_up_in_the_middle():
    assert steps_of(epoch=3, first_step=2) == steps_of(epoch=3)[2:]


def test_repeated_augmentation_repeats_images_with_different_seeds():
    keys = list(chain.from_iterable(steps_of(aug_repeats=3)))
    assert set(Counter(index for index, _ in keys).values()) == {3}
    assert len({numbers for _, numbers in keys}) == len(keys) == 48


UNEQUAL = [0] * 36 + [1] * 9 + [3] * 5


def test_classes_of_unequal_size_are_drawn_equally_often():
    steps = [chain.from_iterable(steps_of(epoch, labels=UNEQUAL)) for epoch in range(24)]
    epochs = [[index for index, _ in epoch] for epoch in steps]
    for epoch in epochs:
        assert len(epoch) == 48
        times, classes = Counter(epoch), Counter(UNEQUAL[index] for index in epoch)
        # 50 draws of three classes, two of which are dropped with the incomplete batch
        assert all(14 <= classes[label] <= 17 for label in (0, 1, 3))
        for label in (0, 1, 3):
            of_class = [times[index] for index in range(50) if UNEQUAL[index] == label]
            # dropped images may be of any class
            assert max(of_class) - min(of_class) <= 3
    assert epochs[0] != epochs[1]
    # all images of a large class are drawn in some epoch
    assert {index for epoch in epochs for index in epoch} == set(range(50))


def test_the_images_of_a_class_are_shuffled_from_their_order_in_the_data():
    labels = [index * index % 7 for index in range(1000)]
    expected = [[index for index in range(1000) if labels[index] == label] for label in (0, 1, 2, 4)]
    assert [images.tolist() for images in TrainBatches(1000, 10, labels=labels).classes] == expected


def test_drawing_equally_follows_from_seed_and_epoch_for_any_processes_and_after_an_interruption():
    whole = steps_of(epoch=2, labels=UNEQUAL, seed=3)
    for world, accum in ((2, 1), (1, 2), (3, 2)):
        assert steps_of(epoch=2, world=world, accum=accum, labels=UNEQUAL, seed=3) == whole
    assert steps_of(epoch=2, first_step=2, labels=UNEQUAL, seed=3) == whole[2:]
    assert steps_of(epoch=2, labels=UNEQUAL, seed=4) != whole


@pytest.fixture
def striped_dataset(tmp_path):
    """The same image 32 times, so that images differ only by augmentation."""
    stripes = Image.fromarray((np.stack([RAMP, RAMP.T, 1 - RAMP], 2) * 255).astype(np.uint8))
    for number in range(32):
        save(tmp_path / 'train' / 'ant' / f'{number}.png', stripes)
    return open_dataset(str(tmp_path), 'train')


DATA_CONFIG = dict(
    input_size=(3, 32, 32), interpolation='bicubic', mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=0.9, crop_mode='center'
)


@pytest.mark.parametrize('aug', [dict(aa='rand-m9-mstd0.5-inc1', reprob=0.5), dict(aug='albumentations')], ids=str)
def test_augmentation_is_the_same_for_any_number_of_workers_and_new_for_every_image(striped_dataset, aug):
    striped_dataset.transform = train_transform(make_recipe(aug), DATA_CONFIG)
    streams = []
    for workers in (0, 2):
        batches = TrainBatches(32, 8, seed=5)
        loader = train_loader(striped_dataset, batches, workers)
        stream = []
        for epoch in range(2):
            batches.start_at(epoch)
            stream += [image for images, _ in loader for image in images]
        streams.append(torch.stack(stream))
    assert torch.equal(*streams)
    assert len(streams[0].flatten(1).unique(dim=0)) == 64


def test_albumentations_in_a_plain_loader_differ_between_workers_and_epochs_and_follow_the_seed(striped_dataset):
    striped_dataset.transform = lambda image: torch.tensor(np.asarray(strong(image)))
    strong = Albumentations([{'Rotate': {'limit': 90, 'p': 1}}])
    streams = []
    for _ in range(2):
        torch.manual_seed(3)
        loader = DataLoader(striped_dataset, batch_size=4, num_workers=2)
        streams.append(torch.cat([images for _ in range(3) for images, _ in loader]))
    assert torch.equal(*streams)
    assert len(streams[0].flatten(1).unique(dim=0)) == 3 * 32


@pytest.mark.parametrize('name', PIPELINES)
def test_a_ready_made_pipeline_survives_yaml_and_pickle(name):
    image = Image.fromarray((np.stack([RAMP, RAMP.T, 1 - RAMP], 2) * 255).astype(np.uint8))
    pipeline = Albumentations(name)
    results = []
    for copy in (
        pipeline,
        Albumentations(yaml.safe_load(yaml.safe_dump(pipeline.pipeline))),
        pickle.loads(pickle.dumps(pipeline)),
    ):
        torch.manual_seed(0)
        results.append(np.stack([np.asarray(copy(image)) for _ in range(8)]))
    assert (results[0] == results[1]).all() and (results[0] == results[2]).all()
    assert (results[0][0] != results[0][1:]).any()


@pytest.mark.parametrize(
    ('pipeline', 'sentence'),
    [
        ('mild', "unknown albumentations pipeline 'mild'; use light, medium, strong"),
        ([{'Rotat': {}}], "no transform 'Rotat', did you mean Rotate"),
        ([{'Rotate': {'limt': 10}}], "Rotate: Argument\\(s\\) 'limt'"),
        ([{'OneOf': {'transforms': [{'Blurr': {}}]}}], "no transform 'Blurr'"),
        ([{'Rotate': {}, 'Blur': {}}], 'one name with its arguments'),
        (['Rotate'], 'one name with its arguments'),
        ([{'Resize': {'height': 8, 'width': 8}}], 'changes the image size'),
        ([{'Rotate': 3}], 'the arguments of albumentations Rotate are names with their values, not 3'),
        ([{'OneOf': {'transforms': 3}}], 'the transforms of albumentations OneOf are a list, not 3'),
        ([{'Normalize': {'p': 1}}], 'makes an array of float32'),
        ([{'ToGray': {'num_output_channels': 1, 'p': 1}}], 'leave out what changes the channels or normalizes'),
    ],
)
def test_a_mistake_in_a_pipeline_gets_one_sentence(pipeline, sentence):
    with pytest.raises(UserError, match=sentence):
        Albumentations(pipeline)


@pytest.mark.parametrize('suffix', ['jpg', 'png'])
@pytest.mark.parametrize('size', [(1, 1), (1, 9), (2, 1)])
def test_a_crop_has_at_least_one_pixel(tmp_path, suffix, size):
    save(tmp_path / 'a' / f'1.{suffix}', colour('red', size))
    transform = train_transform(make_recipe({}), dict(resolve_data_config(timm.create_model('test_vit'), 16)))
    dataset = open_dataset(str(tmp_path), 'train', transform)
    torch.manual_seed(0)
    assert {dataset[0][0].shape for _ in range(60)} == {(3, 16, 16)}


@pytest.mark.parametrize('error', [cv2.error('too large'), ValueError('bad')])
def test_an_image_that_a_library_cannot_decode_is_named(tmp_path, error):
    save(tmp_path / 'a' / '1.png', colour('red'))

    def fail(file):
        raise error

    dataset = open_dataset(str(tmp_path), 'train', SimpleNamespace(read=fail))
    with pytest.raises(UserError, match='cannot read the image a/1.png of'):
        dataset[0]


def test_evaluation_is_timms_transform_elementwise():
    image = Image.fromarray((np.stack([RAMP, RAMP.T, 1 - RAMP], 2) * 255).astype(np.uint8))
    assert torch.equal(eval_transform(DATA_CONFIG)(image), create_transform(**DATA_CONFIG, is_training=False)(image))


def test_a_model_is_evaluated_at_the_size_it_is_trained_at():
    model = timm.create_model('test_vit', img_size=48)
    assert resolve_data_config(model, img_size=48)['input_size'] == (3, 48, 48)
    assert resolve_data_config(timm.create_model('test_resnet'), [32, 64], 1.0)['input_size'] == (3, 32, 64)
    assert resolve_data_config(timm.create_model('test_resnet'), crop_pct=1.0)['crop_pct'] == 1


def test_grey_models_get_one_channel():
    config = dict(DATA_CONFIG, input_size=(1, 32, 32), mean=(0.5,), std=(0.5,))
    for transform in (train_transform(make_recipe({}), config), eval_transform(config)):
        assert transform(colour('red', (40, 50))).shape == (1, 32, 32)


def test_an_unknown_auto_augment_policy_gets_one_sentence():
    with pytest.raises(UserError, match="unknown aa 'best'"):
        train_transform(SimpleNamespace(**vars(make_recipe(dict(aa='best')))), DATA_CONFIG)
