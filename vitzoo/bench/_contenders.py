"""What `vitzoo bench kernels` compares: each kernel's op, inputs as a layer makes them, and its form in flex_attention.

flex_attention can express windows by a mask, with the shared keys put in front of the others, and FAVOR+ as two
softmaxes (vitzoo/kernels/favor.py says how). AFT-conv has weights from a table, which are no scores of queries.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from vitzoo.mixers._window import window_attention
from vitzoo.mixers.aft import aft_conv
from vitzoo.mixers.performer import orthogonal_features, performer_attention

WINDOW, HALO, LANDMARKS = 7, 3, 8
KERNEL_SIZE, NUM_FEATURES = 11, 256


@dataclass(frozen=True)
class Case:
    """Arguments of an op: `inputs` with gradients, `others` without, and the gradient of the output."""

    inputs: list[torch.Tensor]
    others: tuple
    grad: torch.Tensor

    def args(self) -> list:
        """All arguments, in order."""
        return [*self.inputs, *self.others]

    def to(self, device: torch.device, dtype: torch.dtype) -> 'Case':
        """The same case elsewhere; what has no gradient keeps its precision."""
        others = tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in self.others)
        return Case([x.to(device, dtype) for x in self.inputs], others, self.grad.to(device, dtype))

    def with_gradients(self) -> 'Case':
        """The same numbers, as leaves of a graph of their own."""
        return replace(self, inputs=[x.detach().requires_grad_() for x in self.inputs])

    def bytes(self, backward: bool) -> int:
        """What must be read and written at least: inputs and output, and going back these and their gradients."""
        size = sum(x.numel() * x.element_size() for x in (*self.inputs, self.grad))
        return 3 * size if backward else size


@dataclass(frozen=True)
class KernelTask:
    """A kernel under the op that chooses it; `make` takes tokens, batch size, heads and width of a head."""

    name: str
    op: Callable[..., torch.Tensor]
    make: Callable[[int, int, int, int], Case]
    flex: Callable[..., torch.Tensor] | None = None


def make_qkv(tokens: int, batch_size: int, heads: int, d: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Queries, keys, values as parts of one tensor, and a gradient, the heads of a token side by side."""
    q, k, v, grad = torch.randn(batch_size, tokens, 4, heads, d).transpose(1, 3).unbind(2)
    return [q, k, v], grad


def make_aft_conv(tokens: int, batch_size: int, heads: int, d: int) -> Case:
    """A kernel of 11 x 11."""
    (q, k, v), grad = make_qkv(tokens, batch_size, heads, d)
    side, kernel = math.isqrt(tokens), torch.randn(heads, KERNEL_SIZE, KERNEL_SIZE)
    return Case([q, k[..., :1], v, kernel], ((side, side),), grad)


def make_performer(tokens: int, batch_size: int, heads: int, d: int) -> Case:
    """256 features."""
    inputs, grad = make_qkv(tokens, batch_size, heads, d)
    return Case(inputs, (orthogonal_features(NUM_FEATURES, d), d**-0.5), grad)


def make_window(tokens: int, batch_size: int, heads: int, d: int) -> Case:
    """Windows of 7 x 7 with a halo of 3, and 8 landmarks, as long-short has them; no bias."""
    inputs, grad = make_qkv(tokens, batch_size, heads, d)
    shared, side = torch.randn(2, batch_size, heads, LANDMARKS, d), math.isqrt(tokens)
    return Case([*inputs, *shared], ((side, side), WINDOW, HALO, d**-0.5), grad)


@cache
def flex(is_cuda: bool) -> Callable[..., torch.Tensor]:
    """flex_attention, compiled where it is to be fast."""
    return torch.compile(flex_attention, dynamic=False) if is_cuda else flex_attention


def ask_for_lse() -> dict:
    """The option of flex_attention that returns its lse, which changed its name in torch 2.9."""
    request = getattr(flex_module, 'AuxRequest', None)
    return dict(return_lse=True) if request is None else dict(return_aux=request(lse=True))


def flex_performer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, features: torch.Tensor, scale: float
) -> torch.Tensor:
    """Every feature attends the tokens, then every token attends the features."""
    B, heads = q.shape[:2]
    weight = (scale**0.5 * features).to(q.dtype).expand(B, heads, -1, -1)
    half_norm = scale / 2 * k.float().square().sum(dim=-1)

    def less_half_norm(score, b, h, f, j):
        return score - half_norm[b, h, j]

    mean, lse = flex(q.is_cuda)(weight, k, v, score_mod=less_half_norm, scale=1.0, **ask_for_lse())
    # newer versions return it among other things
    lse = getattr(lse, 'lse', lse)

    def more_of_what_is_seen(score, b, h, i, f):
        return score + lse[b, h, f]

    return flex(q.is_cuda)(q, weight, mean, score_mod=more_of_what_is_seen, scale=1.0)


def flex_window(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_shared: torch.Tensor, v_shared: torch.Tensor,
    grid_size: tuple[int, int], window_size: int, halo: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    """The shared keys first, and of the others those that a query's window and its halo hold."""
    mask = window_mask(grid_size, window_size, halo, k_shared.shape[2], q.device)
    k, v = torch.cat([k_shared, k], dim=2), torch.cat([v_shared, v], dim=2)
    return flex(q.is_cuda)(q, k, v, block_mask=mask, scale=scale)


@cache
def window_mask(grid_size: tuple[int, int], window_size: int, halo: int, shared: int, device: torch.device):
    """The mask, made once for a size, as a model would keep it."""
    H, W = grid_size

    def sees(b, h, i, j):
        row, column = i // W // window_size * window_size, i % W // window_size * window_size
        y, x = (j - shared) // W, (j - shared) % W
        is_near = (y >= row - halo) & (y < row + window_size + halo)
        is_near = is_near & (x >= column - halo) & (x < column + window_size + halo)
        return (j < shared) | is_near

    return create_block_mask(sees, None, None, H * W, shared + H * W, device=device)


KERNELS = (
    KernelTask('aft_conv', aft_conv, make_aft_conv),
    KernelTask('performer', performer_attention, make_performer, flex_performer),
    KernelTask('window', window_attention, make_window, flex_window),
)
