"""CvT: Introducing Convolutions to Vision Transformers, with any token mixer.

Three stages with overlapping convolutional embeddings and convolutional q/k/v projections, without position embeddings;
the class token joins in the last stage. https://arxiv.org/abs/2103.15808
"""

import re
from functools import partial
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import nn
from torch.types import Device

from vitzoo.mixers import QKVMixer, TokenMixer, mixer_class
from vitzoo.mixers._qkv import ConvQKV

from ._block import drop_path_rates
from ._official import unwrap
from ._pyramid import Pyramid, build_stages, per_stage_mixers
from ._quick_gelu import QuickGELU
from ._register import cfg, register_variants, swapped
from ._resample import resample_weights

__all__ = ['CvT', 'checkpoint_filter_fn']

DOWNSAMPLE_CONV = dict(kernel_size=3, stride=2, padding=1)


def _embed_convs(num_stages: int, patch_size: int) -> list[dict]:
    stem = dict(kernel_size=patch_size + 3, stride=patch_size, padding=patch_size // 2)
    return [stem] + [DOWNSAMPLE_CONV] * (num_stages - 1)


class ConvEmbed(nn.Module):
    """Overlapping patch embedding with layer norm: (B, C_in, H_in, W_in) -> (B, H, W, C)."""

    def __init__(
        self,
        in_chans: int,
        dim: int,
        kernel_size: int,
        stride: int,
        padding: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.proj = nn.Conv2d(in_chans, dim, kernel_size, stride=stride, padding=padding, **dd)
        self.norm = nn.LayerNorm(dim, **dd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class CvT(Pyramid):
    """Convolutional vision transformer.

    `mixer` is one name, or one per stage. `stride_kv` subsamples keys and values if the mixer supports it (softmax);
    mixers that are linear in the number of tokens, or need keys on the grid of the queries, run at stride 1. Attention
    scores are scaled by dim ** -0.5, not head_dim ** -0.5, as in the published models. Stochastic depth is in the last
    stage only, rising linearly to `drop_path_rate`, as in the paper's recipe. `patch_size` is the stride of the first
    convolution. Raises ValueError if an image is too small to leave a token.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = 'token',
        embed_dims: tuple[int, ...] = (64, 192, 384),
        num_heads: tuple[int, ...] = (1, 3, 6),
        depths: tuple[int, ...] = (1, 2, 10),
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        class_token: bool = True,
        stride_kv: int = 2,
        mixer: str | tuple[str, ...] = 'softmax',
        mixer_kwargs: dict | tuple[dict, ...] | None = None,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        patch_size: int = 4,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if stride_kv < 1:
            raise ValueError(f'stride_kv must be at least 1, not {stride_kv}.')
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        num_stages = len(depths)
        grid_sizes = self.grid_sizes(to_2tuple(img_size), num_stages, patch_size)
        mixers = [
            (name, {**self.settings_of_mixer(mixer_class(name), dim, stride_kv), **kwargs})
            for (name, kwargs), dim in zip(per_stage_mixers(mixer, mixer_kwargs, num_stages), embed_dims, strict=True)
        ]
        rates = drop_path_rates(drop_path_rate, depths[-1])
        stages = build_stages(
            [partial(ConvEmbed, **conv) for conv in _embed_convs(num_stages, patch_size)],
            embed_dims,
            num_heads,
            depths,
            (0,) * (num_stages - 1) + (int(class_token),),
            grid_sizes,
            mixers,
            in_chans=in_chans,
            drop_path_rates=[0.0] * sum(depths[:-1]) + rates,
            pos_drop_rate=pos_drop_rate,
            mlp_ratio=mlp_ratio,
            qkv_bias=qkv_bias,
            proj_drop=proj_drop_rate,
            attn_drop=attn_drop_rate,
            act_layer=QuickGELU,
            **dd,
        )
        super().__init__(
            stages,
            embed_dims,
            [patch_size * 2**i for i in range(num_stages)],
            img_size=img_size,
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            drop_rate=drop_rate,
            norm_layer=nn.LayerNorm,
            **dd,
        )
        self.stride_kv = stride_kv

    @staticmethod
    def settings_of_mixer(cls: type[TokenMixer], dim: int, stride_kv: int) -> dict:
        """CvT's scale and projection for a mixer over q, k and v; other mixers have neither."""
        if not issubclass(cls, QKVMixer):
            return {}
        return {'scale': dim**-0.5, 'qkv_layer': partial(ConvQKV, stride_kv=stride_kv if cls.subsampled_kv else 1)}

    @staticmethod
    def grid_sizes(img_size: tuple[int, int], num_stages: int, patch_size: int) -> list[tuple[int, int]]:
        sizes, (H, W) = [], img_size
        for conv in _embed_convs(num_stages, patch_size):
            H, W = ((side + 2 * conv['padding'] - conv['kernel_size']) // conv['stride'] + 1 for side in (H, W))
            sizes.append((H, W))
        if min(sizes[-1]) < 1:
            raise ValueError(
                f'img_size {img_size} is too small for CvT, whose first convolution needs at least 3 x 3 pixels.'
            )
        return sizes


def checkpoint_filter_fn(state_dict: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Convert checkpoints of Microsoft's CvT and of transformers' CvtForImageClassification, and resample parameters of
    mixers to the model's grid."""
    state_dict = unwrap(state_dict)
    if any(name.startswith('cvt.encoder.') for name in state_dict):
        state_dict = {_rename(name, TRANSFORMERS_RENAMES): tensor for name, tensor in state_dict.items()}
    elif any(name.startswith('stage0.') for name in state_dict):
        state_dict = {_rename(name, MICROSOFT_RENAMES): tensor for name, tensor in state_dict.items()}
    return resample_weights(state_dict, model)


MICROSOFT_RENAMES = (
    (r'^stage(\d)\.', r'stages.\1.'),
    (r'\.patch_embed\.', '.embed.'),
    (r'\.attn\.conv_proj_([qkv])\.', r'.attn.qkv.conv_\1.'),
    (r'\.attn\.proj_([qkv])\.', r'.attn.qkv.proj_\1.'),
)
TRANSFORMERS_RENAMES = (
    (r'^cvt\.encoder\.', ''),
    (r'^layernorm\.', 'norm.'),
    (r'^classifier\.', 'head.'),
    (r'\.embedding\.convolution_embeddings\.projection\.', '.embed.proj.'),
    (r'\.embedding\.convolution_embeddings\.normalization\.', '.embed.norm.'),
    (r'\.layers\.', '.blocks.'),
    (r'\.attention\.attention\.convolution_projection_([qkv])\w*\.convolution_projection\.', r'.attn.qkv.conv_\1.'),
    (r'\.convolution\.', '.conv.'),
    (r'\.normalization\.', '.bn.'),
    (r'\.attention\.attention\.projection_([qkv])\w*\.', r'.attn.qkv.proj_\1.'),
    (r'\.attention\.output\.dense\.', '.attn.proj.'),
    (r'\.intermediate\.dense\.', '.mlp.fc1.'),
    (r'\.output\.dense\.', '.mlp.fc2.'),
    (r'\.layernorm_before\.', '.norm1.'),
    (r'\.layernorm_after\.', '.norm2.'),
)


def _rename(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


SIZES: dict[str, dict[str, Any]] = {
    '13': dict(embed_dims=(64, 192, 384), num_heads=(1, 3, 6), depths=(1, 2, 10)),
    '21': dict(embed_dims=(64, 192, 384), num_heads=(1, 3, 6), depths=(1, 4, 16)),
    'w24': dict(embed_dims=(192, 768, 1024), num_heads=(3, 12, 16), depths=(2, 2, 20)),
    # for images of 64 to 160 pixels: 16 x 16 tokens in the first stage at 128
    'nano': dict(embed_dims=(48, 96, 192), num_heads=(1, 3, 6), depths=(2, 2, 2), patch_size=8, img_size=128),
}
# tests/model_names.txt lists the names that `swapped` generates
VARIANTS = {
    **{f'cvt_{size}': args for size, args in SIZES.items()},
    **swapped('cvt', SIZES),
}


def _cfg(name: str, **kwargs: Any) -> dict:
    args = VARIANTS[name.partition('.')[0]]
    size, is_fixed = args.get('img_size', 224), mixer_class(args.get('mixer', 'softmax')).grid_bound
    return cfg(
        **{
            'first_conv': 'stages.0.embed.proj',
            'input_size': (3, size, size),
            'fixed_input_size': is_fixed,
            **kwargs,
        }
    )


def _microsoft(hub_id: str, **kwargs: Any) -> dict:
    return dict(
        hf_hub_id=f'microsoft/{hub_id}',
        license='mit',
        origin_url='https://github.com/microsoft/CvT',
        paper_ids='arXiv:2103.15808',
        **kwargs,
    )


def _microsoft_384(hub_id: str) -> dict:
    """Evaluated on whole images resized to a square."""
    return _microsoft(hub_id, input_size=(3, 384, 384), crop_pct=1.0, crop_mode='squash')


WEIGHTS = {
    'cvt_13.msft_in1k': _microsoft('cvt-13'),
    'cvt_13.msft_in1k_384': _microsoft_384('cvt-13-384'),
    'cvt_13.msft_in22k_ft_in1k_384': _microsoft_384('cvt-13-384-22k'),
    'cvt_21.msft_in1k': _microsoft('cvt-21'),
    'cvt_21.msft_in1k_384': _microsoft_384('cvt-21-384'),
    'cvt_21.msft_in22k_ft_in1k_384': _microsoft_384('cvt-21-384-22k'),
    'cvt_w24.msft_in22k_ft_in1k_384': _microsoft_384('cvt-w24-384-22k'),
}

register_variants(
    __name__,
    CvT,
    VARIANTS,
    _cfg,
    {name: _cfg(name, **kwargs) for name, kwargs in WEIGHTS.items()},
    filter_fn=checkpoint_filter_fn,
    out_indices=(0, 1, 2),
)
