"""Throughput and peak memory."""

import pytest
import torch
from torch import nn

from vitzoo.metrics.speed import CLEAR_REFS, PeakMemory, images_per_second


class Recorder(nn.Module):
    """Keeps the batch size of each call."""

    def __init__(self):
        super().__init__()
        self.batch_sizes = []

    def forward(self, x):
        self.batch_sizes.append(len(x))


def test_speed_is_that_of_one_batch():
    model = Recorder()
    speed = images_per_second(model, torch.zeros(4, 3, 2, 2), seconds=0.01)
    assert speed > 0 and set(model.batch_sizes) == {4} and len(model.batch_sizes) > 2


@pytest.mark.skipif(not CLEAR_REFS.exists(), reason='only Linux can reset the peak')
def test_peak_memory_is_that_of_the_context():
    with PeakMemory(torch.device('cpu')) as large:
        torch.ones(75_000_000)
    with PeakMemory(torch.device('cpu')) as small:
        torch.ones(10)
    assert 250 < large.megabytes - small.megabytes < 400
