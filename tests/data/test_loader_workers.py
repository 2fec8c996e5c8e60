"""Worker processes of the loaders."""

import subprocess
import sys

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
