"""Depthwise convolution with its own gradient of the filters, against that of PyTorch."""

import pytest
import torch
from torch.nn import functional as F

from vitzoo.mixers._depthwise_conv import depthwise_conv


def inputs(shape=(3, 6, 9, 7), size=5, dtype=torch.float64, channels_last=True):
    torch.manual_seed(0)
    image = torch.randn(shape, dtype=dtype)
    if channels_last:
        image = image.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(shape[1], 1, size, size, dtype=dtype, requires_grad=True)
    return image.requires_grad_(), weight, torch.randn(shape[1], dtype=dtype, requires_grad=True)


def torch_conv(image, weight, bias=None):
    return F.conv2d(image, weight, bias, padding=weight.shape[-1] // 2, groups=len(weight))


@pytest.mark.parametrize('channels_last', [True, False])
@pytest.mark.parametrize(
    'shape, size',
    [
        ((3, 6, 9, 7), 5),
        ((1, 1, 5, 5), 5),
        ((2, 4, 3, 8), 5),
        ((2, 3, 6, 6), 11),
        # more than is copied at once
        ((40, 9, 64, 64), 7),
        # filters and images that PyTorch treats
        ((2, 4, 8, 8), 3),
        ((2, 4, 1, 30), 5),
        ((2, 4, 5, 30), 11),
    ],
)
def test_output_and_gradients_are_those_of_a_convolution(shape, size, channels_last):
    args = inputs(shape, size, channels_last=channels_last)
    expected, out = torch_conv(*args), depthwise_conv(*args)
    assert torch.equal(out, expected)
    grad = torch.randn_like(out)
    for found, wanted in zip(torch.autograd.grad(out, args, grad), torch.autograd.grad(expected, args, grad)):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_only_large_filters_on_images_have_their_own_gradient():
    assert type(depthwise_conv(*inputs()).grad_fn).__name__ == '_DepthwiseConvBackward'
    assert type(depthwise_conv(*inputs(size=3)).grad_fn).__name__ == 'ConvolutionBackward0'
    assert type(depthwise_conv(*inputs((2, 4, 1, 30))).grad_fn).__name__ == 'ConvolutionBackward0'
    with torch.no_grad():
        assert depthwise_conv(*inputs()).grad_fn is None


def test_first_and_second_derivatives_agree_with_finite_differences():
    args = inputs((2, 2, 4, 5))
    assert torch.autograd.gradcheck(depthwise_conv, args)
    assert torch.autograd.gradgradcheck(depthwise_conv, args)


@pytest.mark.parametrize('trained', [(True, False, False), (False, True, False), (False, True, True)])
def test_what_is_frozen_gets_no_gradient(trained):
    args = [x.detach().requires_grad_(need) for x, need in zip(inputs(), trained)]
    depthwise_conv(*args).square().sum().backward()
    assert [x.grad is not None for x in args] == list(trained)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_autocast_keeps_the_dtypes_of_a_convolution(dtype):
    grads = {}
    for conv in (torch_conv, depthwise_conv):
        args = inputs(dtype=torch.float32)
        with torch.autocast('cpu', torch.bfloat16, enabled=dtype is torch.bfloat16):
            out = conv(*args)
        assert out.dtype is dtype
        out.float().square().sum().backward()
        assert all(x.grad.dtype is torch.float32 for x in args)
        grads[conv] = [x.grad for x in args]
    tolerance = 1e-4 if dtype is torch.float32 else 2e-2
    for found, wanted in zip(grads[depthwise_conv], grads[torch_conv]):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())


def test_autocast_leaves_float64_alone():
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(depthwise_conv(*inputs()), torch_conv(*inputs()))
