"""The interface of a token mixer, the registry of mixers, and the base class most of them share.

A mixer takes (B, P + H*W, dim) tokens, the P prefix tokens (class, distillation, register) first and then the grid in
raster order, and returns the same shape. It does not depend on the backbone that contains it.
"""

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from operator import index as as_int
from types import NoneType, UnionType
from typing import Any, get_args

import torch
from timm.layers import register_notrace_module
from torch import nn
from torch.types import Device

from vitzoo._arguments import constructor_arguments, is_whole
from vitzoo.errors import did_you_mean

from ._grid import check_grid
from ._numerics import no_autocast
from ._qkv import LinearQKV, norm_heads, split_heads
from ._rope import Rope
from ._softmax_health import SoftmaxHealth

__all__ = [
    'ParameterFreeMixer',
    'QKVMixer',
    'TokenMixer',
    'create_mixer',
    'list_mixers',
    'mixer_class',
    'named_mixers',
    'no_autocast',
    'register_mixer',
    'set_step',
]

# arguments that a class chooses for its base class
_OF_THE_CLASS = ('k_dim', 'shared_qk')

_mixers: dict[str, type['TokenMixer']] = {}


def register_mixer(name: str) -> Callable[[type['TokenMixer']], type['TokenMixer']]:
    """Class decorator that registers a mixer under `name` for every backbone, test, benchmark and report.

    Raises ValueError if the name is taken, TypeError if the class lacks its fast `op` or its specification `op_naive`.
    """

    def register(cls: type['TokenMixer']) -> type['TokenMixer']:
        if name in _mixers:
            raise ValueError(f"The mixer name '{name}' is taken by {_mixers[name].__module__}; choose another.")
        for attr in ('op', 'op_naive'):
            if not callable(getattr(cls, attr, None)):
                raise TypeError(
                    f"Mixer '{name}' needs a static `{attr}`: every mixer has a fast op and its naive form."
                )
        # a mixer of a package of its own may override these without rotary positions
        cls.has_rope = cls.has_rope and all(
            'rope' in inspect.signature(method).parameters
            for method in (cls.forward, getattr(cls, 'to_qkv', cls.forward))
        )
        _mixers[name] = cls
        # a leaf for torch.fx: control flow in a mixer depends on the grid size
        return register_notrace_module(cls)

    return register


def list_mixers() -> list[str]:
    """Names of all registered mixers, sorted."""
    return sorted(_mixers)


def mixer_class(name: str) -> type['TokenMixer']:
    """The class registered under `name`; raises ValueError with the closest names if there is none."""
    if not isinstance(name, str):
        raise ValueError(f"A mixer is a name such as 'ls', not {name!r}.")
    if name not in _mixers:
        hint = did_you_mean(name, _mixers) or f': there are {", ".join(list_mixers())}'
        raise ValueError(f"Unknown mixer '{name}'{hint}")
    return _mixers[name]


def create_mixer(name: str, dim: int, num_heads: int, *, grid_size: tuple[int, int], **kwargs: Any) -> 'TokenMixer':
    """Build the mixer `name` for tokens of width `dim` on a `grid_size` = (H, W) grid.

    Raises ValueError for an unknown name or an invalid value, TypeError for a keyword that the mixer does not take.
    """
    cls = mixer_class(name)
    check_arguments(name, dict(kwargs, num_heads=num_heads))
    # some functions of torch do not take whole numbers of numpy
    kwargs = {key: as_int(value) if is_whole(value) else value for key, value in kwargs.items()}
    try:
        return cls(dim, num_heads, grid_size=grid_size, **kwargs)
    except TypeError as error:
        # later versions of Python go on after the quoted name
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None or unknown[1] not in kwargs:
            raise
        hint = did_you_mean(unknown[1], constructor_arguments(cls) - {'grid_size'})
        given = kwargs[unknown[1]]
        if isinstance(given, dict):
            hint = f'; give them as keywords: {", ".join(f"{key}={value!r}" for key, value in given.items())}'
        raise TypeError(f"{name} does not take the argument '{unknown[1]}'{hint}") from error


