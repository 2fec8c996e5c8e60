"""Multi-head linear attention (MHLA): linear attention over blocks of the grid, mixed by learned weights.

    out_i = phi(q_i) . sum_b m_{b(i) b} S_b / (phi(q_i) . sum_b m_{b(i) b} z_b + 1e-6) + DWC(v)_i
    S_b = sum_{j in b} phi(k_j) v_j^T,  z_b = sum_{j in b} phi(k_j),  phi(x) = relu(x) + 1e-6

where b(i) is the block of token i. The weights m are shared by the heads and start larger for near blocks. Linear in
the number of tokens: O((N + M^2 head_dim) dim) for M blocks. A grid of any size is divided into the same number of
blocks, whose sides differ by at most one token, the larger first; along a side of fewer tokens than blocks each token
is a block, and the last blocks are empty. Prefix tokens are one more block, which starts at no distance from any other.
The convolution is on the grid, padded with zeros. There is no scale of the scores. A weight below 0 counts as 0, which
keeps the normalizer positive; the official code does not ensure that, and agrees for positive weights. A weight at or
below 0 gets the gradient of a positive one, so that it can grow. Its normalizer is not the paper's:
`normalizer='position'` mixes, in place of z_b, the normalizers phi(q_l) . z_{b(l)} of the tokens l at the same position
in each block; a block that is too small to have that token counts as 0. The official class applies a layer norm of its
own after that of the transformer block, which is left out. MHLA: Restoring Expressivity of Linear Attention via
Token-Level Multi-Head, https://arxiv.org/abs/2601.07832
"""

import math
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._grid_conv import GridConv, grid_conv_naive
from ._kernel_mixer import KernelMixer
from ._numerics import wide_dtype
from ._recompute import recompute_heads
from .base import no_autocast, register_mixer

__all__ = ['MHLA', 'block_mixing_weights', 'mhla_attention', 'mhla_naive']

_EPS = 1e-6
_LOCALITIES = ('linear', 'cos', 'exp', 'local', 'gaussian')


def block_mixing_weights(num_blocks: int, locality: str, num_prefix_tokens: int = 0) -> torch.Tensor:
    """Initial weights between `num_blocks` x `num_blocks` blocks and one of prefix tokens, if any, (M, M).

    `locality` names the function of the distance of the centres of two blocks, in blocks, as in the official code:
    'linear', 'cos', 'exp', 'local' or 'gaussian'. Columns sum to 1, except for 'gaussian'.
    """
    places = torch.cartesian_prod(*[torch.arange(num_blocks, device='cpu', dtype=torch.float32)] * 2)
    distance = torch.linalg.vector_norm(places[:, None] - places, dim=-1)
    relative = distance / distance.max().clamp(min=1)
    weights = {
        'linear': 1 - relative,
        'cos': (math.pi / 4 * relative).cos(),
        'exp': (-distance / 3).exp(),
        'local': (distance <= 1.5).float(),
        'gaussian': (-4.5 * relative.square()).exp(),
    }[locality]
    if num_prefix_tokens:
        weights = F.pad(weights, (0, 1, 0, 1), value=1.0)
    return weights if locality == 'gaussian' else weights / weights.sum(dim=0)


def mhla_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mixing: torch.Tensor,
    conv: GridConv | None,
    grid_size: tuple[int, int],
    num_blocks: int,
    normalizer: str = 'paper',
) -> torch.Tensor:
    """The N x N attention matrix with the weight of each pair; arguments as `mhla_attention`."""
    (H, W), N = grid_size, q.shape[2]

    def cut(length: int) -> list[tuple[int, int]]:
        pieces = torch.arange(length).tensor_split(num_blocks)
        return [(block, place) for block, piece in enumerate(pieces) for place in range(len(piece))]

    # of prefix tokens the block is the last, and no position
    places = [(num_blocks**2, -1)] * (N - H * W)
    places += [(by * num_blocks + bx, y * W + x) for by, y in cut(H) for bx, x in cut(W)]
    block, position = torch.tensor(places, device=q.device).T
    q, k = q.relu() + _EPS, k.relu() + _EPS
    m = _without_negative(mixing)[block][:, block]
    attn = m * (q @ k.mT)
    total = attn.sum(dim=-1, keepdim=True)
    if normalizer == 'position':
        same_block = (block[:, None] == block).to(q.dtype)
        same_position = (position[:, None] == position).to(q.dtype)
        on_grid = (position >= 0).to(q.dtype)
        own = (same_block * (q @ k.mT)).sum(dim=-1, keepdim=True)  # (B, heads, N, 1)
        to_prefix = (attn * (1 - on_grid)).sum(dim=-1, keepdim=True)
        by_position = (m * same_position * on_grid) @ own + to_prefix
        total = torch.where(on_grid[:, None] > 0, by_position, total)
    out = attn @ v / (total + _EPS)
    return out if conv is None else out + grid_conv_naive(conv, v, grid_size)


