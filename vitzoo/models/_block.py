"""The transformer block of all backbones."""

from collections.abc import Callable
from typing import Any

import torch
from timm.layers import DropPath, Mlp, calculate_drop_path_rates
from torch import nn
from torch.types import Device

from vitzoo.mixers import TokenMixer, create_mixer
from vitzoo.mixers._rope import Rope

__all__ = ['Block', 'check_reset', 'check_tokens', 'drop_path_rates']


class Block(nn.Module):
    """Pre-norm block: x + mixer(norm(x)), then x + mlp(norm(x)), with timm's parameter names.

    `mixer` is a name from `vitzoo.list_mixers()` and `mixer_kwargs` its own arguments, in addition to the common ones.
    `layer` is the index of the block in the model.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mixer: str,
        grid_size: tuple[int, int],
        mixer_kwargs: dict | None = None,
        num_prefix_tokens: int = 0,
        layer: int = 0,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
        norm_layer: Callable[..., nn.Module] = nn.LayerNorm,
        act_layer: type[nn.Module] = nn.GELU,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.num_prefix_tokens = num_prefix_tokens
        self.norm1 = norm_layer(dim, **dd)
        of_the_model: dict[str, Any] = dict(
            dim=dim,
            num_heads=num_heads,
            grid_size=grid_size,
            num_prefix_tokens=num_prefix_tokens,
            layer=layer,
            qkv_bias=qkv_bias,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            **dd,
        )
        taken = sorted(of_the_model.keys() & (mixer_kwargs or {}))
        if taken:
            raise ValueError(f'The {taken[0]} of a mixer is that of the model; leave {taken[0]} out of mixer_kwargs.')
        self.attn = create_mixer(mixer, **of_the_model, **(mixer_kwargs or {}))
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = norm_layer(dim, **dd)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer, drop=proj_drop, **dd)
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int], *rope: Rope) -> torch.Tensor:
        """Tokens (B, P + H*W, C), the grid size (H, W) and, if used, rotary positions -> (B, P + H*W, C)."""
        x = x + self.drop_path1(self.attn(self.norm1(x), grid_size, *rope))
        x = x + self.drop_path2(self.mlp(self.norm2(x)))
        return x


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """The rates of stochastic depth of `depth` blocks, from 0 to `rate` in the last; ValueError unless it is a rate."""
    if not 0 <= rate <= 1:
        raise ValueError(f'drop_path_rate must be between 0 and 1, not {rate}.')
    # timm's annotation includes the rates of stages
    rates: Any = calculate_drop_path_rates(rate, depth)
    return rates


def check_reset(mixers: dict[str, TokenMixer]) -> None:
    """Raise RuntimeError if mixers, by their names in a model, have weights that they set only when they are built."""
    for path, mixer in mixers.items():
        for name, module in mixer.named_modules(prefix=path):
            tensors = [] if hasattr(module, 'reset_parameters') else [*module._parameters, *module._buffers]
            for tensor in tensors:
                if getattr(module, tensor) is not None:
                    raise RuntimeError(
                        f'{name}.{tensor} is set when its mixer is built, and cannot be initialized again; build the'
                        f' model on its device, or load weights instead.'
                    )


def check_tokens(mixer: TokenMixer, x: torch.Tensor, attn_mask: object, is_causal: bool, advice: str) -> None:
    """Raise ValueError for a mask, or for tokens (B, P + H*W, C) that do not fit the grid of a mixer."""
    if attn_mask is not None or is_causal:
        raise ValueError('Token mixers do not support attn_mask or is_causal.')
    P, (H, W) = mixer.num_prefix_tokens, mixer.grid_size
    if x.shape[1] != P + H * W:
        raise ValueError(
            f'{type(mixer).__name__} is set to {P} prefix tokens and a {H} x {W} grid, and got {x.shape[1]} tokens: '
            f'{advice}.'
        )
