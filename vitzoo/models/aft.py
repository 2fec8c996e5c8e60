"""AFT: the attention free transformer's ImageNet models, a DeiT body with any token mixer.

AFT-full keeps class token and positions; every other mixer on this body has neither and averages the tokens.
An Attention Free Transformer, section 5.3, https://arxiv.org/abs/2105.14103
"""

import torch
from torch import nn

from vitzoo.mixers import mixer_class

from ._register import cfg, register_variants, swapped
from .deit import DeiT
from .deit import checkpoint_filter_fn as deit_checkpoint_filter_fn

__all__ = ['AFT', 'checkpoint_filter_fn']


class AFT(DeiT):
    """DeiT without class token and positions, pooled by averaging; arguments are DeiT's."""

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        *,
        mixer: str = 'aft_conv',
        class_token: bool = False,
        pos_embed: str = 'none',
        global_pool: str | None = None,
        **kwargs,
    ) -> None:
        if global_pool is None:
            global_pool = 'token' if class_token else 'avg'
        super().__init__(
            img_size, mixer=mixer, class_token=class_token, pos_embed=pos_embed, global_pool=global_pool, **kwargs
        )


def checkpoint_filter_fn(state_dict: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Ours to ours, positions resampled to the model's grid."""
    return deit_checkpoint_filter_fn(state_dict, model)


SIZES = {'tiny': dict(embed_dim=192, num_heads=3), 'small': dict(embed_dim=384, num_heads=6)}
VARIANTS = swapped('aft', SIZES, lambda mixer: mixer)
for _size in SIZES:
    VARIANTS[f'aft_full_{_size}'].update(class_token=True, pos_embed='learn')
# heads and kernels of the paper's table 7; the plain names are its best rows
VARIANTS['aft_conv_tiny'].update(num_heads=192)
VARIANTS['aft_conv_small'].update(num_heads=384)
VARIANTS['aft_conv_tiny_h32'] = {**VARIANTS['aft_conv_tiny'], 'num_heads': 32}
VARIANTS['aft_conv_small_h16'] = {**VARIANTS['aft_conv_small'], 'num_heads': 16}
VARIANTS['aft_conv_small_k15'] = {**VARIANTS['aft_conv_small'], 'mixer_kwargs': {'kernel_size': 15}}


def _cfg(name: str) -> dict:
    args = VARIANTS[name]
    is_fixed = args.get('pos_embed') == 'learn' or mixer_class(args['mixer']).grid_bound
    return cfg(first_conv='patch_embed.proj', crop_pct=0.9, fixed_input_size=is_fixed)


register_variants(
    __name__,
    AFT,
    VARIANTS,
    _cfg,
    filter_fn=checkpoint_filter_fn,
    out_indices=3,
)
