"""A lock on the folder of a run, so that two trainings never write to the same folder.

The lock is a file with the host, process and start time of its owner, which touches it every `HEARTBEAT_SECONDS`. It is
stale if its owner was a process of this machine that has ended, or if an owner elsewhere has not touched it for
`STALE_SECONDS`. The next start takes a stale lock over. An owner that finds the lock of another process, for example
after it was suspended, stops before it writes anything.
"""

import json
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO

import psutil

from vitzoo.errors import UserError

LOCK_FILE = '.lock'
HEARTBEAT_SECONDS = 10
STALE_SECONDS = 60


class FolderLocked(UserError):
    """Another run is in progress in the folder."""


class LostLock(UserError):
    """Another process has taken over the lock of this one."""


class FolderLock:
    """The lock of a folder; as a context manager, it is released at the end of the block if it was acquired.

    Args:
        folder: Must exist when the lock is acquired.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path, self.token = folder, folder / LOCK_FILE, uuid.uuid4().hex
        self.is_held = self.is_lost = False
        self._released = threading.Event()

    def __enter__(self) -> 'FolderLock':
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def acquire(self, wait: Callable[[str], None] = print) -> None:
        """Create the lock file, and keep touching it in a thread.

        Args:
            wait: Called with a note before waiting, which is for an owner that may not run any more.

        Raises:
            FolderLocked: Another run is in progress in the folder.
            OSError: The folder cannot be written.
        """
        while not self._create():
            if (stale := self._find_stale(wait)) is not None:
                self._remove(stale)
        self.is_held = True
        threading.Thread(target=self._keep_touching, name='lock', daemon=True).start()

    def release(self) -> None:
        """Remove the lock file, if it is still that of this process."""
        self._released.set()
        with suppress(OSError):
            if self.is_held and self._is_own():
                self.path.unlink()
        self.is_held = False

    def check(self) -> None:
        """Check that the lock was not taken over, if it was acquired.

        Raises:
            LostLock: It was.
        """
        if self.is_held and not self._is_own():
            self.is_lost = True
            raise LostLock(
                f"another process has taken over the run in '{self.folder}', so this one stops without writing"
                f' anything; end the other process before you resume this run again'
            )

    def _create(self) -> bool:
        """Create the lock file; False if there is one. The mode 'x' is atomic, also on NFS."""
        owner = dict(token=self.token, **identify_process(psutil.Process()))
        try:
            with self.path.open('x') as file:
                self._write(owner, file)
        except FileExistsError:
            return False
        return True

    def _write(self, owner: dict, file: TextIO) -> None:
        """Write the owner to the file of the lock, which is removed by an error such as a full disk, and by Ctrl-C."""
        try:
            json.dump(owner, file)
            file.flush()
        except BaseException:
            # without its owner it would hold the folder for STALE_SECONDS
            self.path.unlink(missing_ok=True)
            raise

    def _find_stale(self, wait: Callable[[str], None]) -> dict | None:
        """The owner of the existing lock if it is stale; None if another lock or none has replaced it."""
        owner, touched = read_lock(self.path)
        if owner is None:
            return None
        is_running = is_process_running(owner)
        if is_running:
            raise FolderLocked(self._describe_run(owner))
        if is_running is False or _file_server_time(self.folder) - touched > STALE_SECONDS:
            return owner
        wait(f'note   waiting up to {STALE_SECONDS} s to see if {_describe(owner)} is still training')
        deadline = time.monotonic() + STALE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(HEARTBEAT_SECONDS / 10)
            found = read_lock(self.path)
            if found[0] != owner:
                return None
            if found[1] != touched:
                raise FolderLocked(self._describe_run(owner))
        return owner

    def _describe_run(self, owner: dict) -> str:
        return (
            f"a run is in progress in '{self.folder}', by {_describe(owner)}; wait until it ends, stop it with"
            f' SIGTERM, or choose another --output'
        )

    def _remove(self, stale: dict) -> None:
        """Remove a stale lock, unless another start has replaced it in the meantime."""
        aside = self.path.with_name(f'{LOCK_FILE}-{self.token}')
        with suppress(FileNotFoundError):
            self.path.rename(aside)
            if read_lock(aside)[0] != stale:
                # give it back
                with suppress(FileExistsError):
                    os.link(aside, self.path)
            aside.unlink()

    def _is_own(self) -> bool:
        owner, _ = read_lock(self.path)
        return owner is not None and owner.get('token') == self.token

    def _keep_touching(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            # a file system that fails for a moment must not end the heartbeat
            with suppress(OSError):
                if not self._is_own():
                    self.is_lost = True
                    return
                os.utime(self.path)


def read_lock(path: Path) -> tuple[dict | None, float]:
    """The owner in a lock file, empty if it is not readable, and when it was touched; (None, 0) if there is no file."""
    try:
        # opening the file makes NFS ask the server for its time
        with path.open() as file:
            touched, text = os.fstat(file.fileno()).st_mtime, file.read()
    except FileNotFoundError:
        return None, 0
    try:
        owner = json.loads(text)
    except ValueError:
        # created a moment ago, or by a process that was killed while it wrote
        return {}, touched
    return owner if isinstance(owner, dict) else {}, touched


def identify_process(process: psutil.Process) -> dict:
    """The host, number and start time of a process."""
    return dict(host=_host(), pid=process.pid, started=process.create_time())


def is_process_running(owner: dict) -> bool | None:
    """Return True if the owner still runs, and None if that is unknown: it is on another host, may not be read, or has
    a number that was reused."""
    if owner.get('host') != _host():
        return None
    try:
        # changes with the system clock
        process = psutil.Process(owner['pid'])
        started, status = process.create_time(), process.status()
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return None
    if abs(started - owner['started']) > 1:
        return None
    return status != psutil.STATUS_ZOMBIE


def _host() -> str:
    """The name of this machine and, as containers may share it, of the namespace of its process numbers."""
    try:
        return f'{socket.gethostname()} {os.readlink("/proc/self/ns/pid")}'
    except OSError:
        return socket.gethostname()


def is_locked(folder: Path) -> bool:
    """Return True if a process that runs, or touched its lock less than `STALE_SECONDS` ago, has locked a folder."""
    owner, touched = read_lock(folder / LOCK_FILE)
    if owner is None:
        return False
    is_running = is_process_running(owner)
    return is_running is not False and (is_running or _file_server_time(folder) - touched <= STALE_SECONDS)


def _describe(owner: dict) -> str:
    if not owner:
        return 'a process that is just starting'
    started = datetime.fromtimestamp(owner['started']).strftime('%Y-%m-%d %H:%M')
    return f'process {owner["pid"]} on {owner["host"].split()[0]}, started {started}'


def _file_server_time(folder: Path) -> float:
    """The time as the file system of a folder sees it; that of this machine, if no file can be written there."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()
