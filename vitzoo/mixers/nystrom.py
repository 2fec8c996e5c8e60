"""Nystromformer: softmax attention through landmarks and an iterative pseudo-inverse.

    out = softmax(q k~^T) pinv(softmax(q~ k~^T)) softmax(q~ k^T) v

q~ and k~ are m landmarks, means of neighbouring tokens, and pinv iterates

    Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4

Linear in the number of tokens: O(N m dim). With a landmark for every token and a converged inverse it is softmax
attention. The landmarks are

* segment: the means of m consecutive segments of the tokens, as in the paper; prefix tokens are ordinary tokens;
* grid: the means of h x w cells of the grid, h w <= m, as nearly square as possible, and each prefix token. On an image
  a segment is a strip, part of a row or several rows; a cell is a neighbourhood in both dimensions.

The first Z is A^T divided by the largest sums of a row and of a column of |A|, those of a sample and head; the authors'
code for long texts takes the largest of the whole batch by default, so that a sample depends on the others.

Lengths of segments, and sides of cells, differ by at most one, the shorter first, so there is no padding. A
convolution of k tokens adds the term sum_o w_o v_(i+o), |o| <= k // 2, to the output: one kernel per head along
the sequence of all tokens, the prefix tokens first and then the grid in raster order, with zeros beyond its ends.
Nystromformer, https://arxiv.org/abs/2102.03902, equation 13 and section "Moore-Penrose inverse computation"
"""

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._numerics import wide_dtype
from ._wide_layers import WideConv2d
from .base import QKVMixer, no_autocast, register_mixer
from .softmax import softmax_attention

__all__ = [
    'Nystrom', 'grid_means', 'iterative_pinv', 'landmark_grid', 'nystrom_attention', 'nystrom_naive', 'segment_means',
]  # fmt: skip


def segment_means(x: torch.Tensor, num_segments: int, dim: int = 2) -> torch.Tensor:
    """Means of consecutive segments along a dimension, the shorter segments first: (..., N, ...) -> (..., m, ...).

    The order is that of the authors' vision code, ImageNet/T2T-ViT/models/token_nystromformer.py of
    https://github.com/mlpen/Nystromformer.
    """
    # divmod refuses the sizes of torch.jit.trace
    size, longer = x.shape[dim] // num_segments, x.shape[dim] % num_segments
    shorter = num_segments - longer
    head, tail = x.split([shorter * size, longer * (size + 1)], dim=dim)
    head = head.unflatten(dim, (shorter, size)).mean(dim=dim + 1)
    tail = tail.unflatten(dim, (longer, size + 1)).mean(dim=dim + 1)
    return torch.cat([head, tail], dim=dim)


def grid_means(x: torch.Tensor, grid_size: tuple[int, int], num_landmarks: int) -> torch.Tensor:
    """Prefix tokens and the means of cells: (B, heads, P + H*W, d) -> (B, heads, P + h*w, d)."""
    P = x.shape[2] - grid_size[0] * grid_size[1]
    h, w = landmark_grid(grid_size, num_landmarks)
    prefix, grid = x[:, :, :P], x[:, :, P:].unflatten(2, grid_size)
    grid = segment_means(segment_means(grid, h, dim=2), w, dim=3)
    return torch.cat([prefix, grid.flatten(2, 3)], dim=2)


def _landmark_means(x: torch.Tensor, num_landmarks: int, grid_size: tuple[int, int] | None) -> torch.Tensor:
    """Means of cells if `grid_size` is given, else of segments."""
    if grid_size is None:
        return segment_means(x, min(num_landmarks, x.shape[2]))
    return grid_means(x, grid_size, num_landmarks)


