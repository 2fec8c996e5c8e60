"""`vitzoo bench loader`: training images per second, against torchvision and timm with the same augmentation.

All load the same files, alternately in one process, after a warm-up pass.

Examples:
    vitzoo bench loader
    vitzoo bench loader --data-dir photos --workers 2
"""

import argparse
import os
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image
from psutil import Process
from rich.console import Console
from rich.progress import track
from rich.table import Table
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_dataset, create_loader
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from vitzoo.bench._harness import Spread
from vitzoo.bench._results import find_doubt, make_row
from vitzoo.data import Normalize, open_dataset, train_loader, train_transform
from vitzoo.data.layout import SUFFIXES
from vitzoo.data.loader import TrainBatches
from vitzoo.errors import CommandParser, UserError
from vitzoo.machine import describe_machine, format_machine
from vitzoo.metrics.speed import synchronize
from vitzoo.options import add_workers, default_device, device, positive
from vitzoo.train.recipe import make_recipe


def main(argv: list[str] | None = None) -> dict[str, list[dict]]:
    """Measure what the command line asks for; return the speed of every pass, by loader.

    Raises:
        UserError: The images cannot be found or read, or are fewer than a batch.
    """
    args = parse_args(argv)
    with TemporaryDirectory() as folder:
        if args.data_dir:
            args.images = copy_images(args.data_dir, Path(folder), args.images)
        else:
            make_photos(Path(folder), args.images)
        if args.images < args.batch_size:
            raise UserError(f'{args.images} images are fewer than a batch of {args.batch_size}; lower --batch-size')
        threads = torch.get_num_threads()
        # more threads would compete with the workers
        torch.set_num_threads(1)
        passes = time_loaders(folder, args)
        torch.set_num_threads(threads)
    print_loaders(passes, args)
    return passes


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser('vitzoo bench loader', description=__doc__.partition('\n')[0])
    add = parser.add_argument
    add('--data-dir', metavar='DIR', help='images in class folders (default: generated JPEGs of 500 x 375)')
    add('--images', type=positive, default=512, metavar='N', help='images per pass (default: 512)')
    add('--img-size', type=positive, default=224, metavar='N', help='crop size (default: 224)')
    add('--batch-size', type=positive, default=32, metavar='N', help='images per batch (default: 32)')
    add_workers(parser)
    add('--rounds', type=positive, default=5, metavar='N', help='passes per loader, after a warm-up pass (default: 5)')
    add('--device', type=device, default=default_device(), help='device to load to (default: the GPU if there is one)')
    return parser.parse_args(argv)


def time_loaders(folder: str, args: argparse.Namespace) -> dict[str, list[dict]]:
    """Speed of every pass, the loaders alternating, after one that starts the workers and fills the file cache."""
    normalize = Normalize(_data_config(args.img_size)).to(args.device)
    make = dict(torchvision=torchvision_loader, timm=timm_loader, vitzoo=vitzoo_loader)
    loaders = {name: make_loader(folder, args) for name, make_loader in make.items()}
    passes: dict[str, list[dict]] = {name: [] for name in loaders}
    for _ in _track(range(1 + args.rounds), 'loading'):
        for name, loader in loaders.items():
            passes[name].append(time_pass(loader, normalize, args.device))
    return {name: timed[1:] for name, timed in passes.items()}


def _data_config(img_size: int) -> dict:
    """The data configuration of most ImageNet models, at this size."""
    size = (3, img_size, img_size)
    return dict(input_size=size, interpolation='bicubic', mean=IMAGENET_DEFAULT_MEAN, std=IMAGENET_DEFAULT_STD)


def torchvision_loader(folder: str, args: argparse.Namespace) -> DataLoader:
    """Random resized crop and flip as in torchvision's reference scripts."""
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(args.img_size, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
        ]
    )
    return DataLoader(
        # of any format, as the others
        ImageFolder(folder, transform, is_valid_file=os.path.isfile),
        args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        pin_memory=torch.cuda.is_available(),
    )


def timm_loader(folder: str, args: argparse.Namespace) -> Iterable:
    """The same augmentation by timm's loader, which also normalizes on the device."""
    config = _data_config(args.img_size)
    return create_loader(
        # by default PNG and JPEG only
        create_dataset('folder', root=folder, input_key=';'.join(SUFFIXES)),
        batch_size=args.batch_size,
        is_training=True,
        # None leaves it out, although the annotation of timm has numbers only
        color_jitter=None,  # type: ignore[arg-type]
        num_workers=args.workers,
        pin_memory=torch.cuda.is_available(),
        device=args.device,
        **config,
    )


def vitzoo_loader(folder: str, args: argparse.Namespace) -> DataLoader:
    """The same augmentation by vitzoo's training loader."""
    recipe = make_recipe(dict(train_interpolation='bicubic', color_jitter=0))
    dataset = open_dataset(folder, 'train', train_transform(recipe, _data_config(args.img_size)))
    return train_loader(dataset, TrainBatches(len(dataset), args.batch_size), args.workers)


