"""The kernels against the naive forms of their ops, and their use of a GPU's registers and shared memory.

They run on the GPU if there is one, else in Triton's interpreter, which must be enabled before Triton is imported: the
first test here runs the others in a subprocess.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from timm.layers import set_fused_attn
from torch._dynamo.backends.debugging import aot_eager
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from vitzoo import kernels
from vitzoo.bench import _contenders as contenders
from vitzoo.bench import kernels as bench
from vitzoo.bench._harness import LAYER_PASSES, copying, matmul
from vitzoo.bench._results import BENCHMARK_COLUMNS
from vitzoo.mixers.aft import aft_conv, aft_conv_naive
from vitzoo.mixers.performer import performer_attention, performer_naive

# the public function of each kernel's file
FUNCTIONS = {
    'aft_conv': 'aft_conv_triton',
    'favor': 'favor_attention_triton',
    'window': 'window_attention_triton',
}
ROOT = Path(__file__).parents[2]
DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
HAS_TRITON = importlib.util.find_spec('triton') is not None
IS_INTERPRETED = os.environ.get('TRITON_INTERPRET') == '1'
pytestmark = [pytest.mark.gpu] if DEVICE == 'cuda' else []
needs_kernels = pytest.mark.skipif(
    not HAS_TRITON or not (IS_INTERPRETED or DEVICE == 'cuda'), reason='runs in a subprocess, or on a GPU'
)
# the interpreter takes seconds to minutes for each
slow = pytest.mark.slow
# relative to the norm; Triton's interpreter truncates bfloat16, with twice the error of rounding to nearest and a bias
TOLERANCE = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 4e-2}


def child(*command: str, **env: str) -> subprocess.CompletedProcess:
    # packages may be on the path of this process without being installed
    paths = [str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])]
    env = os.environ | dict(PYTHONPATH=os.pathsep.join(paths)) | env
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)


@pytest.mark.skipif(IS_INTERPRETED or DEVICE == 'cuda' or not HAS_TRITON, reason='the tests below run here')
@pytest.mark.parametrize('speed', ['not slow', pytest.param('slow', marks=pytest.mark.slow)])
def test_the_kernels_pass_in_the_interpreter(speed, triton_interpreter):
    command = ('-m', 'pytest', 'tests/kernels/test_kernels.py', '-n', '0', '-k', 'not compile', '-m', speed)
    done = child(*command, TRITON_INTERPRET='1')
    assert done.returncode == 0, done.stdout
    assert ' passed' in done.stdout


@pytest.fixture
def experimental():
    set_fused_attn(True, experimental=True)
    yield
    set_fused_attn(True)


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The names of the kernel functions that were called."""
    called = []
    for name, function in FUNCTIONS.items():
        module = importlib.import_module(f'vitzoo.kernels.{name}')
        original = getattr(module, function)
        monkeypatch.setattr(module, function, lambda *a, f=function, o=original: (called.append(f), o(*a))[1])
    return called


def qkv(grid_size, P, d, std=1.0, heads=2):
    """q, k and v as views of the output of one linear layer."""
    generator = torch.Generator().manual_seed(0)
    N = P + grid_size[0] * grid_size[1]
    x = std * torch.randn(2, N, 3 * heads * d, generator=generator, dtype=torch.float64)
    return [part.unflatten(2, (heads, d)).transpose(1, 2) for part in x.chunk(3, dim=-1)], generator


def aft_case(grid_size, P, d, size, std=1.0):
    (q, k, v), generator = qkv(grid_size, P, d, std)
    return [q, k[..., :1], v, std * torch.randn(2, size, size, generator=generator, dtype=torch.float64), grid_size]


