"""`vitzoo report`: evaluates models and writes what was found as one HTML page that needs nothing else.

Examples:
    vitzoo report runs/cvt_13 runs/cvt_ls_13 --out report
    vitzoo report 'deit_*_patch16_224' resnet50 --data-dir imagenet --corrupt --out report
    vitzoo report --results results.json --out report
    vitzoo report cvt_21 --results report/report.json --title 'CvT on ImageNet' --out report

Every option of `vitzoo validate` that says how to evaluate is one of `vitzoo report`.
"""

import argparse
import json
import os
import shlex
import sys
from datetime import datetime, timezone
from pathlib import Path

from vitzoo.errors import UserError, run_command

PAGE, DATA = 'index.html', 'report.json'
# of `vitzoo validate`, for other things than a report
OTHER_OUTPUTS = ('results_file', 'plot', 'save_predictions', 'from_predictions', 'errors')


def main(argv: list[str] | None = None) -> None:
    """Run the command and end the process with its exit code."""
    run_command(make_report, argv)


def make_report(argv: list[str] | None = None) -> Path:
    """Make the report that the command line asks for, and return the path of its page.

    Raises:
        UserError: An option, a model or a file of results is not what it should be.
    """
    argv = sys.argv[1:] if argv is None else argv
    args, validate_args = parse_args(argv)
    folder = _make_folder(args.out)
    records = [record for path in args.results for record in read_records(path)]
    now = datetime.now(timezone.utc)
    report = dict(title=args.title, made=f'{now.day} {now:%B %Y, %H:%M} UTC', records=records)
    report |= dict(command=shlex.join(['vitzoo', 'report', *argv]))
    if validate_args is not None:
        from vitzoo.report.gather import gather

        # written after every model, so that an interrupted run keeps what it has
        for record in gather(validate_args):
            records.append(record)
            write_report(folder, report)
    if args.benchmarks:
        from vitzoo.report.timings import add_timings

        add_timings(records, args.benchmarks)
    write_report(folder, report)
    print(f'wrote {folder / PAGE} ({(folder / PAGE).stat().st_size / 1e3:,.0f} kB), and its data to {folder / DATA}')
    return folder / PAGE


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, argparse.Namespace | None]:
    """Read the command line: what is the report's own, and what is for `vitzoo validate`, None without models."""
    about, _, examples = __doc__.partition('\n\n')
    parser = argparse.ArgumentParser(
        'vitzoo report',
        usage='vitzoo report [MODEL …] [--out DIR] [--title TEXT] [--results FILE …] [--benchmarks FILE] [OPTION …]',
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add('--out', default='report', metavar='DIR', help=f'the folder for {PAGE} and {DATA} (default: report)')
    add('--title', default='Evaluation of vision models', metavar='TEXT', help='the title of the page')
    add(
        '--results',
        action='extend',
        nargs='+',
        default=[],
        metavar='FILE',
        help=f'records to show as they are: what `vitzoo validate --results-file FILE.json` wrote, or a {DATA}',
    )
    add(
        '--benchmarks',
        metavar='FILE',
        help='time and memory at several image sizes, as `vitzoo bench models` wrote them',
    )
    args, rest = parser.parse_known_args(argv)
    if not rest:
        if not args.results:
            parser.error('name at least one MODEL, or give --results FILE')
        return args, None
    return args, _parse_validate_args(parser, rest)


def _parse_validate_args(parser: argparse.ArgumentParser, rest: list[str]) -> argparse.Namespace:
    from vitzoo.validate.evaluation import parse_args

    args = parse_args(rest)
    for option in OTHER_OUTPUTS:
        if getattr(args, option):
            parser.error(f'--{option.replace("_", "-")} is for `vitzoo validate`; a report keeps its numbers in {DATA}')
    if int(os.environ.get('WORLD_SIZE', '1')) > 1:
        raise UserError(
            'a report is made by one process: evaluate with `accelerate launch validate.py … --results-file FILE.json`,'
            ' then `vitzoo report --results FILE.json`'
        )
    return args


def read_records(path: str) -> list[dict]:
    """Read the records of a results file or of a report.

    Raises:
        UserError: The file cannot be read, or holds no records.
    """
    try:
        found = json.loads(Path(path).read_text(encoding='utf-8'))
    except OSError as error:
        raise UserError(f"cannot read the results '{path}': {error.strerror}") from error
    except ValueError as error:
        raise UserError(
            f"the results '{path}' are not JSON ({error}); `vitzoo validate --results-file FILE.json` writes it"
        ) from error
    records = found.get('records') if isinstance(found, dict) else found
    if not isinstance(records, list) or not all(isinstance(record, dict) and 'model' in record for record in records):
        raise UserError(f"'{path}' holds no records of models; `vitzoo validate --results-file FILE.json` writes them")
    # whoever measured them did not say where
    records = [{'measured_on': f'not recorded in {path}', **record} for record in records]
    if not isinstance(found, dict) or not found.get('command'):
        return records
    return [{**record, 'commands': [*record.get('commands', ()), found['command']]} for record in records]


def write_report(folder: Path, report: dict) -> None:
    """Write the page and its data."""
    from vitzoo.report.page import render
    from vitzoo.validate.results import plain

    report = {**report, 'records': [plain(record) for record in report['records']]}
    for name, text in ((DATA, json.dumps(report, indent=1, allow_nan=False)), (PAGE, render(report))):
        partial = folder / f'.{name}'
        partial.write_text(text, encoding='utf-8')
        partial.replace(folder / name)


def _make_folder(path: str) -> Path:
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder '{path}' of the report: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"cannot write to the folder '{path}' of the report")
    return folder
