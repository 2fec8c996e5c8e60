"""The command line of `vitzoo study`."""

import argparse
import shlex
import sys
from pathlib import Path

from vitzoo.errors import CommandParser, UserError
from vitzoo.study.plan import Study, read_study
from vitzoo.study.report import write_study_report
from vitzoo.study.results import collect
from vitzoo.study.slurm import slurm_settings, submit_workers
from vitzoo.study.status import CellState, check_failures, find_state, print_status
from vitzoo.study.tables import format_markdown
from vitzoo.study.worker import Worker
from vitzoo.train.stopping import StopSignal


def run_study(argv: list[str] | None = None) -> None:
    """Run `vitzoo study` with these arguments.

    Raises:
        UserError: The study is invalid, its cells were computed with other options, or a cell failed or was stopped.
    """
    args = parse_args(argv)
    study = read_study(args.file)
    for cell in study.cells:
        cell.record.check()
    dict(run=_run, status=_status, report=_report)[args.action](study, args)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(
        'vitzoo study', description='Train, convert and compare models with several seeds.', allow_abbrev=False
    )
    actions = parser.add_subparsers(dest='action', required=True, metavar='run|status|report')
    run = actions.add_parser('run', help='compute the cells that are not finished', allow_abbrev=False)
    status = actions.add_parser('status', help='print the state of the cells and the table so far')
    report = actions.add_parser('report', help='write the tables (Markdown, LaTeX, CSV) and the HTML page')
    for action in (run, status, report):
        action.add_argument('file', metavar='FILE.yaml', help='the study, see docs/study.md')
    cells_help = (
        "compute only these cells and their teachers; wildcards of names such as 'deit/*/seed-0' (default: all)"
    )
    run.add_argument('--cells', nargs='+', default=['*'], metavar='NAME', help=cells_help)
    launch_help = "command that starts a cell's processes, such as 'accelerate launch --num_processes 4'"
    run.add_argument('--launch', type=shlex.split, default=[sys.executable], metavar='COMMAND', help=launch_help)
    slurm_help = 'submit Slurm jobs as workers, by the package submitit: partition=gpu,gpus=1,minutes=240,jobs=4'
    run.add_argument('--slurm', type=slurm_settings, metavar='KEY=VALUE,…', help=slurm_help)
    run.add_argument('--retry', action='store_true', help='compute failed cells again')
    report.add_argument('--out', metavar='DIR', help="output folder (default: report/ in the study's folder)")
    return parser.parse_args(argv)


def _run(study: Study, args: argparse.Namespace) -> None:
    if not args.launch:
        raise UserError(
            "--launch is empty; give a command such as 'accelerate launch --num_processes 4', or leave it out"
        )
    study = study.choose(args.cells)
    if args.retry:
        for cell in study.cells:
            cell.record.forget_failure()
    if args.slurm:
        _submit(study, args)
        return
    with StopSignal() as stop:
        Worker(study, launch=args.launch, should_stop=lambda: stop.received).run()
    print_status(study)
    check_failures(study)
    left = [cell.name for cell in study.cells if find_state(cell) in (CellState.FREE, CellState.WAITING)]
    if left and not stop.received:
        raise UserError(
            f'a step was stopped from outside; cells left to do: {len(left)} of {len(study.cells)}, the first is'
            f' {left[0]}; run the study again to continue'
        )


def _submit(study: Study, args: argparse.Namespace) -> None:
    folder = study.folder / 'slurm'
    jobs = submit_workers(args.file, args.launch, args.slurm, folder, args.cells)
    print(f'submitted {", ".join(job.job_id for job in jobs)}, with logs in {folder}')
    print(f'vitzoo study status {args.file} shows the progress')


def _status(study: Study, args: argparse.Namespace) -> None:
    print_status(study)
    rows = collect(study)
    if rows:
        print(f'\n{format_markdown(study, rows)}')


def _report(study: Study, args: argparse.Namespace) -> None:
    rows = collect(study)
    if not rows:
        raise UserError(f"no cell of '{args.file}' has results yet; compute some with vitzoo study run {args.file}")
    folder = Path(args.out) if args.out else study.folder / 'report'
    for path in write_study_report(folder, study, rows):
        print(f'wrote {path}')