def landmark_grid(grid_size: tuple[int, int], num_landmarks: int) -> tuple[int, int]:
    """Rows and columns of cells, at most `num_landmarks` cells in all, each as nearly square as possible."""
    H, W = grid_size
    best, best_ratio = (1, 1), float('inf')
    for h in range(1, min(H, num_landmarks) + 1):
        w = min(W, num_landmarks // h)
        ratio = max(H * w, W * h) / min(H * w, W * h)
        if ratio < best_ratio:
            best, best_ratio = (h, w), ratio
    return best


def iterative_pinv(a: torch.Tensor, num_iterations: int) -> torch.Tensor:
    """Moore-Penrose inverse of row-stochastic matrices (..., m, m), each initialised from its own norms."""
    norms = a.sum(dim=-2).amax(dim=-1) * a.sum(dim=-1).amax(dim=-1)
    z = a.transpose(-2, -1) / norms[..., None, None]
    shape, a, z = a.shape, a.flatten(0, -3), z.flatten(0, -3)
    eye = torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)
    for _ in range(num_iterations):
        az = a @ z
        inner = torch.baddbmm(15 * eye, az, 7 * eye - az, alpha=-1)
        z = z @ torch.baddbmm(13 / 4 * eye, az, inner, alpha=-1 / 4)
    return z.view(shape)


