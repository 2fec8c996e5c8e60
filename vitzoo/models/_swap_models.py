"""Vision transformers with other token mixers in their blocks: grid, image size and weight decay."""

from collections.abc import Callable
from inspect import signature
from math import ceil, floor
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed, resample_abs_pos_embed_nhwc, to_2tuple
from timm.models._input import get_model_input_config, get_model_traits, update_model_input_size
from timm.models.beit import Beit
from timm.models.cait import Cait
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit
from timm.models.pvt_v2 import PyramidVisionTransformerV2
from timm.models.swin_transformer import SwinTransformer
from timm.models.twins import Twins
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import nn

from vitzoo.mixers import TokenMixer
from vitzoo.mixers._grid import check_grid
from vitzoo.mixers._rel_bias import resample_offsets

from ._block import check_reset
from ._swap_blocks import SwappedTimmBlock
from .aft import AFT
from .cvt import CvT
from .deit import DeiT
from .vil import ViL

__all__ = ['SWAPPED_MODELS', 'SwappedModel']


# their arguments are not known while torch.fx traces a model
torch.fx.wrap('check_grid')
torch.fx.wrap('_check_images')

# each class below is put in front of that of a model, whose attributes and methods it has
_Model: Any = object


class SwappedModel(_Model):
    """A model that `swap_mixer` changed.

    `token_blocks`, `grid_size_of`, `num_prefix_in_block` and `mixer_settings` are also called with a model that is not
    changed yet.
    """

    # name of the model's bias of relative positions for all blocks, which becomes part of the mixers
    shared_bias: str | None = None
    blocks: Any

    def token_blocks(self: Any) -> dict[str, nn.Module]:
        """The blocks whose attention can be replaced, by name, in order."""
        return {f'blocks.{i}': block for i, block in enumerate(self.blocks)}

    @staticmethod
    def is_default(block: nn.Module) -> bool:
        """True if the attention of a block is replaced unless the user chooses blocks."""
        return True

    def grid_size_of(self: Any, name: str) -> tuple[int, int]:
        """The grid of the tokens in a block."""
        return _embedded_grid(self.patch_embed)

    def num_prefix_in_block(self: Any, name: str) -> int:
        return self.num_prefix_tokens

    def mixer_settings(self: Any, name: str, cls: type[TokenMixer]) -> dict:
        """Keywords that the model gives to a mixer of class `cls` in a block."""
        return {}

    def has_pos_embed(self) -> bool:
        """True if a position embedding is added to the tokens."""
        return getattr(self, 'pos_embed', None) is not None

    def mixers(self) -> dict[str, TokenMixer]:
        """The mixers by their names in the model."""
        return {
            '.'.join(part for part in (path, name, 'attn') if part): holder.attn
            for path, block in self.token_blocks().items()
            if isinstance(block, SwappedTimmBlock)
            for name, holder in block.attention_holders().items()
        }

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        mixers = {f'{path}.{name}' for path, mixer in self.mixers().items() for name in mixer.no_weight_decay()}
        return set(super().no_weight_decay()) | mixers


class _ResettableModel(SwappedModel):
    """A model whose weights timm can initialize again."""

    def init_weights(self, *args: Any, **kwargs: Any) -> None:
        """Initialize the weights as timm does; `needs_reset` also those that layers set when they are built.

        Raises:
            RuntimeError: Some of them belong to mixers, which set them only when they are built, or timm scales the
                last layer of attention, which a mixer does not have.
        """
        if hasattr(super(), 'fix_init_weight') and getattr(self, 'fix_init', True):
            self._check_last_layers()
        if signature(super().init_weights).bind(*args, **kwargs).arguments.get('needs_reset', True):
            check_reset(self.mixers())
        super().init_weights(*args, **kwargs)

    def _check_last_layers(self) -> None:
        """Raise RuntimeError if a mixer has no layer `proj`, of which timm scales the weights by its depth."""
        for path, mixer in self.mixers().items():
            if getattr(mixer, 'proj', None) is None:
                raise RuntimeError(
                    f'{path} has no layer proj, whose weights timm scales when it initializes {type(self).__name__};'
                    f' initialize the model before the swap, or load weights instead.'
                )


