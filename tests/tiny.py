"""Tiny models, and a few small pictures as every kind of data that the commands read."""

import csv
import io
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import timm
import torch
from hub import ClassLabel, ImageFeature, Table, make_package, unknown_split
from PIL import Image
from timm.models import save_for_hf
from toys import make_images

import vitzoo  # noqa: F401  registers the models

DEIT = dict(depth=2, embed_dim=24, num_heads=2, patch_size=8)
VIL = dict(depths=[1, 1, 1, 1], embed_dims=[16, 16, 16, 32], num_heads=[1, 2, 2, 2])
CVT = dict(depths=[1, 1, 1], embed_dims=[16, 16, 32], num_heads=[1, 2, 2])
SHIFT = [dict(random_shift=True, shift_steps=3), dict(random_shift=True), {}, {}]
# timm's name and the arguments that make it tiny
MODELS = {
    'deit_softmax': ('deit_softmax_tiny', DEIT),
    'deit_linformer': ('deit_linformer_tiny', DEIT),
    'deit_performer': ('deit_performer_tiny', DEIT | dict(mixer_kwargs=dict(redraw_every=2))),
    'deit_routing': ('deit_routing_tiny', DEIT),
    'deit_sinkhorn': ('deit_sinkhorn_tiny', DEIT),
    'deit_reformer': ('deit_reformer_tiny', DEIT),
    'aft_full': ('aft_full_tiny', DEIT),
    'cvt': ('cvt_13', CVT),
    'cvt_ls': ('cvt_ls_13', CVT),
    'vil': ('vil_tiny', VIL | dict(mixer_kwargs=SHIFT)),
    'vit': ('test_vit', {}),
    'resnet': ('test_resnet', {}),
    'swapped': ('vitzoo_swapped', dict(base_model='test_vit', swap_mixer=[dict(mixer='aft_full', blocks=[0])])),
    'distilled': ('deit_tiny_distilled_patch16_224', DEIT),
}
CLASSES = ['blue', 'green', 'red']

COUNTS = dict(train_red=13, train_green=10, train_blue=5, val_red=4, val_green=3, val_blue=2)
UNDIVIDED = dict(all_red=16, all_green=12, all_blue=7)


class MakeOnce:
    """Calls `make(*args, folder)` once for the same arguments, each time with a folder of its own below `root`."""

    def __init__(self, root: Path):
        self.root, self.made = root, {}

    def __call__(self, make: Callable, *args):
        key = (make, args)
        if key not in self.made:
            self.made[key] = make(*args, Path(tempfile.mkdtemp(dir=self.root)))
        return self.made[key]


def make_model(name: str, class_names: tuple[str, ...], in_chans: int, multi_label: bool, folder: Path) -> Path:
    """A model for images of 32 x 32 as training writes it, with random weights."""
    architecture, kwargs = MODELS[name]
    torch.manual_seed(0)
    size = {} if name == 'resnet' else dict(img_size=32)
    model = timm.create_model(architecture, num_classes=len(class_names), in_chans=in_chans, **kwargs, **size)
    heads = model.get_classifier()
    for head in heads if isinstance(heads, tuple) else [heads]:
        # so that classes differ in their scores; a model without classes has no weights there
        if class_names:
            torch.nn.init.normal_(head.weight)
    data_config = dict(input_size=(in_chans, 32, 32), mean=(0.5,) * in_chans, std=(0.3,) * in_chans, crop_pct=0.9)
    about = dict(label_names=list(class_names), vitzoo=dict(multi_label=multi_label))
    save_for_hf(model, str(folder), model_config=about, safe_serialization=True, data_config=data_config)
    return folder


def make_data(kind: str, root: Path) -> str:
    """Write 28 training and 9 validation images, or 35 that are not divided, and return their --data-dir."""
    name, _, part = kind.partition(' ')
    counts = UNDIVIDED if part == 'undivided' else COUNTS
    source = make_images(root / 'source', **counts)
    if part == 'undivided':
        source = source / 'all'
    return WRITERS[name](source, root)


