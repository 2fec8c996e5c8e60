"""Loading the weights of one image size into a model of another.

The weights are loaded into a copy of the model that is set to their image size, and the model's own `set_input_size`
resamples them there. Every backbone, position embedding and mixer therefore resamples in one place only, mixers of
other packages included.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from timm.layers import to_2tuple
from timm.models._input import get_model_traits
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from vitzoo.errors import silenced
from vitzoo.mixers.base import named_mixers

from ._meta import meta_copy
from ._pyramid import Pyramid

__all__ = ['find_sizes', 'is_resizable', 'resample_checkpoint', 'resample_weights', 'without_size_warnings']

_logger = logging.getLogger(__name__)
# no published weights are for larger images
_LARGEST_SIDE = 2048


def resample_weights(
    state_dict: dict[str, Tensor], model: nn.Module, img_size: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Resample position embeddings and grid-bound parameters of mixers to the image size of the model.

    The result equals that of loading the weights at their own image size and calling `model.set_input_size()`.

    Args:
        state_dict: Weights in the layout of the model. If they fit the model at no image size, they are returned as
            they are.
        img_size: Height and width of the images of these weights; by default that in their config if they fit it,
            else the model's own, else that of square images, with a warning.
    """
    new_size = _img_size(model)
    bound = [name for name in _bound_names(model) if name in state_dict]
    if not bound:
        return state_dict
    if img_size is None:
        old_size = _weights_size(state_dict, model)
    else:
        old_size = _with_patches_of(model, state_dict, to_2tuple(img_size))
    if old_size is None or old_size == new_size or not _fits(_shapes(model, old_size), state_dict):
        return state_dict
    copied = meta_copy(model)
    copied.set_input_size(old_size)
    own = copied.state_dict()
    # in the dtype of the model, as if loaded into it before resampling
    tensors = {name: state_dict[name].to(own[name].dtype) for name in bound}
    copied.load_state_dict(tensors, strict=False, assign=True)
    copied.set_input_size(new_size)
    resampled = copied.state_dict()
    return {**state_dict, **{name: resampled[name] for name in bound}}


def _weights_size(state_dict: dict[str, Tensor], model: nn.Module) -> tuple[int, int] | None:
    """Height and width of the images that weights are for; None if they fit the model at no image size.

    The config is `img_size` in config.json, else `input_size` in the pretrained config.
    """
    own_size = _img_size(model)
    declared = [_with_patches_of(model, state_dict, size) for size in _declared_sizes(model)]
    candidates = [*declared, own_size]
    # the config mostly has the model's own size, and any other costs a copy of the model
    for size in dict.fromkeys(candidates):
        if _fits(_shapes(model, size), state_dict):
            return size
    size = _square_size(state_dict, model)
    if size is not None:
        _logger.warning(
            'The weights are not for images of %d x %d, as their config has it, and are taken to be for square images '
            'of %d x %d; if that is wrong, pass input_size in pretrained_cfg_overlay.',
            *candidates[0],
            *size,
        )
    return size


def without_size_warnings() -> AbstractContextManager[None]:
    """Do not tell of weights that are taken to be for square images, because the caller will, or has."""
    return silenced(_logger)


