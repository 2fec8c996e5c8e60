"""Contenders of `vitzoo bench kernels`: each kernel's op, realistic inputs, and the same function by flex_attention.

In flex_attention, windows are a block mask with the shared keys before the others, and FAVOR+ is two softmaxes (see
vitzoo/kernels/favor.py). AFT-conv has no such form: its weights come from a table and not from scores.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from vitzoo.mixers._window import window_attention
from vitzoo.mixers.aft import aft_conv
from vitzoo.mixers.performer import orthogonal_features, performer_attention

_WINDOW_SIZE, _HALO, _LANDMARKS = 7, 3, 8
_KERNEL_SIZE, _NUM_FEATURES = 11, 256


@dataclass(frozen=True)
class Case:
    """Arguments of an op: `inputs` require gradients, `others` do not; `grad` is the gradient of the output."""

    inputs: list[torch.Tensor]
    others: tuple
    grad: torch.Tensor

    def args(self) -> list:
        """All arguments, in order."""
        return [*self.inputs, *self.others]

    def to(self, device: torch.device, dtype: torch.dtype) -> 'Case':
        """The case on another device; arguments without gradients keep their dtype."""
        others = tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in self.others)
        return Case([x.to(device, dtype) for x in self.inputs], others, self.grad.to(device, dtype))

    def with_gradients(self) -> 'Case':
        """A copy whose inputs are leaves that require gradients."""
        return replace(self, inputs=[x.detach().requires_grad_() for x in self.inputs])

    def bytes(self, backward: bool) -> int:
        """Minimum memory traffic: inputs and output, and in the backward pass these again with their gradients."""
        size = sum(x.numel() * x.element_size() for x in (*self.inputs, self.grad))
        return 3 * size if backward else size


@dataclass(frozen=True)
class KernelTask:
    """An op with a kernel; `make` takes the number of tokens, batch size, number of heads and head dimension."""

    name: str
    op: Callable[..., torch.Tensor]
    make: Callable[[int, int, int, int], Case]
    flex: Callable[..., torch.Tensor] | None = None


def make_qkv(tokens: int, batch_size: int, heads: int, d: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k and v as views of one tensor, as a layer's projection returns them, and a gradient of the same layout."""
    q, k, v, grad = torch.randn(batch_size, tokens, 4, heads, d).transpose(1, 3).unbind(2)
    return [q, k, v], grad


def make_aft_conv(tokens: int, batch_size: int, heads: int, d: int) -> Case:
    """Inputs of AFT-conv with a kernel of 11 x 11, on a square grid."""
    (q, k, v), grad = make_qkv(tokens, batch_size, heads, d)
    side, kernel = math.isqrt(tokens), torch.randn(heads, _KERNEL_SIZE, _KERNEL_SIZE)
    return Case([q, k[..., :1], v, kernel], ((side, side),), grad)


def make_performer(tokens: int, batch_size: int, heads: int, d: int) -> Case:
    """Inputs of FAVOR+ with 256 features."""
    inputs, grad = make_qkv(tokens, batch_size, heads, d)
    return Case(inputs, (orthogonal_features(_NUM_FEATURES, d), d**-0.5), grad)


def make_window(tokens: int, batch_size: int, heads: int, d: int) -> Case:
    """Inputs of window attention as in long-short: windows of 7 x 7, a halo of 3, 8 landmarks, no bias."""
    inputs, grad = make_qkv(tokens, batch_size, heads, d)
    shared, side = torch.randn(2, batch_size, heads, _LANDMARKS, d), math.isqrt(tokens)
    return Case([*inputs, *shared], ((side, side), _WINDOW_SIZE, _HALO, d**-0.5), grad)


@cache
def flex_function(is_cuda: bool) -> Callable[..., torch.Tensor]:
    """flex_attention, compiled on a GPU."""
    if is_cuda:
        return torch.compile(flex_attention, dynamic=False)
    return flex_attention


def lse_option() -> dict:
    """The option by which flex_attention returns its lse, renamed in torch 2.9."""
    request = getattr(flex_module, 'AuxRequest', None)
    return dict(return_lse=True) if request is None else dict(return_aux=request(lse=True))


def flex_performer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: torch.Tensor, scale: float
) -> torch.Tensor:
    """FAVOR+ as two softmaxes: features attend to tokens, then tokens attend to features."""
    B, heads = q.shape[:2]
    weight = (scale**0.5 * features).to(q.dtype).expand(B, heads, -1, -1)
    half_norm = scale / 2 * k.float().square().sum(dim=-1)

    def subtract_half_norm(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, f: torch.Tensor, j: torch.Tensor
    ) -> torch.Tensor:
        return score - half_norm[b, h, j]

    mean, lse = flex_function(q.is_cuda)(weight, k, v, score_mod=subtract_half_norm, scale=1.0, **lse_option())
    # newer versions return it in a named tuple
    lse = getattr(lse, 'lse', lse)

    def add_lse(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, f: torch.Tensor
    ) -> torch.Tensor:
        return score + lse[b, h, f]

    return flex_function(q.is_cuda)(q, weight, mean, score_mod=add_lse, scale=1.0)


def flex_window(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor,
    grid_size: tuple[int, int], window_size: int, halo: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Window attention by a block mask: shared keys, and the keys in a query's window and its halo."""
    mask = window_mask(grid_size, window_size, halo, k_shared.shape[2], q.device)
    k, v = torch.cat([k_shared, k], dim=2), torch.cat([v_shared, v], dim=2)
    return flex_function(q.is_cuda)(q, k, v, block_mask=mask, scale=scale)


@cache
def window_mask(
    grid_size: tuple[int, int], window_size: int, halo: int, shared: int, device: torch.device
) -> BlockMask:
    """The block mask, made once per size, as a model would cache it."""
    H, W = grid_size

    def is_visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        row, column = i // W // window_size * window_size, i % W // window_size * window_size
        y, x = (j - shared) // W, (j - shared) % W
        is_near = (y >= row - halo) & (y < row + window_size + halo)
        is_near = is_near & (x >= column - halo) & (x < column + window_size + halo)
        return (j < shared) | is_near

    return create_block_mask(is_visible, None, None, H * W, shared + H * W, device=device)


KERNEL_TASKS = (
    KernelTask('aft_conv', aft_conv, make_aft_conv),
    KernelTask('performer', performer_attention, make_performer, flex_performer),
    KernelTask('window', window_attention, make_window, flex_window),
)
