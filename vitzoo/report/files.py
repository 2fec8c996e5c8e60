"""The files of a report: its page, and its data, which another report can read."""

import json
import os
from datetime import datetime, timezone
from pathlib import Path

from vitzoo._files import printable, replace_file
from vitzoo.errors import UserError

PAGE, DATA = 'index.html', 'report.json'


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


def format_now() -> str:
    """The time at which a report is made."""
    now = datetime.now(timezone.utc)
    return f'{now.day} {now:%B %Y, %H:%M} UTC'


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
