"""Without a GPU: mixers and models run on a pretended one, and do not wait for it; tools/pretend_gpu finds faults."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_plugins import install

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / 'tools' / 'pretend_gpu'
slow = pytest.mark.slow
needs_cuda_build = pytest.mark.skipif(
    shutil.which('gcc') is None or torch.version.cuda is None, reason='needs gcc and a build of torch with CUDA'
)
# mixers of which each has one fault, and one without
FAULTY = """
import torch
from torch.nn import functional as F

from vitzoo.mixers import QKVMixer, register_mixer
from vitzoo.mixers.base import no_autocast


@register_mixer('faultless')
class Faultless(QKVMixer):
    op = op_naive = staticmethod(F.scaled_dot_product_attention)

    def mix(self, q, k, v, grid_size):
        return self.change(q, v).type_as(v)

    def change(self, q, v):
        return self.op(q, q, v)


@register_mixer('left')
class Left(Faultless):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.table = torch.ones(self.head_dim)

    def change(self, q, v):
        return v * self.table


@register_mixer('item')
class Item(Faultless):
    def change(self, q, v):
        return v if q.sum().item() else -v


@register_mixer('condition')
class Condition(Faultless):
    def change(self, q, v):
        return v if q.isfinite().all() else -v


@register_mixer('nonzero')
class Nonzero(Faultless):
    def change(self, q, v):
        return v * (q > 0).nonzero().shape[0]


@register_mixer('list')
class List(Faultless):
    def change(self, q, v):
        return v * torch.tensor([1.0] * self.head_dim, device=v.device)


@register_mixer('index')
class Index(Faultless):
    def change(self, q, v):
        return v[:, :, [0] * v.shape[2]]


@register_mixer('mask')
class Mask(Faultless):
    def change(self, q, v):
        with no_autocast(q):
            mask = q.new_zeros(q.shape[2], q.shape[2], dtype=torch.float32)
            return F.scaled_dot_product_attention(q, q, v, attn_mask=mask)


@register_mixer('heads')
class Heads(Faultless):
    def change(self, q, v):
        many = q.new_zeros(65_536, 1, 4, 8)
        return v * F.scaled_dot_product_attention(many, many, many).sum()


class ReadingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * dy.sum().tolist()


@register_mixer('backward')
class Backward(Faultless):
    def change(self, q, v):
        return ReadingBackward.apply(v)
"""
# a part of the line of each fault, and its kind
FAULTS = {
    'v * self.table': 'failure',
    'q.sum().item()': 'host wait',
    'q.isfinite().all()': 'host wait',
    '.nonzero()': 'host wait',
    'torch.tensor(': 'host wait',
    'v[:, :, ': 'host wait',
    'attn_mask=mask': 'failure',
    '(many, many, many)': 'failure',
    'dy.sum().tolist()': 'host wait',
}


def check(*args: str, script: str = 'check.py', **variables: str) -> subprocess.CompletedProcess:
    """Run the check with further environment variables."""
    env = dict(os.environ, **variables)
    command = [sys.executable, FOLDER / script, *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=3600)


@slow
@needs_cuda_build
def test_mixers_and_models_run_on_a_gpu_and_do_not_wait_for_it():
    done = check('--quick')
    assert done.returncode == 0, done.stdout + done.stderr
    # the check does see the wait that gated_linear documents
    (expected,) = re.findall(r'^expected host wait: (\S+):\d+ reads a value,', done.stdout, re.MULTILINE)
    assert expected == 'vitzoo/mixers/_gated_scan.py'


@slow
@needs_cuda_build
def test_the_check_finds_planted_faults_only(tmp_path):
    mixers = re.findall(r"@register_mixer\('(\w+)'\)", FAULTY)
    install(tmp_path, 'faulty', FAULTY, '\n'.join(f'{mixer} = faulty' for mixer in mixers))
    done = check('--quick', '--mixers', *mixers, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stderr
    found = re.findall(r'^(failure|.*host wait): faulty.py:(\d+) ', done.stdout, re.MULTILINE)
    lines = enumerate(FAULTY.splitlines(), 1)
    assert {int(line): kind for kind, line in found} == {
        number: kind for number, line in lines for text, kind in FAULTS.items() if text in line
    }
    assert done.stdout.splitlines()[-1] == '60 passes: 3 failures, 6 host waits, 0 expected host waits'


@needs_cuda_build
def test_the_check_says_that_gcc_is_missing(tmp_path):
    tmp_path.joinpath('nm').symlink_to(shutil.which('nm'))
    done = check(PATH=str(tmp_path))
    assert done.returncode == 2
    assert re.fullmatch("check.py: error: 'gcc' is not installed; install .*\n", done.stderr)


def test_the_check_says_that_torch_was_built_without_cuda(tmp_path):
    (tmp_path / 'torch').mkdir()
    (tmp_path / 'torch' / '__init__.py').touch()
    done = check(PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert re.fullmatch('check.py: error: torch has no libtorch_cuda.so, .*; install .*\n', done.stderr)


@slow
def test_the_check_says_that_torch_does_not_use_the_pretended_gpu():
    done = check('--quick', script='run.py', CUDA_VISIBLE_DEVICES='', PYTHONPATH=f'{ROOT}:{ROOT / "tests"}')
    assert done.returncode == 2
    assert 'does not work with runtime.c: it does not see the device' in done.stderr
