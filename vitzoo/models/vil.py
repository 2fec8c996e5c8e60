"""ViL: Multi-Scale Vision Longformer, with any token mixer.

Four stages of patch embeddings; a fresh class token per stage but the last. The first two stages carry the efficient
mixer, the last two softmax attention. https://arxiv.org/abs/2103.15358
"""

from functools import partial

import torch
from timm.layers import calculate_drop_path_rates, to_2tuple
from torch import nn
from torch.nn import functional as F

from vitzoo.mixers import mixer_class
from vitzoo.mixers._grid import check_grid

from ._block import Block
from ._official import unwrap
from ._pyramid import Pyramid, Stage, per_stage_mixers
from ._register import cfg, register_variants, swapped

__all__ = ['ViL', 'checkpoint_filter_fn']

PATCH_SIZES = (4, 2, 2, 2)

LayerNorm = partial(nn.LayerNorm, eps=1e-6)


class PatchEmbed(nn.Module):
    """Non-overlapping patches and layer norm: (B, C_in, H_in, W_in) -> (B, H, W, C); an incomplete patch is left
    out."""

    def __init__(self, in_chans: int, dim: int, patch_size: int, device=None, dtype=None) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, dim, patch_size, stride=patch_size, device=device, dtype=dtype)
        self.norm = LayerNorm(dim, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class AxialPosEmbed(nn.Module):
    """Absolute positions: half the channels from the row, half from the column, and one vector per prefix token."""

    def __init__(self, dim: int, grid_size: tuple[int, int], num_prefix_tokens: int, device=None, dtype=None) -> None:
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.grid_size = tuple(grid_size)
        self.prefix = nn.Parameter(torch.empty(1, num_prefix_tokens, dim, **dd)) if num_prefix_tokens else None
        self.row = nn.Parameter(torch.empty(1, grid_size[0], dim // 2, **dd))
        self.column = nn.Parameter(torch.empty(1, grid_size[1], dim // 2, **dd))
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        """Tokens (B, P + H*W, C) plus their positions; raises ValueError on another grid than the one made for."""
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
            new = F.interpolate(old.data.float().transpose(1, 2), size=size, mode='linear', antialias=False)
            setattr(self, name, nn.Parameter(new.transpose(1, 2).to(old.dtype), requires_grad=old.requires_grad))


class ViL(Pyramid):
    """Multi-scale vision transformer.

    `mixer` is one name or one per stage. With `pos_embed='rel'` every mixer that can carries a learned bias of relative
    positions (and one that cannot has no positions of its own); with 'abs' each stage adds absolute ones. A stage's
    grid is its input's divided by 4, 2, 2, 2, rounded down. Raises ValueError for an image with an empty grid.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = 'avg',
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
        device=None,
        dtype=None,
    ) -> None:
        if pos_embed not in ('rel', 'abs'):
            raise ValueError(f"pos_embed of ViL is 'rel' or 'abs', not {pos_embed!r}.")
        dd = {'device': device, 'dtype': dtype}
        num_stages = len(depths)
        grid_sizes = self.grid_sizes(to_2tuple(img_size), num_stages)
        mixers = per_stage_mixers(mixer, mixer_kwargs, num_stages)
        rates = calculate_drop_path_rates(drop_path_rate, sum(depths))
        stages = []
        for i, (dim, heads, depth, P) in enumerate(zip(embed_dims, num_heads, depths, num_prefix_tokens, strict=True)):
            name, kwargs = mixers[i]
            first = sum(depths[:i])
            if pos_embed == 'rel' and mixer_class(name).has_rel_bias:
                kwargs = {'rel_bias': 'table', **kwargs}
            blocks = [
                Block(
                    dim,
                    heads,
                    mixer=name,
                    mixer_kwargs=kwargs,
                    grid_size=grid_sizes[i],
                    num_prefix_tokens=P,
                    layer=layer,
                    mlp_ratio=mlp_ratio,
                    qkv_bias=qkv_bias,
                    proj_drop=proj_drop_rate,
                    attn_drop=attn_drop_rate,
                    drop_path=rates[layer],
                    norm_layer=LayerNorm,
                    **dd,
                )
                for layer in range(first, first + depth)
            ]
            embed = PatchEmbed(embed_dims[i - 1] if i else in_chans, dim, PATCH_SIZES[i], **dd)
            pos = AxialPosEmbed(dim, grid_sizes[i], P, **dd) if pos_embed == 'abs' else None
            stages.append(Stage(embed, blocks, dim, num_prefix_tokens=P, pos_embed=pos, pos_drop=pos_drop_rate, **dd))
        super().__init__(
            stages,
            embed_dims,
            [4 * 2**i for i in range(num_stages)],
            img_size=img_size,
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            drop_rate=drop_rate,
            norm_layer=LayerNorm,
            **dd,
        )

    @staticmethod
    def grid_sizes(img_size: tuple[int, int], num_stages: int) -> list[tuple[int, int]]:
        sizes, size = [], img_size
        for patch_size in PATCH_SIZES[:num_stages]:
            size = tuple(side // patch_size for side in size)
            sizes.append(size)
        if min(sizes[-1]) < 1:
            least = 2 ** (num_stages + 1)
            raise ValueError(
                f'img_size {img_size} is too small for ViL, whose last stage needs at least {least} x {least}.'
            )
        return sizes


def checkpoint_filter_fn(state_dict: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """The layout of Microsoft's ViL and of NVIDIA's ViL-LS, or ours, to ours.

    Bias indices are computed, not loaded, and what the official code holds twice is loaded once: the projections of
    global tokens (`sharew`), unless the model has such, and those of Linformer's keys and values (`share_kv`).
    """
    state_dict = unwrap(state_dict)
    if not any(name.startswith('layer1.') for name in state_dict):
        return state_dict
    out, own = {}, model.state_dict()
    for name, tensor in state_dict.items():
        if name.endswith('relative_position_index') or not tensor.numel():
            continue
        if '_global.' in name and _rename(name) not in own:
            continue
        if name.endswith('.proj_v') and torch.equal(tensor, state_dict[name.replace('.proj_v', '.proj_k')]):
            continue
        if name.endswith(('.proj_k', '.proj_v')):
            tensor = tensor.unsqueeze(0)
        # under spatial reduction keys and queries come from different tokens, elsewhere one layer makes both
        if f'{name.partition(".attn.")[0]}.attn.proj_sr.weight' not in state_dict:
            if '.query.' in name:
                continue
            if '.kv.' in name:
                tensor = torch.cat([state_dict[name.replace('.kv.', '.query.')], tensor])
                name = name.replace('.kv.', '.qkv.')
        out[_rename(name)] = tensor
    return out


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
    'to_dynamic_projection': 'dynamic_proj',
    'dual_ln_full': 'norm_full',
    'dual_ln_dp': 'norm_landmarks',
}


def _rename(name: str) -> str:
    """`layer1.0` is an embedding, then attention and MLP halves of the blocks take turns."""
    layer, *rest = name.split('.')
    if not layer.startswith('layer'):
        return name
    place, rest = int(rest[0]), [_RENAMES.get(part, part) for part in rest[1:]]
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
}
VARIANTS = {
    **{f'vil_{size}': args for size, args in NATIVE_SIZES.items()},
    **{f'vil_{size}_abs': {**args, 'pos_embed': 'abs'} for size, args in NATIVE_SIZES.items()},
    **swapped('vil', SIZES, lambda mixer: (mixer, mixer, 'softmax', 'softmax')),
}
# the published long-short models have the colliding bias index
for _size in ('medium', 'base'):
    VARIANTS[f'vil_ls_{_size}']['mixer_kwargs'] = {'rel_bias': 'nvidia'}
VARIANTS['vil_ls_medium_384'] = {
    **VARIANTS['vil_ls_medium'],
    'img_size': 384,
    'mixer_kwargs': {'window_size': 8, 'rel_bias': 'nvidia'},
}
# three of the models fine-tuned at 384 have windows of their own
for _size, _windows in {'medium_wide': (8, 12), 'base_deep': (6, 8), 'base_wide': (8, 8)}.items():
    VARIANTS[f'vil_{_size}_abs_384'] = {
        **VARIANTS[f'vil_{_size}_abs'],
        'img_size': 384,
        'mixer_kwargs': tuple({'window_size': window} for window in _windows) + ({}, {}),
    }


def _cfg(name: str, **kwargs) -> dict:
    size = VARIANTS[name.partition('.')[0]].get('img_size', 224)
    return cfg(
        **{'first_conv': 'stages.0.embed.proj', 'input_size': (3, size, size), 'fixed_input_size': True, **kwargs}
    )


def _microsoft(path: str, **kwargs) -> dict:
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


# the relative models fine-tuned at 384 are left out: nowhere is said which windows they have
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
