"""Softmax attention in half precision on a CPU: the formula in training, PyTorch's fused kernel otherwise."""

import pytest
import torch
from torch.nn import functional as F

from vitzoo.mixers import softmax
from vitzoo.mixers.softmax import softmax_attention


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
        (dict(dtype=torch.float32), True),
        (dict(dtype=torch.bfloat16, requires_grad=False), True),
        (dict(dtype=torch.bfloat16, num_keys=2**16), True),
    ],
)
def test_the_fused_kernel_is_left_only_where_its_backward_pass_is_slower(monkeypatch, arguments, is_fused):
    calls, sdpa = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, 'scaled_dot_product_attention', lambda *args, **kwargs: calls.append(sdpa(*args, **kwargs)))
    out = softmax_attention(*make_qkv(**arguments), 0.3)
    assert (out is None) == bool(calls) == is_fused
