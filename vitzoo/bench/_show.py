"""What `vitzoo bench` shows while it measures and when it has: a bar, and tables."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table


@contextmanager
def progress(what: str) -> Iterator[Callable[[], None]]:
    """A line that says what is measured and for how long, moved by calling it after a round."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn('{task.description}, round {task.completed}'), TimeElapsedColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda: bar.advance(task)


def print_table(title: str, headings: list[str], rows: list[list[str]]) -> None:
    """Print rows of text under their headings, the first column to the left and the others to the right."""
    table = Table(title=title, title_justify='left', box=None, pad_edge=False, header_style='bold')
    for number, heading in enumerate(headings):
        table.add_column(heading, justify='right' if number else 'left', no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    # a file has no width that a table would have to fit
    Console(width=None if console.is_terminal else 240).print(table)


def milliseconds(seconds: float) -> str:
    """A time in three digits or so."""
    return f'{1e3 * seconds:,.{0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 2}f} ms'