def nystrom_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    num_landmarks: int,
    num_iterations: int,
    scale: float,
    grid_size: tuple[int, int] | None = None,
    conv: nn.Conv2d | None = None,
) -> torch.Tensor:
    """The whole N x N approximation, then the values; arguments as `nystrom_attention`."""

    def cut(length: int, pieces: int) -> tuple[torch.Tensor, ...]:
        return torch.arange(length).split([(length + i) // pieces for i in range(pieces)])

    N = q.shape[2]
    if grid_size is None:
        groups = cut(N, min(num_landmarks, N))
    else:
        H, W = grid_size
        prefix = torch.arange(N - H * W).unsqueeze(1)

        def aspect_ratio(cells: tuple[int, int]) -> float:
            sides = H * cells[1], W * cells[0]
            return max(sides) / min(sides)

        shapes = [(h, min(W, num_landmarks // h)) for h in range(1, min(H, num_landmarks) + 1)]
        h, w = min(shapes, key=aspect_ratio)
        rows, columns = cut(H, h), cut(W, w)
        cells = [(row.unsqueeze(1) * W + column).flatten() for row in rows for column in columns]
        groups = [*prefix, *(len(prefix) + cell for cell in cells)]
    q_land, k_land = (torch.stack([x[:, :, group].mean(dim=2) for group in groups], dim=2) for x in (q, k))
    left = (scale * q @ k_land.mT).softmax(dim=-1)
    middle = (scale * q_land @ k_land.mT).softmax(dim=-1)
    right = (scale * q_land @ k.mT).softmax(dim=-1)
    z = middle.mT / (middle.sum(dim=-2).amax(dim=-1) * middle.sum(dim=-1).amax(dim=-1))[..., None, None]
    eye = torch.eye(len(groups), dtype=q.dtype, device=q.device)
    for _ in range(num_iterations):
        az = middle @ z
        z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
    out = left @ z @ right @ v
    if conv is None:
        return out
    size = conv.kernel_size[0]
    padded = F.pad(v, (0, 0, size // 2, size // 2))
    return out + sum(conv.weight[:, :, i] * padded[:, :, i : i + N] for i in range(size))


def nystrom_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    num_landmarks: int,
    num_iterations: int,
    scale: float,
    grid_size: tuple[int, int] | None = None,
    conv: nn.Conv2d | None = None,
) -> torch.Tensor:
    """q, k, v (B, heads, N, d) -> (B, heads, N, d), in float32 or wider, because the inverse needs the precision.

    With `grid_size` the last H*W tokens are the grid and the landmarks are its cells; without, segments of all tokens.
    `conv` is a depthwise convolution over the tokens, with heads as channels.
    """
    with no_autocast(q):
        dtype = wide_dtype(q)
        q, k, v_wide = q.to(dtype), k.to(dtype), v.to(dtype)
        q_land, k_land = (_landmark_means(x, num_landmarks, grid_size) for x in (q, k))
        middle = (scale * q_land @ k_land.mT).softmax(dim=-1)
        context = softmax_attention(q_land, k, v_wide, scale)  # (B, heads, m, d)
        context = iterative_pinv(middle, num_iterations) @ context
        out = softmax_attention(q, k_land, context, scale)
        if conv is not None:
            out = out + conv(v_wide)
        return out.to(v.dtype)


@register_mixer('nystrom')
class Nystrom(QKVMixer):
    """Nystrom attention with `num_landmarks` landmarks and `num_iterations` steps of the pseudo-inverse.

    `landmarks` is 'segment' or 'grid'; the prefix tokens of 'grid' are additional to `num_landmarks`.
    `conv_kernel_size` adds the convolution, of 35 tokens in the authors' models of long sequences and absent from those
    of ImageNet; the layer then has no attention maps. Warns if every token is a landmark.
    """

    approximates_softmax = True
    token_weights = True
    start_arguments = {'conv_kernel_size': 33}
    added_terms = ('conv.',)
    op = staticmethod(nystrom_attention)
    op_naive = staticmethod(nystrom_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_landmarks: int = 64,
        num_iterations: int = 6,
        landmarks: str = 'segment',
        conv_kernel_size: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if num_landmarks < 1 or num_iterations < 1:
            raise ValueError(
                f'nystrom needs num_landmarks and num_iterations of at least 1, '
                f'not {num_landmarks} and {num_iterations}.'
            )
        if landmarks not in ('segment', 'grid'):
            raise ValueError(f"landmarks of nystrom is 'segment' or 'grid', not {landmarks!r}.")
        if conv_kernel_size is not None and (conv_kernel_size < 1 or conv_kernel_size % 2 == 0):
            raise ValueError(
                f'conv_kernel_size of nystrom must be odd and at least 1, or None, not {conv_kernel_size}.'
            )
        self.num_landmarks = num_landmarks
        self.num_iterations = num_iterations
        self.on_grid = landmarks == 'grid'
        self.conv = None
        if conv_kernel_size is not None:
            size, padding = (conv_kernel_size, 1), (conv_kernel_size // 2, 0)
            self.conv = WideConv2d(
                num_heads, num_heads, size, padding=padding, groups=num_heads, bias=False, device=device, dtype=dtype
            )
            # the convolution is not a weighted mean of the values
            self.token_weights = False
        num_tokens = self.grid_size[0] * self.grid_size[1] + (0 if self.on_grid else self.num_prefix_tokens)
        if num_landmarks >= num_tokens:
            warnings.warn(
                f'nystrom with num_landmarks={num_landmarks} makes each of {num_tokens} tokens a landmark, which is '
                f'softmax attention at a higher cost; use fewer landmarks or the mixer softmax.',
                stacklevel=2,
            )

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        on_grid = grid_size if self.on_grid else None
        return self.op(q, k, v, self.num_landmarks, self.num_iterations, self.scale, on_grid, self.conv)

    def softmax_target(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Softmax attention, plus the convolution of the values if there is one."""
        target = super().softmax_target(q, k, v)
        return target if self.conv is None else target + self.conv(v)

    def health(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]
    ) -> dict[str, torch.Tensor]:
        """Adds `pinv_residual`, |A Z A - A| / |A| of the landmarks' matrix A and its inverse Z, averaged over heads."""
        signs = super().health(q, k, v, grid_size)
        with no_autocast(q):
            dtype = wide_dtype(q)
            on_grid = grid_size if self.on_grid else None
            q_land, k_land = (_landmark_means(x.to(dtype), self.num_landmarks, on_grid) for x in (q, k))
            a = (self.scale * q_land @ k_land.mT).softmax(dim=-1)
            residual = a @ iterative_pinv(a, self.num_iterations) @ a - a
            share = torch.linalg.matrix_norm(residual) / torch.linalg.matrix_norm(a)
        return {**signs, 'pinv_residual': share.mean(dim=1)}