def check_arguments(name: str, kwargs: dict[str, Any]) -> None:
    """Raise ValueError for an argument that the mixer `name` sets itself, or for a value of another type."""
    for key in _OF_THE_CLASS:
        if key in kwargs:
            raise ValueError(f'{key} is a part of the definition of {name}; leave {key}={kwargs[key]} out.')
    for base in mixer_class(name).__mro__:
        for key, hint in getattr(vars(base).get('__init__'), '__annotations__', {}).items():
            kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
            kind, *others = (kind for kind in kinds if kind is not NoneType)
            if key not in kwargs or kind not in _CHECKS or others or (kwargs[key] is None and NoneType in kinds):
                continue
            what, is_valid = _CHECKS[kind]
            if not is_valid(kwargs[key]):
                raise ValueError(f'{key} of {name} must be {what}, not {kwargs[key]!r}.')


# description and check of the values of each type
_CHECKS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: ('a whole number', is_whole),
    float: ('a number', lambda value: isinstance(value, Real) and not isinstance(value, bool)),
    bool: ('True or False', lambda value: isinstance(value, bool)),
    str: ('a name', lambda value: isinstance(value, str)),
    Sequence[int]: (
        'a list of whole numbers',
        lambda value: isinstance(value, list | tuple) and all(map(is_whole, value)),
    ),
}


def set_step(model: nn.Module, step: int) -> None:
    """Set the index of the next optimizer step, counted from 0, in every mixer; call before its first forward pass."""
    for _, mixer in named_mixers(model):
        mixer.set_step(step)


def named_mixers(model: nn.Module) -> Iterator[tuple[str, 'TokenMixer']]:
    """Paths and modules of all mixers of a model, in order."""
    return ((path, module) for path, module in model.named_modules() if isinstance(module, TokenMixer))