class _ResizableModel(_ResettableModel):
    """A model whose image size timm can change."""

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Resample everything bound to the image size, an int or (H, W)."""
        blocks = self.blocks
        # some models resize the biases of their attention layers, which mixers do not have
        self.blocks = nn.ModuleList(block for block in blocks if not isinstance(block, SwappedTimmBlock))
        try:
            super().set_input_size(img_size=img_size, patch_size=patch_size)
        finally:
            self.blocks = blocks
        for mixer in self.mixers().values():
            mixer.set_input_size(_embedded_grid(self.patch_embed))


class _DynamicModel(_ResizableModel):
    """A model that takes images of any size if it has `dynamic_img_size`."""

    def _pos_embed(self, x: torch.Tensor) -> Any:
        if self.dynamic_img_size:
            # grids of different shape may have the same number of tokens; x is (B, H, W, C) here
            check_grid(type(self).__name__, _embedded_grid(self.patch_embed), x.shape[1:3])
        return super()._pos_embed(x)


class SwappedViT(_DynamicModel, VisionTransformer):
    """A timm VisionTransformer that `swap_mixer` changed."""


class SwappedDistilledViT(_DynamicModel, VisionTransformerDistilled):
    """A timm VisionTransformerDistilled that `swap_mixer` changed."""


class SwappedEva(_DynamicModel, Eva):
    """A timm Eva (EVA-02, DINOv3, PE, RoPE-ViT) that `swap_mixer` changed."""


class SwappedRelPosViT(_ResizableModel, VisionTransformerRelPos):
    """A timm VisionTransformerRelPos that `swap_mixer` changed."""

    shared_bias = 'shared_rel_pos'


class SwappedBeit(_ResizableModel, Beit):
    """A timm Beit that `swap_mixer` changed."""

    shared_bias = 'rel_pos_bias'


class SwappedCait(SwappedModel, Cait):
    """A timm Cait that `swap_mixer` changed, in the blocks of patch tokens."""

    def num_prefix_in_block(self, name: str) -> int:
        # the class token enters the blocks after them
        return 0

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resample everything bound to the image size, an int or (H, W)."""
        old_size, img_size = self.patch_embed.grid_size, to_2tuple(img_size)
        self.patch_embed.set_input_size(img_size)
        grid_size = self.patch_embed.grid_size
        new = resample_abs_pos_embed(self.pos_embed.data, grid_size, old_size, num_prefix_tokens=0)
        self.pos_embed = _like(self.pos_embed, new)
        for mixer in self.mixers().values():
            mixer.set_input_size(grid_size)
        update_model_input_size(self, img_size)


class SwappedSAM(SwappedModel, VisionTransformerSAM):
    """A timm VisionTransformerSAM that `swap_mixer` changed, in the blocks whose attention is over the whole grid."""

    @staticmethod
    def is_default(block: nn.Module) -> bool:
        return not block.window_size

    def num_prefix_in_block(self, name: str) -> int:
        return 0

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resample everything bound to the image size, an int or (H, W)."""
        img_size = to_2tuple(img_size)
        self.patch_embed.set_input_size(img_size)
        grid_size = self.patch_embed.grid_size
        if self.pos_embed is not None:
            self.pos_embed = _like(self.pos_embed, resample_abs_pos_embed_nhwc(self.pos_embed.data, grid_size))
        for block in self.blocks:
            if isinstance(block, SwappedTimmBlock):
                block.attn.set_input_size(grid_size)
            elif block.attn.use_rel_pos and not block.window_size:
                for name, size in zip(('rel_pos_h', 'rel_pos_w'), grid_size):
                    old = getattr(block.attn, name)
                    setattr(block.attn, name, _like(old, resample_offsets(old.data, size)))
        update_model_input_size(self, img_size)


def _check_images(patch_coord: torch.Tensor | None) -> None:
    if patch_coord is not None:
        raise ValueError('Token mixers need images of one size: pass images (B, C, H, W), not patches.')


class SwappedNaFlexViT(_ResettableModel, NaFlexVit):
    """A timm NaFlexVit that `swap_mixer` changed: it takes images of one size, at first that of its positions."""

    embeds: Any

    def grid_size_of(self, name: str) -> tuple[int, int]:
        size = get_model_traits(self).get('img_size')
        return self.embeds.dynamic_feat_size(size) if size else tuple(self.embeds.pos_embed_grid_size)

    def has_pos_embed(self) -> bool:
        return self.embeds.pos_embed_type not in ('', 'none')

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resample everything in the mixers that is bound to the image size, an int or (H, W)."""
        for mixer in self.mixers().values():
            mixer.set_input_size(self.embeds.dynamic_feat_size(to_2tuple(img_size)))
        update_model_input_size(self, to_2tuple(img_size))

    def _forward_embeds(self, x: torch.Tensor, patch_coord: torch.Tensor | None, *args: Any, **kwargs: Any) -> dict:
        _check_images(patch_coord)
        for name, mixer in self.mixers().items():
            check_grid(name, mixer.grid_size, self.embeds.dynamic_feat_size(x.shape[-2:]))
        return super()._forward_embeds(x, patch_coord, *args, **kwargs)


class SwappedSwin(_ResettableModel, SwinTransformer):
    """A timm SwinTransformer that `swap_mixer` changed: its mixers act on whole stages."""

    def token_blocks(self) -> dict[str, nn.Module]:
        return {
            f'layers.{i}.blocks.{j}': block
            for i, layer in enumerate(self.layers)
            for j, block in enumerate(layer.blocks)
        }

    def grid_size_of(self, name: str) -> tuple[int, int]:
        return tuple(SwappedSwin.token_blocks(self)[name].input_resolution)

    def num_prefix_in_block(self, name: str) -> int:
        return 0


