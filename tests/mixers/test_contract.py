"""The contract of every registered mixer: equal to its specification, independent of the batch, finite, resizable."""

import inspect
import math
import re

import numpy as np
import pytest
import torch
from helpers import (
    DIM,
    GRID,
    HEADS,
    SETTINGS,
    build,
    cast,
    mixers_of_ours,
    perturb,
    recorded_call,
    run_with_gradients,
    tokens,
    with_inputs,
)
from timm.models._manipulate import reinit_non_persistent_buffers
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from vitzoo import create_mixer, list_mixers, register_mixer
from vitzoo.mixers import QKVMixer, TokenMixer, _recompute, _window, mixer_class
from vitzoo.mixers._chunked import chunk_attention
from vitzoo.mixers._gated_scan import gated_scan
from vitzoo.mixers._window import window_attention
from vitzoo.mixers.performer import performer_attention

CASES = [
    pytest.param(name, kwargs, id=f'{name}-{i}')
    for name in list_mixers()
    for i, kwargs in enumerate(SETTINGS.get(name, [{}]))
]


@pytest.mark.parametrize('num_prefix_tokens', [0, 1, 2])
@pytest.mark.parametrize('grid_size', [(4, 4), (3, 6), (5, 7), (1, 11)], ids=lambda g: f'{g[0]}x{g[1]}')
@pytest.mark.parametrize('name, kwargs', CASES)
def test_fast_op_equals_naive_form_with_gradients(name, kwargs, grid_size, num_prefix_tokens):
    mixer = build(name, grid_size, num_prefix_tokens, **kwargs)
    args = recorded_call(mixer, tokens(mixer))
    fast, fast_grads = run_with_gradients(mixer.op, args)
    naive, naive_grads = run_with_gradients(mixer.op_naive, args)
    torch.testing.assert_close(fast, naive, rtol=1e-9, atol=1e-9)
    for fast_grad, naive_grad in zip(fast_grads, naive_grads, strict=True):
        torch.testing.assert_close(fast_grad, naive_grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('name, kwargs', CASES)
def test_every_parameter_gets_a_gradient(name, kwargs):
    mixer = build(name, num_prefix_tokens=1, **kwargs)
    mixer(tokens(mixer).requires_grad_(), GRID).square().sum().backward()
    without = [name for name, p in mixer.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without == []


# docs/mixers.md has this list: PyTorch's fused attention
FUSED = ['biformer', 'global', 'linformer', 'nystrom', 'set', 'sinkhorn', 'softmax', 'srformer']


@pytest.mark.parametrize('num_prefix_tokens', [0, 1])
@pytest.mark.parametrize('name, kwargs', CASES)
def test_layers_are_called_so_that_hooks_pruning_and_adapters_reach_them(name, kwargs, num_prefix_tokens):
    mixer = build(name, num_prefix_tokens=num_prefix_tokens, **kwargs)
    # those for prefix tokens have nothing to do without any
    layers = {
        path: layer
        for path, layer in mixer.named_modules()
        if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd | nn.LayerNorm)
        and (num_prefix_tokens or 'global' not in path)
    }
    called = set()
    for path, layer in layers.items():
        layer.register_forward_hook(lambda *_, path=path: called.add(path))
    mixer(tokens(mixer), GRID)
    assert called == set(layers)


def second_derivatives(op, args: tuple) -> tuple[torch.Tensor, ...]:
    """The Hessian of a function of the output times a vector, for every tensor and parameter among the arguments."""
    args, inputs = with_inputs(args)
    options = dict(allow_unused=True, materialize_grads=True)
    grads = torch.autograd.grad(op(*args).square().sum(), inputs, create_graph=True, **options)
    vectors = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in inputs]
    return torch.autograd.grad(sum((g * z).sum() for g, z in zip(grads, vectors)), inputs, **options)