class TokenMixer(nn.Module):
    """Mixes P prefix tokens (class, distillation, register) with an H x W grid of patch tokens.

    Subclasses set `op` (fast) and `op_naive` (the specification) and declare their capabilities:

    * `attn_weights`: attention weights are formed, so `attn_drop` can act on them;
    * `token_weights`: `mix(q, k, v, grid_size)` is A v with weights A between tokens that do not depend on v, rows
      summing to 1 (those of nystrom nearly), for a v of any width;
    * `subsampled_kv`: keys and values may lie on a coarser grid than the queries;
    * `has_rel_bias`: takes `rel_bias='table'`, a learned relative position bias;
    * `has_decomposed_bias`: takes `rel_bias='decomposed'`, a relative position bias that depends on the query;
    * `has_talking_heads`: takes `talking_heads`, linear layers over the heads;
    * `has_reduction`: takes `sr_ratio`, the ratio of the grids of queries and keys;
    * `grid_bound`: has parameters for one grid size with any options, which `set_input_size` resamples;
    * `has_qk_norm`: takes `qk_norm` and `norm_layer`, which normalize queries and keys;
    * `has_rope`: `forward` takes `rope`, rotary positions, and compares rotated queries with rotated keys;
    * `has_own_rope`: rotates queries and keys by positions of its own unless `rope=False`;
    * `approximates_softmax`: approximates softmax attention over all tokens, so that `QKVMixer.health` can compare;
    * `parts`: names of the parts that it consists of; while `part` is one of them, the others are left out.

    Three more say how a transfer starts from the weights of trained attention:

    * `start_arguments`: its arguments, without norms, gates and rotations that would change the inherited queries, keys
      and values, or the output, from the first step on;
    * `added_terms`: prefixes of the names of parameters whose effect is added to scores or outputs, which start at 0;
    * `gate_bias`: the bias with which a linear layer `gate`, if it has one, starts open; its weights start at 0.

    Backbones build every mixer with the same keywords: those of this class and `qkv_bias`, `proj_drop`, `device` and
    `dtype`, which a subclass takes itself. `layer` is the index of the mixer among all mixers of its model. Random
    values that a mixer keeps depend only on its `seed` and `layer`: they differ between layers, and are the same each
    time the model is built.
    """

    attn_weights = False
    token_weights = False
    subsampled_kv = False
    has_rel_bias = False
    has_decomposed_bias = False
    has_talking_heads = False
    has_reduction = False
    grid_bound = False
    has_qk_norm = False
    has_rope = False
    has_own_rope = False
    approximates_softmax = False
    parts: tuple[str, ...] = ()
    part: str | None = None
    start_arguments: dict[str, Any] = {}
    added_terms: tuple[str, ...] = ('rel_bias.',)
    gate_bias: float | None = None

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
        attn_drop: float = 0.0,
    ) -> None:
        super().__init__()
        if num_heads < 1:
            raise ValueError(f'num_heads must be at least 1, not {num_heads}.')
        if dim % num_heads:
            raise ValueError(f'dim {dim} is not divisible by num_heads {num_heads}.')
        if not 0 <= attn_drop < 1:
            raise ValueError(f'attn_drop must be at least 0 and below 1, not {attn_drop}.')
        if attn_drop and not self.attn_weights:
            raise ValueError(
                f'{type(self).__name__} never forms attention weights, so attn_drop={attn_drop} cannot act on them; '
                f'use proj_drop.'
            )
        self.dim = dim
        self.num_heads = num_heads
        H, W = grid_size
        self.grid_size = (H, W)
        self.num_prefix_tokens = num_prefix_tokens
        self.layer = layer
        self.step_is_set = False

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        """(B, P + H*W, dim) -> (B, P + H*W, dim)."""
        raise NotImplementedError

    def set_input_size(self, grid_size: tuple[int, int]) -> None:
        """Adapt to a new grid; mixers with grid-bound parameters resample them here."""
        H, W = grid_size
        self.grid_size = (H, W)

    def set_step(self, step: int) -> None:
        """Adapt to the index of the next optimizer step."""
        self.step_is_set = True

    def warn_without_step(self, option: str) -> None:
        """Warn once, in a training forward pass, if `set_step`, on which `option` depends, was never called."""
        # a compiled forward pass cannot warn, and must not be compiled again when the flag changes
        if torch.compiler.is_compiling() or self.step_is_set or not (self.training and torch.is_grad_enabled()):
            return
        self.step_is_set = True
        warnings.warn(
            f'{option} of {type(self).__name__} has no effect without the step; call vitzoo.set_step(model, step) '
            f'before each optimizer step.',
            stacklevel=2,
        )

    def inherit_from(self, parent: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, tuple[str, ...]]]:
        """Parameters taken from others of the parent, the state dict of attention or of another mixer.

        Returns tensors and the names in `parent` that they come from, by name in this mixer. Parameters of the same
        name and shape are inherited without it. None by default.
        """
        return {}

    def implied_arguments(self) -> dict[str, Any]:
        """Arguments that the name of a model may only imply, for the config of its weights. None by default."""
        return {}

    def check_grid(self, grid_size: tuple[int, int]) -> None:
        """Raise ValueError unless `grid_size` is the one the parameters are made for."""
        check_grid(type(self).__name__, self.grid_size, grid_size)

    def no_weight_decay(self) -> set[str]:
        """Names of parameters, relative to the mixer, to exclude from weight decay; by default position biases."""
        return {name for name, _ in self.named_parameters() if name.startswith(('rel_bias.', 'prefix_bias.'))}


