"""Mixers, small models, inputs and comparisons that several test files share."""

import copy
import functools
import math
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

import vitzoo
from vitzoo.mixers import TokenMixer, create_mixer, mixer_class
from vitzoo.mixers._op_calls import recorded_calls
from vitzoo.models._block import Block

# mixers: DIM channels, HEADS heads, on a rectangular grid
DIM, HEADS, GRID = 12, 3, (4, 5)
# small enough that a small grid has several windows, landmarks and features; mixers not listed have their defaults
SETTINGS = {
    'aft_conv': [{'kernel_size': 3}, {'kernel_size': 7}],
    'aft_local': [{'window_size': 2, 'bias_dim': 4}, {'window_size': 3, 'bias_dim': 4}],
    'agent': [{'num_cells': 2}, {'num_cells': 3, 'agent_bias': False, 'conv_size': 0}],
    'biformer': [{'num_windows': 3, 'topk': 2}, {'num_windows': 2, 'topk': 1, 'lepe_size': 3}],
    'bigbird': [
        {'block_size': 2, 'num_global_blocks': 0, 'num_random_blocks': 1},
        {'block_size': 1, 'num_global_blocks': 2, 'num_random_blocks': 2, 'seed': 5},
        {'block_size': 3, 'num_random_blocks': 0},
    ],
    'focused': [{'conv_size': 3}, {'power': 2, 'conv_size': 0, 'pos_embed': True}],
    'flowformer': [{}, {'clamp': False}],
    'gated_linear': [{'rank': 3}],
    'global': [{'num_global': 3}, {'num_global': 1}],
    'hedgehog': [{}, {'num_features': 3}],
    'inline': [{}, {'residual': False, 'mean_scores': False}],
    'linformer': [
        {'rank': 5},
        {'rank': 4, 'share_kv': True},
        {'rank': 3, 'share_heads': False},
        {'rank': 5, 'sum_first': False},
        {'rank': 4, 'share_kv': True, 'sum_first': False},
    ],
    'local': [{'block_size': 2, 'memory_halo': 1}, {'block_size': 3, 'memory_halo': 0}],
    'longformer': [
        {'window_size': 2},
        {'window_size': 3, 'rel_bias': 'table'},
        {'window_size': 1, 'exact': True},
        {'window_size': 2, 'exact': True, 'rel_bias': 'table'},
        {'window_size': 1, 'random_shift': True},
        {'window_size': 2, 'random_shift': True, 'rel_bias': 'table'},
        {'window_size': 2, 'global_proj': True},
        {'window_size': 1, 'global_proj': True, 'rel_bias': 'table', 'qk_norm': True},
    ],
    'ls': [
        {'window_size': 3, 'rank': 2},
        {'window_size': 2, 'rank': 0},
        {'window_size': 1, 'rank': 1, 'rel_bias': 'table'},
        {'window_size': 4, 'rank': 2, 'rel_bias': 'nvidia'},
        {'window_size': 2, 'rank': 2, 'dual_norm': False},
    ],
    'mala': [{'conv_size': 3}, {'rope': False, 'gate': False, 'conv_size': 0, 'mean_scores': False}],
    'mhla': [
        {'num_blocks': 2, 'conv_size': 3},
        {'num_blocks': 2, 'conv_size': 0, 'normalizer': 'position', 'rms_norm': True},
    ],
    'monarch': [{}, {'num_steps': 3}],
    'neighborhood': [
        {'kernel_size': 3},
        {'kernel_size': 2, 'dilation': 2},
        {'kernel_size': 5, 'dilation': 3, 'rel_bias': 'none'},
    ],
    'nystrom': [
        {'num_landmarks': 5},
        {'num_landmarks': 6, 'landmarks': 'grid'},
        {'num_landmarks': 4, 'conv_kernel_size': 5},
    ],
    'performer': [{'num_features': 16}, {'num_features': 9, 'eps': 1e-4}, {'num_features': 6, 'kernel': 'relu'}],
    'polaformer': [{'conv_size': 3}, {'conv_size': 0, 'gate': False, 'pos_embed': True}],
    'pool': [{}, {'pool_size': 5}],
    'reformer': [
        {'num_hashes': 1, 'bucket_size': 2},
        {'num_hashes': 3, 'bucket_size': 3},
        {'num_hashes': 2, 'bucket_size': 64},
    ],
    'relu_linear': [{}, {'scales': (3,)}],
    'rfa': [{'num_features': 16}, {'num_features': 16, 'gate': True}, {'num_features': 16, 'floor': 4.0}],
    'rmt': [{}, {'decay': 'weights'}, {'decomposed': False, 'rope': False}, {'decomposed': False, 'decay': 'weights'}],
    'routing': [{'num_clusters': 3}, {'num_clusters': 4, 'cluster_size': 7}, {'num_clusters': 2, 'cluster_size': 1}],
    'set': [{'num_inducing': 5}, {'num_inducing': 1}],
    'sinkhorn': [{'block_size': 1}, {'block_size': 2}, {'block_size': 3, 'num_iterations': 2, 'temperature': 0.5}],
    'soft': [{'ratio': 2}, {'ratio': 3, 'conv_size': 5}],
    'softmax': [{}, {'talking_heads': True}, {'rel_bias': 'table'}, {'rel_bias': 'decomposed'}],
    'sparse': [
        {},
        {'stride': 3},
        {'pattern': 'fixed', 'num_summaries': 1},
        {'pattern': 'fixed', 'stride': 4, 'num_summaries': 2},
    ],
    'srformer': [{'sr_ratio': 3}, {'sr_ratio': 2, 'norm': 'instance'}],
    'swin': [{'window_size': 2}, {'window_size': 3, 'shift': True}, {'window_size': 3, 'rel_bias': 'none', 'layer': 1}],
    'synthesizer': [
        {},
        {'variant': 'random'},
        {'variant': 'factorized_dense'},
        {'variant': 'factorized_random', 'rank': 3},
    ],
    'ttt': [{}, {'rope': True}],
    'vssd': [{'d_state': 5}, {'d_state': 3, 'expand': 1, 'qkv_bias': False}],
}


