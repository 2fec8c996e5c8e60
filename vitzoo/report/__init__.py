"""`vitzoo report`: evaluates models and writes the results as one self-contained HTML page.

Examples:
    vitzoo report runs/cvt_13 runs/cvt_ls_13 --out report
    vitzoo report 'deit_*_patch16_224' resnet50 --data-dir imagenet --corrupt --out report
    vitzoo report --results results.json --out report
    vitzoo report cvt_21 --results report/report.json --title 'CvT on ImageNet' --out report

The options of `vitzoo validate` are accepted, except those for its output files.
"""

import argparse
import json
import os
import shlex
import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from vitzoo._files import printable, replace_file
from vitzoo.errors import CommandParser, UserError, format_flag, run_command

if TYPE_CHECKING:
    from vitzoo.validate.options import EvalOptions

PAGE, DATA = 'index.html', 'report.json'
# outputs of `vitzoo validate` that a report does not have
_OTHER_OUTPUTS = ('results_file', 'plot', 'save_predictions', 'from_predictions', 'errors')


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit with its exit code."""
    run_command(make_report, argv)


def make_report(argv: list[str] | None = None) -> Path:
    """Make the report, and return the path of its page.

    Raises:
        UserError: An option, a model or a file of results is invalid.
    """
    argv = sys.argv[1:] if argv is None else argv
    args, options = parse_args(argv)
    records = [record for path in args.results for record in read_records(path)]
    timings = _read_timings(args.benchmarks, records, options) if args.benchmarks else []
    folder = make_folder(Path(args.out))
    now = datetime.now(timezone.utc)
    report = dict(title=args.title, made=f'{now.day} {now:%B %Y, %H:%M} UTC', records=records)
    report |= dict(command=shlex.join(['vitzoo', 'report', *argv]))
    if options is not None:
        from vitzoo.report.gather import gather
        from vitzoo.validate.unfinished import remove_unfinished

        options = replace(options, results_file=str(folder / DATA))
        # write after every model, so that an interrupted run keeps its results
        evaluated = []
        for record in gather(options):
            records.append(record)
            evaluated.append(record['model'])
            write_report(folder, report)
        remove_unfinished(options, evaluated)
    if args.benchmarks:
        from vitzoo.report.timings import add_timings

        add_timings(records, timings, args.benchmarks)
    write_report(folder, report)
    print(f'wrote {folder / PAGE} ({(folder / PAGE).stat().st_size / 1e3:,.0f} kB) and its data, {folder / DATA}')
    return folder / PAGE


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, 'EvalOptions | None']:
    """Read the command line: the report's own options, and those of the evaluation, None without models."""
    about, _, examples = __doc__.partition('\n\n')
    parser = CommandParser(
        'vitzoo report',
        usage='vitzoo report [MODEL …] [--out DIR] [--title TEXT] [--results FILE …] [--benchmarks FILE] [OPTION …]',
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add('--out', default='report', metavar='DIR', help=f'output folder for {PAGE} and {DATA} (default: report)')
    add('--title', default='Evaluation of vision models', metavar='TEXT', help='title of the page')
    add(
        '--results',
        action='extend',
        nargs='+',
        default=[],
        metavar='FILE',
        help=f'records to add without an evaluation: a JSON file of `vitzoo validate --results-file`, or a {DATA}',
    )
    add(
        '--benchmarks',
        metavar='FILE',
        help='time and memory at several image sizes, from `vitzoo bench models`',
    )
    args, rest = parser.parse_known_args(argv)
    if not rest:
        if not args.results:
            parser.error('name at least one MODEL, or give --results FILE')
        return args, None
    return args, _parse_eval_options(parser, rest)


def _parse_eval_options(parser: argparse.ArgumentParser, rest: list[str]) -> 'EvalOptions':
    from vitzoo.validate.options import parse_args

    options = parse_args(
        rest, no_model=f'{rest[0]} needs a MODEL to evaluate: name at least one, or drop the options of the evaluation'
    )
    for name in _OTHER_OUTPUTS:
        if getattr(options, name):
            parser.error(f'{format_flag(name)} is for `vitzoo validate`; a report writes its numbers to {DATA}')
    if int(os.environ.get('WORLD_SIZE', '1')) > 1:
        raise UserError(
            'a report is made in one process: run `accelerate launch validate.py … --results-file FILE.json`, '
            'then run `vitzoo report --results FILE.json`'
        )
    return options


def _read_timings(path: str, records: list[dict], options: 'EvalOptions | None') -> list[dict]:
    """The rows of a file of benchmarks; a file without the models is an error before they are evaluated."""
    from vitzoo.load import find_models
    from vitzoo.report.gather import find_origin
    from vitzoo.report.timings import find_timed, read_timings

    timings = read_timings(path)
    evaluated = find_models(options.models) if options is not None else []
    find_timed([*records, *(dict(model=name) | find_origin(name) for name in evaluated)], timings, path)
    return timings


def read_records(path: str) -> list[dict]:
    """Read the records of a results file or of a report.

    Raises:
        UserError: The file cannot be read, has no records, or records with values of another type.
    """
    from vitzoo.report.records import check_record

    try:
        found = json.loads(Path(path).read_text(encoding='utf-8'))
    except OSError as error:
        raise UserError(f"cannot read the results '{path}': {error.strerror}") from error
    except ValueError as error:
        raise UserError(
            f"the results '{path}' are not JSON ({error}); `vitzoo validate --results-file FILE.json` writes it"
        ) from error
    records = found.get('records') if isinstance(found, dict) else found
    if not isinstance(records, list) or not records:
        raise UserError(f"'{path}' has no records of models; `vitzoo validate --results-file FILE.json` writes them")
    try:
        for record in records:
            check_record(record)
    except ValueError as error:
        raise UserError(
            f"'{path}' has a wrong record: {error}; `vitzoo validate --results-file FILE.json` writes them"
        ) from error
    # a results file does not record the machine
    records = [{'measured_on': f'not recorded in {path}', **record} for record in records]
    if not isinstance(found, dict) or not found.get('command'):
        return records
    return [{**record, 'commands': [*record.get('commands', ()), found['command']]} for record in records]


def make_folder(folder: Path) -> Path:
    """Create the folder of a report before its long measurements, and return it.

    Raises:
        UserError: It cannot be created or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the report's folder '{folder}': {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise UserError(f"cannot write to the report's folder '{folder}'")
    return folder


def write_report(folder: Path, report: dict) -> None:
    """Write the page and its data."""
    from vitzoo.report.page import render

    report = write_records(folder, report)
    _write(folder / PAGE, printable(render(report)))


def write_records(folder: Path, report: dict) -> dict:
    """Write the data of a page, which `vitzoo report --results` reads, and return it as it was written."""
    from vitzoo.validate.results import without_nan

    report = {**report, 'records': [without_nan(record) for record in report['records']]}
    _write(folder / DATA, json.dumps(report, indent=1, allow_nan=False))
    return report


def _write(path: Path, text: str) -> None:
    with replace_file(path) as partial:
        partial.write_text(text, encoding='utf-8')
