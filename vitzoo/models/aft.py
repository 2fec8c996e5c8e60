"""AFT: the ImageNet models of the attention free transformer, a DeiT body with any token mixer.

AFT-full has a class token and a position embedding; with all other mixers the body has neither and averages the tokens.
An Attention Free Transformer, section 5.3, https://arxiv.org/abs/2105.14103
"""

from typing import Any

from vitzoo.mixers import mixer_class

from ._register import cfg, register_variants, swapped
from .deit import SIZES as DEIT_SIZES
from .deit import DeiT, checkpoint_filter_fn

__all__ = ['AFT', 'checkpoint_filter_fn']


class AFT(DeiT):
    """DeiT without class token and position embedding, average-pooled; takes the arguments of `DeiT`."""

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        *,
        mixer: str = 'aft_conv',
        class_token: bool = False,
        pos_embed: str = 'none',
        global_pool: str | None = None,
        **kwargs: Any,
    ) -> None:
        if global_pool is None:
            global_pool = 'token' if class_token else 'avg'
        super().__init__(
            img_size, mixer=mixer, class_token=class_token, pos_embed=pos_embed, global_pool=global_pool, **kwargs
        )


SIZES = {size: DEIT_SIZES[size] for size in ('nano', 'tiny', 'small')}


def _aft_conv(size: str, num_heads: int, **kwargs: Any) -> dict:
    return {**SIZES[size], 'num_heads': num_heads, 'mixer': 'aft_conv', **kwargs}


# tests/model_names.txt lists the names that `swapped` generates
VARIANTS = {
    **swapped('aft', SIZES),
    **{
        f'aft_full_{size}': {**args, 'mixer': 'aft_full', 'class_token': True, 'pos_embed': 'learn'}
        for size, args in SIZES.items()
    },
    # numbers of heads and kernel sizes from table 7 of the paper, its best rows without a suffix
    'aft_conv_nano': _aft_conv('nano', 96),
    'aft_conv_tiny': _aft_conv('tiny', 192),
    'aft_conv_tiny_h32': _aft_conv('tiny', 32),
    'aft_conv_small': _aft_conv('small', 384),
    'aft_conv_small_h16': _aft_conv('small', 16),
    'aft_conv_small_k15': _aft_conv('small', 384, mixer_kwargs={'kernel_size': 15}),
}


def _cfg(name: str) -> dict:
    args = VARIANTS[name]
    is_fixed = args.get('pos_embed') == 'learn' or mixer_class(args['mixer']).grid_bound
    size = args.get('img_size', 224)
    return cfg(first_conv='patch_embed.proj', input_size=(3, size, size), crop_pct=0.9, fixed_input_size=is_fixed)


register_variants(
    __name__,
    AFT,
    VARIANTS,
    _cfg,
    filter_fn=checkpoint_filter_fn,
    out_indices=3,
)