def write_grey(source: Path, root: Path) -> str:
    for path in source.rglob('*.jpg'):
        with Image.open(path) as image:
            image.convert('L').save(path.with_suffix('.png'))
        path.unlink()
    return str(source)


def write_tar(source: Path, root: Path) -> str:
    with tarfile.open(root / 'photos.tar', 'w') as tar:
        tar.add(source, 'photos')
    return str(root / 'photos.tar')


def write_zip(source: Path, root: Path) -> str:
    with zipfile.ZipFile(root / 'photos.zip', 'w') as archive:
        for path in sorted(source.rglob('*.*')):
            archive.write(path, path.relative_to(source))
    return str(root / 'photos.zip')


def write_shards(source: Path, root: Path) -> str:
    """Two shards of each part, with labels in .cls files."""
    (root / 'shards').mkdir()
    parts = {part: source / part for part in ('train', 'val')} if (source / 'train').is_dir() else {'all': source}
    for name, part in parts.items():
        for number in range(2):
            with tarfile.open(root / 'shards' / f'photos-{name}-{number}.tar', 'w') as tar:
                for path in sorted(part.rglob('*.jpg'))[number::2]:
                    key = f'{path.parent.name}-{path.stem}'
                    for suffix, content in dict(jpg=path.read_bytes(), cls=path.parent.name.encode()).items():
                        info = tarfile.TarInfo(f'{key}.{suffix}')
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))
    return f'wds/{root / "shards"}'


def write_labels(source: Path, root: Path) -> str:
    """A labels.csv for each part: of every third image two labels, of one none."""
    for part in [source / 'train', source / 'val'] if (source / 'train').is_dir() else [source]:
        files = sorted(path.relative_to(part) for path in part.rglob('*.jpg'))
        with (part / 'labels.csv').open('w', newline='') as file:
            table = csv.writer(file)
            table.writerow(['file', 'labels'])
            for number, path in enumerate(files):
                labels = [path.parent.name, 'first'] if number % 3 == 0 else [path.parent.name]
                table.writerow([path, ';'.join(labels if number != 1 else [])])
    return str(source)


WRITERS = dict(
    folder=lambda source, root: str(source),
    grey=write_grey,
    tar=write_tar,
    zip=write_zip,
    wds=write_shards,
    torch=lambda source, root: f'torch/image_folder:{source}',
    hfds=lambda source, root: f'hfds/{source}',
    labels=write_labels,
)


def install_datasets() -> None:
    """Let `import datasets` give a package that reads class folders, for which no network is needed."""

    def load_dataset(path: str, name: None, split: str, cache_dir: None) -> Table:
        splits = {'train': 'train', 'test': 'val'} if (Path(path) / 'train').is_dir() else {'train': '.'}
        if split not in splits:
            raise unknown_split(split, list(splits))
        # the datasets of these tests that are not divided have the names of CIFAR's columns
        image_key = 'image' if len(splits) == 2 else 'img'
        folder = Path(path) / splits[split]
        names = sorted(place.name for place in folder.iterdir())
        files = [(file, label) for label, name in enumerate(names) for file in sorted((folder / name).iterdir())]
        rows = [{image_key: dict(path=str(file), bytes=file.read_bytes()), 'label': label} for file, label in files]
        return Table({image_key: ImageFeature(), 'label': ClassLabel(*names)}, rows)

    sys.modules['datasets'] = make_package(load_dataset)


def validate_tiny(arguments: list[str]) -> None:
    """`vitzoo validate` in a process of its own, without measuring a speed."""
    from vitzoo.validate import evaluation
    from vitzoo.validate.command import validate

    evaluation.measure_throughput = lambda *args: evaluation.Speed(1.0)
    install_datasets()
    validate(arguments)
