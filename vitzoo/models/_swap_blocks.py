"""timm's transformer blocks with token mixers as their attention, and vitzoo's with another mixer."""

# timm's blocks take other arguments, such as masks, in place of which mixers have a grid
# mypy: disable-error-code="override"

from typing import Any

import torch
from timm.layers import register_notrace_module
from timm.models.beit import Block as BeitBlock
from timm.models.cait import LayerScaleBlock
from timm.models.eva import EvaBlock, EvaBlockPostNorm
from timm.models.pvt_v2 import Block as PVTBlock
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.twins import Block as TwinsBlock
from timm.models.vision_transformer import Block, ParallelThingsBlock, ResPostBlock
from timm.models.vision_transformer_relpos import RelPosBlock, ResPostRelPosBlock
from timm.models.vision_transformer_sam import Block as SAMBlock
from torch import nn

from vitzoo.mixers import TokenMixer
from vitzoo.mixers._rope import Rope

from ._block import Block as ZooBlock
from ._block import check_tokens
from ._swap_attention import Unsupported

__all__ = ['SWAPPED_BLOCKS', 'SwappedBlock', 'SwappedTimmBlock']


# put in front of the class of a block, whose attributes it has
_Block: Any = object


class SwappedTimmBlock(_Block):
    """A block of timm on the grid set by `set_input_size`; its other arguments are those of timm's block."""

    attn: Any

    def attention_holders(self: Any) -> dict[str, nn.Module]:
        """The modules that have an attention layer `attn`, by name in the block."""
        return {'': self}

    def keep_settings(self, attn: nn.Module) -> None:
        """Keep what the block needs of the attention layer that is replaced."""

    def mix(
        self,
        mixer: TokenMixer,
        x: torch.Tensor,
        rope: Rope | None = None,
        attn_mask: None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """(B, P + H*W, C) -> (B, P + H*W, C); raises ValueError for a mask or a different number of tokens."""
        check_tokens(mixer, x, attn_mask, is_causal, 'call model.set_input_size() with the image size')
        grid_size = mixer.grid_size
        return mixer(x, grid_size) if rope is None or not mixer.has_rope else mixer(x, grid_size, rope)


@register_notrace_module
class SwappedBlock(SwappedTimmBlock, Block):
    """timm's `Block` with a token mixer."""

    def forward(self, x: torch.Tensor, **masks: Any) -> torch.Tensor:
        x = x + self.drop_path1(self.ls1(self.mix(self.attn, self.norm1(x), **masks)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


@register_notrace_module
class SwappedResPostBlock(SwappedTimmBlock, ResPostBlock):
    """timm's `ResPostBlock` with a token mixer."""

    def forward(self, x: torch.Tensor, **masks: Any) -> torch.Tensor:
        x = x + self.drop_path1(self.norm1(self.mix(self.attn, x, **masks)))
        return x + self.drop_path2(self.norm2(self.mlp(x)))


@register_notrace_module
class SwappedParallelBlock(SwappedTimmBlock, ParallelThingsBlock):
    """timm's `ParallelThingsBlock` with token mixers."""

    def attention_holders(self) -> dict[str, nn.Module]:
        return {f'attns.{i}': branch for i, branch in enumerate(self.attns)}

    def forward(self, x: torch.Tensor, **masks: Any) -> torch.Tensor:
        mixed = [branch.drop_path(branch.ls(self.mix(branch.attn, branch.norm(x), **masks))) for branch in self.attns]
        x = x + torch.stack(mixed).sum(dim=0)
        return x + torch.stack([ffn(x) for ffn in self.ffns]).sum(dim=0)


class _RotaryBlock(SwappedTimmBlock):
    """A block that gets sines and cosines of the grid, in the layout of the attention that it had."""

    def keep_settings(self, attn: nn.Module) -> None:
        if not isinstance(attn, TokenMixer):
            self.rotate_half = attn.rotate_half

    def rotary(self, rope: torch.Tensor | None) -> Rope | None:
        return None if rope is None else Rope(rope, self.rotate_half)


@register_notrace_module
class SwappedEvaBlock(_RotaryBlock, EvaBlock):
    """timm's `EvaBlock` with a token mixer."""

    def forward(self, x: torch.Tensor, rope: torch.Tensor | None = None, **masks: Any) -> torch.Tensor:
        mixed = self.mix(self.attn, self.norm1(x), self.rotary(rope), **masks)
        x = x + self.drop_path1(mixed if self.gamma_1 is None else self.gamma_1 * mixed)
        mlp = self.mlp(self.norm2(x))
        return x + self.drop_path2(mlp if self.gamma_2 is None else self.gamma_2 * mlp)


@register_notrace_module
class SwappedEvaBlockPostNorm(_RotaryBlock, EvaBlockPostNorm):
    """timm's `EvaBlockPostNorm` with a token mixer."""

    def forward(self, x: torch.Tensor, rope: torch.Tensor | None = None, **masks: Any) -> torch.Tensor:
        x = x + self.drop_path1(self.norm1(self.mix(self.attn, x, self.rotary(rope), **masks)))
        return x + self.drop_path2(self.norm2(self.mlp(x)))


@register_notrace_module
class SwappedRelPosBlock(SwappedTimmBlock, RelPosBlock):
    """timm's `RelPosBlock` with a token mixer, which has a bias of its own instead of the model's."""

    def forward(self, x: torch.Tensor, shared_rel_pos: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.drop_path1(self.ls1(self.mix(self.attn, self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


@register_notrace_module
class SwappedResPostRelPosBlock(SwappedTimmBlock, ResPostRelPosBlock):
    """timm's `ResPostRelPosBlock` with a token mixer, which has a bias of its own instead of the model's."""

    def forward(self, x: torch.Tensor, shared_rel_pos: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.drop_path1(self.norm1(self.mix(self.attn, x)))
        return x + self.drop_path2(self.norm2(self.mlp(x)))


@register_notrace_module
class SwappedBeitBlock(SwappedTimmBlock, BeitBlock):
    """timm's block of `Beit` with a token mixer, which has a bias of its own instead of the model's."""

    def forward(self, x: torch.Tensor, shared_rel_pos_bias: torch.Tensor | None = None) -> torch.Tensor:
        mixed = self.mix(self.attn, self.norm1(x))
        x = x + self.drop_path1(mixed if self.gamma_1 is None else self.gamma_1 * mixed)
        mlp = self.mlp(self.norm2(x))
        return x + self.drop_path2(mlp if self.gamma_2 is None else self.gamma_2 * mlp)


@register_notrace_module
class SwappedLayerScaleBlock(SwappedTimmBlock, LayerScaleBlock):
    """timm's block of `Cait` with a token mixer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path(self.gamma_1 * self.mix(self.attn, self.norm1(x)))
        return x + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x)))


@register_notrace_module
class SwappedSwinBlock(SwappedTimmBlock, SwinTransformerBlock):
    """timm's block of `SwinTransformer` with a token mixer over the whole grid instead of its windows."""

    def keep_settings(self, attn: nn.Module) -> None:
        # the mask of shifted windows
        self.attn_mask = None

    def set_input_size(self, feat_size: tuple[int, int], *args: Any, **kwargs: Any) -> None:
        self.input_resolution = feat_size
        self.attn.set_input_size(feat_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H, W, C) -> (B, H, W, C)."""
        grid_size = tuple(x.shape[1:3])
        x = x.flatten(1, 2)
        x = x + self.drop_path1(self.attn(self.norm1(x), grid_size))
        x = x + self.drop_path2(self.mlp(self.norm2(x)))
        return x.unflatten(1, grid_size)


@register_notrace_module
class SwappedPVTBlock(SwappedTimmBlock, PVTBlock):
    """timm's block of `PyramidVisionTransformerV2` with a token mixer, on the grid of its input."""

    def forward(self, x: torch.Tensor, feat_size: tuple[int, int]) -> torch.Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x), tuple(feat_size)))
        return x + self.drop_path2(self.mlp(self.norm2(x), feat_size))


@register_notrace_module
class SwappedTwinsBlock(SwappedTimmBlock, TwinsBlock):
    """timm's block of `Twins` with a token mixer over the whole grid, that of its input."""

    def forward(self, x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x), tuple(size)))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


@register_notrace_module
class SwappedSAMBlock(SwappedTimmBlock, SAMBlock):
    """timm's block of `VisionTransformerSAM` without windows, with a token mixer."""

    def attention_holders(self) -> dict[str, nn.Module]:
        if self.window_size:
            raise Unsupported(f'its attention is within windows of {self.window_size} x {self.window_size} tokens')
        return {'': self}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, H, W, C) -> (B, H, W, C)."""
        grid_size = tuple(x.shape[1:3])
        x = x.flatten(1, 2)
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), grid_size)))
        x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return x.unflatten(1, grid_size)


class SwappedZooBlock(SwappedTimmBlock, ZooBlock):
    """vitzoo's `Block` with another mixer."""

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int], *rope: Rope) -> torch.Tensor:
        return super().forward(x, grid_size, *(rope if self.attn.has_rope else ()))


# the block that takes the place of each block, by changing the class of the instance
SWAPPED_BLOCKS = {
    Block: SwappedBlock,
    ResPostBlock: SwappedResPostBlock,
    ParallelThingsBlock: SwappedParallelBlock,
    EvaBlock: SwappedEvaBlock,
    EvaBlockPostNorm: SwappedEvaBlockPostNorm,
    RelPosBlock: SwappedRelPosBlock,
    ResPostRelPosBlock: SwappedResPostRelPosBlock,
    BeitBlock: SwappedBeitBlock,
    LayerScaleBlock: SwappedLayerScaleBlock,
    SwinTransformerBlock: SwappedSwinBlock,
    PVTBlock: SwappedPVTBlock,
    TwinsBlock: SwappedTwinsBlock,
    SAMBlock: SwappedSAMBlock,
    ZooBlock: SwappedZooBlock,
}
