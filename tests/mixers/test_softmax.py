"""Softmax attention on a CPU: the formula in bfloat16 and in training in float16, PyTorch's fused kernel otherwise."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from vitzoo.mixers import _softmax_cpu, softmax
from vitzoo.mixers.softmax import softmax_attention, softmax_naive


def make_qkv(dtype: torch.dtype, num_keys: int = 9, requires_grad: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    tokens = (13, num_keys, num_keys)
    return [torch.randn(2, 3, N, 8).to(dtype).requires_grad_(requires_grad) for N in tokens]


def errors(dtype: torch.dtype, bias: torch.Tensor | None) -> list[float]:
    """Relative errors of the output and of the gradients of q, k and v against float64."""
    results = []
    for each in (dtype, torch.float64):
        q, k, v = (x.detach().to(each).requires_grad_() for x in make_qkv(dtype))
        out = softmax_attention(q, k, v, 0.3, bias)
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype))
        results.append([x.detach().double() for x in (out, q.grad, k.grad, v.grad)])
    return [float((found - exact).norm() / exact.norm()) for found, exact in zip(*results)]


@pytest.mark.parametrize('biased', [False, True])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_the_formula_is_as_exact_as_the_fused_kernel(monkeypatch, dtype, biased):
    bias = torch.linspace(-2, 2, 3 * 13 * 9).view(3, 13, 9) if biased else None
    ours = errors(dtype, bias)
    monkeypatch.setattr(softmax, '_is_fused_backward_slower', lambda *qkv: False)
    fused = errors(dtype, bias)
    assert all(mine < 2 * theirs for mine, theirs in zip(ours, fused))
    assert max(ours) < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ('arguments', 'is_fused'),
    [
        (dict(dtype=torch.bfloat16), False),
        (dict(dtype=torch.float16), False),
        (dict(dtype=torch.bfloat16, num_keys=2**16), True),
        (dict(dtype=torch.float32), True),
        (dict(dtype=torch.bfloat16, num_keys=2**16, requires_grad=False), False),
        (dict(dtype=torch.float16, requires_grad=False), True),
        (dict(dtype=torch.float32, requires_grad=False), True),
    ],
)
def test_the_fused_kernel_is_left_only_where_it_is_slower(monkeypatch, arguments, is_fused):
    calls, sdpa = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, 'scaled_dot_product_attention', lambda *args, **kwargs: calls.append(sdpa(*args, **kwargs)))
    out = softmax_attention(*make_qkv(**arguments), 0.3)
    assert (out is None) == bool(calls) == is_fused


def test_a_bias_that_is_trained_alone_has_the_gradient_of_the_fused_kernel():
    q, k, v = make_qkv(torch.bfloat16, requires_grad=False)
    ours, fused = (torch.linspace(-2, 2, 3 * 13 * 9).view(3, 13, 9).requires_grad_() for _ in range(2))
    softmax_attention(q, k, v, 0.3, ours).sum().backward()
    mask = fused.to(q.dtype).unsqueeze(0)
    F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3).sum().backward()
    assert torch.equal(ours.grad, fused.grad) and ours.grad.any()


# all samples at a time, one sample, two heads, one head, and four queries
@pytest.mark.parametrize('num_scores', [2**20, 400, 250, 120, 40])
@pytest.mark.parametrize('bias_shape', [None, (3, 13, 9), (2, 3, 13, 9), (2, 1, 1, 9)])
def test_attention_by_blocks_is_the_formula(monkeypatch, bias_shape, num_scores):
    monkeypatch.setattr(_softmax_cpu, '_NUM_SCORES', num_scores)
    q, k, v = make_qkv(torch.float64, requires_grad=False)
    bias = None if bias_shape is None else torch.randn(bias_shape, dtype=torch.float64)
    out = _softmax_cpu.softmax_attention_cpu(q, k, v, 0.3, bias)
    torch.testing.assert_close(out, softmax_naive(q, k, v, 0.3, bias))


def test_a_traced_function_takes_larger_batches(monkeypatch):
    monkeypatch.setattr(_softmax_cpu, '_NUM_SCORES', 400)
    qkv = make_qkv(torch.bfloat16, requires_grad=False)
    traced = torch.jit.trace(lambda q, k, v: softmax_attention(q, k, v, 0.3), [x[:1] for x in qkv])
    torch.testing.assert_close(traced(*qkv), softmax_attention(*qkv, 0.3), rtol=0.02, atol=0.02)


@pytest.mark.parametrize('offset', [0.0, 20.0])
@pytest.mark.parametrize('biased', [False, True])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_keys_far_from_zero_lose_no_digits(dtype, biased, offset):
    q, k, v = make_qkv(dtype, requires_grad=False)
    k = k + offset
    bias = torch.linspace(-2, 2, 3 * 13 * 9).view(3, 13, 9) if biased else None
    exact = softmax_naive(*(x.double() for x in (q, k, v)), 0.3, bias)
    fused = F.scaled_dot_product_attention(q, k, v, attn_mask=None if bias is None else bias.to(dtype), scale=0.3)
    error, of_fused = (float((out.double() - exact).norm()) for out in (softmax_attention(q, k, v, 0.3, bias), fused))
    assert error < 2 * of_fused


@pytest.mark.parametrize('num_queries, num_keys', [(0, 9), (13, 0), (0, 0)])
def test_attention_without_queries_or_keys(num_queries, num_keys):
    q, k, v = (torch.randn(2, 3, N, 8, dtype=torch.bfloat16) for N in (num_queries, num_keys, num_keys))
    assert softmax_attention(q, k, v, 0.3).equal(q.new_zeros(2, 3, num_queries, 8))


@pytest.mark.skipif(torch.cuda.is_available(), reason='the GPU is a pretended one')
def test_on_a_gpu_the_choice_of_the_formula_compiles_with_sizes_that_vary():
    def choose(q, k, bias):
        return q if softmax._is_fused_backward_slower(q, k, k, bias) else -q

    torch.compiler.reset()
    compiled = torch.compile(choose, fullgraph=True, backend='eager', dynamic=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for num_keys in (1100, 1200):
            q, k, bias = (torch.empty(2, 3, *size, device='cuda') for size in ((49, 8), (num_keys, 8), (49, num_keys)))
            assert compiled(q.requires_grad_(), k, bias).shape == q.shape
            assert compiled(q, k, None).shape == q.shape