def build(
    name: str,
    grid_size: tuple[int, int] = GRID,
    num_prefix_tokens: int = 0,
    *,
    dim: int = DIM,
    num_heads: int = HEADS,
    dtype: torch.dtype = torch.float64,
    **kwargs,
) -> TokenMixer:
    """A mixer with no parameter left at a special value, at which a mistake would not show."""
    torch.manual_seed(0)
    mixer = create_mixer(
        name, dim, num_heads, grid_size=grid_size, num_prefix_tokens=num_prefix_tokens, dtype=dtype, **kwargs
    )
    return perturb(mixer)


def perturb(module: nn.Module, std: float = 0.5) -> nn.Module:
    """Add noise to every parameter."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(std * torch.randn_like(parameter))
    return module


def tokens(mixer: TokenMixer, batch_size: int = 2, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Random tokens for the grid and prefix of a mixer, (B, P + H*W, dim)."""
    generator = torch.Generator().manual_seed(seed)
    H, W = mixer.grid_size
    shape = (batch_size, mixer.num_prefix_tokens + H * W, mixer.dim)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def qkv(N: int, d: int = 8, std: float = 1.0, seed: int = 0) -> list[torch.Tensor]:
    """Random queries, keys and values, (2, 2, N, d) each."""
    generator = torch.Generator().manual_seed(seed)
    return [std * torch.randn(2, 2, N, d, generator=generator, dtype=torch.float64) for _ in range(3)]


def recorded_call(mixer: TokenMixer, x: torch.Tensor) -> tuple:
    """The arguments with which the mixer calls its op on `x`."""
    with recorded_calls(mixer) as calls:
        mixer(x, mixer.grid_size)
    return calls[0]


def cast(args: tuple, dtype: torch.dtype) -> list:
    """Arguments of an op with their tensors and modules in another dtype."""

    def convert(arg):
        if isinstance(arg, nn.Module):
            return copy.deepcopy(arg).to(dtype)
        return arg.to(dtype) if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg

    return [convert(arg) for arg in args]