def far_keys_case(grid_size, P, d, size):
    """A key far above the others, with a weight that outweighs it in its own window; then a weight far above others."""
    q, k, v, kernel, grid_size = aft_case(grid_size, P, d, size)
    k, kernel = torch.zeros_like(k), torch.zeros_like(kernel)
    k[:, :, k.shape[2] // 2], kernel[0, size // 2, size // 2], kernel[1, 0, 0] = 30, -60, 90
    return [q, k, v, kernel, grid_size]


def performer_case(grid_size, P, d, num_features, std=1.0):
    (q, k, v), generator = qkv(grid_size, P, d, std)
    return [q, k, v, torch.randn(num_features, d, generator=generator, dtype=torch.float64), d**-0.5]


# more than one tile and part along each axis, and sizes that are not multiples of anything
CASES = {
    'aft_conv': (aft_conv, aft_conv_naive, aft_case((9, 13), 1, 20, 5)),
    'aft_conv_wide': (aft_conv, aft_conv_naive, aft_case((10, 8), 2, 16, 11)),
    'aft_conv_one_channel': (aft_conv, aft_conv_naive, aft_case((3, 5), 1, 1, 3)),
    'aft_conv_small_grid': (aft_conv, aft_conv_naive, aft_case((3, 5), 0, 33, 7)),
    'aft_conv_large': (aft_conv, aft_conv_naive, aft_case((9, 13), 1, 16, 5, std=10.0)),
    'performer': (performer_attention, performer_naive, performer_case((11, 13), 1, 20, 70)),
    'performer_few': (performer_attention, performer_naive, performer_case((3, 5), 2, 16, 6)),
    'performer_wide': (performer_attention, performer_naive, performer_case((9, 9), 0, 65, 33)),
    'performer_large': (performer_attention, performer_naive, performer_case((11, 13), 1, 20, 70, std=10.0)),
}
# the naive form of performer does not shift its exponents and overflows here; the op in float64 does not
CASES['performer_large'] = (performer_attention, performer_attention, CASES['performer_large'][2])


def run(op, args, dtype, device='cpu'):
    """The output of an op and all gradients, in float64."""
    args = [a.to(device, dtype) if isinstance(a, torch.Tensor) else a for a in args]
    is_performer = 'performer' in op.__name__
    inputs = [a.detach().requires_grad_() for a in (args[:3] if is_performer else args[:4])]
    out = op(*inputs, *args[len(inputs) :])
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=device).reshape(out.shape)
    grads = torch.autograd.grad((out.double() * weights).sum(), inputs)
    return [x.double().cpu() for x in (out, *grads)]


# a case of each kernel, and all the others
QUICK = [('aft_conv_small_grid', torch.bfloat16), ('performer_few', torch.float32), ('performer_few', torch.float16)]
THOROUGH = [(case, dtype) for case in CASES for dtype in TOLERANCE if (case, dtype) not in QUICK]


@needs_kernels
@pytest.mark.parametrize('case, dtype', [*QUICK, *(pytest.param(*each, marks=slow) for each in THOROUGH)], ids=str)
def test_a_kernel_equals_the_naive_form_with_gradients(case, dtype, experimental, calls):
    op, naive, args = CASES[case]
    # rounded first, so that both see the same numbers
    args = [a.to(dtype) if isinstance(a, torch.Tensor) else a for a in args]
    got = run(op, args, dtype, DEVICE)
    assert len(calls) == 1
    expected = run(naive, args, torch.float64)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.isfinite().all()
        assert ((ours - theirs).norm() / theirs.norm()).item() < TOLERANCE[dtype]


@needs_kernels
@slow
def test_the_kernel_of_aft_conv_is_precise_if_keys_or_weights_are_far_apart(experimental, calls):
    args = far_keys_case((5, 9), 1, 16, 3)
    got = run(aft_conv, args, torch.float32, DEVICE)
    assert len(calls) == 1
    expected = run(aft_conv_naive, args, torch.float64)
    # the gradients of far keys and weights are sums of do * out over all tokens that cancel almost to 0, so their error
    # is that of the terms: a GPU's exp2 and division are off by up to 2 units in the last place, the interpreter's not
    out = expected[0]
    terms = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)).abs().sum(dim=(0, 2, 3))
    cancelling = 4 * torch.finfo(torch.float32).eps * terms.max().item() if DEVICE == 'cuda' else 1e-5
    for ours, theirs, atol in zip(got, expected, (1e-5, 1e-5, cancelling, 1e-5, cancelling), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=atol)


