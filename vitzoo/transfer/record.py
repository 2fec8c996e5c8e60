"""transfer.json: the results of a transfer, written after each of its pieces, so that it can be continued."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from vitzoo.errors import UserError

RECORD = 'transfer.json'
# states of unfinished stages
STATES = 'stages'


class Ledger:
    """Results by key, in the order in which they were computed.

    Args:
        folder: Where the file is; created on the first result.
        settings: All that the results depend on.
        is_main: Whether this process writes.
    """

    def __init__(self, folder: Path, settings: dict, is_main: bool = True) -> None:
        self.folder, self.is_main = folder, is_main
        # as they are read from the file
        self.results: dict[str, Any] = dict(settings=json.loads(json.dumps(settings)), seconds={})

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / RECORD

    def open(self, resume: bool, overwrite: bool) -> None:
        """Continue the file in the folder, or begin one.

        Raises:
            UserError: There is a transfer and `resume` and `overwrite` are false, or it has other settings, or the
                folder has another run or is a file.
        """
        if self.folder.is_file():
            raise UserError(f"'{self.folder}' is a file; choose another --output")
        if self.path.is_file() and resume:
            self._read()
        elif self.path.is_file() and not overwrite:
            raise UserError(
                f"there is a transfer in '{self.folder}' already; continue it with --resume, replace it with"
                f' --overwrite, or choose another --output'
            )
        elif (self.folder / 'config.json').exists() and not self.path.is_file():
            raise UserError(f"'{self.folder}' has a model that is not of a transfer; choose another --output")
        elif overwrite and self.is_main:
            self._clear()

    def once(self, key: str, compute: Callable[[], Any], start: float | None = None) -> Any:
        """The result of a key, computed now if it is not in the file yet; its time counts from `start`."""
        if key not in self.results:
            start = perf_counter() if start is None else start
            self.results[key] = compute()
            self.results['seconds'][key] = round(perf_counter() - start, 2)
            self.write()
        return self.results[key]

    def stage(self, key: str, compute: Callable[[], Any]) -> Any:
        """The result of a stage, which continues from its own state, or ends at once if it was finished."""
        start = perf_counter()
        result = compute()
        return self.once(key, lambda: result, start)

    def write(self) -> None:
        """Write all results."""
        if not self.is_main:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        partial = self.folder / f'.{RECORD}'
        partial.write_text(json.dumps(self.results, indent=1), encoding='utf-8')
        partial.replace(self.path)

    def state_file(self, stage: str) -> Path:
        """Where a stage keeps its state."""
        if self.is_main:
            (self.folder / STATES).mkdir(parents=True, exist_ok=True)
        return self.folder / STATES / f'{stage}.pt'

    def forget_states(self) -> None:
        """Delete the states of finished stages."""
        if self.is_main:
            shutil.rmtree(self.folder / STATES, ignore_errors=True)

    def _read(self) -> None:
        try:
            found = json.loads(self.path.read_text(encoding='utf-8'))
            before = found['settings']
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"cannot read '{self.path}': {error}; start again with --overwrite") from error
        now = self.results['settings']
        changed = [key for key in now if before.get(key) != now[key]]
        if changed:
            key = changed[0]
            raise UserError(
                f"cannot resume '{self.folder}': its {key} is {before.get(key)}, not {now[key]}; keep it, or"
                f' start again with --overwrite'
            )
        self.results = found

    def _clear(self) -> None:
        for name in (RECORD, 'config.json', 'model.safetensors', 'metrics.csv'):
            (self.folder / name).unlink(missing_ok=True)
        self.forget_states()
