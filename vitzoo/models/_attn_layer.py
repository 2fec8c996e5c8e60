"""Token mixers for the argument `attn_layer` of timm's VisionTransformer."""

from itertools import count
from typing import Any

import torch
from timm.layers import register_notrace_module, to_2tuple
from torch import nn

from vitzoo.mixers import QKVMixer, TokenMixer, mixer_class
from vitzoo.mixers.base import check_arguments

from ._block import check_tokens

__all__ = ['attn_layer']


def attn_layer(
    mixer: str,
    *,
    img_size: int | tuple[int, int] = 224,
    patch_size: int | tuple[int, int] = 16,
    num_prefix_tokens: int = 1,
    **mixer_kwargs: Any,
) -> type[TokenMixer]:
    """A class of attention layers for one timm model, such as `VisionTransformer(attn_layer=attn_layer('ls'))`.

    timm passes neither the grid nor the number of prefix tokens to these layers, so that they are given here. The grid
    is fixed: `set_input_size()` of the model does not change it. `vitzoo.swap_mixer` has neither limit.

    Args:
        img_size: That of the model.
        patch_size: That of the model.
        num_prefix_tokens: Number of the model's class, distillation and register tokens.
        mixer_kwargs: The mixer's own arguments.

    Raises:
        ValueError: The mixer or a value of its arguments does not exist, the image is smaller than a patch, or, when
            the model is built, it has `scale_attn_norm`.
    """
    cls: Any = mixer_class(mixer)
    check_arguments(mixer, mixer_kwargs)
    H, W = (side // patch for side, patch in zip(to_2tuple(img_size), to_2tuple(patch_size)))
    grid_size = H, W
    if min(grid_size) < 1:
        raise ValueError(f'img_size {img_size} is smaller than a patch of {patch_size}.')
    # timm builds the blocks in their order
    layers = count()

    @register_notrace_module
    class MixerLayer(cls):
        def __init__(
            self,
            dim: int,
            num_heads: int = 8,
            qk_norm: bool = False,
            scale_norm: bool = False,
            proj_bias: bool = True,
            norm_layer: type[nn.Module] | None = None,
            **kwargs: Any,
        ) -> None:
            if scale_norm:
                raise ValueError('attn_layer does not take scale_attn_norm; leave it out, or use vitzoo.swap_mixer.')
            # mixers without queries and keys have nothing to normalize
            norm = {'qk_norm': True, 'norm_layer': norm_layer} if qk_norm and cls.has_qk_norm else {}
            place = {'grid_size': grid_size, 'num_prefix_tokens': num_prefix_tokens, 'layer': next(layers)}
            # that of timm's attention, whose weights may be loaded
            scale = {'scale': (dim // num_heads) ** -0.5} if issubclass(cls, QKVMixer) else {}
            super().__init__(dim, num_heads, **{**kwargs, **norm, **place, **scale, **mixer_kwargs})
            if not proj_bias and isinstance(getattr(self, 'proj', None), nn.Linear):
                self.proj.register_parameter('bias', None)

        def forward(self, x: torch.Tensor, attn_mask: None = None, is_causal: bool = False) -> torch.Tensor:
            """(B, P + H*W, dim) -> (B, P + H*W, dim); raises ValueError for a mask or a different number of tokens."""
            advice = 'pass img_size, patch_size and num_prefix_tokens of the model to attn_layer'
            check_tokens(self, x, attn_mask, is_causal, advice)
            return super().forward(x, self.grid_size)

    MixerLayer.__name__ = MixerLayer.__qualname__ = f'{cls.__name__}Layer'
    return MixerLayer
