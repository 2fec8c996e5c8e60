"""Files that are never half written, and names that can be printed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """A hidden file next to `path` to write, which replaces it at the end; an error leaves the old one only.

    A link stays, and the file that it leads to is replaced.
    """
    path = path.resolve()
    partial = path.with_name(f'.{path.name}')
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def printable(name: str) -> str:
    """A file name in which bytes that are not UTF-8 are replaced by question marks in diamonds."""
    return name.encode(errors='surrogateescape').decode(errors='replace')
