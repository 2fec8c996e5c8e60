"""Settings of the whole suite."""

import torch


def pytest_configure() -> None:
    # the tensors of the tests are small, and pytest runs one process per core already
    torch.set_num_threads(1)
