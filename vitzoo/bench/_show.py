"""Progress display and tables of `vitzoo bench`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table


@contextmanager
def show_rounds(description: str) -> Iterator[Callable[[], None]]:
    """Show what is measured, the number of rounds and the time; the context is a function to call after each round."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn('{task.description}, round {task.completed}'), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(description, total=None)
        yield lambda: bar.advance(task)


def print_table(title: str, headings: list[str], rows: list[list[str]]) -> None:
    """Print rows of text under their headings, the first column left-aligned and the others right-aligned."""
    table = Table(title=title, title_justify='left', box=None, pad_edge=False, header_style='bold')
    for number, heading in enumerate(headings):
        table.add_column(heading, justify='right' if number else 'left', no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    # without a terminal there is no width to fit into
    Console(width=None if console.is_terminal else 240).print(table)


def format_time(seconds: float) -> str:
    """A time in milliseconds, with about three digits."""
    if seconds >= 0.1:
        digits = 0
    elif seconds >= 0.01:
        digits = 1
    else:
        digits = 2
    return f'{1e3 * seconds:,.{digits}f} ms'


def format_quartiles(low: float, high: float, digits: int = 2) -> str:
    """The quartiles of a ratio."""
    return f'{low:.{digits}f} … {high:.{digits}f}'
