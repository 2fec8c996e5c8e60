"""The window attention kernel against its specification, on a GPU or in Triton's interpreter."""

import json
from functools import partial
from math import prod

import pytest
import torch
from test_kernels import SHARED, child
from timm.layers import set_fused_attn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.flop_counter import FlopCounterMode

import vitzoo.kernels
from vitzoo import create_mixer
from vitzoo.mixers._window import window_attention, window_attention_naive
from vitzoo.mixers.softmax import softmax_naive
from vitzoo.mixers.swin import shifted_window_attention, shifted_window_naive

pytest.importorskip('triton')

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
slow = pytest.mark.slow
HEADS, SCALE = 2, 0.3
# relative to the norm: the rounding error of inputs and weights
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# grid_size, window_size, halo, shared keys, head dimension; in 'blocks', queries and keys need several blocks
SHAPES = {
    'half': ((5, 7), 3, 1, 2, 8),
    'whole': ((5, 4), 2, 2, 1, 20),
    'none': ((4, 7), 4, 0, 0, 16),
    'far': ((2, 4), 1, 2, 3, 8),
    'blocks': ((8, 10), 9, 4, 17, 8),
    'one': ((3, 4), 5, 2, 3, 8),
}
# grid_size, window_size, shift, prefix tokens, has_bias
SHIFTED = {
    'odd': ((5, 7), 3, 1, 1, True),
    'narrow': ((9, 4), 4, 2, 0, True),
    'whole': ((8, 10), 4, 2, 2, False),
    'far': ((8, 10), 4, 1, 0, True),
    'even_layer': ((5, 7), 3, 0, 2, True),
    'one': ((3, 2), 4, 2, 1, True),
}


@pytest.fixture
def device(monkeypatch, request):
    """A device on which the kernel may run, with timm's experimental kernels enabled."""
    if not torch.cuda.is_available():
        request.getfixturevalue('triton_interpreter')
        monkeypatch.setenv('TRITON_INTERPRET', '1')
        interpret_standard_functions(monkeypatch)
    set_fused_attn(True, experimental=True)
    yield 'cuda' if torch.cuda.is_available() else 'cpu'
    set_fused_attn(True)


def interpret_standard_functions(monkeypatch):
    """Interpret functions such as `tl.sum`, which Triton compiles if it was imported before the interpreter was on."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for module in (tl, tl.standard):
        for name, function in list(vars(module).items()):
            if isinstance(function, JITFunction):
                monkeypatch.setattr(module, name, InterpretedFunction(function.fn))


def make_inputs(shape, device, dtype=torch.float32, std=1.0, has_bias=True, batch_size=2):
    """q, k, v as views of one tensor, shared keys and values, and both biases in float32."""
    (H, W), w, halo, S, d = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)

    def randn(*size, std=std):
        return std * torch.randn(*size, generator=generator)

    q, k, v = randn(batch_size, H * W, 3, HEADS, d).to(dtype).permute(2, 0, 3, 1, 4)
    inputs = [q, k, v, randn(batch_size, HEADS, S, d).to(dtype), randn(batch_size, HEADS, S, d).to(dtype)]
    if has_bias:
        inputs += [randn(HEADS, w * w, (w + 2 * halo) ** 2, std=1.0), randn(HEADS, S, std=1.0)]
    return [x.to(device) for x in inputs]


def attend(op, shape, *inputs, **kwargs):
    grid_size, w, halo, *_ = SHAPES[shape]
    return op(*inputs[:5], grid_size, w, halo, SCALE, *inputs[5:], **kwargs)


def run_with_gradients(op, shape, inputs):
    return gradients(lambda *inputs: attend(op, shape, *inputs), inputs)


def gradients(function, inputs):
    """The output of a function, and the gradients of a sum of its elements with different weights."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = function(*inputs)
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).reshape(out.shape).to(out.dtype)
    grads = torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True, materialize_grads=True)
    return [out, *grads]


def assert_close(got, expected, tolerance):
    for x, y in zip(got, expected, strict=True):
        assert x.isfinite().all()
        assert (x.double() - y).norm() <= tolerance * y.norm()