class ParameterFreeMixer(TokenMixer):
    """A mixer of tokens without learned parameters, so `qkv_bias`, `device` and `dtype` do not apply to it."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.proj_drop = nn.Dropout(proj_drop)


class QKVMixer(SoftmaxHealth, TokenMixer):
    """A mixer of queries, keys and values: project, mix, merge the heads, project back.

    `qkv_layer` is the projection (`LinearQKV`, or `ConvQKV` for CvT) with the keys that `k_dim` and `shared_qk`
    describe; `scale` multiplies q.k and is head_dim ** -0.5 by default. With `LinearQKV` the parameters are called
    `qkv` and `proj` as in timm, so a ViT checkpoint loads strictly into every mixer that adds none. `qk_norm`
    normalizes the queries and keys of each head with `norm_layer(head_dim)`, as timm's attention does; raises
    ValueError for a mixer with narrower keys. `scale_norm` applies `norm_layer(dim)` before `proj`, as in EVA-02. A
    subclass whose output is not a function of products q_i . k_j sets `has_rope = False`.
    """

    has_qk_norm = True
    has_rope = True

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
        shared_qk: bool = False,
        qkv_layer: Callable[..., nn.Module] = LinearQKV,
        qk_norm: bool = False,
        scale_norm: bool = False,
        norm_layer: Callable[..., nn.Module] = nn.LayerNorm,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, attn_drop=attn_drop, **kwargs)
        if scale is not None and not 0 < scale < math.inf:
            raise ValueError(f'scale must be more than 0 and finite, not {scale}.')
        if qk_norm and k_dim is not None:
            raise ValueError(
                f'{type(self).__name__} has keys of width {k_dim} for all heads, which qk_norm cannot normalize; '
                f'set qk_norm=False.'
            )
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5 if scale is None else scale
        self.qkv = qkv_layer(
            dim,
            num_heads,
            k_dim=k_dim,
            shared_qk=shared_qk,
            num_prefix_tokens=self.num_prefix_tokens,
            qkv_bias=qkv_bias,
            **dd,
        )
        # the layer may be wrapped by one of another class, such as LoRA's
        self.qkv_sizes = self.qkv.sizes if isinstance(self.qkv, LinearQKV) else None
        self.q_norm = norm_layer(self.head_dim, **dd) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim, **dd) if qk_norm and not shared_qk else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.scale_norm = norm_layer(dim, **dd) if scale_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def inherit_from(self, parent: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, tuple[str, ...]]]:
        """The fused layer of queries, keys and values from separate layers q and kv, as spatial reduction has."""
        names = {kind: (f'q.{kind}', f'kv.{kind}') for kind in ('weight', 'bias')}
        return {
            f'qkv.{kind}': (torch.cat([parent[q], parent[kv]]), (q, kv))
            for kind, (q, kv) in names.items()
            if q in parent and kv in parent
        }

    @property
    def dropout_p(self) -> float:
        """Dropout rate of the attention weights in the current mode, 0 in evaluation."""
        return self.attn_drop.p if self.training else 0.0

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int], rope: Rope | None = None) -> torch.Tensor:
        q, k, v = self.to_qkv(x, grid_size, rope)
        return self.project(self.mix(q, k, v, grid_size))

    def to_qkv(
        self, x: torch.Tensor, grid_size: tuple[int, int], rope: Rope | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens (B, N, dim) -> queries, keys and values (B, heads, N, head_dim); `rope` rotates queries and keys."""
        if self.qkv_sizes is None:
            # a convolution of the grid
            q, k, v = self.qkv(x, grid_size)
        else:
            q, k, v = (split_heads(part, self.num_heads) for part in self.qkv(x).split(self.qkv_sizes, dim=-1))
        q, k = self.norm_qk(q, k)
        if rope is not None:
            # keys shared with the queries have no channels
            q, k = rope.rotate(q), rope.rotate(k) if k.shape[-1] else k
        # under autocast a norm returns float32
        return q.to(v.dtype), k.to(v.dtype), v

    def norm_qk(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalize queries and keys (B, heads, N, head_dim)."""
        return norm_heads(self.q_norm, q), norm_heads(self.k_norm, k)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        """Queries, keys and values (B, heads, N, head_dim) -> mixed values (B, heads, N, head_dim)."""
        raise NotImplementedError

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Merge the heads and project: (B, heads, N, head_dim) -> (B, N, dim)."""
        x = self.scale_norm(x.transpose(1, 2).flatten(2))
        return self.proj_drop(self.proj(x))