def find_sizes(
    state_dict: dict[str, Tensor], model: nn.Module, img_size: Sequence[int] | None = None
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The image size that `resample_weights` takes weights to be for and that of the model; None if they are equal.

    They are not known of models that cannot change their image size, and of weights in another layout.
    """
    if not is_resizable(model) or not any(name in state_dict for name in _bound_names(model)):
        return None
    old_size = _weights_size(state_dict, model) if img_size is None else to_2tuple(img_size)
    return None if old_size in (None, _img_size(model)) else (old_size, _img_size(model))


def resample_checkpoint(
    state_dict: dict[str, Tensor], model: nn.Module, img_size: Sequence[int] | None
) -> dict[str, Tensor]:
    """Resample the weights in a file to the image size of a model, as `resample_weights` does.

    Models other than those of vitzoo, swapped ones and timm's VisionTransformer are left to timm.

    Args:
        img_size: Height and width of the images of these weights, if known.

    Raises:
        ValueError: The image size is not known, and the weights fit with several grids.
    """
    if not isinstance(model, (Pyramid, VisionTransformer)) and not (any(named_mixers(model)) and is_resizable(model)):
        return state_dict
    if img_size is None and _fits(_shapes(model, _img_size(model)), state_dict):
        for size in _declared_sizes(model):
            resampled = resample_weights(state_dict, model, size)
            if any(not _is_equal(resampled[name], tensor) for name, tensor in state_dict.items()):
                (H, W), own = size, _img_size(model)
                raise ValueError(
                    f'its weights fit for images of {own[0]} x {own[1]} and of {H} x {W}; write a folder that says '
                    f'which with vitzoo convert FILE --model NAME --model-kwargs img_size=[H,W], and use that folder'
                )
        return state_dict
    return resample_weights(state_dict, model, img_size)


def is_resizable(model: nn.Module) -> bool:
    """Return True if the image size of a model of timm can be read and changed."""
    return hasattr(model, 'set_input_size') and get_model_traits(model).get('img_size') is not None


def _declared_sizes(model: nn.Module) -> list[tuple[int, int]]:
    """The image sizes in a model's description of its pretrained weights, the most reliable first."""
    img_size = (getattr(model, 'pretrained_model_args', None) or {}).get('img_size')
    input_size = (getattr(model, 'pretrained_cfg', None) or {}).get('input_size')
    sizes = [img_size, input_size and input_size[-2:]]
    return [to_2tuple(size) for size in sizes if size]


def _with_patches_of(model: nn.Module, state_dict: dict[str, Tensor], size: tuple[int, int]) -> tuple[int, int]:
    """The image size at which the model has the grid of weights that may be for another patch size."""
    weight = state_dict.get('patch_embed.proj.weight')
    if weight is None or weight.ndim != 4 or not _has_patches(model):
        return size
    if tuple(weight.shape[-2:]) == tuple(model.patch_embed.patch_size):
        # it need not be a multiple of patches, which may be padded
        return size
    sides = zip(size, weight.shape[-2:], model.patch_embed.patch_size, strict=True)
    H, W = (side // old * new for side, old, new in sides)
    return H, W


def _square_size(state_dict: dict[str, Tensor], model: nn.Module) -> tuple[int, int] | None:
    """The smallest square image size at which weights fit."""
    step = model.feature_info[0]['reduction']
    bound = [name for name in _bound_names(model) if name in state_dict]
    num_values = sum(state_dict[name].numel() for name in bound)
    side, smallest, copied = 0, 0, meta_copy(model)
    while smallest <= num_values and side < _LARGEST_SIDE:
        side += step
        shapes = _resize(copied, (side, side))
        if _fits(shapes, state_dict):
            return side, side
        smallest = sum(shapes[name].numel() for name in bound) if shapes else 0
    return None


def _img_size(model: nn.Module) -> tuple[int, int]:
    if _has_patches(model):
        return to_2tuple(model.patch_embed.img_size)
    return to_2tuple(model.img_size if hasattr(model, 'img_size') else get_model_traits(model)['img_size'])


def _has_patches(model: nn.Module) -> bool:
    """Return True for a model of patches without overlap, whose embedding has the image size."""
    return hasattr(getattr(model, 'patch_embed', None), 'img_size')


def _bound_names(model: nn.Module) -> list[str]:
    """Names of the tensors that may depend on the image size: those of mixers, and positions."""
    mixers = [f'{path}.{name}' for path, mixer in named_mixers(model) for name in mixer.state_dict()]
    positions = {'pos_embed', 'relative_position_bias_table', 'rel_pos_h', 'rel_pos_w'}
    return list(
        dict.fromkeys(mixers + [name for name in model.state_dict() if positions.intersection(name.split('.'))])
    )


def _shapes(model: nn.Module, img_size: tuple[int, int]) -> dict[str, torch.Size]:
    """Shapes of the tensors that may depend on the image size, at this one; empty if the model does not support it."""
    return _resize(model if img_size == _img_size(model) else meta_copy(model), img_size)


def _resize(model: nn.Module, img_size: tuple[int, int]) -> dict[str, torch.Size]:
    """Set a model to an image size, and return the shapes as `_shapes` does."""
    if img_size != _img_size(model):
        try:
            model.set_input_size(img_size)
        except (AssertionError, RuntimeError, ValueError):
            return {}
    tensors = model.state_dict()
    return {name: tensors[name].shape for name in _bound_names(model)}


def _fits(shapes: dict[str, torch.Size], state_dict: dict[str, Tensor]) -> bool:
    return bool(shapes) and all(state_dict[name].shape == shape for name, shape in shapes.items() if name in state_dict)


def _is_equal(a: Tensor, b: Tensor) -> bool:
    # weights may be nan, which does not equal itself
    return a.shape == b.shape and torch.allclose(a, b.to(a.dtype), rtol=0, atol=0, equal_nan=True)