@needs_kernels
@slow
def test_the_kernel_of_aft_conv_keeps_its_precision_within_autocast(experimental, calls):
    # three tiles of one sample
    q, k, v, *others = aft_case((1, 17), 1, 1, 3)
    args = [q[:1], k[:1], v[:1], *others]
    expected = run(aft_conv, args, torch.float32, DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        found = run(aft_conv, args, torch.float32, DEVICE)
    assert len(calls) == 2
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@needs_kernels
@slow
def test_the_kernel_of_aft_conv_splits_long_rows(experimental, calls, monkeypatch):
    monkeypatch.setattr('vitzoo.kernels.aft_conv._ROW_TILES', 16)
    # 17 sums of a row: those of 16 tiles, and the whole
    q, k, v, *others = aft_case((1, 121), 1, 1, 3)
    args = [q[:1], k[:1], v[:1], *others]
    got, expected = run(aft_conv, args, torch.float32, DEVICE), run(aft_conv_naive, args, torch.float64)
    assert len(calls) == 1
    for ours, theirs in zip(got, expected, strict=True):
        assert ((ours - theirs).norm() / theirs.norm()).item() < TOLERANCE[torch.float32]


@needs_kernels
@pytest.mark.parametrize('case', ['aft_conv_small_grid', 'performer_few'])
def test_torch_func_transforms_the_pytorch_form(case, experimental, calls):
    op, naive, (*args, last) = CASES[case]
    args = [a.to(DEVICE) for a in args]
    expected = torch.func.grad(lambda q: naive(q, *args[1:], last).square().sum())(args[0])
    q, *others = (a.float() for a in args)
    found = torch.func.grad(lambda q: op(q, *others, last).square().sum())(q)
    assert calls == []
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=1e-4)


