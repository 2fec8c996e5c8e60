"""Multiply-accumulates (MACs) for one image, counted on the meta device with unfused attention.

The "FLOPs" of vision papers are MACs: one multiplication and one addition. Matrix products, convolutions and Fourier
transforms count; activations, norms, reductions and copies do not. Inside a token mixer, element-wise products of two
tensors and pooling count as well, because Hydra, AFT and PoolFormer mix tokens with them. An activation
that a mixer writes as one `torch.addcmul`, such as ELU + 1, is as free as others; products that mix tokens are
`addcmul_`, which counts.
"""

from typing import Any

import torch
from timm.layers import get_device_dtype
from timm.models._input import get_model_input_config
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from vitzoo.errors import UserError
from vitzoo.mixers import TokenMixer
from vitzoo.mixers.base import named_mixers
from vitzoo.models._meta import meta_copy

# ops that need no formula, in addition to those that torch tags as views or point-wise (some activations lack the
# tag, more of them in older versions)
FREE_OPS = {
    'reductions': 'sum mean prod amax amin max min argmax argmin any all var std var_mean std_mean logsumexp cumsum '
    'cumprod norm linalg_vector_norm sort topk',
    'normalization': '_softmax _log_softmax _safe_softmax native_layer_norm native_group_norm native_batch_norm '
    '_native_batch_norm_legit _native_batch_norm_legit_no_training _fused_rms_norm native_dropout',
    'activations': 'abs relu relu6 gelu silu elu celu selu hardtanh hardsigmoid hardswish leaky_relu softplus mish '
    'sigmoid tanh glu log_sigmoid_forward floor_divide',
    'resampling': 'avg_pool1d avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d max_pool2d_with_indices '
    'upsample_nearest2d upsample_bilinear2d upsample_bicubic2d _upsample_nearest_exact2d _upsample_bilinear2d_aa '
    '_upsample_bicubic2d_aa grid_sampler_2d',
    'moving': 'cat stack clone copy _to_copy repeat repeat_interleave index _unsafe_index index_select index_copy '
    'index_put _unsafe_index_put index_fill index_add gather scatter scatter_add scatter_reduce slice_scatter '
    'select_scatter where masked_fill embedding roll flip rot90 tril triu im2col col2im pixel_shuffle pixel_unshuffle '
    'constant_pad_nd reflection_pad2d replication_pad2d split split_with_sizes unsafe_split unsafe_chunk '
    '_unsafe_view _reshape_alias as_strided resize set _local_scalar_dense',
    'making': 'empty empty_like empty_strided empty_permuted new_empty new_empty_strided new_zeros new_ones new_full '
    'zeros zeros_like ones ones_like full full_like scalar_tensor arange linspace eye fill zero rand rand_like randn '
    'randn_like randint randperm bernoulli uniform normal',
}
FREE_OP_NAMES = frozenset(name for names in FREE_OPS.values() for name in names.split())


def _product_macs(out: torch.Tensor, *factors: Any) -> int:
    """Element-wise product; a product with a scalar is free, but not that with a number per head of a single head."""
    is_mixing = all(isinstance(factor, torch.Tensor) and factor.ndim > 0 for factor in factors)
    return out.numel() if is_mixing else 0


def _added_product_macs(out: torch.Tensor, _: torch.Tensor, *factors: Any) -> int:
    """Element-wise product that is added to a tensor."""
    return _product_macs(out, *factors)


def _pooling_macs(out: torch.Tensor, x: torch.Tensor, kernel_size: list[int], *args: Any) -> int:
    """Pooling as a depthwise convolution with constant weights."""
    return out.numel() * kernel_size[0] * kernel_size[-1]


# counted inside token mixers only; elsewhere these are gates, layer scale and downsampling. `addcmul` is left out: in
# `linear`, `focused` and `ttt` it is the feature map or the derivative of SiLU, of one token's own numbers
MIXING_OPS = {
    torch.ops.aten.mul: _product_macs,
    torch.ops.aten.mul_: _product_macs,
    torch.ops.aten.addcmul_: _added_product_macs,
    torch.ops.aten.avg_pool2d: _pooling_macs,
}


