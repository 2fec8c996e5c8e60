"""Notes on the machine that a command runs on."""

import pytest
import torch

from vitzoo.machine import note_slow_bfloat16


@pytest.mark.parametrize(
    ('capability', 'machine', 'device', 'dtype', 'is_slow'),
    [
        ('AVX2', 'x86_64', 'cpu', 'bfloat16', True),
        ('DEFAULT', 'AMD64', 'cpu', 'bfloat16', True),
        ('AVX512', 'x86_64', 'cpu', 'bfloat16', False),
        ('AVX2', 'x86_64', 'cpu', 'float32', False),
        ('AVX2', 'x86_64', 'meta', 'bfloat16', False),
        ('DEFAULT', 'arm64', 'cpu', 'bfloat16', False),
    ],
)
def test_bfloat16_is_noted_where_a_processor_has_no_fast_products_in_it(
    monkeypatch, capability, machine, device, dtype, is_slow
):
    monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: capability)
    monkeypatch.setattr('platform.machine', lambda: machine)
    assert bool(note_slow_bfloat16(torch.device(device), dtype)) is is_slow
