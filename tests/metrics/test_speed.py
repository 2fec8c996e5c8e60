"""Throughput and peak memory."""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from vitzoo.metrics import speed as speed_module
from vitzoo.metrics.speed import (
    CLEAR_REFS,
    PeakMemory,
    Speed,
    format_speed,
    is_busy,
    measure_throughput,
    peak_process_megabytes,
)


class Recorder(nn.Module):
    """Keeps the batch size of each call."""

    def __init__(self):
        super().__init__()
        self.batch_sizes = []

    def forward(self, x):
        self.batch_sizes.append(len(x))


def test_speed_is_that_of_one_batch():
    model = Recorder()
    speed = measure_throughput(model, torch.zeros(4, 3, 2, 2), seconds=0.01).images_per_second
    assert speed > 0 and set(model.batch_sizes) == {4} and len(model.batch_sizes) > 2


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason='only Linux can reset the peak')
def test_peak_memory_is_that_of_the_context():
    with PeakMemory(torch.device('cpu')) as large:
        torch.ones(75_000_000)
    with PeakMemory(torch.device('cpu')) as small:
        torch.ones(10)
    assert 250 < large.megabytes - small.megabytes < 400


@pytest.mark.skipif(sys.platform != 'linux', reason='other systems have no such file')
@pytest.mark.parametrize('text', ['Name: python\n', None])
def test_peak_memory_needs_no_line_of_linux(text, tmp_path, monkeypatch):
    expected = peak_process_megabytes(torch.device('cpu'))
    path = tmp_path / 'status'
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(speed_module, 'STATUS', path)
    # that since the start of the process, without a reset
    assert peak_process_megabytes(torch.device('cpu')) > 0.5 * expected


@pytest.mark.slow
@pytest.mark.skipif('CS_GNU_LIBC_VERSION' not in getattr(os, 'confstr_names', {}), reason='an allocator of its own')
def test_peak_memory_does_not_count_memory_that_the_allocator_keeps():
    code = (
        "import sys; sys.argv = ['vitzoo']\n"
        'import torch, vitzoo\n'
        'from vitzoo.metrics.speed import PeakMemory\n'
        'torch.ones(75_000_000)\n'
        "with PeakMemory(torch.device('cpu')) as small: torch.ones(10)\n"
        "with PeakMemory(torch.device('cpu')) as large: torch.ones(75_000_000)\n"
        'print(large.megabytes - small.megabytes)\n'
    )
    child = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert 250 < float(child.stdout) < 400


@pytest.mark.parametrize('load, pauses, doubt', [(9.0, 0, 'busy machine'), (0.5, 0, None), (0.5, 1, 'uneven rounds')])
def test_a_speed_of_a_busy_machine_or_of_uneven_rounds_is_doubted(load, pauses, doubt, monkeypatch):
    clock = itertools.accumulate(itertools.cycle([0.0, 1.0, 0.0, 1.0 + pauses]))
    monkeypatch.setattr('vitzoo.metrics.speed.time.perf_counter', lambda: next(clock))
    monkeypatch.setattr('vitzoo.metrics.speed.system_load', lambda: load)
    monkeypatch.setattr('os.cpu_count', lambda: 4)
    speed = measure_throughput(Recorder(), torch.zeros(6, 3, 2, 2), seconds=12)
    assert speed == Speed(6 / (1 + pauses / 2), doubt)


def test_a_long_pause_does_not_count_in_a_speed(monkeypatch):
    clock = itertools.accumulate(itertools.cycle([0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 20.0]))
    monkeypatch.setattr('vitzoo.metrics.speed.time.perf_counter', lambda: next(clock))
    assert measure_throughput(Recorder(), torch.zeros(6, 3, 2, 2), seconds=24).images_per_second == 6


@pytest.mark.parametrize(
    ('images_per_second', 'text'),
    [(11471.4, '11,471'), (10.2, '10'), (9.96, '10'), (9.94, '9.9'), (5.0, '5'), (0.42, '0.42'), (0.0314, '0.031')],
)
def test_a_slow_model_has_a_speed_other_than_zero(images_per_second, text):
    assert format_speed(images_per_second) == text


def test_an_unknown_load_is_not_busy():
    assert not is_busy(None, 4) and not is_busy(100.0, None) and not is_busy(6.0, 4) and is_busy(6.1, 4)