def count_macs(model: nn.Module, img_size: int | tuple[int, int] | None = None) -> int:
    """Count the multiply-accumulates for one image; the model itself is neither run nor changed.

    An operation without a formula that may multiply (a decomposition, a custom op) is an error. Add its formula, in
    FLOPs, with `torch.utils.flop_counter.register_flop_formula`. Windows are counted whole, also if they reach
    beyond the grid, where a CPU computes only the rows on it.

    Args:
        img_size: Height and width of the image; by default the model's own.

    Raises:
        UserError: An operation has no formula or cannot run on the meta device, or the model cannot run at `img_size`.
    """
    shape = input_shape(model, img_size)
    if min(shape) < 1:
        raise UserError(f'img_size={img_size} is not a size: the sides of an image have at least one pixel')
    dtype = get_device_dtype(model)['dtype']
    try:
        return count_call_macs(model, torch.empty(1, *shape, device='meta', dtype=dtype))
    except UserError:
        raise
    except (AssertionError, RuntimeError, ValueError) as error:
        if shape == input_shape(model):
            raise
        own = ' x '.join(map(str, input_shape(model)[1:]))
        raise UserError(
            f'{type(model).__name__} cannot run at img_size={img_size} ({error}); its own size is {own}: '
            'create it with this img_size, or call its set_input_size() first if it has one'
        ) from error


def count_call_macs(module: nn.Module, *args: Any) -> int:
    """Count the multiply-accumulates of a call as `count_macs` does; tensor arguments are on the meta device."""
    module_name = type(module).__name__
    module = meta_copy(module).eval().requires_grad_(False)
    fused: list[Any] = [child for child in module.modules() if hasattr(child, 'fused_attn')]
    for child in fused:
        child.fused_attn = False
    try:
        with torch.device('meta'):
            macs, uncounted = run_and_count(module, *args)
    except NotImplementedError as error:
        raise UserError(f'cannot count the MACs of {module_name} on the meta device: {error}') from error
    if uncounted:
        raise UserError(
            f'cannot count the MACs of {module_name}: no formula for {", ".join(sorted(uncounted))}; '
            'add one with torch.utils.flop_counter.register_flop_formula'
        )
    return macs


def input_shape(model: nn.Module, img_size: int | tuple[int, int] | None = None) -> tuple[int, int, int]:
    """Channels, height and width of the images of a model, at its own or the given size."""
    channels, *size = get_model_input_config(model)['input_size']
    size = size if img_size is None else img_size
    height, width = (size, size) if isinstance(size, int) else size
    return channels, height, width


@torch.no_grad()
def run_and_count(model: nn.Module, *args: Any) -> tuple[int, set[str]]:
    """Run a model on any device, and return its MACs and the names of the operations without a formula."""
    watcher, counter = _OpWatcher(), FlopCounterMode(display=False)
    hooks = []
    for _, mixer in named_mixers(model):
        hooks += [mixer.register_forward_pre_hook(watcher.enter), mixer.register_forward_hook(watcher.leave)]
    try:
        # the watcher is the outer mode, so that it sees the parts of composite ops
        with sdpa_kernel(SDPBackend.MATH), watcher, counter:
            model(*args)
    finally:
        for hook in hooks:
            hook.remove()
    return counter.get_total_flops() // 2 + watcher.mixing_macs, watcher.uncounted


class _OpWatcher(TorchDispatchMode):
    """Counts the element-wise MACs of token mixers, and collects operations that are neither counted nor free."""

    def __init__(self) -> None:
        super().__init__()
        self.uncounted: set[str] = set()
        self.mixing_macs = 0
        self.depth = 0

    def enter(self, mixer: TokenMixer, args: tuple) -> None:
        self.depth += 1

    def leave(self, mixer: TokenMixer, args: tuple, output: torch.Tensor) -> None:
        self.depth -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        packet = func._overloadpacket
        cheap = func.is_view or torch.Tag.pointwise in func.tags or packet.__name__.rstrip('_') in FREE_OP_NAMES
        if packet not in flop_registry and not (cheap and func.namespace in ('aten', 'prim', 'prims')):
            self.uncounted.add(str(packet))
        out = func(*args, **(kwargs or {}))
        if self.depth and packet in MIXING_OPS:
            self.mixing_macs += MIXING_OPS[packet](out, *args)
        return out