def with_inputs(args: tuple) -> tuple[list, list[torch.Tensor]]:
    """Copies of the arguments of an op, and of these what can have a gradient: tensors, and parameters of modules."""
    args = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
    inputs = [a.requires_grad_() for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
    return args, inputs + [parameter for a in args if isinstance(a, nn.Module) for parameter in a.parameters()]


def run_with_gradients(op, args: tuple) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The output of an op, and its gradients for every tensor and for every parameter of a module among `args`."""
    args, inputs = with_inputs(args)
    out = op(*args)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).reshape(out.shape)
    return out, torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True, materialize_grads=True)


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-9) -> None:
    """Compare with the same relative and absolute tolerance."""
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """|got - expected| / |expected|."""
    return ((got - expected).norm() / expected.norm()).item()


# models: one small size of each backbone
SMALL = {
    'aft': dict(embed_dim=24, num_heads=2, depth=2),
    'cvt': dict(embed_dims=(16, 24, 32), num_heads=(1, 2, 2), depths=(1, 1, 1)),
    'deit': dict(embed_dim=24, num_heads=2, depth=2),
    'vil': dict(embed_dims=(16, 24, 24, 32), num_heads=(1, 2, 2, 2), depths=(1, 1, 1, 1)),
}
SMALLEST = {'aft': 'tiny', 'cvt': '13', 'deit': 'tiny', 'vil': 'tiny'}
# models of the registered widths with one block per stage
SHALLOW = {
    'aft': dict(depth=1),
    'cvt': dict(depths=(1, 1, 1)),
    'deit': dict(depth=1),
    'vil': dict(depths=(1, 1, 1, 1)),
}


def combinations() -> list:
    """A name of every mixer in every backbone; those beyond one backbone per mixer, in turn, are marked slow.

    Softmax and long-short attention are tested in all backbones.
    """
    params = []
    for i, mixer in enumerate(vitzoo.list_mixers()):
        for j, (backbone, size) in enumerate(SMALLEST.items()):
            if f'{backbone}_{mixer}' in vitzoo.list_mixers():
                continue
            is_first = i % len(SMALLEST) == j or mixer in ('ls', 'softmax')
            name = f'{backbone}_{mixer.removeprefix(backbone + "_")}_{size}'
            params.append(pytest.param(name, marks=[] if is_first else pytest.mark.slow))
    return params


COMBINATIONS = combinations()


def build_model(name: str, img_size: int = 64, **kwargs) -> nn.Module:
    """The small size of a backbone, in evaluation mode."""
    torch.manual_seed(0)
    kwargs = {**SMALL[name.split('_')[0]], 'num_classes': 5, **kwargs}
    return timm.create_model(name, img_size=img_size, **kwargs).eval()


def images(*size: int, batch_size: int = 2, in_chans: int = 3) -> torch.Tensor:
    """Random images, 64 x 64 by default."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch_size, in_chans, *(size or (64, 64)), generator=generator)


def blocks(model: nn.Module) -> list[Block]:
    """The transformer blocks of a model."""
    return [module for module in model.modules() if isinstance(module, Block)]


def one_in(number: int, cases: Iterable) -> list:
    """Cases, which may be `pytest.param`, of which one in `number` is quick, and the others are slow."""
    params = [case if hasattr(case, 'marks') else pytest.param(case) for case in cases]
    slow = [[pytest.mark.slow] * bool(i % number) for i in range(len(params))]
    return [pytest.param(*p.values, marks=[*p.marks, *extra], id=p.id) for p, extra in zip(params, slow)]


def mixers_of_ours() -> list[str]:
    """The mixers of vitzoo itself, without those of installed plugins."""
    return [name for name in vitzoo.list_mixers() if mixer_class(name).__module__.startswith('vitzoo.')]


@functools.cache
def _official_recordings() -> dict[str, bytes]:
    """Contents of the safetensors files of tests/golden, by name."""
    with tarfile.open(Path(__file__).parent / 'golden' / 'official.tar.xz') as archive:
        return {Path(member.name).stem: archive.extractfile(member).read() for member in archive}


def golden(name: str) -> dict[str, torch.Tensor]:
    """Tensors recorded from the official code, from tests/golden or, for further recordings, ../shared/golden."""
    if name in _official_recordings():
        return safetensors.torch.load(_official_recordings()[name])
    path = Path(__file__).resolve().parents[2] / 'shared' / 'golden' / f'{name}.safetensors'
    if not path.exists():
        pytest.skip(f'{name}.safetensors is neither in tests/golden nor in ../shared/golden')
    return safetensors.torch.load_file(path)


def recorded_on_grid(case: str) -> tuple[dict[str, torch.Tensor], tuple[int, int]]:
    """Tensors of tools/record_official.py and the grid, such as of 'mala_5x7'."""
    tensors = safetensors.torch.load_file(Path(__file__).parent / 'golden' / 'awkward.safetensors')
    height, width = map(int, case.rpartition('_')[2].split('x'))
    found = {key.removeprefix(f'{case}/'): value for key, value in tensors.items() if key.startswith(f'{case}/')}
    return found, (height, width)


def assert_output_and_gradient_of_official_code(
    mixer: TokenMixer, recorded: dict[str, torch.Tensor], grid: tuple[int, int]
) -> None:
    """Compare with tensors of `recorded_on_grid`, in float64."""
    x = recorded['input'].double().requires_grad_()
    output = mixer.double().eval()(x, grid)
    (gradient,) = torch.autograd.grad(output.square().sum() / 2, x)
    assert relative_error(output, recorded['output']) < 1e-6 and relative_error(gradient, recorded['gradient']) < 1e-6


def assert_initialized_or_refused(model: nn.Module) -> bool:
    """Initialize a model from NaN; False if it refuses, because its mixers set some weights when they are built."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(math.nan if tensor.is_floating_point() else 0)
    try:
        model.init_weights()
    except RuntimeError as error:
        assert re.search(r'^blocks\.0\.attn.* is set when its mixer is built', str(error))
        return False
    assert all(tensor.isfinite().all() for tensor in (*model.parameters(), *model.buffers()))
    return True