class _StagedModel(SwappedModel):
    """A model with stages of blocks."""

    def token_blocks(self) -> dict[str, nn.Module]:
        return {
            f'stages.{i}.blocks.{j}': block
            for i, stage in enumerate(self.stages)
            for j, block in enumerate(stage.blocks)
        }


class SwappedPVT(_StagedModel, PyramidVisionTransformerV2):
    """A timm PyramidVisionTransformerV2 that `swap_mixer` changed.

    Blocks get the grid of each image; mixers that are bound to a grid start with that of timm's image size.
    """

    def grid_size_of(self, name: str) -> tuple[int, int]:
        return _stage_grid(name, get_model_input_config(self)['input_size'][1:], ceil)

    def num_prefix_in_block(self, name: str) -> int:
        return 0

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resample everything in the mixers that is bound to the image size, an int or (H, W)."""
        for name, mixer in self.mixers().items():
            mixer.set_input_size(_stage_grid(name, to_2tuple(img_size), ceil))
        update_model_input_size(self, to_2tuple(img_size))


class SwappedTwins(SwappedModel, Twins):
    """A timm Twins that `swap_mixer` changed: its mixers act on whole stages.

    Blocks get the grid of each image; mixers that are bound to a grid start with that of the model's image size.
    """

    patch_embeds: Any

    def token_blocks(self) -> dict[str, nn.Module]:
        return {f'blocks.{i}.{j}': block for i, stage in enumerate(self.blocks) for j, block in enumerate(stage)}

    def grid_size_of(self, name: str) -> tuple[int, int]:
        return _stage_grid(name, self.patch_embeds[0].img_size, floor)

    def num_prefix_in_block(self, name: str) -> int:
        return 0

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resample everything in the mixers that is bound to the image size, an int or (H, W)."""
        for name, mixer in self.mixers().items():
            mixer.set_input_size(_stage_grid(name, to_2tuple(img_size), floor))
        self.patch_embeds[0].img_size = to_2tuple(img_size)
        update_model_input_size(self, to_2tuple(img_size))


class SwappedDeiT(SwappedModel, DeiT):
    """A DeiT that `swap_mixer` changed."""


class SwappedAFT(SwappedModel, AFT):
    """An AFT that `swap_mixer` changed."""


class _SwappedPyramid(_StagedModel):
    """A pyramid of vitzoo, whose stages have prefix tokens and a grid of their own."""

    def grid_size_of(self, name: str) -> tuple[int, int]:
        return self.get_submodule(name).attn.grid_size

    def num_prefix_in_block(self, name: str) -> int:
        return self.get_submodule(name).num_prefix_tokens


class SwappedCvT(_SwappedPyramid, CvT):
    """A CvT that `swap_mixer` changed: its mixers keep the convolutional projection."""

    def mixer_settings(self, name: str, cls: type[TokenMixer]) -> dict:
        return self.settings_of_mixer(cls, self.get_submodule(name).attn.dim, self.stride_kv)


class SwappedViL(_SwappedPyramid, ViL):
    """A ViL that `swap_mixer` changed."""

    def mixer_settings(self, name: str, cls: type[TokenMixer]) -> dict:
        return self.settings_of_mixer(cls, 'rel' if self.stages[0].pos_embed is None else 'abs')


# the model that takes the place of each model, by changing the class of the instance
SWAPPED_MODELS = {
    VisionTransformer: SwappedViT,
    VisionTransformerDistilled: SwappedDistilledViT,
    Eva: SwappedEva,
    VisionTransformerRelPos: SwappedRelPosViT,
    Beit: SwappedBeit,
    Cait: SwappedCait,
    VisionTransformerSAM: SwappedSAM,
    NaFlexVit: SwappedNaFlexViT,
    SwinTransformer: SwappedSwin,
    PyramidVisionTransformerV2: SwappedPVT,
    Twins: SwappedTwins,
    DeiT: SwappedDeiT,
    AFT: SwappedAFT,
    CvT: SwappedCvT,
    ViL: SwappedViL,
}


def _embedded_grid(patch_embed: Any) -> tuple[int, int]:
    """The grid of the patches of an image, of which those at the border may be padded."""
    if patch_embed.dynamic_img_pad:
        return patch_embed.dynamic_feat_size(patch_embed.img_size)
    return tuple(patch_embed.grid_size)


def _like(old: nn.Parameter, tensor: torch.Tensor) -> nn.Parameter:
    """A parameter in the place of another."""
    return nn.Parameter(tensor.contiguous(), requires_grad=old.requires_grad)


def _stage_grid(name: str, img_size: tuple[int, int], rounded: Callable[[float], int]) -> tuple[int, int]:
    """The grid of a block's stage; the name of the block has the index of the stage in second place."""
    reduction = 4 * 2 ** int(name.split('.')[1])
    H, W = (rounded(size / reduction) for size in img_size)
    return H, W
