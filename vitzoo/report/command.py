"""The command line of `vitzoo report`."""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import vitzoo.report
from vitzoo.errors import CommandParser, UserError, format_flag
from vitzoo.options import num_processes
from vitzoo.report.files import DATA, PAGE, format_now, make_folder, read_records, write_report

if TYPE_CHECKING:
    from vitzoo.validate.options import EvalOptions

# outputs of `vitzoo validate` that a report does not have
_OTHER_OUTPUTS = ('results_file', 'plot', 'save_predictions', 'from_predictions', 'errors')


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
    report = dict(title=args.title, made=format_now(), records=records)
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
    about, _, examples = (vitzoo.report.__doc__ or '').partition('\n\n')
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
    if num_processes() > 1:
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
