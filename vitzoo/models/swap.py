"""In-place replacement of the attention of a timm VisionTransformer by a token mixer that inherits its weights."""

import logging
from copy import deepcopy

import torch
from timm.layers import Attention, register_notrace_module
from timm.models._input import update_model_args
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from vitzoo.mixers import QKVMixer, TokenMixer, create_mixer, mixer_class
from vitzoo.mixers._grid import check_grid
from vitzoo.models._swap_record import name_entrypoint
from vitzoo.models.inherit import Inheritance, inherit_weights, summarize_names

__all__ = ['SwappedBlock', 'SwappedDistilledViT', 'SwappedViT', 'swap_mixer']

_logger = logging.getLogger(__name__)


def swap_mixer(model: VisionTransformer, mixer: str, blocks: list[int] | None = None, **mixer_kwargs) -> nn.Module:
    """Replace the attention of a timm VisionTransformer by `mixer`, in all blocks or in the given ones.

    The model is changed in place and returned. The mixer inherits the settings and weights of the attention under the
    same parameter names (`blocks.0.attn.qkv.weight`, …); parameters that attention does not have are initialised.
    The `Inheritance` of each new mixer, by block, is in `model.inheritance`, and a warning names the weights of the
    attention that are lost. Random values of mixers are drawn from their `seed`, and are never inherited.
    `mixer_kwargs` are the mixer's own arguments, or override those settings. The grid is that of the model's image
    size, and follows `model.set_input_size()`. timm exports and loads the model as any other; to load a bare checkpoint
    of it, repeat the swap first.

    Raises:
        ValueError: The type of the model, of a block or of its attention is not supported, or the block or mixer does
            not exist.
        TypeError: The mixer does not have one of the arguments.
    """
    _check_model(model)
    indices = _block_indices(model, blocks)
    mixers = {i: _mixer_for(model, i, mixer, mixer_kwargs) for i in indices}
    for i, (new, _) in mixers.items():
        # change the class in place so that weights, hooks and references to the modules survive
        model.blocks[i].__class__ = SwappedBlock
        model.blocks[i].attn = new
    model.__class__ = SwappedDistilledViT if isinstance(model, VisionTransformerDistilled) else SwappedViT
    model.inheritance = {**getattr(model, 'inheritance', {}), **{i: report for i, (_, report) in mixers.items()}}
    lost = [f'blocks.{i}.attn.{name}' for i in indices for name in model.inheritance[i].lost]
    if lost:
        _logger.warning('%s does not inherit all weights of the attention, in %s', mixer, summarize_names(lost))
    # recorded in an exported config, whose architecture repeats the swaps
    swaps = getattr(model, '_model_args', {}).get('swap_mixer', [])
    update_model_args(model, swap_mixer=[*swaps, {'mixer': mixer, 'blocks': indices, **mixer_kwargs}])
    name_entrypoint(model)
    return model


