"""The command line of `vitzoo doctor`: decode all images, run the checks, and print and write the findings."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch.utils.data import DataLoader, Dataset

from vitzoo.data.archives import ArchiveReader
from vitzoo.data.class_map import ClassMapReader
from vitzoo.data.dataset import SAMPLE, Images, Splits
from vitzoo.data.decode import DECODING_ERRORS, describe_decoding_error
from vitzoo.data.options import DATA_OPTIONS, NO_OPTIONS, DataOptions
from vitzoo.data.reader import LabelledReader
from vitzoo.doctor.checks import FINDING_SEVERITIES, ExaminedSplit, Finding, check
from vitzoo.doctor.facts import Facts, inspect_image
from vitzoo.errors import CommandParser, UserError, count_of
from vitzoo.options import add_data_options, add_workers, check_output, positive

_COLORS = {'error': 'bold red', 'warning': 'yellow', 'note': 'cyan'}
_MAX_NAMES = 4
_BATCH_SIZE = 16


def examine_and_exit(argv: list[str] | None = None) -> None:
    """Examine a dataset and exit with code 1 if there are errors."""
    if any(finding.severity == 'error' for finding in examine(argv)):
        raise SystemExit(1)


def examine(argv: list[str] | None = None) -> list[Finding]:
    """Examine the dataset given on the command line, print the findings and return them.

    Raises:
        UserError: The dataset does not exist, or the file cannot be written.
    """
    args = parse_args(argv)
    if args.json:
        check_output(args.json, ('.json',))
    root = SAMPLE if args.data_dir == 'sample' else Path(args.data_dir).expanduser()
    splits = []
    try:
        options = DataOptions(**{name: getattr(args, name) for name in DATA_OPTIONS})
        splits = open_splits(args.data_dir, args.multi_label, options)
        inspect_images(splits, args.workers)
        val, folder = splits[1] if splits[1:] else None, root if root.is_dir() else None
        findings = check(splits[0], val, folder, args.img_size, options)
    except UserError as error:
        if not root.exists():
            raise
        findings = [Finding('unusable', 'error', 'the dataset cannot be used', str(error), [args.data_dir])]
    print_findings(args.data_dir, splits, findings)
    if args.json:
        write_findings(args.json, args.data_dir, splits, findings)
    return findings


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(
        'vitzoo doctor', description='Examine all images of a dataset, and report problems and how to fix them.'
    )
    add = parser.add_argument
    add('data_dir', metavar='DATA_DIR', help='dataset, as --data-dir of train: a folder, .tar or .zip, wds/FOLDER, …')
    add('--multi-label', action='store_true', help='read labels.csv (columns file, labels) instead of class folders')
    add_data_options(parser)
    add('--img-size', type=positive, default=224, metavar='N', help='image size for training (default: 224)')
    add_workers(parser)
    add('--json', metavar='FILE', help='write all findings with all file names, .json')
    return parser.parse_args(argv)


def open_splits(data_dir: str, multi_label: bool = False, options: DataOptions = NO_OPTIONS) -> list[ExaminedSplit]:
    """Open the training split and the validation split if there is one, as training does; the latter may be alone."""
    found = Splits(data_dir, multi_label, options)
    readers = {} if found.has_val and not found.has_train else dict(train=found.open('train'))
    if found.has_val:
        readers['val'] = found.open('val')
    splits = []
    for split, reader in readers.items():
        # only folders and archives have other files next to the images
        files = reader.reader if isinstance(reader, ClassMapReader) else reader
        prefix, names = getattr(files, 'prefix', ''), files.archive.names if hasattr(files, 'archive') else []
        names = [name.removeprefix(prefix) for name in names if name.startswith(prefix) and name != prefix]
        splits.append(
            ExaminedSplit(split, Images(reader), names, _prefix(files, split, data_dir) if found.is_divided else '')
        )
    return splits


def _prefix(files: LabelledReader, split: str, data_dir: str) -> str:
    """The folder or archive of a split by its name in the data, which may be another than that of the split."""
    if not isinstance(files, ArchiveReader):
        return f'{split}/'
    root = Path(data_dir).expanduser()
    return f'{files.root.relative_to(root).as_posix() if root.is_dir() else files.root.name}/'


def inspect_images(splits: list[ExaminedSplit], workers: int) -> None:
    """Decode all images and add the facts about them to their splits."""
    console = Console(stderr=True)
    columns: list[Any] = ['{task.description}', BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        for split in splits:
            task = bar.add_task(f'reading {split.name}', total=len(split.images))
            for facts in DataLoader(_FactsDataset(split.images), _BATCH_SIZE, num_workers=workers, collate_fn=list):
                split.facts += facts
                bar.advance(task, len(facts))


class _FactsDataset(Dataset):
    """The facts about each image of a dataset."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Facts:
        try:
            file, _ = self.images.reader[index]
        except DECODING_ERRORS as error:
            return Facts(error=describe_decoding_error(error))
        return inspect_image(file)


def print_findings(data_dir: str, splits: list[ExaminedSplit], findings: list[Finding]) -> None:
    """Print each finding with the first few names and the fix."""
    console = Console(highlight=False, soft_wrap=True)
    for split in splits:
        images = count_of(len(split.images), 'image')
        classes = count_of(len(split.class_counts()), 'label' if split.images.is_multi_label else 'class')
        console.print(f'{split.name:6} {images} of {classes} in {split.images.root}', markup=False)
    for finding in findings:
        more = ', … (all with --json FILE)' if len(finding.where) > _MAX_NAMES else ''
        console.print()
        console.print(f'{finding.severity:8}', style=_COLORS[finding.severity], end='')
        console.print(f'{len(finding.where):,} {finding.code}: {finding.message}', markup=False)
        console.print(f'        {", ".join(finding.where[:_MAX_NAMES])}{more}', style='dim', markup=False)
        console.print(f'        fix: {finding.fix}', markup=False)
    counts = [(severity, sum(one.severity == severity for one in findings)) for severity in FINDING_SEVERITIES]
    summary = ', '.join(count_of(count, severity) for severity, count in counts if count)
    console.print(f'\n{summary or "no problems found"}: {data_dir}', markup=False)


def write_findings(path: str, data_dir: str, splits: list[ExaminedSplit], findings: list[Finding]) -> None:
    """Write the findings and the number of images per class as JSON."""
    parts = {split.name: dict(images=len(split.images), classes=split.class_counts()) for split in splits}
    listed = [dict(asdict(finding), count=len(finding.where)) for finding in findings]
    report = dict(data_dir=data_dir, parts=parts, findings=listed)
    Path(path).write_text(json.dumps(report, indent=2, ensure_ascii=False), encoding='utf-8', errors='backslashreplace')
