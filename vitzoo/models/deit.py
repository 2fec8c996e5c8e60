"""DeiT: timm's VisionTransformer with our block, and so with any token mixer.

Plain DeiT is in timm (`deit_small_patch16_224`, …); `deit_softmax_small` loads its weights and returns its logits.
https://arxiv.org/abs/2012.12877
"""

from typing import Any

import torch
from timm.layers import LayerNorm, PatchEmbed, RotaryEmbeddingCat, to_2tuple
from timm.models._features import feature_take_indices
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer import checkpoint_filter_fn as vit_checkpoint_filter_fn
from torch import nn
from torch.types import Device

from vitzoo.mixers import mixer_class
from vitzoo.mixers._rope import Rope

from ._block import Block, check_reset, drop_path_rates
from ._official import unwrap
from ._recompute import recompute_block
from ._register import cfg, register_variants, swapped
from ._resample import resample_weights

__all__ = ['DeiT', 'checkpoint_filter_fn']


class AnySizePatchEmbed(PatchEmbed):
    """timm's patch embedding for images of any size; incomplete patches at the border are dropped."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class DeiT(VisionTransformer):
    """Vision transformer with `mixer` in its blocks; everything else is timm's, including parameter names.

    `pos_embed` is 'learn', 'none', or 'rope' for rotary positions on both axes, with the frequencies of RoPE-ViT
    (https://arxiv.org/abs/2403.13298). Without a learned embedding and with a mixer that is not bound to the grid, the
    model takes images of any size. Raises ValueError for an image smaller than a patch, and for rotary positions with a
    mixer that does not compare queries with keys, or with heads whose width is not a multiple of 4.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = 'token',
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        class_token: bool = True,
        pos_embed: str = 'learn',
        reg_tokens: int = 0,
        fc_norm: bool | None = None,
        mixer: str = 'softmax',
        mixer_kwargs: dict | None = None,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        patch_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        if patch_drop_rate:
            raise ValueError('patch_drop_rate removes tokens from the grid that mixers need; leave it at 0.')
        self._check_mixer(mixer, mixer_kwargs)
        self._check_pos_embed(pos_embed, mixer, embed_dim // num_heads)
        any_size = pos_embed in ('none', 'rope')
        # depth 0, because timm's own blocks would be built only to be replaced
        super().__init__(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            # timm lists the names in its annotation
            global_pool=global_pool,  # type: ignore[arg-type]
            embed_dim=embed_dim,
            depth=0,
            num_heads=num_heads,
            class_token=class_token,
            pos_embed='none' if any_size else pos_embed,
            reg_tokens=reg_tokens,
            fc_norm=fc_norm,
            dynamic_img_size=any_size,
            drop_rate=drop_rate,
            pos_drop_rate=pos_drop_rate,
            weight_init='skip',
            embed_layer=AnySizePatchEmbed if any_size else PatchEmbed,
            **dd,
        )
        self.rope = None
        if pos_embed == 'rope':
            self.rope = RotaryEmbeddingCat(embed_dim // num_heads, in_pixels=False, temperature=100.0, **dd)
            if mixer_class(mixer).has_own_rope:
                # queries and keys are rotated once
                mixer_kwargs = {'rope': False, **(mixer_kwargs or {})}
        grid_size = self.patch_embed.grid_size
        if min(grid_size) < 1:
            raise ValueError(
                f'img_size {self.patch_embed.img_size} is smaller than a patch of {self.patch_embed.patch_size}.'
            )
        rates = drop_path_rates(drop_path_rate, depth)
        self.blocks = nn.Sequential(
            *(
                Block(
                    embed_dim,
                    num_heads,
                    mixer=mixer,
                    mixer_kwargs=mixer_kwargs,
                    grid_size=grid_size,
                    num_prefix_tokens=self.num_prefix_tokens,
                    layer=i,
                    mlp_ratio=mlp_ratio,
                    qkv_bias=qkv_bias,
                    proj_drop=proj_drop_rate,
                    attn_drop=attn_drop_rate,
                    drop_path=rate,
                    norm_layer=LayerNorm,
                    **dd,
                )
                for i, rate in enumerate(rates)
            )
        )
        reduction = self.patch_embed.feat_ratio()
        self.feature_info = [
            {'module': f'blocks.{i}', 'num_chs': embed_dim, 'reduction': reduction} for i in range(depth)
        ]
        self.weight_init_mode = ''
        self.init_weights(needs_reset=False)

    def init_weights(self, mode: str = '', needs_reset: bool = True) -> None:
        """Initialize the weights as timm does; `needs_reset` also those that layers set when they are built.

        Raises:
            RuntimeError: Some of them belong to mixers, which set them only when they are built.
        """
        if needs_reset:
            check_reset({f'blocks.{i}.attn': block.attn for i, block in enumerate(self.blocks)})
        super().init_weights(mode, needs_reset)

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """Resample everything bound to the image size, an int or (H, W)."""
        super().set_input_size(
            img_size=None if img_size is None else to_2tuple(img_size),
            patch_size=None if patch_size is None else to_2tuple(patch_size),
        )
        for block in self.blocks:
            block.attn.set_input_size(self.patch_embed.grid_size)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        mixers = {f'blocks.{i}.attn.{name}' for i, b in enumerate(self.blocks) for name in b.attn.no_weight_decay()}
        return super().no_weight_decay() | mixers

    # without is_causal, because mixers have no masks
    def forward_intermediates(  # type: ignore[override]
        self,
        x: torch.Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: None = None,
    ) -> list | tuple[torch.Tensor, list] | dict[str, Any]:
        """Final features and grid tokens after each block in `indices`, as in timm's VisionTransformer."""
        if output_fmt not in ('NCHW', 'NLC'):
            raise ValueError(f"output_fmt is 'NCHW' or 'NLC', not {output_fmt!r}.")
        if attn_mask is not None:
            raise ValueError('Token mixers do not support attn_mask.')
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        intermediates, prefixes, P = [], [], self.num_prefix_tokens
        x, grid_size = self.embed(x)
        positions = self.positions(grid_size)
        for i, block in enumerate(self.blocks[: max_index + 1] if stop_early else self.blocks):
            x = recompute_block(block, x, *positions) if self.grad_checkpointing else block(x, *positions)
            if i in take_indices:
                tokens = self.norm(x) if norm else x
                grid = tokens[:, P:]
                if output_fmt == 'NCHW':
                    grid = grid.transpose(1, 2).unflatten(2, grid_size).contiguous()
                intermediates.append(grid)
                prefixes.append(tokens[:, :P])
        has_prefixes = return_prefix_tokens and P > 0
        if output_dict:
            found = {'image_intermediates': intermediates}
            found |= {'image_intermediates_prefix': prefixes} if has_prefixes else {}
            return found if intermediates_only else {**found, 'image_features': self.norm(x)}
        pairs = list(zip(intermediates, prefixes)) if has_prefixes else intermediates
        return pairs if intermediates_only else (self.norm(x), pairs)

    def embed(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
        """Images (B, in_chans, H, W) -> tokens (B, P + N, C) with positions, and their grid size."""
        grid_size = self.patch_embed.dynamic_feat_size(x.shape[-2:])
        x = self._pos_embed(self.patch_embed(x))
        return self.norm_pre(x), grid_size

    def positions(self, grid_size: tuple[int, int]) -> tuple[tuple[int, int]] | tuple[tuple[int, int], Rope]:
        """The arguments of a block next to the tokens: the grid and, if used, rotary positions."""
        return (grid_size,) if self.rope is None else (grid_size, Rope(self.rope.get_embed(list(grid_size))))

    # without attn_mask, because mixers have no masks
    def forward_features(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x, grid_size = self.embed(x)
        positions = self.positions(grid_size)
        for block in self.blocks:
            x = recompute_block(block, x, *positions) if self.grad_checkpointing else block(x, *positions)
        return self.norm(x)

    # without attn_mask, because mixers have no masks
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.forward_head(self.forward_features(x))

    @staticmethod
    def _check_mixer(mixer: str, mixer_kwargs: dict | None) -> None:
        for argument, value in dict(mixer=mixer, mixer_kwargs=mixer_kwargs).items():
            if isinstance(value, list | tuple):
                raise ValueError(
                    f'{argument}={value!r} has several entries, but all blocks are of one stage; '
                    f'`vitzoo.swap_mixer(model, [...])` gives each block a mixer of its own.'
                )

    @staticmethod
    def _check_pos_embed(pos_embed: str, mixer: str, head_dim: int) -> None:
        if pos_embed not in ('', 'none', 'learn', 'rope'):
            raise ValueError(f"pos_embed is 'learn', 'none' or 'rope', not {pos_embed!r}.")
        if pos_embed == 'rope' and not mixer_class(mixer).has_rope:
            raise ValueError(
                f"pos_embed='rope' rotates queries and keys, which {mixer} does not compare; use 'learn' or 'none'."
            )
        if pos_embed == 'rope' and head_dim % 4:
            raise ValueError(f"pos_embed='rope' needs heads whose width is a multiple of 4, not {head_dim}.")


def checkpoint_filter_fn(state_dict: dict[str, torch.Tensor], model: DeiT) -> dict[str, torch.Tensor]:
    """Unwrap checkpoints of Facebook's DeiT and of timm, and resample positions to the model's grid."""
    resampled = resample_weights(unwrap(state_dict), model)
    converted = vit_checkpoint_filter_fn(resampled, model)
    if 'pos_embed' in resampled and 'pos_embed' in converted:
        # timm may have resampled it a second time
        converted['pos_embed'] = resampled['pos_embed']
    return converted


SIZES = {
    'tiny': dict(embed_dim=192, num_heads=3),
    'small': dict(embed_dim=384, num_heads=6),
    'base': dict(embed_dim=768, num_heads=12),
    # for images of 64 to 160 pixels: 16 x 16 tokens at 128
    'nano': dict(embed_dim=96, num_heads=3, patch_size=8, img_size=128),
}
# tests/model_names.txt lists these names
VARIANTS = swapped('deit', SIZES)


def _cfg(name: str) -> dict:
    size = VARIANTS[name].get('img_size', 224)
    return cfg(first_conv='patch_embed.proj', input_size=(3, size, size), crop_pct=0.9, fixed_input_size=True)


register_variants(
    __name__,
    DeiT,
    VARIANTS,
    _cfg,
    filter_fn=checkpoint_filter_fn,
    out_indices=3,
)
