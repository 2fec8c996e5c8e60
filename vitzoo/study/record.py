"""cell.json in the run folder of a cell: its options, the steps that are finished, and a failure."""

import json
from pathlib import Path
from typing import Any

from vitzoo._files import replace_file
from vitzoo.errors import UserError, content_error
from vitzoo.report.records import check_record
from vitzoo.train.recipe import make_recipe, read_recipe_file
from vitzoo.transfer.record import RECORD

CELL_FILE = 'cell.json'
# results of the evaluations of a cell, one file for each
EVALUATIONS = 'evaluations'
# of the settings of a teacher among those of its student
TEACHER_PREFIX = 'teacher '


class CellRecord:
    """The steps of a cell: its training or transfer, then its evaluations.

    Every property is read from the file, because other workers may have changed it.

    Args:
        folder: The run folder.
        command: 'train' or 'transfer'.
        settings: The options that the model depends on.
        evaluations: Options of the evaluations, by name.
    """

    def __init__(
        self, folder: Path, command: str, settings: dict[str, Any], evaluations: dict[str, dict[str, Any]]
    ) -> None:
        self.folder, self.path, self.command = folder, folder / CELL_FILE, command
        # as they are read from the file
        self.expected = json.loads(json.dumps({command: settings, **evaluations}))

    @property
    def steps(self) -> list[str]:
        """All steps, in order."""
        return list(self.expected)

    @property
    def finished(self) -> dict[str, dict]:
        """Settings and seconds of each finished step."""
        return self._read()['finished']

    @property
    def failure(self) -> dict | None:
        """Step, exit code and last line of output of a failure, unless the study no longer has this step."""
        failure = self._read()['failure']
        return failure if failure and failure['step'] in self.steps else None

    @property
    def missing(self) -> list[str]:
        """The steps that are not finished."""
        finished = self.finished
        return [step for step in self.steps if step not in finished]

    @property
    def is_finished(self) -> bool:
        """True if all steps are."""
        return not self.missing

    @property
    def seconds(self) -> float:
        """Time of the finished steps."""
        return sum(step['seconds'] for step in self.finished.values())

    def check(self) -> None:
        """Check that the steps computed so far had the options that the study has now.

        Raises:
            UserError: They had others, or the file cannot be read.
        """
        computed = {step: found['settings'] for step, found in self.finished.items()}
        if any((self.folder / name).exists() for name in ('checkpoints', RECORD)):
            # resuming with others would mix two recipes in one model
            started = self._read()['started'] if self.path.is_file() else self._read_recipe()
            computed = started | computed
        for step, before in computed.items():
            # an evaluation may have been removed from the study
            now = _without_unrecorded(self.expected.get(step, before), before)
            changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
            if changed:
                key = changed[0]
                # the folder has the training, too
                is_model = step == self.command
                others = ', give the study another output, or remove this folder'
                advice = others if is_model else ' or rename the evaluation'
                raise UserError(
                    f"'{self.folder}' was computed with {step} {key} = {before.get(key)!r}, not {now.get(key)!r}; undo"
                    f' the change{advice}'
                )

    def results(self, evaluation: str) -> dict | None:
        """The record that `vitzoo validate` wrote in an evaluation, None if it is not finished.

        Raises:
            UserError: The file cannot be read.
        """
        if evaluation not in self.finished:
            return None
        return read_evaluation(self.results_file(evaluation))

    def results_file(self, evaluation: str) -> Path:
        """Where the record of an evaluation is."""
        return self.folder / EVALUATIONS / f'{evaluation}.json'

    def start(self) -> None:
        """Record the options that the training or transfer starts with."""
        self._write(self._read() | dict(started={self.command: self.expected[self.command]}))

    def finish(self, step: str, seconds: float, command: str, place: dict[str, Any] | None = None) -> None:
        """Record that a step is finished, and for an evaluation on which machine."""
        found, about = self._read(), dict(command=command, place=place or {})
        seconds += found['spent'].pop(step, 0)
        found['finished'][step] = dict(settings=self.expected[step], seconds=round(seconds, 2), **about)
        self._write(found)

    def spend(self, step: str, seconds: float) -> None:
        """Record the time of an attempt that did not finish a step."""
        found = self._read()
        found['spent'][step] = found['spent'].get(step, 0) + seconds
        self._write(found)

    def fail(self, step: str, code: int, message: str) -> None:
        """Record that a step failed."""
        self._write(self._read() | dict(failure=dict(step=step, code=code, message=message)))

    def forget_failure(self) -> None:
        """Remove the failure, so that the cell is computed again."""
        found = self._read()
        if found['failure']:
            self._write(found | dict(failure=None))

    def _read(self) -> dict:
        return read_cell_file(self.path)

    def _read_recipe(self) -> dict[str, dict]:
        """The options that a training whose cell.json was removed has in its recipe, as `start` records them."""
        path = self.folder / 'recipe.yaml'
        if self.command != 'train' or not path.is_file():
            return {}
        # a recipe has the contents of a pipeline, which a study may name
        now = {key: value for key, value in self.expected[self.command].items() if key != 'albumentations'}
        before, wanted = make_recipe(read_recipe_file(path)), make_recipe(now)
        other = {key: found for key in now if (found := getattr(before, key)) != getattr(wanted, key)}
        return {self.command: self.expected[self.command] | other}

    def _write(self, found: dict) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with replace_file(self.path) as partial:
            partial.write_text(json.dumps(found, indent=1), encoding='utf-8')


def read_cell_file(path: Path) -> dict:
    """The content of a cell.json, that of a new cell if there is none.

    Raises:
        UserError: It cannot be read, or is not of a cell.
    """
    try:
        found = json.loads(path.read_text(encoding='utf-8'))
        # files of earlier versions have no machines and no times of attempts
        finished = {
            step: dict(place={}) | about | dict(settings=dict(about['settings']), seconds=float(about['seconds']))
            for step, about in found['finished'].items()
        }
        return dict(started=found['started'], finished=finished, failure=found['failure'], spent=found.get('spent', {}))
    except FileNotFoundError:
        return dict(started={}, finished={}, failure=None, spent={})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cannot read '{path}': {content_error(error)}; remove it to compute the cell again") from error


def read_evaluation(path: Path) -> dict:
    """The record that `vitzoo validate` wrote in an evaluation of a cell.

    Raises:
        UserError: The file cannot be read, or is not of an evaluation.
    """
    try:
        (record,) = json.loads(path.read_text(encoding='utf-8'))
        check_record(record)
    except (OSError, ValueError, TypeError) as error:
        cell = path.parents[1] / CELL_FILE
        raise UserError(f"cannot read '{path}': {error}; remove '{cell}' to compute the cell again") from error
    return record


def _without_unrecorded(settings: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Settings without those that earlier versions did not record: a teacher's, then the data of a training."""
    added = {'data_dir', f'{TEACHER_PREFIX}data_dir'}
    if not any(key.startswith(TEACHER_PREFIX) for key in before):
        added |= {key for key in settings if key.startswith(TEACHER_PREFIX)}
    return {key: value for key, value in settings.items() if key in before or key not in added}