@pytest.fixture
def kernel_calls(monkeypatch):
    """The shapes of the queries of each call of the kernel."""
    calls = []

    def import_and_watch():
        from vitzoo.kernels import window

        op = window.window_attention_triton
        monkeypatch.setattr(window, 'window_attention_triton', lambda q, *args: calls.append(q.shape) or op(q, *args))
        return calls

    return import_and_watch


QUICK = [('none', torch.float32), ('one', torch.float32), ('far', torch.bfloat16)]
# the interpreter takes seconds for each
THOROUGH = [(shape, torch.float32) for shape in ('half', 'whole', 'blocks', 'far')]
THOROUGH += [(shape, dtype) for shape in ('half', 'blocks') for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize('shape, dtype', [*QUICK, *(pytest.param(*case, marks=slow) for case in THOROUGH)], ids=str)
def test_output_and_gradients_equal_the_specification(shape, dtype, device, kernel_calls):
    calls = kernel_calls()
    inputs = make_inputs(shape, device, dtype, batch_size=1 + (shape == 'half'))
    got = run_with_gradients(window_attention, shape, inputs)
    assert len(calls) == 1 and got[0].dtype == dtype
    expected = run_with_gradients(window_attention_naive, shape, [x.double() for x in inputs])
    assert_close(got, expected, TOLERANCES[dtype])


def make_shifted(shape, device, dtype=torch.float32):
    """q, k, v as views of one tensor, and the bias in float32 if there is one."""
    (H, W), w, _, P, has_bias = SHIFTED[shape]
    generator = torch.Generator().manual_seed(0)
    inputs = [*torch.randn(1, P + H * W, 3, HEADS, 8, generator=generator).to(dtype).permute(2, 0, 3, 1, 4)]
    inputs += [torch.randn(HEADS, w * w, w * w, generator=generator)] if has_bias else []
    return [x.to(device) for x in inputs]


def attend_shifted(op, shape, q, k, v, bias=None, **kwargs):
    grid_size, w, shift, *_ = SHIFTED[shape]
    return op(q, k, v, grid_size, w, shift, SCALE, bias, **kwargs)


SHIFTED_QUICK = [('narrow', torch.float32), ('one', torch.float32)]
SHIFTED_THOROUGH = [(shape, torch.float32) for shape in ('odd', 'whole', 'far', 'even_layer')]
SHIFTED_THOROUGH += [('odd', torch.bfloat16), ('far', torch.float16)]


@pytest.mark.parametrize(
    'shape, dtype', [*SHIFTED_QUICK, *(pytest.param(*case, marks=slow) for case in SHIFTED_THOROUGH)], ids=str
)
def test_shifted_windows_equal_the_specification(shape, dtype, device, kernel_calls):
    calls = kernel_calls()
    inputs = make_shifted(shape, device, dtype)
    got = gradients(partial(attend_shifted, shifted_window_attention, shape), inputs)
    assert len(calls) == 1 and got[0].dtype == dtype
    expected = gradients(partial(attend_shifted, shifted_window_naive, shape), [x.double() for x in inputs])
    assert_close(got, expected, TOLERANCES[dtype])


def place_in_windows(place, w, halo, offset):
    """Positions of queries (N) in their windows along an axis, and of keys (N, N) in the windows and halos of these."""
    first = (place + offset) // w * w - offset
    return place - first, place - first[:, None] + halo


def attend_offset_naive(q, k, v, k_shared, v_shared, grid_size, window_size, halo, offset, scale, bias, bias_shared):
    """Softmax attention under a dense N x N mask; arguments as `window_attention_triton`."""
    (H, W), (side_h, side_w) = grid_size, (w + 2 * h for w, h in zip(window_size, halo))
    token = torch.arange(H * W, device=q.device)
    (y, y_k), (x, x_k) = (place_in_windows(*axis) for axis in zip((token // W, token % W), window_size, halo, offset))
    near = (y_k >= 0) & (y_k < side_h) & (x_k >= 0) & (x_k < side_w)
    index = (y_k * side_w + x_k).where(near, 0)
    dense = bias[:, (y * window_size[1] + x)[:, None], index].masked_fill(~near, float('-inf'))
    dense = torch.cat([bias_shared.unsqueeze(1).expand(-1, H * W, -1), dense], dim=2)
    return softmax_naive(q, torch.cat([k_shared, k], dim=2), torch.cat([v_shared, v], dim=2), scale, dense)


@pytest.mark.parametrize(
    'window_size, halo, offset', [((2, 3), (1, 2), (1, 1)), pytest.param((3, 2), (1, 3), (2, 1), marks=slow)]
)
def test_an_offset_and_a_halo_are_independent(window_size, halo, offset, device):
    from vitzoo.kernels.window import window_attention_triton

    generator = torch.Generator().manual_seed(0)
    queries, keys = prod(window_size), prod(w + 2 * h for w, h in zip(window_size, halo))
    shapes = [(1, HEADS, 20, 8)] * 3 + [(1, HEADS, 3, 8)] * 2 + [(HEADS, queries, keys), (HEADS, 3)]
    inputs = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    got, expected = (
        gradients(lambda *x, op=op: op(*x[:5], (4, 5), window_size, halo, offset, SCALE, *x[5:]), x)
        for op, x in ((window_attention_triton, inputs), (attend_offset_naive, [x.double() for x in inputs]))
    )
    assert_close(got, expected, 1e-6)


@pytest.mark.parametrize('shape', [pytest.param('half', marks=slow), 'none'])
def test_biases_are_optional(shape, device):
    inputs = make_inputs(shape, device, has_bias=False)
    expected = run_with_gradients(window_attention_naive, shape, [x.double() for x in inputs])
    assert_close(run_with_gradients(window_attention, shape, inputs), expected, 1e-6)


@slow
@pytest.mark.parametrize('dtype', TOLERANCES, ids=str)
def test_large_scores_stay_finite_and_as_precise_as_in_pytorch(dtype, device):
    inputs = make_inputs('half', device, dtype, std=10.0)
    got = run_with_gradients(window_attention, 'half', inputs)
    set_fused_attn(True)
    pytorch = run_with_gradients(window_attention, 'half', inputs)
    expected = run_with_gradients(window_attention_naive, 'half', [x.double() for x in inputs])
    q, k, *_ = (x.double() for x in inputs)
    # the rounding error of a score is the relative error of its weight
    rounding = torch.finfo(torch.float32).eps * (SCALE * q @ k.mT).abs().max()
    for x, y, exact in zip(got, pytorch, expected):
        assert x.isfinite().all()
        assert (x - exact).norm() <= max((y - exact).norm(), rounding * exact.norm())


@slow
def test_a_bias_of_minus_infinity_masks_keys(device):
    inputs = make_inputs('whole', device)
    # mask the first rows of the halo, which are whole blocks of keys in larger windows
    inputs[5][:, :, :13] = float('-inf')
    expected = run_with_gradients(window_attention_naive, 'whole', [x.double() for x in inputs])
    assert_close(run_with_gradients(window_attention, 'whole', inputs), expected, 1e-6)


def test_inputs_may_have_any_strides(device):
    inputs = make_inputs('none', device)
    expected = run_with_gradients(window_attention, 'none', inputs)
    for dims in ((1, 0), (3, 2), (3, 1)):
        # v has other strides than k
        moved = [x.transpose(*dims).contiguous().transpose(*dims) for x in inputs[:5]]
        moved[2] = inputs[2].contiguous()
        got = run_with_gradients(window_attention, 'none', moved + inputs[5:])
        assert all(torch.equal(x, y) for x, y in zip(got, expected))


@slow
def test_gradients_are_deterministic(device):
    inputs = make_inputs('half', device)
    first, second = (run_with_gradients(window_attention, 'half', inputs) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second))


@slow
def test_gradients_do_not_depend_on_the_number_of_parts(device, monkeypatch):
    inputs = make_inputs('half', device)
    expected = run_with_gradients(window_attention_naive, 'half', [x.double() for x in inputs])
    for programs in (1, 24):
        monkeypatch.setattr('vitzoo.kernels.window._NUM_PROGRAMS', programs)
        assert_close(run_with_gradients(window_attention, 'half', inputs), expected, 1e-6)


def test_only_inputs_output_and_lse_are_saved_for_backward(device):
    inputs = [x.requires_grad_() for x in make_inputs('half', device)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = attend(window_attention, 'half', *inputs)
    own = [x for x in kept if all(x.data_ptr() != y.data_ptr() for y in (*inputs, out))]
    assert sum(x.numel() for x in own if x.shape == out.shape[:3]) == out[..., 0].numel()
    assert [x.shape for x in own if x.shape != out.shape[:3]] == []


@slow
def test_torch_accepts_the_custom_op_with_and_without_biases(device):
    from vitzoo.kernels import window  # noqa: F401

    for has_bias in (True, False):
        inputs = [x.requires_grad_() for x in make_inputs('half', device, has_bias=has_bias, batch_size=1)]
        inputs += [] if has_bias else [None, None]
        args = (*inputs, [5, 7], [3, 3], [1, 1], [0, 2], SCALE)
        torch.library.opcheck(torch.ops.vitzoo.window_attention, args)


@slow
def test_a_compiled_function_has_the_same_output_and_gradients(device):
    torch._dynamo.reset()
    inputs = make_inputs('half', device)
    compiled = torch.compile(window_attention, backend='aot_eager', fullgraph=True)
    got = run_with_gradients(compiled, 'half', inputs)
    assert all(torch.equal(x, y) for x, y in zip(got, run_with_gradients(window_attention, 'half', inputs)))


def counted_flops(shape, inputs):
    with FlopCounterMode(display=False) as forward:
        out = attend(window_attention, shape, *[x.requires_grad_() for x in inputs])
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize('shape', [pytest.param('half', marks=slow), 'one'])
def test_flops_equal_those_of_the_pytorch_form(shape, device, kernel_calls):
    calls = kernel_calls()
    forward, backward = counted_flops(shape, make_inputs(shape, device))
    # the meta device, on which MACs are counted, has no kernels
    assert len(calls) == 1 and forward == counted_flops(shape, make_inputs(shape, 'meta'))[0] and len(calls) == 1
    tiles, queries, keys = {'half': (6, 9, 27), 'one': (1, 12, 15)}[shape]
    assert forward == 2 * HEADS * tiles * queries * keys * 4 * SHAPES[shape][-1]
    # five products of the same size for two, as torch counts its own fused attention
    assert 2 * backward == 5 * forward


def test_flops_of_shifted_windows_equal_those_of_the_pytorch_form(device, kernel_calls):
    calls, flops = kernel_calls(), []
    for where in (device, 'meta'):
        with FlopCounterMode(display=False) as counter:
            attend_shifted(shifted_window_attention, 'far', *make_shifted('far', where))
        flops.append(counter.get_total_flops())
    # 2 x 3 windows of 4 x 4 tokens on the rolled grid of 8 x 10
    assert len(calls) == 1 and flops == [2 * 2 * HEADS * 6 * 16 * 16 * 8] * 2


@pytest.mark.parametrize('fused', [True, False])
def test_the_kernel_is_not_used_in_float32_or_without_fused_attention(fused, device, kernel_calls):
    calls = kernel_calls()
    set_fused_attn(fused)
    attend(window_attention, 'half', *make_inputs('half', device))
    assert calls == []


def test_the_kernel_stays_off_without_triton(device, kernel_calls, monkeypatch):
    calls = kernel_calls()
    monkeypatch.setattr(vitzoo.kernels, 'HAS_TRITON', False)
    attend(window_attention, 'half', *make_inputs('half', device))
    assert calls == []


def test_unsupported_inputs_fall_back_to_pytorch(device, kernel_calls):
    calls = kernel_calls()
    inputs = make_inputs('half', device)
    wide = [torch.cat([x] * 9, dim=-1) for x in inputs[:5]]
    q, k, v, k_shared, v_shared = inputs[:5]
    assert wide[0].shape[-1] == 72
    for others in (wide, [x.double() for x in inputs], [q, k, v[..., :3], k_shared, v_shared[..., :3]]):
        set_fused_attn(True)
        expected = attend(window_attention, 'half', *others)
        set_fused_attn(True, experimental=True)
        assert torch.equal(attend(window_attention, 'half', *others), expected)
    attend(window_attention, 'half', *inputs, dropout_p=0.5)
    inputs = make_shifted('odd', device)
    attend_shifted(shifted_window_attention, 'odd', *inputs, dropout_p=0.5)
    attend_shifted(shifted_window_attention, 'odd', *(x.double() for x in inputs))
    attend_shifted(shifted_window_attention, 'odd', *(torch.cat([x] * 9, dim=-1) for x in inputs[:3]))
    # more samples than a launch can have
    many = torch.zeros(65_536, 1, 1, 1, device=device)
    no_tokens = many[:, :, :0]
    assert window_attention(many, many, many, no_tokens, no_tokens, (1, 1), 1, 0, SCALE).shape == many.shape
    assert calls == []


MIXERS = [
    pytest.param('ls', {'window_size': 3, 'rank': 2, 'rel_bias': 'table'}, marks=slow),
    pytest.param('longformer', {'window_size': 2, 'rel_bias': 'table'}, marks=slow),
    pytest.param('longformer', {'window_size': 2, 'exact': True}, marks=slow),
    ('local', {'block_size': 3, 'memory_halo': 1}),
    ('swin', {'window_size': 3, 'layer': 1}),
]


@pytest.mark.parametrize('name, kwargs', MIXERS, ids=str)
def test_mixers_are_the_same_with_and_without_the_kernel(name, kwargs, device, kernel_calls):
    calls = kernel_calls()
    torch.manual_seed(0)
    mixer = create_mixer(name, 16, HEADS, grid_size=(5, 7), num_prefix_tokens=1, **kwargs).to(device)
    x = torch.randn(2, 36, 16, device=device)
    results = []
    for experimental in (True, False):
        set_fused_attn(True, experimental=experimental)
        mixer.zero_grad()
        out = mixer(x, (5, 7))
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad.clone() for p in mixer.parameters())])
    assert calls == [(2, HEADS, 35, 8)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_flex_attention_gives_the_same_output(device):
    (H, W), w, halo, S, _ = SHAPES['half']
    q, k, v, k_shared, v_shared, bias, bias_shared = make_inputs('half', 'cpu')
    side = w + 2 * halo

    def positions(i, j):
        """Positions of a query in its window, and of a key in that window and its halo."""
        j, y, x = j - S, i // W, i % W
        return (y, x), (j // W - y // w * w + halo, j % W - x // w * w + halo)

    def mask(b, h, i, j):
        _, (y, x) = positions(i, j)
        return (j < S) | (y >= 0) & (y < side) & (x >= 0) & (x < side)

    def score(score, b, h, i, j):
        (y_q, x_q), (y_k, x_k) = positions(i, j)
        index = y_k.clamp(0, side - 1) * side + x_k.clamp(0, side - 1)
        near = bias[h, y_q % w * w + x_q % w, index]
        return score + torch.where(j < S, bias_shared[h, j.clamp(max=S - 1)], near)

    block_mask = create_block_mask(mask, None, None, H * W, S + H * W, device='cpu')
    keys, values = torch.cat([k_shared, k], dim=2), torch.cat([v_shared, v], dim=2)
    got = flex_attention(q.contiguous(), keys, values, score, block_mask, scale=SCALE)
    expected = attend(window_attention_naive, 'half', q, k, v, k_shared, v_shared, bias, bias_shared)
    torch.testing.assert_close(got, expected)


USUAL = [
    (90, 'bfloat16', 64, 7, 3), (80, 'float32', 32, 7, 7), (100, 'bfloat16', 64, 7, 3), (86, 'bfloat16', 128, 15, 7),
]  # fmt: skip
# bytes per thread, 0 if not here: large windows on sm_80, float32, and for sm_100 the gradient of the bias
SPILLS = {(80, 'bfloat16'): 64, (80, 'float16'): 64, (80, 'float32'): 8, (90, 'float32'): 16, (100, 'bfloat16'): 8}
OTHERS = [
    (arch, dtype, head_dim, *window)
    for arch in (80, 90)
    for dtype in ('bfloat16', 'float16', 'float32')
    for head_dim in (32, 64, 128)
    for window in ((7, 3), (7, 7), (15, 7))
    if (dtype, head_dim) != ('float32', 128)
]


@slow
@pytest.mark.parametrize('case', [*USUAL, *OTHERS], ids=str)
def test_the_kernels_compile_within_the_limits_of_gpus(case):
    pytest.importorskip('triton', minversion='3.3')
    done = child('tools/compile_ahead.py', 'window', *map(str, case), TRITON_INTERPRET='0')
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(kernels) == 5
    for kernel in kernels:
        assert kernel['spills'] <= SPILLS.get(case[:2], 0), kernel
        assert kernel['shared'] <= SHARED[case[0]], kernel
