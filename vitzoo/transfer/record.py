"""transfer.json: the results of a transfer, written after each of its pieces, so that it can be continued."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from vitzoo._files import replace_file
from vitzoo.errors import UserError, content_error
from vitzoo.train.run_folder import RUN_FILES, RUN_FOLDERS, remove_old_run

RECORD = 'transfer.json'
# states of unfinished stages
STATES = 'stages'


class TransferRecord:
    """Results by key, in the order in which they were computed.

    Args:
        folder: Where the file is; created on the first result.
        settings: All that the results depend on.
        is_main: Whether this process writes.
        teacher_weights: Hash of the teacher's weights, by which it is known after it was moved, and that must not
            change; None for one that has no file.
    """

    def __init__(self, folder: Path, settings: dict, is_main: bool = True, teacher_weights: str | None = None) -> None:
        self.folder, self.is_main = folder, is_main
        # as they are read from the file
        self.results: dict[str, Any] = dict(settings=json.loads(json.dumps(settings)), seconds={})
        self.results['teacher_weights'] = teacher_weights
        # the key that is being computed, and since when its time is not counted yet
        self.in_progress: tuple[str, float] | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / RECORD

    def open(self, resume: bool, overwrite: bool) -> None:
        """Continue the file in the folder, or begin one; with `overwrite`, `clear` must follow.

        Raises:
            UserError: There is a transfer and `resume` and `overwrite` are false, or it has other settings or another
                teacher, or the folder has another run.
        """
        if self._students() is not None:
            raise UserError(
                f"'{self.folder}' has transfers to several mixers, in folders of their names; give --output one of"
                f' these, or choose another'
            )
        if self.path.is_file() and resume:
            self._continue()
        elif self.path.is_file() and not overwrite:
            raise UserError(
                f"there is a transfer in '{self.folder}' already; continue it with --resume, replace it with"
                f' --overwrite, or choose another --output'
            )
        elif not self.path.is_file() and any((self.folder / name).exists() for name in RUN_FILES + RUN_FOLDERS):
            raise UserError(f"'{self.folder}' has a model or a run that is not of a transfer; choose another --output")

    def clear(self) -> None:
        """Delete the transfer in the folder."""
        if not self.is_main:
            return
        # in this order, a transfer that is killed here can be begun again, and never continues stages of the old one
        self.delete_states()
        if self.path.is_file():
            self.write()
        remove_old_run(self.folder)
        self.path.unlink(missing_ok=True)

    def open_summary(self) -> None:
        """Check that the file can have the results of several mixers.

        Raises:
            UserError: The file is that of one mixer, or cannot be read.
        """
        if self.path.is_file() and 'students' not in self._read('remove it, or choose another --output'):
            raise UserError(f"'{self.folder}' has a transfer to one mixer; choose another --output for several")

    def write_students(self, results: list[dict]) -> None:
        """Write the results of several mixers, and keep those of other mixers that the file has."""
        mixers = {result['settings']['mixer'] for result in results}
        earlier = [result for result in self._students() or [] if result['settings']['mixer'] not in mixers]
        self.results['students'] = [*earlier, *results]
        self.write()

    def compute_once(self, key: str, compute: Callable[[], Any]) -> Any:
        """The result of a key, computed now if it is not in the file yet."""
        if key not in self.results:
            self.in_progress = key, perf_counter()
            self.results[key] = compute()
            self.write_time()
            self.in_progress = None
        return self.results[key]

    def stage(self, key: str, compute: Callable[[], Any]) -> Any:
        """The result of a stage, which continues from its own state, or ends at once if it was finished."""
        if key in self.results:
            compute()
        return self.compute_once(key, compute)

    def write_time(self) -> None:
        """Write all results, with the time that the current key has taken so far, before an interruption too."""
        if self.in_progress is None:
            return
        key, since = self.in_progress
        now, seconds = perf_counter(), self.results['seconds']
        seconds[key] = round(seconds.get(key, 0) + now - since, 2)
        self.in_progress = key, now
        self.write()

    def write(self) -> None:
        """Write all results."""
        if not self.is_main:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with replace_file(self.path) as partial:
            partial.write_text(json.dumps(self.results, indent=1), encoding='utf-8')

    def state_file(self, stage: str) -> Path:
        """Where a stage keeps its state."""
        if self.is_main:
            (self.folder / STATES).mkdir(parents=True, exist_ok=True)
        return self.folder / STATES / f'{stage}.pt'

    def delete_states(self) -> None:
        """Delete the states of finished stages."""
        if self.is_main:
            for name in (STATES, 'checkpoints', 'best'):
                shutil.rmtree(self.folder / name, ignore_errors=True)

    def _students(self) -> list[dict] | None:
        """The results in the file of several mixers; None if there is none."""
        try:
            return json.loads(self.path.read_text(encoding='utf-8')).get('students')
        except (OSError, ValueError, AttributeError):
            return None

    def _read(self, advice: str) -> dict:
        """The results in the file.

        Raises:
            UserError: It cannot be read; `advice` ends the message.
        """
        try:
            found = json.loads(self.path.read_text(encoding='utf-8'))
            # raises an error for another kind of file
            found['settings']
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"cannot read '{self.path}': {content_error(error)}; {advice}") from error
        return found

    def _continue(self) -> None:
        found = self._read('start again with --overwrite')
        before, now = found['settings'], self.results['settings']
        weights = self.results['teacher_weights']
        # a teacher that was moved, or whose folder is written in another way, is the same; a checkpoint fits several
        if weights is not None and not now.get('checkpoint') and found.get('teacher_weights') == weights:
            before['teacher'] = now['teacher']
        changed = [key for key in now if before.get(key) != now[key]]
        if changed:
            key = changed[0]
            raise UserError(
                f"cannot resume '{self.folder}': its {key} is {before.get(key)}, not {now[key]}; keep it, or"
                f' start again with --overwrite'
            )
        if None not in (weights, found.get('teacher_weights')) and found['teacher_weights'] != weights:
            source = now.get('checkpoint') or now['teacher']
            raise UserError(
                f"cannot resume '{self.folder}': the weights of its teacher, in '{source}', have changed; restore them,"
                f' or start again with --overwrite'
            )
        self.results = found


def hash_weights(teacher: str, checkpoint: str | None = None) -> str | None:
    """SHA-256 of the file of a teacher's weights, or of those in its folder; None for another name."""
    weights = Path(checkpoint or Path(teacher.removeprefix('local-dir:')).expanduser() / 'model.safetensors')
    return hashlib.sha256(weights.read_bytes()).hexdigest() if weights.is_file() else None