@needs_kernels
@pytest.mark.parametrize('case', [pytest.param('aft_conv_small_grid', marks=slow), 'performer_few'])
def test_a_kernel_is_deterministic(case, experimental):
    op, _, args = CASES[case]
    first, second = (run(op, args, torch.float32, DEVICE) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@needs_kernels
@pytest.mark.parametrize('case', ['aft_conv_small_grid', 'performer_few'])
def test_a_sample_does_not_depend_on_its_batch(case, experimental):
    op, _, (q, k, v, *rest) = CASES[case]
    rest = [a.float().to(DEVICE) if isinstance(a, torch.Tensor) else a for a in rest]
    q, k, v = (x.float().to(DEVICE) for x in (q, k, v))
    # the other sample is a hundred times as large
    scale = torch.tensor([1.0, 100.0], device=DEVICE).reshape(2, 1, 1, 1)
    alone = op(q[:1], k[:1], v[:1], *rest)
    torch.testing.assert_close(op(scale * q, scale * k, v, *rest)[:1], alone, rtol=1e-5, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize('name', ['aft_conv', 'favor'])
def test_torch_accepts_the_custom_op(name):
    op = importlib.import_module(f'vitzoo.kernels.{name}').forward_op
    (q, k, v), _ = qkv((2, 3), 1, 16, heads=1)
    q, k, v = (x[:1].float().to(DEVICE).requires_grad_() for x in (q, k, v))
    if name == 'aft_conv':
        kernel = torch.zeros(1, 3, 3, device=DEVICE, requires_grad=True)
        torch.library.opcheck(op, (q, k[..., :1].detach().requires_grad_(), v, kernel, 2, 3))
    else:
        torch.library.opcheck(op, (q, k, v, torch.ones(6, 16, device=DEVICE), 0.25))


@needs_kernels
@pytest.mark.parametrize('case, target', [('aft_conv_small_grid', 'aft_conv'), ('performer_few', 'favor_attention')])
def test_a_kernel_is_used_under_the_compiler(case, target, experimental):
    op, _, args = CASES[case]
    expected = run(op, args, torch.float32, DEVICE)
    targets = []

    def backend(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(op, fullgraph=True, backend=backend)
    got = run(wraps(op)(lambda *args: compiled(*args)), args, torch.float32, DEVICE)
    assert any(f'vitzoo.{target}' in name for name in targets), targets
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@needs_kernels
@slow
def test_flops_are_those_of_the_formula(experimental):
    # 2 samples, 2 heads; 3 x 5 cells of 33 channels, 7 x 7 taps on numerator and denominator
    macs = 4 * (15 * 49 * 34 + 2 * 15 * 33)
    assert flops(*CASES['aft_conv_small_grid']) == (2 * macs, 6 * macs)
    # 17 tokens of 16 channels, 6 features
    macs = 4 * 6 * (4 * 17 * 16 + 17)
    assert flops(*CASES['performer_few']) == (2 * macs, 6 * macs)


def flops(op, _, args) -> tuple[int, int]:
    """FLOPs of a forward pass, and of forward and backward."""
    args = [a.float().to(DEVICE) if isinstance(a, torch.Tensor) else a for a in args]
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        op(*args)
    with FlopCounterMode(display=False) as both:
        run(op, args, torch.float32, DEVICE)
    return forward.get_total_flops(), both.get_total_flops()


@needs_kernels
@pytest.mark.parametrize('dtype, fused', [(torch.float32, True), (torch.float32, False), (torch.bfloat16, False)])
@pytest.mark.parametrize('case', ['aft_conv_small_grid', 'performer_few'])
def test_no_kernel_is_used_in_float32_or_without_fused_attention(case, dtype, fused, calls):
    op, _, args = CASES[case]
    set_fused_attn(fused)
    try:
        run(op, args, dtype, DEVICE)
    finally:
        set_fused_attn(True)
    assert calls == []


@pytest.mark.skipif(DEVICE != 'cuda', reason='needs a CUDA device')
@pytest.mark.parametrize(
    'case, dtype, is_used',
    [
        ('aft_conv_small_grid', torch.bfloat16, False),
        ('performer_few', torch.bfloat16, True),
        ('performer_few', torch.float16, False),
    ],
)
def test_on_a_gpu_a_kernel_is_the_default_where_it_is_faster(case, dtype, is_used, calls):
    op, _, args = CASES[case]
    run(op, args, dtype, DEVICE)
    assert bool(calls) == is_used


@pytest.mark.parametrize(
    'dtype, capability, hip, is_faster, expected',
    [
        (torch.bfloat16, (8, 0), None, True, True),
        (torch.float16, (9, 0), None, True, True),
        (torch.float32, (9, 0), None, True, False),
        (torch.bfloat16, (7, 5), None, True, False),
        (torch.bfloat16, (9, 0), '6.4', True, False),
        (torch.bfloat16, (9, 0), None, False, False),
    ],
)
def test_kernels_are_the_default_where_they_were_measured(dtype, capability, hip, is_faster, expected, monkeypatch):
    monkeypatch.setattr(kernels, 'HAS_TRITON', True)
    monkeypatch.setattr(kernels, '_compiles', lambda index: True)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda index: capability)
    monkeypatch.setattr(torch.version, 'hip', hip)
    x = SimpleNamespace(dtype=dtype, device=torch.device('cuda', 0), is_cuda=True, numel=lambda: 4)
    assert kernels.use_kernel(x, is_faster) is expected
    set_fused_attn(True, experimental=True)
    try:
        assert kernels.use_kernel(x, is_faster)
        set_fused_attn(False)
        assert not kernels.use_kernel(x, is_faster)
    finally:
        set_fused_attn(True)


@pytest.mark.skipif(DEVICE == 'cuda', reason='there is a GPU')
def test_fake_tensors_on_a_gpu_that_is_missing_have_no_kernel():
    with FakeTensorMode():
        assert not kernels.use_kernel(torch.empty(1, 2, 4, 8, device='cuda', dtype=torch.bfloat16))


class AssemblerError(Exception):
    """As Triton's errors, of no common class."""


@pytest.mark.parametrize('kind', [RuntimeError, AssemblerError])
def test_a_machine_on_which_triton_cannot_compile_is_warned_of_once(kind, monkeypatch):
    def fail():
        raise kind('Failed to find C compiler. Please specify via CC environment variable.')

    monkeypatch.setitem(sys.modules, 'vitzoo.kernels._common', SimpleNamespace(empty_kernel={(1,): fail}))
    kernels._try_kernel.cache_clear()
    # no device has the index -1, which CUDA ignores
    with pytest.warns(UserWarning, match='slower PyTorch operations; .*: Failed to find C compiler'):
        assert not kernels._compiles(-1)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert not kernels._compiles(-1)
    kernels._try_kernel.cache_clear()


@needs_kernels
@pytest.mark.parametrize('case', ['aft_conv_small_grid', 'performer_few'])
def test_unsupported_inputs_fall_back_to_pytorch(case, experimental, calls):
    op, naive, args = CASES[case]
    # float64; no image; head dimensions that are too large; learned features
    torch.testing.assert_close(run(op, args, torch.float64), run(naive, args, torch.float64))
    assert run(op, [*(a[:0] for a in args[:3]), *args[3:]], torch.float32, DEVICE)[0].numel() == 0
    if case == 'aft_conv_small_grid':
        run(op, aft_case((3, 3), 0, 129, 3), torch.float32, DEVICE)
    else:
        run(op, performer_case((3, 3), 0, 129, 6), torch.float32, DEVICE)
        q, k, v, features, scale = (a.float().to(DEVICE) if isinstance(a, torch.Tensor) else a for a in args)
        op(q, k, v, features.requires_grad_(), scale)
        op(q, k, v, features, scale, 'relu')
    assert calls == []


@needs_kernels
def test_a_traced_op_has_no_kernel(experimental, calls):
    *tensors, scale = (a.float().to(DEVICE) if isinstance(a, torch.Tensor) else a for a in CASES['performer_few'][2])
    traced = torch.jit.trace(lambda *tensors: performer_attention(*tensors, scale), tensors, check_trace=False)
    assert 'vitzoo::' not in str(traced.graph) and calls == []


@needs_kernels
@pytest.mark.parametrize('case', ['aft_conv_small_grid', 'performer_few'])
def test_without_triton_ops_fall_back_to_pytorch(case, experimental, calls, monkeypatch):
    monkeypatch.setattr(kernels, 'HAS_TRITON', False)
    op, naive, args = CASES[case]
    for ours, theirs in zip(run(op, args, torch.float32), run(naive, args, torch.float64), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert calls == []


@pytest.fixture
def bench_args(monkeypatch):
    monkeypatch.setattr(bench, 'matmul', partial(matmul, size=64))
    monkeypatch.setattr(bench, 'copying', partial(copying, size=64))
    options = '--seconds 0 --min-rounds 1 --dim 32 --heads 2 --batch 1 --against pytorch sdpa --device'
    return bench.parse_args([*options.split(), DEVICE])


@needs_kernels
@slow
@pytest.mark.parametrize('name', [task.name for task in contenders.KERNEL_TASKS])
def test_the_benchmark_reports_time_and_work_of_a_kernel(name, bench_args, calls):
    (task,) = (task for task in contenders.KERNEL_TASKS if task.name == name)
    rows = bench.measure_kernel(task, 16, bench_args)
    assert len(calls) > 1
    assert [(fields['what'], fields['against']) for fields in rows] == [
        (what, against) for what in LAYER_PASSES for against in ('kernel', 'pytorch', 'sdpa')
    ]
    for fields in rows:
        assert set(fields) < set(BENCHMARK_COLUMNS)
        assert fields['ratio'] > 0 and fields['seconds'] > 0
        assert fields['copy_gbs'] > 0 and fields['matmul_gflops'] > 0
        assert ('matmul_share' in fields) == ('io_mb' in fields) == (fields['against'] != 'sdpa')
    bench.print_kernels(rows)


@needs_kernels
def test_the_benchmark_refuses_a_wrong_kernel(bench_args, monkeypatch, capsys):
    (task,) = (task for task in contenders.KERNEL_TASKS if task.name == 'performer')
    monkeypatch.setattr(bench, 'with_kernel', lambda op: lambda *args: 1.1 * op(*args))
    assert bench.measure_kernel(task, 16, bench_args) == []
    assert 'refused: performer, kernel, 16 tokens: the output differs' in capsys.readouterr().out


def triton_version() -> tuple[int, ...]:
    return tuple(map(int, importlib.metadata.version('triton').split('.')[:2])) if HAS_TRITON else (0, 0)


# shared memory per block, in bytes
SHARED = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@pytest.mark.skipif(triton_version() < (3, 3), reason='needs the compiler interface of Triton 3.3')
@slow
@pytest.mark.parametrize('name', ['aft_conv', 'favor'])
def test_the_kernels_compile_within_the_limits_of_gpus(name):
    done = child('tools/compile_ahead.py', name, TRITON_INTERPRET='0')
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {fields['arch'] for fields in found} == {*SHARED}
    for fields in found:
        assert fields['registers'] <= 255
        assert fields['shared'] <= SHARED[fields['arch']], fields
        # bytes per thread
        assert fields['spills'] <= 96, fields
