"""On a GPU every mixer gives the values and gradients of the CPU, in a CUDA graph too, and is finite under autocast."""

import pytest
import torch
from helpers import DIM, HEADS, SETTINGS, build, run_with_gradients, tokens

from vitzoo import create_mixer, list_mixers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device'),
]
CASES = [
    pytest.param(name, kwargs, id=f'{name}-{i}')
    for name in list_mixers()
    for i, kwargs in enumerate(SETTINGS.get(name, [{}]))
]
GRID = (9, 13)


@pytest.mark.parametrize('num_prefix_tokens', [0, 2])
@pytest.mark.parametrize('name, kwargs', CASES)
def test_a_gpu_gives_the_values_and_gradients_of_the_cpu(name, kwargs, num_prefix_tokens):
    assert_values_and_gradients_of_the_cpu(build(name, GRID, num_prefix_tokens, **kwargs).eval(), GRID)


def test_agents_of_many_tokens_give_the_values_and_gradients_of_the_cpu():
    assert_values_and_gradients_of_the_cpu(build('agent', (33, 35), 1).eval(), (33, 35))


def assert_values_and_gradients_of_the_cpu(mixer, grid):
    x = tokens(mixer)
    expected, expected_grads = run_with_gradients(lambda mixer, x: mixer(x, grid), [mixer, x])
    mixer.cuda()
    with torch.no_grad():
        torch.testing.assert_close(mixer(x.cuda(), grid).cpu(), expected.detach(), rtol=1e-8, atol=1e-8)
    found, grads = run_with_gradients(lambda mixer, x: mixer(x, grid), [mixer, x.cuda()])
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-8, atol=1e-8)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad.cpu(), expected_grad, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize('num_prefix_tokens', [0, 2])
@pytest.mark.parametrize('name, kwargs', CASES)
def test_a_cuda_graph_gives_the_values_and_gradients_of_other_tokens(name, kwargs, num_prefix_tokens):
    mixer = build(name, GRID, num_prefix_tokens, **kwargs).eval().cuda()
    x = tokens(mixer).cuda()
    # the warm-up that a capture needs, outside of the default stream
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run_with_gradients(lambda mixer, x: mixer(x, GRID), [mixer, x])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found, grads = run_with_gradients(lambda mixer, x: mixer(x, GRID), [mixer, x])
    with torch.no_grad():
        x.copy_(x.flip(1) + 1)
    graph.replay()
    expected, expected_grads = run_with_gradients(lambda mixer, x: mixer(x, GRID), [mixer, x])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('name, kwargs', CASES)
def test_a_training_step_on_a_gpu_stays_finite_under_autocast(name, kwargs, dtype):
    torch.manual_seed(0)
    mixer = create_mixer(name, DIM, HEADS, grid_size=GRID, num_prefix_tokens=1, device='cuda', **kwargs)
    x = tokens(mixer, dtype=torch.float32).cuda().requires_grad_()
    with torch.autocast('cuda', dtype):
        y = mixer(x, GRID)
    y.float().square().mean().backward()
    grads = [x.grad, *(parameter.grad for parameter in mixer.parameters() if parameter.grad is not None)]
    assert all(tensor.isfinite().all() for tensor in (y, *grads))
