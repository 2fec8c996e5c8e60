"""Multiply-accumulates (MACs) of one image, counted on the meta device with attention in its textbook form.

The "FLOPs" of the vision papers are MACs: one multiplication and one addition. Matrix products and convolutions count;
element-wise work, reductions and copies do not.
"""

import copy

import torch
from timm.models._input import get_model_input_config
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from vitzoo.errors import UserError

# what needs no formula, beside the ops that carry torch's own tag of a view or of point-wise work (which some
# activations lack, more of them in older versions)
FREE_OPS = {
    'reductions': 'sum mean prod amax amin max min argmax argmin any all var std var_mean std_mean logsumexp cumsum '
    'cumprod norm linalg_vector_norm sort topk',
    'normalisation': '_softmax _log_softmax _safe_softmax native_layer_norm native_group_norm native_batch_norm '
    '_native_batch_norm_legit _native_batch_norm_legit_no_training _fused_rms_norm native_dropout',
    'activations': 'relu relu6 gelu silu elu celu selu hardtanh hardsigmoid hardswish leaky_relu softplus mish sigmoid '
    'tanh glu log_sigmoid_forward floor_divide',
    'resampling': 'avg_pool1d avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d max_pool2d_with_indices '
    'upsample_nearest2d upsample_bilinear2d upsample_bicubic2d _upsample_nearest_exact2d _upsample_bilinear2d_aa '
    '_upsample_bicubic2d_aa grid_sampler_2d',
    'moving': 'cat stack clone copy _to_copy repeat repeat_interleave index _unsafe_index index_select index_copy '
    'index_put _unsafe_index_put index_fill index_add gather scatter scatter_add scatter_reduce slice_scatter '
    'select_scatter where masked_fill embedding roll flip rot90 tril triu im2col col2im pixel_shuffle pixel_unshuffle '
    'constant_pad_nd reflection_pad2d replication_pad2d split split_with_sizes unsafe_split unsafe_chunk '
    '_unsafe_view _reshape_alias as_strided resize set',
    'making': 'empty empty_like empty_strided empty_permuted new_empty new_empty_strided new_zeros new_ones new_full '
    'zeros zeros_like ones ones_like full full_like scalar_tensor arange linspace eye fill zero rand rand_like randn '
    'randn_like randint randperm bernoulli uniform normal',
}
FREE_OP_NAMES = frozenset(name for names in FREE_OPS.values() for name in names.split())


def count_macs(model: nn.Module, img_size: int | tuple[int, int] | None = None) -> int:
    """Count the multiply-accumulates of one image; the model itself is neither run nor changed.

    An operation that would count as zero though it multiplies (an FFT, a decomposition, a custom op) stops the count.
    Give it a formula, in FLOPs, with `torch.utils.flop_counter.register_flop_formula`.

    Args:
        img_size: Height and width of the image; by default what the model was made for.

    Raises:
        UserError: An operation has no formula, or cannot run on the meta device.
    """
    model_name = type(model).__name__
    images = torch.empty(1, *input_shape(model, img_size), device='meta')
    model = _meta_copy(model).eval()
    for module in model.modules():
        if hasattr(module, 'fused_attn'):
            module.fused_attn = False
    watcher, counter = _OpWatcher(), FlopCounterMode(display=False)
    try:
        # the watcher stands outside the counter, so that it sees what composite ops are made of
        with torch.no_grad(), torch.device('meta'), sdpa_kernel(SDPBackend.MATH), watcher, counter:
            model(images)
    except NotImplementedError as error:
        raise UserError(f'cannot count the MACs of {model_name} on the meta device: {error}') from error
    if watcher.uncounted:
        raise UserError(
            f'cannot count the MACs of {model_name}: no formula for {", ".join(sorted(watcher.uncounted))}; '
            'add one with torch.utils.flop_counter.register_flop_formula'
        )
    return counter.get_total_flops() // 2


def input_shape(model: nn.Module, img_size: int | tuple[int, int] | None = None) -> tuple[int, int, int]:
    """Find the channels, height and width of the images that a model was made for, or of those asked for."""
    channels, *size = get_model_input_config(model)['input_size']
    size = img_size or size
    height, width = (size, size) if isinstance(size, int) else size
    return channels, height, width


class _OpWatcher(TorchDispatchMode):
    """Collects the names of the operations that nobody counts and that are not free."""

    def __init__(self):
        super().__init__()
        self.uncounted = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = func._overloadpacket
        cheap = func.is_view or torch.Tag.pointwise in func.tags or packet.__name__.rstrip('_') in FREE_OP_NAMES
        if packet not in flop_registry and not (cheap and func.namespace in ('aten', 'prim', 'prims')):
            self.uncounted.add(str(packet))
        return func(*args, **(kwargs or {}))


def _meta_copy(model: nn.Module) -> nn.Module:
    """Copy a model onto the meta device without copying its weights."""
    # deepcopy takes what it finds in memo for a tensor's copy; tensors kept as plain attributes are found in vars()
    memo = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(torch.empty_like(tensor, device='meta'), requires_grad=False)
            elif isinstance(tensor, torch.Tensor):
                memo[id(tensor)] = torch.empty_like(tensor, device='meta')
    return copy.deepcopy(model, memo)
