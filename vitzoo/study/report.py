"""The files of a study's report: tables, the HTML page, and the records of its finished cells."""

import shlex
from pathlib import Path

from vitzoo._files import replace_file
from vitzoo.report.files import DATA, PAGE, format_now, make_folder, write_records
from vitzoo.study.page import render_study
from vitzoo.study.plan import Study, StudyCell
from vitzoo.study.results import Row, group_records, has_more, read_cell
from vitzoo.study.tables import count_finished, format_latex, format_markdown, format_notes, write_cells, write_csv


def write_study_report(folder: Path, study: Study, rows: list[Row]) -> list[Path]:
    """Write all files of a report, and return their paths.

    Raises:
        UserError: The folder cannot be created or written to.
    """
    make_folder(folder)
    made = format_now()
    page = render_study(study, rows, [count_finished(study), made], format_notes(study, rows))
    for name, text in (
        ('table.md', format_markdown(study, rows)),
        ('table.tex', format_latex(study, rows)),
        (PAGE, page),
    ):
        with replace_file(folder / name) as partial:
            partial.write_text(text + '\n', encoding='utf-8')
    write_csv(folder / 'table.csv', rows)
    write_cells(folder / 'cells.csv', study)
    records = [record for cell in study.cells for record in _cell_records(study, cell)]
    command = shlex.join(['vitzoo', 'study', 'report', study.path])
    write_records(folder, dict(title=study.title, made=made, records=records, command=command))
    return [folder / name for name in ('table.md', 'table.tex', 'table.csv', 'cells.csv', DATA, PAGE)]


def _cell_records(study: Study, cell: StudyCell) -> list[dict]:
    """The record of a cell's first evaluation, and of others that have more than an accuracy on other inputs."""
    found = {name: record for name in cell.evaluations if (record := read_cell(cell, name)) is not None}
    first, *others = group_records(study, found).values() or [{}]
    trained = cell.record.finished.get(cell.command, {})
    commands = [trained['command']] if 'command' in trained else []
    records = [first, *(other for other in others if has_more(other, first))]
    return [record | dict(commands=commands) for record in records if record]
