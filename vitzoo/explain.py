"""`vitzoo explain`: draw the image regions that a model's predictions are based on.

Examples:
    vitzoo explain photo.jpg --model runs/photos --out maps
    vitzoo explain holiday 'scans/**/*.png' --model cvt_13 --out maps --target 'Egyptian cat'
    vitzoo explain photo.jpg --model deit_small_patch16_224 --out maps --method rollout

For each image a figure is written to the folder: the image as the model sees it, and the same with a heatmap. The
methods are described in vitzoo/metrics/explanation.py. An image that cannot be read is reported on stderr and skipped,
and the exit code is 1.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from vitzoo.classes import class_names, readable
from vitzoo.classifier import load_classifier, open_images, skip_unreadable
from vitzoo.data.transforms import unnormalize
from vitzoo.data.unlabelled import find_files
from vitzoo.errors import CommandParser, UserError, count_of, did_you_mean, run_command
from vitzoo.load import fit_data_config
from vitzoo.metrics.explanation import METHODS, explain
from vitzoo.metrics.finite import check_logits
from vitzoo.options import add_model_options, autocast, check_output


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit with its exit code."""
    run_command(_explain_and_exit, argv)


def explain_files(argv: list[str] | None = None) -> list[str]:
    """Run `vitzoo explain` with these arguments, and return the names of images that could not be read.

    Raises:
        UserError: There are no images, or the model, the class or another option is not valid.
    """
    # lazy: importing matplotlib takes a second, which `vitzoo explain --help` should not
    from vitzoo.figures import draw_explanation

    args = parse_args(argv)
    files = find_files(args.images)
    paths = _choose_paths(args.out, list(files))
    _check_not_inputs(paths, list(files))
    for path in paths:
        check_output(path, ('.png',))
    loaded = load_classifier(args)
    name, model, names = loaded.name, loaded.model, class_names(loaded.model)
    target = None if args.target is None else _find_class(args.target, names)
    titles = readable(names)
    unreadable: list[str] = []
    with autocast(args.device, args.amp_dtype):
        data_config = fit_data_config(name, model, args.img_size, args.crop_pct)
        loader = open_images(files, data_config, args)
        is_multi_label = loaded.about.get('multi_label', False)
        records = explain_images(model, loader, args.method, target, is_multi_label, name)
        records = (dict(path=path, **record) for path, record in zip(paths, records))
        for record in skip_unreadable(records, len(files), unreadable, 'explaining'):
            title = f'{titles[record["label"]]} ({100 * record["probability"]:.0f} %), {record["method"]}'
            draw_explanation(record['path'], unnormalize(record['image'], data_config), record['heat'], title)
    print(f'wrote {count_of(len(files) - len(unreadable), "figure")} to {args.out}')
    return unreadable


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser('vitzoo explain', description=__doc__.partition('\n')[0])
    add = parser.add_argument
    add('images', nargs='+', metavar='IMAGES', help='files, folders, .tar or .zip archives, or globs in quotes')
    add('--model', required=True, help='folder of a trained model, or timm name')
    add('--out', required=True, metavar='DIR', help='folder for the figures, one .png per image')
    add('--method', choices=METHODS, default='auto', help='auto: gradient for vision transformers, gradcam for CNNs')
    add('--target', metavar='CLASS', help='name or index of the class to explain (default: the most likely)')
    add_model_options(parser)
    # gradients need as much memory as training
    parser.set_defaults(batch_size=8)
    return parser.parse_args(argv)


def explain_images(
    model: nn.Module,
    loader: DataLoader,
    method: str,
    target: int | None = None,
    is_multi_label: bool = False,
    name: str | None = None,
) -> Iterator[dict]:
    """Yield a heatmap for each image of a loader of `ImageFiles`, in order.

    A record is {file, image, heat, method, label, probability}, with the normalized image (C, H, W) and the heatmap
    (H, W) of class `target`, or of the most likely one; or {file, error} for an image that cannot be read.

    Args:
        name: Name of the model in errors.

    Raises:
        UserError: The logits are not finite.
    """
    device = next(model.parameters()).device
    for images, files, errors in loader:
        images = images.to(device, non_blocking=True)
        with torch.no_grad():
            logits = model(images).float()
        check_logits(logits, model, images, files.__getitem__, name)
        shares = logits.sigmoid() if is_multi_label else logits.softmax(dim=1)
        labels = logits.argmax(dim=1)
        labels = labels if target is None else torch.full_like(labels, target)
        heat, used = explain(model, images, method, labels)
        for i, (file, error) in enumerate(zip(files, errors)):
            if error:
                yield dict(file=file, error=error)
                continue
            found = dict(image=images[i].cpu(), heat=heat[i].float().cpu(), method=used)
            yield dict(file=file, **found, label=int(labels[i]), probability=shares[i, labels[i]].item())


def _find_class(text: str, names: list[str]) -> int:
    """The index of a class, given its name, also in words, or its index if no class has that name."""
    for known in (names, readable(names)):
        if text in known:
            return known.index(text)
    if text.isdecimal() and int(text) < len(names):
        return int(text)
    hint = did_you_mean(text, names) or f': there are {len(names)}, from {names[0]} to {names[-1]}'
    raise UserError(f"the model has no class '{text}'{hint}")


def _choose_paths(folder: str, files: list[str]) -> list[str]:
    """A .png path in the folder for each image, with a number if several images have the same name."""
    taken, paths = set(), []
    # the number of each stem to try next: frames of many folders may have one name
    next_number: dict[str, int] = {}
    for file in files:
        stem = Path(file).stem
        number = next_number.get(stem, 1)
        while (name := stem if number == 1 else f'{stem}-{number}') in taken:
            number += 1
        next_number[stem] = number + 1
        taken.add(name)
        paths.append(f'{folder}/{name}.png')
    return paths


def _check_not_inputs(paths: list[str], files: list[str]) -> None:
    """Raise UserError if a figure would overwrite an image, perhaps one that is explained later."""
    images = {_identify(file): file for file in files}
    for path, file in zip(paths, files):
        found = _identify(path)
        if found is not None and found in images:
            raise UserError(
                f"the figure of '{file}' would overwrite the image '{images[found]}'; give another folder as --out"
            )


def _identify(path: str) -> tuple[int, int] | None:
    """Device and inode, which all paths of a file share, also on a disk that ignores case; None if there is no file."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _explain_and_exit(argv: list[str] | None) -> None:
    if explain_files(argv):
        raise SystemExit(1)


if __name__ == '__main__':
    main()