@pytest.mark.parametrize('is_long', [False, True], ids=['stored', 'recomputed'])
@pytest.mark.parametrize('name, kwargs', CASES)
def test_second_derivatives_are_those_of_the_naive_form(name, kwargs, is_long, monkeypatch):
    if is_long:
        monkeypatch.setattr(_recompute, '_STORED_SAMPLE', 0)
        monkeypatch.setattr(_recompute, '_STORED', 0)
    mixer = build(name, num_prefix_tokens=1, **kwargs)
    args = recorded_call(mixer, tokens(mixer))
    # `autograd.grad` and not `backward`, which also visits nodes that only the gradients lead to, and their errors
    with sdpa_kernel(SDPBackend.MATH):
        fast, naive = (second_derivatives(op, args) for op in (mixer.op, mixer.op_naive))
    for found, expected in zip(fast, naive, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_second_derivatives_have_the_dropout_of_the_output():
    torch.manual_seed(1)
    q, k, v = (torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.randn(3, 3, 6, dtype=torch.float64)

    def attend(*qkv):
        torch.manual_seed(0)
        return chunk_attention(*qkv, 0.7, bias, dropout_p=0.4)

    assert torch.autograd.gradgradcheck(attend, (q, k, v))


@pytest.mark.parametrize('name', FUSED)
def test_pytorchs_fused_attention_refuses_second_derivatives(name):
    mixer = build(name, **SETTINGS.get(name, [{}])[0])
    with pytest.raises(RuntimeError, match='derivative for .* is not implemented'):
        second_derivatives(mixer.op, recorded_call(mixer, tokens(mixer)))


def test_rmt_without_rotations_takes_heads_of_odd_width():
    mixer = create_mixer('rmt', 6, 2, grid_size=GRID, num_prefix_tokens=1, rope=False).double()
    args = recorded_call(mixer, tokens(mixer))
    torch.testing.assert_close(mixer.op(*args), mixer.op_naive(*args))


@pytest.mark.parametrize('std', [1, 3, 6])
@pytest.mark.parametrize('name, kwargs', CASES)
def test_a_sample_does_not_depend_on_its_batch(name, kwargs, std):
    mixer = build(name, num_prefix_tokens=1, **kwargs)
    # no other tensor has a first dimension of 11; the samples differ in scale, to reveal a statistic over the batch
    B, scales = 11, std * torch.logspace(-1, 0.3, 11, dtype=torch.float64)
    args = scaled(recorded_call(mixer, tokens(mixer, B)), B, scales)
    batched = mixer.op(*args)
    for i in range(B):
        alone = mixer.op(*(a[i : i + 1] if is_per_sample(a, B) else a for a in args))
        torch.testing.assert_close(batched[i : i + 1], alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('is_long', [False, True], ids=['stored', 'recomputed'])
@pytest.mark.parametrize('name, kwargs', CASES)
def test_an_empty_batch_has_no_gradient(name, kwargs, is_long, monkeypatch):
    if is_long:
        monkeypatch.setattr(_recompute, '_STORED_SAMPLE', 0)
    mixer = build(name, num_prefix_tokens=1, **kwargs)
    x = tokens(mixer, 0).requires_grad_()
    out = mixer(x, GRID)
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad.shape == x.shape
    assert all(p.grad is None or not p.grad.any() for p in mixer.parameters())
    assert all(buffer.isfinite().all() for buffer in mixer.buffers())


@pytest.mark.parametrize('num_prefix_tokens', [0, 1])
@pytest.mark.parametrize('name, kwargs', CASES)
@torch.no_grad()
def test_fused_attention_has_as_many_heads_for_any_batch(name, kwargs, num_prefix_tokens, monkeypatch):
    # of which a GPU takes 65,535, and as many samples
    fused, shapes = F.scaled_dot_product_attention, []

    def record(q: torch.Tensor, *args, **options) -> torch.Tensor:
        shapes.append(q.shape)
        return fused(q, *args, **options)

    monkeypatch.setattr(F, 'scaled_dot_product_attention', record)
    mixer = build(name, num_prefix_tokens=num_prefix_tokens, **kwargs)
    x = tokens(mixer)
    mixer(x, GRID)
    mixer(x.repeat(3, 1, 1), GRID)
    of_batch, of_larger_batch = shapes[: len(shapes) // 2], shapes[len(shapes) // 2 :]
    assert [shape[1] for shape in of_batch] == [shape[1] for shape in of_larger_batch]
    assert all(shape[0] <= len(x) for shape in of_batch)


class _Copies(TorchFunctionMode):
    """The number of tensors made from numbers of Python, for which a GPU waits, and which no CUDA graph has."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize('num_prefix_tokens', [0, 1])
@pytest.mark.parametrize('name, kwargs', CASES)
def test_a_forward_pass_copies_no_numbers_to_the_device(name, kwargs, num_prefix_tokens):
    mixer = build(name, num_prefix_tokens=num_prefix_tokens, **kwargs)
    # on a CPU some mixers have another form
    x = tokens(mixer).to('meta').requires_grad_()
    mixer.to('meta')
    with _Copies() as copies:
        mixer(x, GRID)
    assert copies.count == 0


@pytest.mark.parametrize(
    'function',
    [
        lambda q, k, v: chunk_attention(q[0], k[0], v[0], 0.5, torch.zeros(1, 16, 32))[0],
        lambda q, k, v: performer_attention(q, k, v, torch.ones(6, 4), 0.5),
        lambda q, k, v: window_attention(q, k, v, k[:, :, :3], v[:, :, :3], (4, 4), 2, 1, 0.5),
        lambda q, k, v: gated_scan(q, k, v, q, k, 0.5),
    ],
    ids=['chunks', 'features', 'windows', 'scan'],
)
@pytest.mark.parametrize('create_graph', [False, True])
def test_a_function_with_a_gradient_of_its_own_computes_it_outside_of_autocast(function, create_graph):
    inputs = [torch.randn(2, 2, 16, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    inputs = [x.requires_grad_() for x in inputs]
    out, found = function(*inputs), []
    weight = torch.ones_like(out)
    for is_enabled in (False, True):
        with torch.autocast('cpu', torch.bfloat16, enabled=is_enabled):
            found.append(torch.autograd.grad(out, inputs, weight, retain_graph=True, create_graph=create_graph))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize('name, kwargs', CASES)
def test_an_empty_batch_has_no_outputs_in_half_precision(name, kwargs):
    mixer = build(name, num_prefix_tokens=1, dtype=torch.bfloat16, **kwargs).eval()
    x = tokens(mixer, 0, dtype=torch.bfloat16)
    with torch.no_grad():
        assert mixer(x, GRID).shape == x.shape


@pytest.mark.parametrize('value', [math.inf, math.nan])
@pytest.mark.parametrize('name, kwargs', CASES)
def test_a_sample_that_is_not_finite_leaves_the_others_as_they_are(name, kwargs, value):
    mixer = build(name, (5, 7), num_prefix_tokens=1, **kwargs)
    # no other tensor has a first dimension of 11
    B, others = 11, [0, 2, 10]
    args = recorded_call(mixer, tokens(mixer, B))
    expected = run_with_gradients(mixer.op, args)
    for broken in (a for a in args if is_per_sample(a, B) and a.is_floating_point()):
        broken_args = [a.clone() if a is broken else a for a in args]
        next(b for a, b in zip(args, broken_args) if a is broken)[1] = value
        out, grads = run_with_gradients(mixer.op, broken_args)
        torch.testing.assert_close(out[others], expected[0][others], rtol=1e-9, atol=1e-12)
        for grad, expected_grad in zip(grads, expected[1], strict=True):
            if is_per_sample(grad, B):
                torch.testing.assert_close(grad[others], expected_grad[others], rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings('ignore:There is a performance drop')
@pytest.mark.parametrize('name', list_mixers())
def test_gradients_per_sample_by_torch_func_are_those_of_autograd(name):
    mixer = build(name, num_prefix_tokens=1, **SETTINGS.get(name, [{}])[0]).eval()
    x, weights = tokens(mixer), {key: p.detach() for key, p in mixer.named_parameters()}

    def loss(weights, x):
        return torch.func.functional_call(mixer, weights, (x[None], GRID)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), (None, 0))(weights, x)
    for i in range(len(x)):
        inputs = {key: p.clone().requires_grad_() for key, p in weights.items()}, x[i].clone().requires_grad_()
        expected = torch.autograd.grad(loss(*inputs), [*inputs[0].values(), inputs[1]])
        for one, other in zip([*(grad[i] for grad in found[0].values()), found[1][i]], expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


@pytest.mark.filterwarnings('ignore:There is a performance drop')
@pytest.mark.parametrize(
    'name, kwargs',
    [
        ('swin', {}),
        ('neighborhood', {}),
        ('softmax', {'rel_bias': 'table'}),
        ('softmax', {'rel_bias': 'decomposed'}),
        ('longformer', {'rel_bias': 'table'}),
    ],
    ids=str,
)
def test_learned_biases_of_an_ensemble_train_by_torch_func(name, kwargs):
    mixers = [perturb(build(name, num_prefix_tokens=1, **kwargs), std=scale) for scale in (0.1, 0.2)]
    x, (weights, buffers) = tokens(mixers[0]), torch.func.stack_module_state(mixers)
    run = torch.func.vmap(lambda *state: torch.func.functional_call(mixers[0], state, (x, GRID)))
    run(weights, buffers).square().sum().backward()
    for i, mixer in enumerate(mixers):
        mixer(x, GRID).square().sum().backward()
        for key, p in mixer.named_parameters():
            torch.testing.assert_close(weights[key].grad[i], p.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize('name, kwargs', CASES)
def test_a_mixer_from_the_meta_device_equals_its_original(name, kwargs):
    original = build(name, num_prefix_tokens=1, **kwargs).eval()
    kwargs = dict(grid_size=GRID, num_prefix_tokens=1, dtype=torch.float64, device='meta', **kwargs)
    loaded = create_mixer(name, DIM, HEADS, **kwargs).eval().to_empty(device='cpu')
    for tensor in (*loaded.parameters(), *loaded.buffers()):
        tensor.data.fill_(math.nan if tensor.is_floating_point() else 0)
    loaded.load_state_dict(original.state_dict())
    reinit_non_persistent_buffers(loaded)
    x = tokens(original)
    torch.testing.assert_close(loaded(x, GRID), original(x, GRID), rtol=0, atol=0)


@pytest.mark.parametrize('name, kwargs', CASES)
def test_the_default_device_and_dtype_are_those_of_every_tensor(name, kwargs):
    with torch.device('meta'):
        mixer = create_mixer(name, DIM, HEADS, grid_size=GRID, num_prefix_tokens=1, **kwargs)
    torch.set_default_dtype(torch.float64)
    try:
        double = create_mixer(name, DIM, HEADS, grid_size=GRID, num_prefix_tokens=1, **kwargs)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(tensor.is_meta for tensor in (*mixer.parameters(), *mixer.buffers()))
    mixer(torch.empty(2, 1 + math.prod(GRID), DIM, device='meta', requires_grad=True), GRID).sum().backward()
    tensors = (*double.parameters(), *double.buffers())
    assert all(tensor.dtype == torch.float64 for tensor in tensors if tensor.is_floating_point())


# torch.jit fails with the sizes that they compute with
UNTRACEABLE = ['aft_conv', 'biformer', 'routing']


@pytest.mark.filterwarnings('ignore::torch.jit.TracerWarning', 'ignore:.*torch.jit:DeprecationWarning')
@pytest.mark.parametrize('name', sorted(set(list_mixers()) - set(UNTRACEABLE)))
def test_a_traced_mixer_takes_larger_batches(name):
    mixer = build(name, num_prefix_tokens=1, **SETTINGS.get(name, [{}])[0]).eval().requires_grad_(False)
    x = tokens(mixer, 5)
    traced = torch.jit.trace(lambda x: mixer(x, GRID), x[:2], check_trace=False)
    # the tracer keeps numbers in float32
    torch.testing.assert_close(traced(x), mixer(x, GRID), rtol=1e-5, atol=1e-6)


def is_per_sample(arg, batch_size):
    return isinstance(arg, torch.Tensor) and arg.ndim > 2 and arg.shape[0] == batch_size


def scaled(args, batch_size, scales):
    """Queries, keys, values and other per-sample tensors, scaled to the given standard deviations."""
    scales = torch.as_tensor(scales, dtype=torch.float64).expand(batch_size)

    def scale(a):
        return scales.reshape(-1, *[1] * (a.ndim - 1)) * a / a.std() if a.numel() > 1 else a

    return [scale(a) if is_per_sample(a, batch_size) and a.is_floating_point() else a for a in args]


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize('name, kwargs', CASES)
def test_values_and_gradients_stay_finite(name, kwargs, dtype):
    mixer = build(name, num_prefix_tokens=1, **kwargs)
    args = recorded_call(mixer, tokens(mixer))
    for std in (0.1, 1, 4, 8):
        out, grads = run_with_gradients(mixer.op, cast(scaled(args, 2, std), dtype))
        assert out.dtype == dtype
        assert all(x.isfinite().all() for x in (out, *grads)), std


@pytest.mark.parametrize('name', list_mixers())
def test_gradients_of_a_new_mixer_are_finite_in_float16_autocast(name):
    # with windows, tiles and blocks at the border that are not whole
    mixer = create_mixer(name, 24, 2, grid_size=(16, 15), num_prefix_tokens=1)
    x = tokens(mixer, dtype=torch.float32).requires_grad_()
    with torch.autocast('cpu', torch.float16):
        out = mixer(x, (16, 15))
    (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in mixer.parameters())


@pytest.mark.parametrize('name, kwargs', CASES)
def test_padding_has_no_effect(name, kwargs, monkeypatch):
    mixer = build(name, (5, 7), num_prefix_tokens=1, **kwargs)
    x = tokens(mixer)
    torch.manual_seed(2)
    expected = mixer(x, (5, 7))
    pad = _window._pad

    def pad_with_junk(x, *args):
        return pad(x, *args) + 1e3 * (1 - pad(torch.ones_like(x), *args))

    monkeypatch.setattr(_window, '_pad', pad_with_junk)
    # repeat the random draws of training mode
    torch.manual_seed(2)
    torch.testing.assert_close(mixer(x, (5, 7)), expected, rtol=0, atol=0)


@pytest.mark.parametrize('name, kwargs', CASES)
def test_a_new_input_size_and_back_keeps_the_parameters_close(name, kwargs):
    mixer = build(name, (3, 3), num_prefix_tokens=1, **kwargs)
    # resampled from a coarse grid, positions are as smooth as trained ones; white noise does not survive resampling
    mixer.set_input_size((6, 6))
    before = {key: value.clone() for key, value in mixer.state_dict().items()}
    mixer.set_input_size((8, 12))
    assert mixer(tokens(mixer), (8, 12)).isfinite().all()
    mixer.set_input_size((6, 6))
    for key, value in mixer.state_dict().items():
        assert value.shape == before[key].shape
        value, old = value.flatten().double(), before[key].flatten().double()
        assert torch.nn.functional.cosine_similarity(value, old, dim=0) > 0.95, key


@pytest.mark.parametrize('name', list_mixers())
def test_an_unknown_keyword_raises(name):
    with pytest.raises(TypeError, match='windowsize'):
        create_mixer(name, DIM, HEADS, grid_size=GRID, windowsize=7)


@pytest.mark.parametrize('name', list_mixers())
def test_no_weight_decay_names_exist(name):
    kwargs = SETTINGS.get(name, [{}])[-1]
    mixer = build(name, num_prefix_tokens=1, **kwargs)
    assert mixer.no_weight_decay() <= {name for name, _ in mixer.named_parameters()}


# parameters that multiply tokens, as the weights of layers do
MATRICES = {'q_map', 'k_map', 'proj_k', 'proj_v', 'w1', 'w2', 'w3', 'scales.0.weight'}


def own_parameters(mixer: TokenMixer) -> set[str]:
    """The parameters of several dimensions that are not weights of PyTorch's layers."""
    owners = {key: mixer.get_submodule(key.rpartition('.')[0]) for key, p in mixer.named_parameters() if p.ndim > 1}
    return {key for key, owner in owners.items() if not isinstance(owner, nn.Linear | nn.Conv1d | nn.Conv2d)}


@pytest.mark.parametrize('name', mixers_of_ours())
def test_positions_and_tokens_of_a_mixer_have_no_weight_decay(name):
    for options in SETTINGS.get(name, [{}]):
        mixer = build(name, num_prefix_tokens=1, **options)
        assert own_parameters(mixer) - MATRICES <= mixer.no_weight_decay(), options


# of positions and tokens that do not start at one value, if it is not 0.02; that of set's depends on their number
SPREADS = {'u_query': 0.01, 'u_key': 0.01, 'kernel': 1.0, 'mixing': 0.14}


@pytest.mark.parametrize('name', mixers_of_ours())
def test_positions_and_tokens_of_a_new_mixer_have_their_spread(name):
    for options in SETTINGS.get(name, [{}]):
        torch.manual_seed(0)
        mixer = create_mixer(name, 48, 4, grid_size=(6, 8), num_prefix_tokens=1, **options)
        for key in own_parameters(mixer) - MATRICES - {'inducing'}:
            parameter = mixer.get_parameter(key)
            if parameter.numel() > 40 and parameter.std() > 0:
                spread = SPREADS.get(key.rpartition('.')[2], 0.02)
                assert parameter.std().item() == pytest.approx(spread, rel=0.2), key


def boolean_options(name: str) -> list[dict]:
    """No keywords of a mixer, and for each of its switches the opposite of the default."""
    inits = [inspect.signature(kind.__init__) for kind in mixer_class(name).__mro__ if issubclass(kind, TokenMixer)]
    defaults = {key: option.default for init in reversed(inits) for key, option in init.parameters.items()}
    options = [{key: not default} for key, default in defaults.items() if isinstance(default, bool)]
    return [{}, *options]


@pytest.mark.parametrize('name', list_mixers())
def test_the_parameters_of_a_norm_have_no_weight_decay(name):
    for options in boolean_options(name):
        try:
            mixer = build(name, **(SETTINGS.get(name, [{}])[0] | options))
        except ValueError:
            continue
        # timm leaves out those of one dimension
        wide = {key for key, parameter in mixer.named_parameters() if parameter.ndim > 1}
        norms = {path for path, module in mixer.named_modules() if 'norm' in f'{path} {type(module).__name__}'.lower()}
        assert {key for key in wide if key.rpartition('.')[0] in norms} <= mixer.no_weight_decay(), options


@pytest.mark.parametrize('name', list_mixers())
def test_attention_dropout_acts_or_is_refused(name):
    if not create_mixer(name, DIM, HEADS, grid_size=GRID).attn_weights:
        with pytest.raises(ValueError, match='attn_drop'):
            create_mixer(name, DIM, HEADS, grid_size=GRID, attn_drop=0.5)
        return
    mixer = build(name, attn_drop=0.5)
    x = tokens(mixer)
    assert not torch.equal(mixer(x, GRID), mixer(x, GRID))
    mixer.eval()
    assert torch.equal(mixer(x, GRID), mixer(x, GRID))


def test_the_error_for_an_unknown_keyword_suggests_the_closest_one():
    with pytest.raises(TypeError, match=r"^ls does not take the argument 'windowsize', did you mean window_size\?$"):
        create_mixer('ls', 24, 2, grid_size=(4, 4), windowsize=3)


@pytest.mark.parametrize('name', list_mixers())
def test_the_error_for_a_mapping_of_keywords_says_how_to_give_them(name):
    with pytest.raises(TypeError, match=r"argument 'kwarg'(?!.* kwargs)"):
        create_mixer(name, 64, 2, grid_size=(4, 4), kwarg=3)
    with pytest.raises(TypeError, match="'mixer_kwargs'; give them as keywords: window_size=3, mode='max'$"):
        create_mixer(name, 64, 2, grid_size=(4, 4), mixer_kwargs=dict(window_size=3, mode='max'))


@pytest.mark.parametrize(
    ('name', 'kwargs', 'message'),
    [
        ('ls', dict(num_heads='2'), "num_heads of ls must be a whole number, not '2'"),
        ('ls', dict(num_heads=0), 'num_heads must be at least 1, not 0'),
        ('ls', dict(num_heads=-3), 'num_heads must be at least 1, not -3'),
        ('ls', dict(scale='abc'), "scale of ls must be a number, not 'abc'"),
        ('performer', dict(scale=-1), 'scale must be more than 0 and finite, not -1'),
        ('performer', dict(scale=math.inf), 'scale must be more than 0 and finite, not inf'),
        ('aft_full', dict(bias_dim=0), 'bias_dim must be at least 1, not 0'),
        ('synthesizer', dict(variant=3), 'variant of synthesizer must be a name, not 3'),
        ('relu_linear', dict(scales=5), 'scales of relu_linear must be a list of whole numbers, not 5'),
        ('relu_linear', dict(scales=['5']), "scales of relu_linear must be a list of whole numbers, not ['5']"),
        ('ls', dict(qkv_bias='no'), "qkv_bias of ls must be True or False, not 'no'"),
        ('softmax', dict(attn_drop='0.1'), "attn_drop of softmax must be a number, not '0.1'"),
        ('softmax', dict(attn_drop=1.5), 'attn_drop must be at least 0 and below 1, not 1.5'),
        ('nystrom', dict(conv_kernel_size=2.5), 'conv_kernel_size of nystrom must be a whole number, not 2.5'),
        ('routing', dict(cluster_size='4'), "cluster_size of routing must be a whole number, not '4'"),
        ('ls', dict(shared_qk=True), 'shared_qk is a part of the definition of ls; leave shared_qk=True out'),
    ],
)
def test_an_argument_of_another_type_or_out_of_range_is_named(name, kwargs, message):
    with pytest.raises(ValueError, match=f'^{re.escape(message)}'):
        create_mixer(name, **{**dict(dim=DIM, num_heads=HEADS, grid_size=GRID), **kwargs})


@pytest.mark.parametrize(('name', 'key'), [('agent', 'num_cells'), ('linformer', 'rank'), ('nystrom', 'num_landmarks')])
def test_whole_numbers_of_numpy_are_those_of_python(name, key):
    ours, theirs = (build(name, **{key: value}) for value in (np.int64(3), 3))
    assert torch.equal(ours(tokens(ours), GRID), theirs(tokens(theirs), GRID))


@pytest.mark.parametrize('value', [2.5, True, 'two', None])
def test_an_argument_that_must_be_whole_is_refused_if_it_is_not(value):
    for mixer, key in dict(nystrom='num_landmarks', ls='window_size', routing='num_clusters').items():
        with pytest.raises(ValueError, match=f'{key} of {mixer} must be a whole number, not {value!r}'):
            create_mixer(mixer, DIM, HEADS, grid_size=GRID, **{key: value})


def test_the_error_for_an_unknown_mixer_suggests_the_closest_name():
    with pytest.raises(ValueError, match='did you mean performer'):
        create_mixer('perfomer', DIM, HEADS, grid_size=GRID)
    with pytest.raises(ValueError, match=r"A mixer is a name such as 'ls', not \['ls'\]"):
        create_mixer(['ls'], DIM, HEADS, grid_size=GRID)


def test_a_taken_name_and_a_missing_specification_are_refused():
    with pytest.raises(ValueError, match='taken'):
        register_mixer('ls')(QKVMixer)
    with pytest.raises(TypeError, match='op_naive|`op`'):
        register_mixer('brand_new')(QKVMixer)


@pytest.mark.parametrize('name', ['aft_full', 'aft_local', 'softmax'])
def test_positions_refuse_another_grid(name):
    mixer = build(name, **({'rel_bias': 'table'} if name == 'softmax' else {}))
    x = torch.randn(1, 9, DIM, dtype=torch.float64)
    with pytest.raises(ValueError, match='made for a 4 x 5 grid and got 3 x 3'):
        mixer(x, (3, 3))
