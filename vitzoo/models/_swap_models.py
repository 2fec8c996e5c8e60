"""timm's vision transformers with token mixers in their blocks: image size, weight decay and what is refused."""

import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer

from vitzoo.mixers import TokenMixer
from vitzoo.mixers._grid import check_grid

from ._swap_blocks import SwappedTimmBlock

__all__ = ['SWAPPED_MODELS', 'SwappedDistilledViT', 'SwappedEva', 'SwappedModel', 'SwappedViT']


class SwappedModel:
    """A model of timm that `swap_mixer` changed; its mixers follow the image size."""

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Resample everything bound to the image size, an int or (H, W)."""
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        for mixer in self.mixers().values():
            mixer.set_input_size(self.patch_embed.grid_size)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        mixers = {f'{path}.{name}' for path, mixer in self.mixers().items() for name in mixer.no_weight_decay()}
        return super().no_weight_decay() | mixers

    def mixers(self) -> dict[str, TokenMixer]:
        """The mixers by their names in the model."""
        return {
            f'blocks.{i}.{name}.attn'.replace('..', '.'): holder.attn
            for i, block in enumerate(self.blocks)
            if isinstance(block, SwappedTimmBlock)
            for name, holder in block.attention_holders().items()
        }

    def _pos_embed(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        if self.dynamic_img_size:
            # grids of different shape may have the same number of tokens; x is (B, H, W, C) here
            check_grid(type(self).__name__, self.patch_embed.grid_size, x.shape[1:3])
        return super()._pos_embed(x)


class SwappedViT(SwappedModel, VisionTransformer):
    """A timm VisionTransformer that `swap_mixer` changed."""


class SwappedDistilledViT(SwappedModel, VisionTransformerDistilled):
    """A timm VisionTransformerDistilled that `swap_mixer` changed."""


class SwappedEva(SwappedModel, Eva):
    """A timm Eva (EVA-02, DINOv3, PE, RoPE-ViT) that `swap_mixer` changed."""


# the model that takes the place of each model of timm, by changing the class of the instance
SWAPPED_MODELS = {
    VisionTransformer: SwappedViT,
    VisionTransformerDistilled: SwappedDistilledViT,
    Eva: SwappedEva,
}
