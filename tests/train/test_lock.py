"""A run folder is locked while a run is in it; a lock whose owner has died is taken over."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from shlex import split

import psutil
import pytest
from accelerate import Accelerator
from processes import limited_files

from vitzoo.errors import UserError
from vitzoo.train import lock as lock_module
from vitzoo.train import loop as train_module
from vitzoo.train.lock import (
    LOCK_FILE,
    FolderLock,
    FolderLocked,
    LostLock,
    identify_process,
    is_locked,
    is_process_running,
    read_lock,
)
from vitzoo.train.loop import train
from vitzoo.train.run_folder import claim_folder

TINY = split('--model test_vit --img-size 32 --workers 0 --batch-size 8 --lr 1e-3 --warmup-epochs 0 --crop-pct 1')


@pytest.fixture(autouse=True)
def quick_heartbeat(monkeypatch):
    """A heartbeat of 20 milliseconds, and locks that are stale after 10 of them."""
    monkeypatch.setattr(lock_module, 'HEARTBEAT_SECONDS', 0.02)
    monkeypatch.setattr(lock_module, 'STALE_SECONDS', 0.2)


ROOT = Path(__file__).parents[2]


def ended_process() -> int:
    child = subprocess.Popen([sys.executable, '-c', ''])
    child.wait()
    return child.pid


def write_lock(folder: Path, age: float = 0.0, **changes) -> Path:
    """A lock as this process would write it, with changes, last touched `age` seconds ago."""
    process = psutil.Process()
    owner = dict(token='theirs', host=lock_module._host(), pid=process.pid, started=process.create_time())
    (folder / LOCK_FILE).write_text(json.dumps(owner | changes))
    os.utime(folder / LOCK_FILE, (time.time() - age,) * 2)
    return folder / LOCK_FILE


@pytest.mark.parametrize('error', [KeyboardInterrupt, OSError])
def test_a_lock_that_cannot_be_written_leaves_the_folder_free(tmp_path, monkeypatch, error):
    def fail(owner, file):
        file.write('{')
        raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(lock_module.json, 'dump', fail)
        FolderLock(tmp_path).acquire()
    assert list(tmp_path.iterdir()) == [] and not is_locked(tmp_path)


def test_a_full_disk_leaves_no_lock(tmp_path):
    with limited_files(10), pytest.raises(OSError):
        FolderLock(tmp_path).acquire()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_locked_once_and_released(tmp_path):
    with FolderLock(tmp_path) as lock:
        lock.acquire()
        with pytest.raises(FolderLocked, match=f'a run is in progress in .* by process {os.getpid()} on '):
            FolderLock(tmp_path).acquire()
        lock.check()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_read_where_nothing_can_be_written(tmp_path, monkeypatch):
    def refuse(**options):
        raise PermissionError

    monkeypatch.setattr(lock_module.tempfile, 'TemporaryFile', refuse)
    write_lock(tmp_path, host='elsewhere')
    assert is_locked(tmp_path)
    write_lock(tmp_path, host='elsewhere', age=1)
    assert not is_locked(tmp_path)


def test_whether_a_process_that_may_not_be_read_runs_is_unknown(monkeypatch):
    def refuse(process):
        raise psutil.AccessDenied

    owner = identify_process(psutil.Process())
    assert is_process_running(owner)
    monkeypatch.setattr(psutil.Process, 'status', refuse)
    assert is_process_running(owner) is None


def test_a_lock_is_touched_while_it_is_held(tmp_path):
    with FolderLock(tmp_path) as lock:
        lock.acquire()
        os.utime(lock.path, (0, 0))
        deadline = time.monotonic() + 5
        while read_lock(lock.path)[1] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert read_lock(lock.path)[1] > 0


STALE = {
    'a process that has ended': lambda: dict(pid=ended_process()),
    'a process of another host that is silent': lambda: dict(host='other'),
    'a process that died while another got its number': lambda: dict(started=0.0),
    'a process of another host that was silent for long': lambda: dict(host='other', age=60),
}


@pytest.mark.parametrize('case', STALE)
def test_the_lock_of_a_dead_owner_is_taken_over(tmp_path, case):
    write_lock(tmp_path, **STALE[case]())
    notes = []
    with FolderLock(tmp_path) as lock:
        lock.acquire(wait=notes.append)
        assert read_lock(lock.path)[0]['token'] == lock.token
    # nothing has to be waited for if the owner is known to have ended
    assert len(notes) == ('is silent' in case or 'number' in case)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('changes', [dict(age=60), dict(host='other'), dict(started=0.0)], ids=str)
def test_the_lock_of_a_live_owner_is_not_taken_over(tmp_path, changes):
    """An owner on this host is looked up; any other shows that it is alive by touching its lock."""
    path = write_lock(tmp_path, **changes)
    with pytest.raises(FolderLocked, match='wait until it ends, stop it with SIGTERM, or choose another --output'):
        FolderLock(tmp_path).acquire(wait=lambda note: os.utime(path, (0, 0)))
    assert read_lock(path)[0]['token'] == 'theirs'


@pytest.mark.parametrize('content', ['', '{"token', '[]'])
def test_a_half_written_lock_becomes_stale(tmp_path, content):
    (tmp_path / LOCK_FILE).write_text(content)
    with FolderLock(tmp_path) as lock:
        lock.acquire()
        lock.check()


def test_of_two_starts_that_find_the_same_stale_lock_one_takes_it_over(tmp_path):
    stale = read_lock(write_lock(tmp_path, pid=ended_process()))[0]
    with FolderLock(tmp_path) as first, FolderLock(tmp_path) as second:
        first.acquire()
        # the second had read the lock before the first replaced it
        second._remove(stale)
        first.check()
        with pytest.raises(FolderLocked):
            second.acquire()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures('fresh_accelerate')
def test_the_first_process_of_a_run_locks_for_all(tmp_path):
    accelerator = Accelerator(cpu=True)
    with claim_folder(accelerator, tmp_path / 'run', is_named=True) as lock:
        assert lock.is_held
        with pytest.raises(UserError, match='a run is in progress in'), claim_folder(accelerator, lock.folder, True):
            pass
        lock.check()
    assert not (tmp_path / 'run').exists()


@pytest.mark.usefixtures('fresh_accelerate')
@pytest.mark.parametrize('option', ['--overwrite', '--resume auto', ''])
def test_a_second_start_in_the_folder_of_a_run_is_refused(images, tmp_path, option):
    with FolderLock(tmp_path) as lock:
        lock.acquire()
        with pytest.raises(UserError, match='a run is in progress in'):
            train([*TINY, '--data-dir', images, '--output', str(tmp_path), *split(option)])
        lock.check()
        assert list(tmp_path.iterdir()) == [lock.path]


@pytest.mark.usefixtures('fresh_accelerate')
@pytest.mark.parametrize('step', [2, 5])
def test_a_run_whose_folder_is_taken_over_stops_without_writing(images, tmp_path, monkeypatch, step):
    kept = {}

    def take_over(run, *args, **kwargs):
        status = train_step(run, *args, **kwargs)
        if run.step == step:
            write_lock(tmp_path)
            deadline = time.monotonic() + 5
            while not run.lock.is_lost and time.monotonic() < deadline:
                time.sleep(0.01)
            kept.update({path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()})
        return status

    train_step = train_module.train_step
    monkeypatch.setattr(train_module, 'train_step', take_over)
    with pytest.raises(UserError, match='another process has taken over the run in'):
        train([*TINY, '--data-dir', images, '--output', str(tmp_path), '--epochs', '9'])
    assert {path: path.read_bytes() for path in tmp_path.rglob('*') if path.is_file()} == kept
    assert read_lock(tmp_path / LOCK_FILE)[0]['token'] == 'theirs'


def test_a_lost_lock_is_noticed(tmp_path):
    with FolderLock(tmp_path) as lock:
        lock.acquire()
        lock.path.unlink()
        with pytest.raises(LostLock):
            lock.check()


def wait_for(condition, seconds: float = 900) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert condition()


@pytest.mark.slow
def test_workers_whose_launcher_is_killed_save_and_end_and_the_run_resumes(images, tmp_path):
    run = tmp_path / 'run'
    options = [*TINY, '--data-dir', images, '--output', str(run), '--epochs', '400']
    launcher = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', '2', 'train.py']
    first = subprocess.Popen([*launcher, *options], cwd=ROOT)
    wait_for(lambda: any((run / 'checkpoints').glob('step-*')))
    second = subprocess.run(
        [sys.executable, 'train.py', *options, '--resume', 'auto'], cwd=ROOT, capture_output=True, text=True
    )
    assert second.returncode == 2 and second.stderr.count('\n') == 1
    assert f"a run is in progress in '{run}', by process" in second.stderr
    workers = psutil.Process(first.pid).children()
    assert len(workers) == 2
    first.send_signal(signal.SIGKILL)
    first.wait()
    wait_for(lambda: not any(worker.is_running() and worker.status() != 'zombie' for worker in workers))
    assert not (run / LOCK_FILE).exists()
    (run / LOCK_FILE).write_text(json.dumps(dict(host=lock_module._host(), pid=first.pid, started=0.0)))
    steps = int(max((run / 'checkpoints').glob('step-*')).name[5:])
    again = subprocess.run(
        [sys.executable, 'train.py', '--resume', str(run), '--epochs', str(steps // 5 + 1)],
        cwd=ROOT, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert 'resumed from' in again.stdout and not (run / LOCK_FILE).exists()
