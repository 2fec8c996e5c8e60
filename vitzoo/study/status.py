"""The states of the cells of a study, and the time that is left."""

from collections import Counter
from enum import Enum

from vitzoo.errors import UserError, count_of
from vitzoo.study.claim import is_claimed as is_cell_claimed
from vitzoo.study.plan import Study, StudyCell


class CellState(Enum):
    """The state of a cell."""

    FINISHED = 'finished'
    FAILED = 'failed'
    RUNNING = 'running'
    FREE = 'to do'
    WAITING = 'waiting for a teacher'


def find_state(cell: StudyCell, is_claimed: bool | None = None) -> CellState:
    """The state of a cell, from the files in its folder.

    Args:
        is_claimed: Whether a worker computes the cell; by default, this is read from its claim.
    """
    if cell.record.is_finished:
        return CellState.FINISHED
    if cell.record.failure:
        return CellState.FAILED
    if is_cell_claimed(cell.folder) if is_claimed is None else is_claimed:
        return CellState.RUNNING
    if cell.teacher is not None and cell.teacher.command not in cell.teacher.record.finished:
        return CellState.WAITING
    return CellState.FREE


def check_failures(study: Study) -> None:
    """Raise UserError if a cell has failed."""
    failed = [cell.name for cell in study.cells if find_state(cell) is CellState.FAILED]
    if failed:
        raise UserError(
            f'{len(failed)} of {count_of(len(study.cells), "cell")} failed, the first is {failed[0]}; see study.log in'
            f' its folder, correct the cause, and run again with --retry'
        )


def print_status(study: Study) -> None:
    """Print the number of cells in each state, the time left, and the failures."""
    print(f'{study.title}: {describe_cells(study)}')
    for cell in study.cells:
        state = find_state(cell)
        # read before they are used, because another worker may end the step meanwhile
        failure, missing = cell.record.failure, cell.record.missing
        if state is CellState.FAILED and failure is not None:
            print(f'  {cell.name}: {failure["step"]} failed with exit code {failure["code"]}: {failure["message"]}')
        elif state is CellState.RUNNING and missing:
            print(f'  {cell.name}: {missing[0]} is running')


def describe_cells(study: Study) -> str:
    """The number of cells in each state, and an estimate of the time left."""
    states = [find_state(cell) for cell in study.cells]
    counts = Counter(states)
    parts = [f'{counts[state]} {state.value}' for state in CellState if counts[state]]
    times = [cell.record.seconds for cell, state in zip(study.cells, states) if state is CellState.FINISHED]
    left = counts[CellState.RUNNING] + counts[CellState.FREE] + counts[CellState.WAITING]
    if times and left:
        seconds = left * sum(times) / len(times) / max(counts[CellState.RUNNING], 1)
        parts.append(f'about {_format_time(seconds)} left')
    return f'{count_of(len(study.cells), "cell")}: {", ".join(parts)}'


def _format_time(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f'{hours} h {minutes} min' if hours else f'{max(minutes, 1)} min'
