"""Claims of cells by workers, so that each cell is computed by one of them at a time.

A claim is the lock of the folder .claim/ in the cell's folder; the run folder itself is locked by the training. With
the lock is the process that computes the current step. If a worker is killed, that process may go on; the cell is free
only after both have ended. Another machine knows of that process only by the lock of the training.
"""

import json
from pathlib import Path

import psutil

from vitzoo._files import replace_file
from vitzoo.train.lock import FolderLock, FolderLocked, identify_process, is_locked, is_process_running

_CLAIM = '.claim'
_PROCESS = 'process.json'


class Claim:
    """The claim of one worker to a cell.

    Args:
        folder: The run folder of the cell, which is created by `acquire`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / _CLAIM
        self.lock = FolderLock(self.folder)

    def acquire(self) -> bool:
        """Claim the cell; False if another worker has it. Does not wait.

        Raises:
            OSError: The folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if is_claimed(self.folder.parent):
            return False
        try:
            self.lock.acquire(wait=lambda note: None)
        except FolderLocked:
            return False
        # the process of a worker that was killed may have been found before its lock was
        if _is_running(self.folder.parent):
            self.lock.release()
            return False
        return True

    def release(self) -> None:
        """Give the cell back."""
        self.lock.release()

    def watch(self, pid: int) -> None:
        """Record the process that computes the current step."""
        try:
            owner = identify_process(psutil.Process(pid))
        except psutil.NoSuchProcess:
            return
        with replace_file(self.folder / _PROCESS) as partial:
            partial.write_text(json.dumps(owner))


def is_claimed(folder: Path) -> bool:
    """Return True if a worker, or a process that it has started, computes the cell in a run folder."""
    return is_locked(folder / _CLAIM) or _is_running(folder)


def _is_running(folder: Path) -> bool:
    """Return True if the training in a run folder runs, or the recorded process does on this machine."""
    if is_locked(folder):
        return True
    try:
        return is_process_running(json.loads((folder / _CLAIM / _PROCESS).read_text())) is True
    except (OSError, ValueError, KeyError, AttributeError):
        return False
