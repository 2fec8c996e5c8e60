"""The interface of a token mixer, the registry of mixers, and the base class most of them share.

A mixer sees (B, P + H*W, dim) tokens, the P prefix tokens (class, distillation, register) first and then the grid in
raster order, and returns the same shape. It never learns which backbone it sits in.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from timm.layers import register_notrace_function, register_notrace_module
from torch import nn

from vitzoo.errors import did_you_mean

from ._qkv import LinearQKV

__all__ = [
    'QKVMixer',
    'TokenMixer',
    'create_mixer',
    'list_mixers',
    'mixer_class',
    'no_autocast',
    'register_mixer',
    'set_step',
]

_mixers: dict[str, type['TokenMixer']] = {}


def register_mixer(name: str) -> Callable[[type['TokenMixer']], type['TokenMixer']]:
    """Class decorator that makes a mixer known under `name` in every backbone, test, benchmark and report.

    Raises ValueError where the name is taken, TypeError where the class lacks its fast `op` or its specification
    `op_naive`.
    """

    def register(cls: type['TokenMixer']) -> type['TokenMixer']:
        if name in _mixers:
            raise ValueError(f"The mixer name '{name}' is taken by {_mixers[name].__module__}; choose another.")
        for attr in ('op', 'op_naive'):
            if not callable(getattr(cls, attr, None)):
                raise TypeError(
                    f"Mixer '{name}' needs a static `{attr}`: every mixer has a fast op and its naive form."
                )
        _mixers[name] = cls
        # a leaf for torch.fx: what happens inside depends on the size of the grid
        return register_notrace_module(cls)

    return register


def list_mixers() -> list[str]:
    """Names of all registered mixers, sorted."""
    return sorted(_mixers)


def mixer_class(name: str) -> type['TokenMixer']:
    """The class registered under `name`; raises ValueError with the closest names where there is none."""
    if name not in _mixers:
        hint = did_you_mean(name, _mixers) or f': there are {", ".join(list_mixers())}'
        raise ValueError(f"Unknown mixer '{name}'{hint}")
    return _mixers[name]


def create_mixer(name: str, dim: int, num_heads: int, *, grid_size: tuple[int, int], **kwargs) -> 'TokenMixer':
    """Build the mixer `name` for tokens of width `dim` on a `grid_size` = (H, W) grid.

    Raises ValueError for an unknown name or an impossible value, TypeError for a keyword the mixer does not have.
    """
    return mixer_class(name)(dim, num_heads, grid_size=grid_size, **kwargs)


def no_autocast(x: torch.Tensor) -> AbstractContextManager:
    """Context in which what touches `x` keeps its own precision under any autocast."""
    # the meta device has no autocast, and asking it for one raises
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


@register_notrace_function
def check_grid(what: str, made: tuple[int, int], got: tuple[int, int]) -> None:
    """Raise ValueError where the positions of `what`, made for one grid, meet another."""
    if tuple(made) != tuple(got):
        raise ValueError(
            f'The positions of {what} are made for a {made[0]} x {made[1]} grid and got {got[0]} x {got[1]}: '
            f'build the model with img_size= or call model.set_input_size().'
        )


def set_step(model: nn.Module, step: int) -> None:
    """Tell every mixer of a model which optimizer step comes next, counted from 0, before its first forward pass."""
    for module in model.modules():
        if isinstance(module, TokenMixer):
            module.set_step(step)


class TokenMixer(nn.Module):
    """Mixes P prefix tokens (class, distillation, register) with an H x W grid of patch tokens.

    Subclasses set `op` (fast) and `op_naive` (the specification) and state what a backbone may ask of them:

    * `attn_weights`: attention weights exist, so `attn_drop` can act on them;
    * `token_weights`: `mix(q, k, v, grid_size)` is A v with weights A between tokens that do not depend on v, rows
      summing to 1 (those of nystrom nearly), for a v of any width;
    * `subsampled_kv`: keys and values may lie on a coarser grid than the queries;
    * `has_rel_bias`: takes `rel_bias='table'`, a learned bias of relative positions;
    * `grid_bound`: has parameters for one grid size whatever the options, which `set_input_size` resamples;
    * `approximates_softmax`: stands in for softmax attention over all tokens, so that `QKVMixer.health` can compare.

    `layer` is the mixer's place among all mixers of its model. What a mixer draws at random and keeps is a function of
    its own `seed` and of `layer`: it differs from layer to layer, and is the same in every build of the model.
    """

    attn_weights = False
    token_weights = False
    subsampled_kv = False
    has_rel_bias = False
    grid_bound = False
    approximates_softmax = False

    op: Callable[..., torch.Tensor]
    op_naive: Callable[..., torch.Tensor]

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        grid_size: tuple[int, int],
        num_prefix_tokens: int = 0,
        layer: int = 0,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f'dim {dim} is not divisible by num_heads {num_heads}.')
        if attn_drop and not self.attn_weights:
            raise ValueError(
                f'{type(self).__name__} never forms attention weights, so attn_drop={attn_drop} cannot act on them; '
                f'use proj_drop.'
            )
        self.dim = dim
        self.num_heads = num_heads
        self.grid_size = tuple(grid_size)
        self.num_prefix_tokens = num_prefix_tokens
        self.layer = layer

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        """(B, P + H*W, dim) -> (B, P + H*W, dim)."""
        raise NotImplementedError

    def set_input_size(self, grid_size: tuple[int, int]) -> None:
        """Adapt to a new grid; mixers with grid-bound parameters resample them here."""
        self.grid_size = tuple(grid_size)

    def set_step(self, step: int) -> None:
        """Adapt to the optimizer step that comes next; default: nothing changes."""

    def check_grid(self, grid_size: tuple[int, int]) -> None:
        """Raise ValueError unless `grid_size` is the one the parameters are made for."""
        check_grid(type(self).__name__, self.grid_size, grid_size)

    def no_weight_decay(self) -> set[str]:
        """Names, relative to the mixer, that weight decay must leave alone: by default biases of relative position."""
        return {name for name, _ in self.named_parameters() if name.startswith(('rel_bias.', 'prefix_bias.'))}


class QKVMixer(TokenMixer):
    """A mixer of queries, keys and values: project, mix, merge the heads, project back.

    `qkv_layer` is the projection (`LinearQKV`, or `ConvQKV` for CvT) and `scale` what q.k is multiplied with, by
    default head_dim ** -0.5. With `LinearQKV` the parameters are called `qkv` and `proj` as in timm, so a ViT
    checkpoint loads strictly into every mixer that adds none. `qk_norm` normalises the queries and keys of each head
    with `norm_layer(head_dim)`, as timm's attention does; a mixer with narrower keys refuses it with a ValueError.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        scale: float | None = None,
        k_dim: int | None = None,
        qkv_layer: Callable[..., nn.Module] = LinearQKV,
        qk_norm: bool = False,
        norm_layer: Callable[..., nn.Module] = nn.LayerNorm,
        device=None,
        dtype=None,
        **kwargs,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias=qkv_bias, attn_drop=attn_drop, proj_drop=proj_drop, **kwargs)
        if qk_norm and k_dim:
            raise ValueError(f'{type(self).__name__} has one number per key and head, which qk_norm cannot normalise.')
        dd = {'device': device, 'dtype': dtype}
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.qkv = qkv_layer(
            dim, num_heads, k_dim=k_dim, num_prefix_tokens=self.num_prefix_tokens, qkv_bias=qkv_bias, **dd
        )
        self.q_norm = norm_layer(self.head_dim, **dd) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim, **dd) if qk_norm and k_dim is None else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    @property
    def dropout_p(self) -> float:
        """The dropout rate of the attention weights in force now."""
        return self.attn_drop.p if self.training else 0.0

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        q, k, v = self.to_qkv(x, grid_size)
        x = self.mix(q, k, v, grid_size)
        return self.project(x)

    def to_qkv(self, x: torch.Tensor, grid_size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens (B, N, dim) -> queries, keys and values (B, heads, N, head_dim)."""
        q, k, v = self.qkv(x, grid_size)
        # under autocast a norm returns float32
        return self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), v

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        """Queries, keys and values (B, heads, N, head_dim) -> mixed values (B, heads, N, head_dim)."""
        raise NotImplementedError

    def softmax_target(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """What `mix` approximates where the mixer `approximates_softmax`: softmax attention over all tokens."""
        return mixer_class('softmax').op(q, k, v, self.scale)

    def health(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]
    ) -> dict[str, torch.Tensor]:
        """Signs of how well the approximation does, each a number per sample (B,); a mixer adds its own to this one.

        `softmax_error` is |mix - target| / |target| over all heads and tokens, with the exact target in float32 or
        wider. Raises ValueError for a mixer that approximates no softmax attention.
        """
        if not self.approximates_softmax:
            raise ValueError(f'{type(self).__name__} as it is set up does not approximate softmax attention.')
        mixed = self.mix(q, k, v, grid_size)
        with no_autocast(q):
            dtype = torch.promote_types(q.dtype, torch.float32)
            target = self.softmax_target(q.to(dtype), k.to(dtype), v.to(dtype)).flatten(1)
            error = torch.linalg.vector_norm(mixed.to(dtype).flatten(1) - target, dim=1)
            return {'softmax_error': error / torch.linalg.vector_norm(target, dim=1)}

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Merge the heads and project: (B, heads, N, head_dim) -> (B, N, dim)."""
        x = x.transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(x))
