"""Worker processes of the loaders."""

import subprocess
import sys

import torch
from torch.utils.data import TensorDataset

from vitzoo.data.loader import _loader, stop_workers

# the loader is alive when Python ends its child processes
SCRIPT = """
import torch
from torch.utils.data import TensorDataset
from vitzoo.data.loader import _loader

if __name__ == '__main__':
    loader = _loader(TensorDataset(torch.arange(4)), [[0, 1], [2, 3]], 2)
    batches = iter(loader)
    print(next(batches), flush=True)
    torch.kept = loader, batches
"""


def test_a_process_that_still_has_loader_workers_ends():
    done = subprocess.run([sys.executable, '-c', SCRIPT], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, '[tensor([0, 1])]\n'), done.stderr


def test_the_workers_of_a_loader_can_be_stopped_in_the_middle_of_an_iteration():
    loader = _loader(TensorDataset(torch.arange(6)), [[0, 1], [2, 3], [4, 5]], 1)
    batches = iter(loader)
    next(batches)
    workers = batches._workers
    stop_workers(loader)
    assert [worker.is_alive() for worker in workers] == [False]
    # nothing is left to stop
    stop_workers(loader)
    assert [batch.tolist() for (batch,) in loader] == [[0, 1], [2, 3], [4, 5]]
    stop_workers(loader)


def test_a_loader_without_workers_has_nothing_to_stop():
    loader = _loader(TensorDataset(torch.arange(2)), [[0, 1]], 0)
    next(iter(loader))
    stop_workers(loader)
    assert [batch.tolist() for (batch,) in loader] == [[0, 1]]