def mhla_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mixing: torch.Tensor,
    conv: GridConv | None,
    grid_size: tuple[int, int],
    num_blocks: int,
    normalizer: str = 'paper',
) -> torch.Tensor:
    """q, k, v (B, heads, N, d) -> (B, heads, N, d); the last H*W tokens are the grid.

    `mixing` (M, M) are the weights m for M = `num_blocks`^2 blocks in raster order, then for the prefix tokens, if any.
    Features and sums are in float32 or wider.
    """
    attend = partial(_attend, grid_size=grid_size, num_blocks=num_blocks, normalizer=normalizer)
    # features; queries, keys and values in blocks; sums in blocks and on the grid
    num_elements = 10 * q.shape[2] * q.shape[3]
    out = recompute_heads(attend, (q, k, v, mixing.expand(1, 1, -1, -1)), num_elements)
    return out.to(v.dtype) if conv is None else (out + conv(v, grid_size)).to(v.dtype)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mixing: torch.Tensor,
    grid_size: tuple[int, int],
    num_blocks: int,
    normalizer: str,
) -> torch.Tensor:
    """The weighted means, in float32 or wider, for `mixing` (1, 1, M, M)."""
    with no_autocast(q):
        dtype = wide_dtype(q)
        q, k = q.to(dtype).relu() + _EPS, k.to(dtype).relu() + _EPS
        # the normalizer is one more channel
        values = F.pad(v.to(dtype), (0, 1), value=1.0)  # (B, heads, N, d + 1)
        P = q.shape[2] - grid_size[0] * grid_size[1]
        mixing = _without_negative(mixing[0, 0].to(dtype))
        q_blocks, k_blocks, v_blocks = (_to_blocks(x[:, :, P:], grid_size, num_blocks) for x in (q, k, values))
        sums = k_blocks.mT @ v_blocks  # (B, heads, M, d, d + 1)
        if P:
            sums = torch.cat([sums, (k[:, :, :P].mT @ values[:, :, :P]).unsqueeze(2)], dim=2)
        mixed = (mixing @ sums.flatten(3)).unflatten(3, sums.shape[3:])
        T = q_blocks.shape[2]
        out = q_blocks @ mixed[:, :, :T]  # (B, heads, T, h * w, d + 1)
        if normalizer == 'position':
            own = (q_blocks @ sums[:, :, :T, :, -1:]).squeeze(-1)  # (B, heads, T, h * w)
            total = mixing[:T, :T] @ own
            if P:
                to_prefix = q_blocks @ sums[:, :, T:, :, -1:]
                total = total + mixing[:T, T:] * to_prefix.squeeze(-1)
            out = torch.cat([out[..., :-1], total.unsqueeze(-1)], dim=-1)
        out = _from_blocks(out, grid_size, num_blocks)
        if P:
            out = torch.cat([q[:, :, :P] @ mixed[:, :, T], out], dim=2)
        # the gradient of a quotient needs two more tensors
        return out[..., :-1] * (out[..., -1:] + _EPS).reciprocal()


def _without_negative(mixing: torch.Tensor) -> torch.Tensor:
    """Weights with 0 in place of those below, with the gradient of the weights themselves, so that these can grow."""
    return mixing - mixing.detach().clamp(max=0)


def _to_blocks(x: torch.Tensor, grid_size: tuple[int, int], num_blocks: int) -> torch.Tensor:
    """Grid tokens (B, heads, H*W, d) -> blocks (B, heads, num_blocks^2, h*w, d), the smaller ones padded with zeros.

    Unlike those who call `tile`, the sums of blocks depend on the padding.
    """
    x = _cut(_cut(x.unflatten(2, grid_size), 3, num_blocks), 2, num_blocks)  # (B, heads, rows, h, columns, w, d)
    return x.transpose(3, 4).flatten(4, 5).flatten(2, 3)


