"""Settings and fixtures of the whole suite."""

import gc
import importlib.metadata
import os

import pytest
import torch
from packaging.version import Version
from toys import make_images


def pytest_configure(config: pytest.Config) -> None:
    # the tensors are small, and pytest runs one process per core; the variable is for the processes that tests start
    torch.set_num_threads(1)
    os.environ['OMP_NUM_THREADS'] = '1'
    # without -m gpu, tests and the processes they start are the same on all machines
    if 'gpu' not in config.option.markexpr or 'not gpu' in config.option.markexpr:
        os.environ['CUDA_VISIBLE_DEVICES'] = ''


def pytest_collection_finish() -> None:
    # training and validation collect garbage, and would look through all objects of the imported modules each time
    gc.freeze()


@pytest.fixture(scope='session')
def images(tmp_path_factory) -> str:
    """A folder with 40 training and 11 validation images of three classes."""
    root = tmp_path_factory.mktemp('images')
    return str(make_images(root, train_red=14, train_green=13, train_blue=13, val_red=4, val_green=4, val_blue=3))


@pytest.fixture
def quick_timing(monkeypatch) -> None:
    """Time models for 10 milliseconds during `vitzoo validate` and `vitzoo transfer`."""
    from vitzoo.metrics.speed import measure_throughput

    def quick(*args):
        return measure_throughput(*args, seconds=0.01)._replace(doubt=None)

    for module in ('vitzoo.validate.evaluation', 'vitzoo.transfer.measurements'):
        monkeypatch.setattr(f'{module}.measure_throughput', quick)


@pytest.fixture
def fresh_accelerate() -> None:
    """Reset the state of Accelerate, which is global to the process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def triton_interpreter() -> None:
    """Skip if Triton's interpreter fails: up to version 3.6 it converts arrays to scalars as NumPy 2.4 forbids."""
    triton, numpy = (Version(importlib.metadata.version(name)) for name in ('triton', 'numpy'))
    if triton < Version('3.7') and numpy >= Version('2.4'):
        pytest.skip(f'the interpreter of Triton {triton} does not work with NumPy {numpy}')
