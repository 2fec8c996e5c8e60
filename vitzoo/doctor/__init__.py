"""`vitzoo doctor`: looks at every image of a dataset, and says what is wrong with it and how to put it right.

Examples:
    vitzoo doctor photos
    vitzoo doctor photos.zip --img-size 64 --json findings.json

The exit code is 1 where something is an error: training would end, or its accuracy would be wrong.
"""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch.utils.data import DataLoader, Dataset

from vitzoo.data.dataset import SAMPLE, Images, open_reader
from vitzoo.doctor.checks import SEVERITIES, Finding, Part, check
from vitzoo.doctor.facts import Facts, inspect
from vitzoo.errors import UserError, run_command
from vitzoo.options import check_output

STYLES = {'error': 'bold red', 'warning': 'yellow', 'note': 'cyan'}
SHOWN = 4
# images that a worker process decodes at a time
CHUNK = 16


def main(argv: list[str] | None = None) -> None:
    """Run the command and end the process with its exit code."""
    run_command(examine, argv)


def examine(argv: list[str] | None = None) -> None:
    """Run the command; exit code 1 where there are errors."""
    if any(finding.severity == 'error' for finding in doctor(argv)):
        raise SystemExit(1)


def doctor(argv: list[str] | None = None) -> list[Finding]:
    """Examine the dataset that the command line names, print what was found, and return it.

    Raises:
        UserError: There is no such dataset, or the file cannot be written.
    """
    args = parse_args(argv)
    if args.json:
        check_output(args.json, ('.json',))
    root = SAMPLE if args.data_dir == 'sample' else Path(args.data_dir).expanduser()
    parts = []
    try:
        parts = open_parts(args.data_dir)
        look_at(parts, args.workers)
        findings = check(parts[0], parts[1] if parts[1:] else None, root if root.is_dir() else None, args.img_size)
    except UserError as error:
        if not root.exists():
            raise
        findings = [Finding('unusable', 'error', 'this cannot be trained on', str(error), [args.data_dir])]
    print_findings(args.data_dir, parts, findings)
    if args.json:
        write_json(args.json, args.data_dir, parts, findings)
    return findings


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser('vitzoo doctor', description=__doc__.partition('\n')[0])
    add = parser.add_argument
    add('data_dir', metavar='DATA_DIR', help='what training takes as --data-dir: a folder, .tar or .zip, wds/FOLDER, …')
    add('--img-size', type=int, default=224, metavar='N', help='size that images are resized to (default: 224)')
    add('--workers', type=int, default=min(4, os.cpu_count() or 1), metavar='N', help='processes that decode images')
    add('--json', metavar='FILE', help='write all findings with all file names, .json')
    return parser.parse_args(argv)


def open_parts(data_dir: str) -> list[Part]:
    """The training and, if there is one, the validation part; with a labels.csv they have the labels in it."""
    train, is_undivided = open_reader(data_dir, 'train', multi_label=None, divides=True)
    readers = dict(train=train)
    if not is_undivided:
        readers['val'], _ = open_reader(data_dir, 'val', multi_label=train.is_multi_label)
    parts = []
    for split, reader in readers.items():
        # of a dataset that is not in files, there is nothing else
        prefix, names = getattr(reader, 'prefix', ''), reader.source.names if hasattr(reader, 'source') else []
        names = [name.removeprefix(prefix) for name in names if name.startswith(prefix) and name != prefix]
        parts.append(Part(split, Images(reader), names))
    return parts


def look_at(parts: list[Part], workers: int) -> None:
    """Decode every image, and keep what it is like."""
    console = Console(stderr=True)
    columns = ['{task.description}', BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        for part in parts:
            task = bar.add_task(f'looking at {part.split}', total=len(part.images))
            for facts in DataLoader(Inspected(part.images), CHUNK, num_workers=workers, collate_fn=list):
                part.facts += facts
                bar.advance(task, len(facts))


class Inspected(Dataset):
    """What each image of a dataset is like, instead of the image."""

    def __init__(self, images: Images):
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Facts:
        try:
            file, _ = self.images.reader[index]
        except OSError as error:
            return Facts(error=str(error))
        return inspect(file)


def print_findings(data_dir: str, parts: list[Part], findings: list[Finding]) -> None:
    """Print each finding with a few of the names it is about, and the fix."""
    console = Console(highlight=False, soft_wrap=True)
    for part in parts:
        classes = f'{len(part.counts())} {"labels" if part.images.is_multi_label else "classes"}'
        console.print(f'{part.split:6} {len(part.images):,} images of {classes} in {part.images.root}', markup=False)
    for finding in findings:
        more = ', … (all with --json FILE)' if len(finding.where) > SHOWN else ''
        console.print()
        console.print(f'{finding.severity:8}', style=STYLES[finding.severity], end='')
        console.print(f'{len(finding.where):,} {finding.code}: {finding.message}', markup=False)
        console.print(f'        {", ".join(finding.where[:SHOWN])}{more}', style='dim', markup=False)
        console.print(f'        fix: {finding.fix}', markup=False)
    counts = [(severity, sum(one.severity == severity for one in findings)) for severity in SEVERITIES]
    summary = ', '.join(f'{count} {severity}{"s" * (count > 1)}' for severity, count in counts if count)
    console.print(f'\n{summary or "nothing is wrong"}: {data_dir}', markup=False)


def write_json(path: str, data_dir: str, parts: list[Part], findings: list[Finding]) -> None:
    """Write what was found, with the number of images of each class."""
    described = {part.split: dict(images=len(part.images), classes=part.counts()) for part in parts}
    listed = [dict(asdict(finding), count=len(finding.where)) for finding in findings]
    report = dict(data_dir=data_dir, parts=described, findings=listed)
    Path(path).write_text(json.dumps(report, indent=2, ensure_ascii=False), encoding='utf-8', errors='backslashreplace')
