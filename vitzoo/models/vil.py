"""ViL: Multi-Scale Vision Longformer, with any token mixer.

Four stages with patch embeddings and a class token of their own, except in the last. The first two stages use the
efficient mixer, the last two softmax attention. https://arxiv.org/abs/2103.15358
"""

from functools import partial
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from vitzoo.mixers import TokenMixer, mixer_class
from vitzoo.mixers._grid import check_grid

from ._block import drop_path_rates
from ._official import unwrap
from ._pyramid import Pyramid, build_stages, per_stage_mixers
from ._register import cfg, register_variants, swapped
from ._resample import resample_weights

__all__ = ['ViL', 'checkpoint_filter_fn']

LayerNorm = partial(nn.LayerNorm, eps=1e-6)


class PatchEmbed(nn.Module):
    """Non-overlapping patch embedding with layer norm: (B, C_in, H_in, W_in) -> (B, H, W, C).

    Incomplete patches at the border are dropped.
    """

    def __init__(
        self, in_chans: int, dim: int, patch_size: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, patch_size, stride=patch_size, device=device, dtype=dtype)
        self.norm = LayerNorm(dim, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class AxialPosEmbed(nn.Module):
    """Absolute position embedding: half the channels from the row, half from the column, a vector per prefix token."""

    def __init__(
        self,
        dim: int,
        grid_size: tuple[int, int],
        num_prefix_tokens: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f'half of the channels of a position are of its row, so dim must be even, not {dim}.')
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.grid_size = tuple(grid_size)
        self.prefix = nn.Parameter(torch.empty(1, num_prefix_tokens, dim, **dd)) if num_prefix_tokens else None
        self.row = nn.Parameter(torch.empty(1, grid_size[0], dim // 2, **dd))
        self.column = nn.Parameter(torch.empty(1, grid_size[1], dim // 2, **dd))
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        """Add positions to tokens (B, P + H*W, C); raises ValueError if the grid is not the one they are made for."""
        H, W = grid_size
        check_grid('ViL', self.grid_size, grid_size)
        row, column = self.row.unsqueeze(2).expand(-1, -1, W, -1), self.column.unsqueeze(1).expand(-1, H, -1, -1)
        pos = torch.cat([row, column], dim=-1).flatten(1, 2)
        if self.prefix is not None:
            pos = torch.cat([self.prefix, pos], dim=1)
        return x + pos

    def set_input_size(self, grid_size: tuple[int, int]) -> None:
        """Resample rows and columns linearly."""
        self.grid_size = tuple(grid_size)
        for name, size in zip(('row', 'column'), grid_size, strict=True):
            old = getattr(self, name)
            new = _resample(old.data, size).to(old.dtype)
            setattr(self, name, nn.Parameter(new, requires_grad=old.requires_grad))

    def fit_from(self, name: str, parent: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int] | None:
        """Rows or columns of another grid, resampled to this one, and how many values are inherited."""
        own, old = getattr(self, name), parent[name]
        if name == 'prefix' or own.shape[2] != old.shape[2]:
            return None
        return _resample(old, own.shape[1]), min(own.numel(), old.numel())


def _resample(positions: torch.Tensor, size: int) -> torch.Tensor:
    """Positions (1, N, C) -> (1, size, C) in float32."""
    # safetensors does not save other tensors
    return F.interpolate(positions.float().transpose(1, 2), size=size, mode='linear').transpose(1, 2).contiguous()


def _patch_sizes(num_stages: int, patch_size: int) -> tuple[int, ...]:
    return (patch_size,) + (2,) * (num_stages - 1)


class ViL(Pyramid):
    """Multi-scale vision transformer.

    `mixer` is one name, or one per stage. With `pos_embed='rel'` mixers that support it learn a relative position bias,
    and the others have no positions; with 'abs' every stage adds an absolute position embedding. The stages divide the
    grid by `patch_size`, 2, 2 and 2, rounding down. With `pool_include_prefix` the average includes the prefix tokens
    of the last stage, as in the authors' models with global tokens there. Raises ValueError if an image is too small to
    leave a token.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = 'avg',
        pool_include_prefix: bool = False,
        embed_dims: tuple[int, ...] = (48, 96, 192, 384),
        num_heads: tuple[int, ...] = (1, 3, 3, 6),
        depths: tuple[int, ...] = (1, 1, 9, 1),
        num_prefix_tokens: tuple[int, ...] = (1, 1, 1, 0),
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        pos_embed: str = 'rel',
        mixer: str | tuple[str, ...] = ('longformer', 'longformer', 'softmax', 'softmax'),
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
        if pos_embed not in ('rel', 'abs'):
            raise ValueError(f"pos_embed of ViL is 'rel' or 'abs', not {pos_embed!r}.")
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        num_stages = len(depths)
        grid_sizes = self.grid_sizes(to_2tuple(img_size), num_stages, patch_size)
        mixers = [
            (name, {**self.settings_of_mixer(mixer_class(name), pos_embed), **kwargs})
            for name, kwargs in per_stage_mixers(mixer, mixer_kwargs, num_stages)
        ]
        rates = drop_path_rates(drop_path_rate, sum(depths))
        stages = build_stages(
            [partial(PatchEmbed, patch_size=side) for side in _patch_sizes(num_stages, patch_size)],
            embed_dims,
            num_heads,
            depths,
            num_prefix_tokens,
            grid_sizes,
            mixers,
            in_chans=in_chans,
            drop_path_rates=rates,
            pos_embed_layer=AxialPosEmbed if pos_embed == 'abs' else None,
            pos_drop_rate=pos_drop_rate,
            mlp_ratio=mlp_ratio,
            qkv_bias=qkv_bias,
            proj_drop=proj_drop_rate,
            attn_drop=attn_drop_rate,
            norm_layer=LayerNorm,
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
            pool_include_prefix=pool_include_prefix,
            drop_rate=drop_rate,
            norm_layer=LayerNorm,
            **dd,
        )

    @staticmethod
    def settings_of_mixer(cls: type[TokenMixer], pos_embed: str) -> dict:
        """The relative position bias of a mixer that supports it, if the model has relative positions."""
        return {'rel_bias': 'table'} if pos_embed == 'rel' and cls.has_rel_bias else {}

    @staticmethod
    def grid_sizes(img_size: tuple[int, int], num_stages: int, patch_size: int) -> list[tuple[int, int]]:
        sizes, (H, W) = [], img_size
        for divisor in _patch_sizes(num_stages, patch_size):
            H, W = H // divisor, W // divisor
            sizes.append((H, W))
        if min(sizes[-1]) < 1:
            least = patch_size * 2 ** (num_stages - 1)
            raise ValueError(
                f'img_size {img_size} is too small for ViL, whose last stage needs at least {least} x {least}.'
            )
        return sizes


def checkpoint_filter_fn(state_dict: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Convert checkpoints of Microsoft's ViL and of NVIDIA's ViL-LS, and resample positions to the model's grid."""
    state_dict = unwrap(state_dict)
    if any(name.startswith('layer1.') for name in state_dict):
        own = model.state_dict()
        kept = {name: tensor for name, tensor in state_dict.items() if not _is_redundant(name, state_dict, own)}
        state_dict = {_rename(name): tensor for name, tensor in _fuse_qkv(kept).items()}
    return resample_weights(state_dict, model)


def _is_redundant(name: str, state_dict: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> bool:
    """Return True if a tensor is empty, computed by our code, or a copy of another one.

    The official code stores the projections of global tokens twice (`sharew`), and those of Linformer's keys and values
    (`share_kv`).
    """
    if name.endswith(('relative_position_index', 'calls_since_last_redraw')) or not state_dict[name].numel():
        return True
    if '_global.' in name:
        return _rename(name) not in own
    return name.endswith('.proj_v') and torch.equal(state_dict[name], state_dict[name.replace('.proj_v', '.proj_k')])


def _fuse_qkv(state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Merge the layers of queries and of keys and values, and add the dimension of heads to Linformer's projections."""
    fused = {}
    for name, tensor in state_dict.items():
        # spatial reduction needs both layers, because keys and queries come from different tokens
        is_reduced = f'{name.partition(".attn.")[0]}.attn.proj_sr.weight' in state_dict
        if '.kv.' in name and not is_reduced:
            queries = state_dict[name.replace('.kv.', '.query.')]
            fused[name.replace('.kv.', '.qkv.')] = torch.cat([queries, tensor])
        elif name.endswith(('.proj_k', '.proj_v')):
            fused[name] = tensor.unsqueeze(0)
        elif '.query.' not in name or is_reduced:
            fused[name] = tensor
    return fused


_RENAMES = {
    'norm_embed': 'norm',
    'cls_pos_embed': 'pos_embed.prefix',
    'x_pos_embed': 'pos_embed.row',
    'y_pos_embed': 'pos_embed.column',
    'query': 'q',
    'query_global': 'q_global',
    'proj_sr': 'sr',
    'local_relative_position_bias_table': 'rel_bias.table',
    'g2g_relative_position_bias': 'prefix_bias.prefix_prefix',
    'g2l_relative_position_bias': 'prefix_bias.prefix_grid',
    'projection_matrix': 'features',
    'to_dynamic_projection': 'dynamic_proj',
    'dual_ln_full': 'norm_full',
    'dual_ln_dp': 'norm_landmarks',
}


def _rename(name: str) -> str:
    """Our name of an official tensor: `layer1.0` is an embedding, then attention and MLP modules alternate."""
    layer, *rest = name.split('.')
    if not layer.startswith('layer'):
        return name
    place, rest = int(rest[0]), [_RENAMES.get(part, part) for part in rest[1:] if part != 'fast_attention']
    stage = f'stages.{int(layer.removeprefix("layer")) - 1}'
    if place == 0:
        inside = 'embed.' if rest[0] in ('proj', 'norm') else ''
        return f'{stage}.{inside}' + '.'.join(rest)
    block, half = divmod(place - 1, 2)
    if rest[0] == 'norm':
        rest[0] = f'norm{half + 1}'
    return f'{stage}.blocks.{block}.' + '.'.join(rest)


def _stages(embed_dims: tuple[int, ...], num_heads: tuple[int, ...], depths: tuple[int, ...]) -> dict:
    return dict(embed_dims=embed_dims, num_heads=num_heads, depths=depths)


NATIVE_SIZES = {
    'tiny': _stages((48, 96, 192, 384), (1, 3, 3, 6), (1, 1, 9, 1)),
    'small': _stages((96, 192, 384, 768), (3, 3, 6, 12), (1, 2, 8, 1)),
    'medium_deep': _stages((96, 192, 384, 768), (3, 3, 6, 12), (1, 4, 16, 1)),
    'medium_wide': _stages((192, 384, 512, 768), (3, 6, 8, 12), (1, 2, 8, 1)),
    'base_deep': _stages((96, 192, 384, 768), (3, 3, 6, 12), (1, 8, 24, 1)),
    'base_wide': _stages((192, 384, 768, 1024), (3, 6, 12, 16), (1, 2, 8, 1)),
}
SIZES = {
    'tiny': NATIVE_SIZES['tiny'],
    'small': NATIVE_SIZES['small'],
    'medium': NATIVE_SIZES['medium_deep'],
    'base': NATIVE_SIZES['base_deep'],
    # for images of 64 to 160 pixels: 16 x 16 tokens in the first stage at 128
    'nano': {**_stages((48, 96, 128, 192), (3, 3, 4, 6), (2, 2, 2, 1)), 'patch_size': 8, 'img_size': 128},
}
# window sizes of the first two stages in models that were fine-tuned at 384 with other windows than at 224
WINDOWS_384 = {'medium_wide': (8, 12), 'base_deep': (6, 8), 'base_wide': (8, 8)}


def _first_two_stages(mixer: str) -> tuple[str, ...]:
    return (mixer, mixer, 'softmax', 'softmax')


def _nvidia_long_short(size: str, **mixer_kwargs: Any) -> dict:
    """The published long-short models, whose bias index lets different offsets share a row of the table."""
    return {**SIZES[size], 'mixer': _first_two_stages('ls'), 'mixer_kwargs': {**mixer_kwargs, 'rel_bias': 'nvidia'}}


# tests/model_names.txt lists the names that `swapped` generates
VARIANTS = {
    **{f'vil_{size}': args for size, args in NATIVE_SIZES.items()},
    **{f'vil_{size}_abs': {**args, 'pos_embed': 'abs'} for size, args in NATIVE_SIZES.items()},
    **{
        f'vil_{size}_abs_384': {
            **NATIVE_SIZES[size],
            'pos_embed': 'abs',
            'img_size': 384,
            'mixer_kwargs': ({'window_size': first}, {'window_size': second}, {}, {}),
        }
        for size, (first, second) in WINDOWS_384.items()
    },
    'vil_nano': SIZES['nano'],
    **swapped('vil', SIZES, _first_two_stages),
    'vil_ls_medium': _nvidia_long_short('medium'),
    'vil_ls_medium_384': {**_nvidia_long_short('medium', window_size=8), 'img_size': 384},
    'vil_ls_base': _nvidia_long_short('base'),
}


def _cfg(name: str, **kwargs: Any) -> dict:
    size = VARIANTS[name.partition('.')[0]].get('img_size', 224)
    return cfg(
        **{'first_conv': 'stages.0.embed.proj', 'input_size': (3, size, size), 'fixed_input_size': True, **kwargs}
    )


def _microsoft(path: str, **kwargs: Any) -> dict:
    return dict(
        url=f'https://penzhanwu2.blob.core.windows.net/imagenet/msvit/{path}/model_best.pth',
        license='mit',
        origin_url='https://github.com/microsoft/vision-longformer',
        paper_ids='arXiv:2103.15358',
        **kwargs,
    )


def _microsoft_384(path: str) -> dict:
    return _microsoft(f'IN384_IN22kpretrained/{path}', input_size=(3, 384, 384), crop_pct=0.922)


def _nvidia(path: str) -> dict:
    return dict(
        url=f'https://www.dropbox.com/s/{path}/model_best.pth?dl=1',
        license='mit',
        origin_url='https://github.com/NVIDIA/transformer-ls',
        paper_ids='arXiv:2107.02192',
    )


# without the models with relative positions fine-tuned at 384, whose window sizes are not published
WEIGHTS = {
    'vil_tiny.msft_in1k': _microsoft('visionlongformer/longtiny1191_ape0_exact0_nglo1_mode1_swith075'),
    'vil_small.msft_in1k': _microsoft('visionlongformer/small1281_relative'),
    'vil_medium_deep.msft_in1k': _microsoft('visionlongformer/longdeepmedium_ape0_exact0_mode1_switch075'),
    'vil_tiny_abs.msft_in1k': _microsoft('visionlongformer/msvit_tiny_longformersw_1191_train'),
    'vil_small_abs.msft_in1k': _microsoft('visionlongformer/msvit_small_longformersw_1281_train'),
    'vil_medium_deep_abs.msft_in1k': _microsoft('visionlongformer/deepmedium_14161_lr8e-4'),
    'vil_medium_wide_abs.msft_in1k': _microsoft('visionlongformer/wide_medium_1281'),
    'vil_medium_deep_abs.msft_in22k_ft_in1k_384': _microsoft_384(
        'msvitdeepmedium_imagenet384_finetune_bsz256_lr001_wd0'
    ),
    'vil_medium_wide_abs_384.msft_in22k_ft_in1k': _microsoft_384(
        'msvitwidemedium_imagenet384_finetune_bsz512_lr004_wd0'
    ),
    'vil_base_deep_abs_384.msft_in22k_ft_in1k': _microsoft_384('msvitdeepbase_imagenet384_finetune_bsz640_lr003_wd0'),
    'vil_base_wide_abs_384.msft_in22k_ft_in1k': _microsoft_384(
        'msvitwidebase_imagenet384_finetune_bsz768_lr001_wd1e-7'
    ),
    'vil_ls_medium.nvidia_in1k': _nvidia('ng14pebstaaydug'),
    'vil_ls_base.nvidia_in1k': _nvidia('80u5p5eh4txad10'),
    'vil_ls_medium_384.nvidia_in1k': _nvidia('390tzi2ll3sfibl'),
}

register_variants(
    __name__,
    ViL,
    VARIANTS,
    _cfg,
    {name: _cfg(name, **kwargs) for name, kwargs in WEIGHTS.items()},
    filter_fn=checkpoint_filter_fn,
    out_indices=(0, 1, 2, 3),
)