def _from_blocks(x: torch.Tensor, grid_size: tuple[int, int], num_blocks: int) -> torch.Tensor:
    """Blocks (B, heads, num_blocks^2, h*w, d) -> grid tokens (B, heads, H*W, d), the inverse of `_to_blocks`."""
    H, W = grid_size
    x = x.unflatten(2, (num_blocks, num_blocks)).unflatten(4, (-(-H // num_blocks), -(-W // num_blocks)))
    x = x.transpose(3, 4)  # (B, heads, rows, h, columns, w, d)
    return _join(_join(x, 2, H), 3, W).flatten(2, 3)


def _cut(x: torch.Tensor, dim: int, num_pieces: int) -> torch.Tensor:
    """Cut a dimension in pieces, the larger first: (..., length, ...) -> (..., pieces, length of the first, ...).

    The others are padded with zeros.
    """
    # divmod refuses the sizes of torch.jit.trace
    size, larger = x.shape[dim] // num_pieces, x.shape[dim] % num_pieces
    if larger == 0:
        return x.unflatten(dim, (num_pieces, size))
    head, tail = x.split([larger * (size + 1), (num_pieces - larger) * size], dim=dim)
    head = head.unflatten(dim, (larger, size + 1))
    tail = tail.unflatten(dim, (num_pieces - larger, size))
    return torch.cat([head, F.pad(tail, (0, 0) * (x.ndim - 1 - dim) + (0, 1))], dim=dim)


def _join(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """The inverse of `_cut`: (..., pieces, length of the first, ...) -> (..., length, ...)."""
    num_pieces, size = x.shape[dim : dim + 2]
    larger = length % num_pieces
    if larger == 0:
        return x.flatten(dim, dim + 1)
    head, tail = x.split([larger, num_pieces - larger], dim=dim)
    tail = tail.narrow(dim + 1, 0, size - 1)
    return torch.cat([head.flatten(dim, dim + 1), tail.flatten(dim, dim + 1)], dim=dim)


class _AllHeadsRMSNorm(nn.Module):
    """Root mean square norm of (B, heads, N, d) over all heads, with a weight per channel."""

    def __init__(
        self, num_heads: int, head_dim: int, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads, 1, head_dim, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with no_autocast(x):
            dtype = wide_dtype(x)
            x = x.to(dtype)
            mean = x.square().mean(dim=(1, 3), keepdim=True)
            return x * (mean + torch.finfo(torch.float32).eps).rsqrt() * self.weight.to(dtype)


@register_mixer('mhla')
class MHLA(KernelMixer):
    """Multi-head linear attention with `num_blocks` x `num_blocks` blocks.

    `locality` is 'linear', 'cos', 'exp', 'local' or 'gaussian', the initial fall of the weights with the distance of
    the blocks, and `normalizer` 'paper' or 'position', that of the official code. `rms_norm` normalizes queries and
    keys over all heads, as the official class can; `conv_size` is the side of the convolution, or 0 for none.
    """

    start_arguments = {'center_keys': True}
    added_terms = ('conv.',)
    op = staticmethod(mhla_attention)
    op_naive = staticmethod(mhla_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_blocks: int = 4,
        locality: str = 'linear',
        normalizer: str = 'paper',
        rms_norm: bool = False,
        conv_size: int = 5,
        qk_norm: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, qk_norm=qk_norm, device=device, dtype=dtype, **kwargs)
        if num_blocks < 1:
            raise ValueError(f'num_blocks of mhla must be at least 1, not {num_blocks}.')
        if locality not in _LOCALITIES:
            raise ValueError(f'locality of mhla is one of {", ".join(_LOCALITIES)}, not {locality!r}.')
        if normalizer not in ('paper', 'position'):
            raise ValueError(f"normalizer of mhla is 'paper' or 'position', not {normalizer!r}.")
        if rms_norm and qk_norm:
            raise ValueError('rms_norm and qk_norm of mhla both normalize queries and keys; choose one.')
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.num_blocks = num_blocks
        self.normalizer = normalizer
        self.rms_norm = rms_norm
        if rms_norm:
            self.q_norm, self.k_norm = (_AllHeadsRMSNorm(num_heads, self.head_dim, **dd) for _ in range(2))
        mixing = block_mixing_weights(num_blocks, locality, self.num_prefix_tokens)
        self.mixing = nn.Parameter(mixing.to(self.proj.weight))
        self.conv = GridConv(dim, conv_size, **dd) if conv_size else None

    def norm_qk(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.q_norm(q), self.k_norm(k)) if self.rms_norm else super().norm_qk(q, k)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v, self.mixing, self.conv, grid_size, self.num_blocks, self.normalizer)

    def no_weight_decay(self) -> set[str]:
        # timm recognizes weights of norms by their single dimension
        norms = {'q_norm.weight', 'k_norm.weight'} if self.rms_norm else set()
        return super().no_weight_decay() | {'mixing'} | norms