@register_notrace_module
class SwappedBlock(Block):
    """timm's block with a token mixer as its attention, on the grid set by `set_input_size`."""

    def forward(self, x: torch.Tensor, attn_mask: None = None, is_causal: bool = False) -> torch.Tensor:
        """(B, P + H*W, C) -> (B, P + H*W, C); raises ValueError for a mask or a different number of tokens."""
        if attn_mask is not None or is_causal:
            raise ValueError('Token mixers do not support attn_mask or is_causal.')
        P, (H, W) = self.attn.num_prefix_tokens, self.attn.grid_size
        if x.shape[1] != P + H * W:
            raise ValueError(
                f'{type(self.attn).__name__} is set to {P} prefix tokens and a {H} x {W} grid, and got {x.shape[1]} '
                f'tokens: call model.set_input_size() with the image size.'
            )
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), (H, W))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class _Swapped:
    """Image size and weight decay of the mixers, for a VisionTransformer that has some."""

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Resample everything bound to the image size, an int or (H, W)."""
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        for _, mixer in self._mixers():
            mixer.set_input_size(self.patch_embed.grid_size)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        mixers = {f'blocks.{i}.attn.{name}' for i, mixer in self._mixers() for name in mixer.no_weight_decay()}
        return super().no_weight_decay() | mixers

    def _mixers(self) -> list[tuple[int, TokenMixer]]:
        return [(i, block.attn) for i, block in enumerate(self.blocks) if isinstance(block, SwappedBlock)]

    def _pos_embed(self, x: torch.Tensor) -> torch.Tensor:
        if self.dynamic_img_size:
            # grids of different shape may have the same number of tokens; x is (B, H, W, C) here
            check_grid(type(self).__name__, self.patch_embed.grid_size, x.shape[1:3])
        return super()._pos_embed(x)


class SwappedViT(_Swapped, VisionTransformer):
    """A timm VisionTransformer that `swap_mixer` changed."""


class SwappedDistilledViT(_Swapped, VisionTransformerDistilled):
    """A timm VisionTransformerDistilled that `swap_mixer` changed."""


def _check_model(model: nn.Module) -> None:
    if type(model) not in (VisionTransformer, VisionTransformerDistilled, SwappedViT, SwappedDistilledViT):
        raise ValueError(
            f"swap_mixer does not support {type(model).__name__}: it takes timm's VisionTransformer and "
            f'VisionTransformerDistilled models, such as deit3_small_patch16_224 and vit_small_patch14_dinov2, not '
            f'those with rotary positions (DINOv3, EVA-02, PE).'
        )
    if not isinstance(model.patch_drop, nn.Identity):
        raise ValueError('patch_drop_rate removes tokens from the grid that mixers need; build the model without it.')


def _block_indices(model: VisionTransformer, blocks: list[int] | None) -> list[int]:
    depth = len(model.blocks)
    wrong = [i for i in blocks or [] if not -depth <= i < depth]
    if wrong:
        raise ValueError(f'There is no block {wrong[0]}: the model has {depth}, from 0 to {depth - 1}.')
    indices = list(range(depth)) if blocks is None else sorted({i % depth for i in blocks})
    for i in indices:
        reason = _unsupported(model.blocks[i])
        if reason:
            raise ValueError(
                f"swap_mixer cannot replace the attention of block {i}: {reason}. It supports timm's Attention in "
                f"timm's Block, with or without qk_norm, layer scale and biases."
            )
    return indices


def _unsupported(block: nn.Module) -> str | None:
    """The feature of a block that mixers do not have, or None."""
    if type(block) not in (Block, SwappedBlock):
        return f'it is a {type(block).__name__}'
    attn = block.attn
    if isinstance(attn, QKVMixer):
        return None
    if type(attn) is not Attention:
        return f'it has {type(attn).__name__}'
    if attn.gate is not None:
        return 'its attention is gated'
    if not isinstance(attn.norm, nn.Identity):
        return 'its attention has scale_norm'
    if attn.attn_dim != attn.qkv.in_features:
        return f'its attn_head_dim is {attn.head_dim}, not dim / num_heads'
    return None


def _mixer_for(model: VisionTransformer, index: int, name: str, mixer_kwargs: dict) -> tuple[TokenMixer, Inheritance]:
    """A mixer with the settings and weights of a block's attention, and what it inherited."""
    attn = model.blocks[index].attn
    settings = dict(
        dim=attn.qkv.in_features,
        num_heads=attn.num_heads,
        grid_size=model.patch_embed.grid_size,
        num_prefix_tokens=model.num_prefix_tokens,
        layer=index,
        qkv_bias=attn.qkv.bias is not None,
        attn_drop=attn.attn_drop.p,
        proj_drop=attn.proj_drop.p,
        device=attn.qkv.weight.device,
        dtype=attn.qkv.weight.dtype,
    )
    # mixers without queries and keys have nothing to normalize
    if not isinstance(attn.q_norm, nn.Identity) and mixer_class(name).has_qk_norm:
        settings.update(qk_norm=True, norm_layer=lambda *args, **kwargs: deepcopy(attn.q_norm))
    new = create_mixer(name, **{**settings, **mixer_kwargs})
    new.apply(model._init_weights)
    if attn.proj.bias is None and isinstance(getattr(new, 'proj', None), nn.Linear):
        new.proj.register_parameter('bias', None)
    report = inherit_weights(new, {name: parameter.detach() for name, parameter in attn.named_parameters()})
    return new.train(attn.training), report
