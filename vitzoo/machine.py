"""The machine that a measurement depends on: its hardware, its load and the versions of its software."""

import os
import platform
import re
from pathlib import Path

import timm
import torch

from vitzoo.errors import count_of
from vitzoo.metrics.speed import is_busy, system_load


def describe_machine(device: torch.device) -> dict:
    """Hardware, load and versions that a measurement depends on, as columns of a results file."""
    return dict(
        cpu=f'{_cpu_name()}, {os.cpu_count()} cores',
        threads=torch.get_num_threads(),
        gpu=torch.cuda.get_device_name(device) if device.type == 'cuda' else None,
        load=system_load(),
        torch=torch.__version__,
        timm=timm.__version__,
        python=platform.python_version(),
    )


def format_machine(machine: dict) -> str:
    """One line on the machine and the versions."""
    busy = ' (busy machine: the times are unreliable)' if was_busy(machine) else ''
    load = '' if machine['load'] is None else f'; load {machine["load"]}{busy}'
    return f'{_format_hardware(machine)}; {_format_versions(machine)}{load}'


def describe_place(device: torch.device, amp_dtype: str) -> dict:
    """Machine, precision and versions in one line, and for a CPU its load and number of cores."""
    machine = describe_machine(device)
    measured_on = f'{_format_hardware(machine)}, {amp_dtype}; {_format_versions(machine)}'
    return dict(measured_on=measured_on, load=machine['load'], cores=None if machine['gpu'] else os.cpu_count())


def note_slow_bfloat16(device: torch.device, dtype: str) -> list[str]:
    """A note on bfloat16 on a processor that has no fast products in it, in a list that is empty otherwise."""
    # oneDNN has them from AVX-512 on, and others convert every number
    is_slow = device.type == 'cpu' and torch.backends.cpu.get_cpu_capability() in ('DEFAULT', 'AVX2')
    if dtype != 'bfloat16' or not is_slow or platform.machine() not in ('x86_64', 'AMD64'):
        return []
    return ['bfloat16 can be ten times slower than float32 on this processor, which has no AVX-512']


def was_busy(machine: dict) -> bool:
    """Return True if other programs slowed a measurement on the CPU of a described machine."""
    cores = re.search(r'(\d+) cores$', machine.get('cpu') or '')
    return cores is not None and not machine.get('gpu') and is_busy(machine.get('load'), int(cores[1]))


def _format_hardware(machine: dict) -> str:
    return machine['gpu'] or f'{machine["cpu"]}, {count_of(machine["threads"], "thread")}'


def _format_versions(machine: dict) -> str:
    return f'torch {machine["torch"]}, timm {machine["timm"]}, Python {machine["python"]}'


def _cpu_name() -> str:
    info = Path('/proc/cpuinfo')
    names = [line for line in info.read_text().splitlines() if line.startswith('model name')] if info.exists() else []
    return names[0].partition(':')[2].strip() if names else platform.processor() or platform.machine()