def time_pass(loader: Iterable, normalize: Normalize, device: torch.device) -> dict:
    """Images per second and CPU milliseconds per image of one pass, normalization on the device included."""
    images, start, cpu = 0, time.perf_counter(), cpu_seconds()
    for batch, _ in loader:
        batch = normalize(batch.to(device, non_blocking=True))
        images += len(batch)
    synchronize(device)
    return dict(images_per_second=images / (time.perf_counter() - start), cpu_ms=1e3 * (cpu_seconds() - cpu) / images)


def cpu_seconds() -> float:
    """CPU time of this process and its workers so far; other programs on the machine hardly affect it."""
    workers = [process.cpu_times() for process in Process().children(recursive=True)]
    return time.process_time() + sum(worker.user + worker.system for worker in workers)


def copy_images(data_dir: str, folder: Path, count: int) -> int:
    """Copy at most `count` images, the same random ones in every run, into class folders; return how many.

    Raises:
        UserError: The images cannot be found or read, or are not files.
    """
    dataset = open_dataset(data_dir, 'train')
    chosen = np.random.default_rng(0).permutation(len(dataset))[:count]
    for index in chosen.tolist():
        file, label = dataset.reader[index]
        if isinstance(file, Image.Image):
            raise UserError(f"the images of '{data_dir}' are already decoded; use a folder or a tar file of images")
        # decoded once, so that the error of a damaged image names the user's file
        dataset[index]
        # timm finds files by their suffix, and all read them by their content
        path = folder / str(label) / f'{index}{Path(dataset.filename(index)).suffix or ".jpg"}'
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(file.read())
    return len(chosen)


def make_photos(folder: Path, count: int) -> None:
    """Make JPEGs of ImageNet's typical size, 500 x 375 and 100 kB: enlarged images of the sample with added texture."""
    sample, size = open_dataset('sample', 'train'), (500, 375)
    for index in _track(range(count), 'making images'):
        # 7 and 2,000, the number of images, are coprime
        image, label = sample[index * 7 % len(sample)]
        pixels = np.asarray(image.resize(size, Image.Resampling.BICUBIC), dtype=np.float32)
        for coarseness in (1, 2, 4, 8):
            shape = (size[1] // coarseness, size[0] // coarseness)
            noise = np.random.default_rng([index, coarseness]).normal(0, 8, shape).astype(np.float32)
            pixels = pixels + np.asarray(Image.fromarray(noise).resize(size, Image.Resampling.BILINEAR))[..., None]
        path = folder / str(label) / f'{index}.jpg'
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=95)


def _track(steps: range, description: str) -> Iterable[int]:
    """Iterate over `steps` with a transient progress bar, if on a terminal."""
    console = Console(stderr=True)
    return track(steps, description, console=console, transient=True, disable=not console.is_terminal)


def print_loaders(passes: dict[str, list[dict]], args: argparse.Namespace) -> None:
    """Print the median and range over all passes, and the speedup of vitzoo over the others within each round."""
    table = Table(box=None, pad_edge=False, header_style='bold')
    for heading in ('', 'images/s', 'lowest – highest', 'per worker', 'CPU ms per image'):
        table.add_column(heading, justify='right' if heading else 'left')
    for name, timed in passes.items():
        speeds = [timing['images_per_second'] for timing in timed]
        spread = f'{min(speeds):,.0f} – {max(speeds):,.0f}'
        each = f'{median(speeds) / max(args.workers, 1):,.0f}'
        table.add_row(name, f'{median(speeds):,.0f}', spread, each, f'{median(t["cpu_ms"] for t in timed):.2f}')
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    for name in passes:
        if name == 'vitzoo':
            continue
        rounds = list(zip(passes[name], passes['vitzoo']))
        faster = [ours['images_per_second'] / theirs['images_per_second'] for theirs, ours in rounds]
        cheaper = median(theirs['cpu_ms'] / ours['cpu_ms'] for theirs, ours in rounds)
        console.print(
            f'vitzoo loads {median(faster):.2f} times the images/s of {name} ({min(faster):.2f} – {max(faster):.2f} in'
            f' {len(rounds)} rounds), and {cheaper:.2f} times the images per second of CPU time'
        )
    data = args.data_dir or 'generated, 500 x 375'
    console.print(
        f'{args.images} images ({data}), crops of {args.img_size}, batches of {args.batch_size},'
        f' {args.workers} workers, {args.device.type}'
    )
    console.print(format_machine(describe_machine(args.device)))
    uneven = [name for name, timed in passes.items() if _is_uneven(timed)]
    if uneven:
        console.print(f'uneven rounds: {", ".join(uneven)}; measure again on a quiet machine')


def _is_uneven(timed: list[dict]) -> bool:
    seconds = Spread.of(1 / timing['images_per_second'] for timing in timed)
    return find_doubt(make_row(seconds)) is not None
