"""Settings and fixtures of the whole suite."""

import functools
import importlib.metadata

import pytest
import torch
from packaging.version import Version
from toys import make_images


def pytest_configure() -> None:
    # the tensors of the tests are small, and pytest runs one process per core already
    torch.set_num_threads(1)


@pytest.fixture(scope='session')
def images(tmp_path_factory) -> str:
    """A folder with 40 training and 11 validation images of three classes."""
    root = tmp_path_factory.mktemp('images')
    return str(make_images(root, train_red=14, train_green=13, train_blue=13, val_red=4, val_green=4, val_blue=3))


@pytest.fixture
def quick_timing(monkeypatch) -> None:
    """Time models for 10 milliseconds during `vitzoo validate`."""
    from vitzoo.metrics.speed import images_per_second

    quick = functools.partial(images_per_second, seconds=0.01)
    monkeypatch.setattr('vitzoo.validate.evaluation.images_per_second', quick)


@pytest.fixture
def fresh_accelerate() -> None:
    """Accelerate keeps its state for the life of a process; let it forget, as in a new one."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def triton_interpreter() -> None:
    """Skips where Triton's interpreter itself fails: that of 3.2 turns arrays into numbers as NumPy 2.4 forbids."""
    triton, numpy = (Version(importlib.metadata.version(name)) for name in ('triton', 'numpy'))
    if triton < Version('3.3') and numpy >= Version('2.4'):
        pytest.skip(f'the interpreter of Triton {triton} does not run with NumPy {numpy}')
