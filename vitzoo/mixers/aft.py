"""Attention Free Transformer: every token averages all values, channel by channel, with weights exp(k + position bias).

    out_i = sigmoid(q_i) * sum_j exp(k_j + w_ij) v_j / sum_j exp(k_j + w_ij)

* full: w_ij = u_i . u'_j, learned factors per token; O(N^2 dim)
* local: w_ij = u_i . u'_j as in full where |dy| < s and |dx| < s on the grid, and 0 elsewhere; O(N s^2 dim)
* simple: w = 0; O(N dim)
* conv: one key per head and token, w_ij from a k x k kernel per head where it covers j around i and 0 elsewhere; O(N
  k^2 dim)

The paper's 1-D distance |i - j| < s of AFT-local becomes a distance on the 2-D grid. In full and local, prefix tokens
have their own factors and no position, so they are within the window of every token; in simple and conv their w is 0.
An Attention Free Transformer, equations 2, 3, 5 and section 3, https://arxiv.org/abs/2105.14103
"""

from functools import partial
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from vitzoo.kernels import use_kernel

from ._depthwise_conv import depthwise_conv
from ._numerics import LOG2_E, is_compiled, is_traced, needs_gradient, wide_dtype
from ._recompute import apply_to_heads, recompute_heads
from ._window import fit_halo, fit_window, halo_mask, tile, tile_with_halo, untile
from .base import QKVMixer, no_autocast, register_mixer

__all__ = [
    'AFTConv', 'AFTFull', 'AFTLocal', 'AFTSimple', 'aft_conv', 'aft_conv_naive', 'aft_full', 'aft_full_naive',
    'aft_local', 'aft_local_naive', 'aft_simple', 'aft_simple_naive',
]  # fmt: skip

# the largest exponent of a weight of aft_conv, so that weights far below it do not underflow in float32
_HEADROOM = 40.0
# the fewest tokens and channels of a head for which the Triton kernel of aft_conv is the default in bfloat16: fewer
# tokens are faster without it, and heads that it pads to 16 channels were not timed, as float16 was not
_LEAST_TOKENS, _LEAST_CHANNELS = 1024, 16
# the smallest exponent in a kernel of aft_conv with which sums over all tokens lose at most two decimal digits
_LEAST_BIAS = -3.0


def aft_full_naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The formula for every pair and channel; arguments as `aft_full`."""
    weights = (k.unsqueeze(2) + bias[..., None]).exp()  # (B, heads, N, N, d)
    return q.sigmoid() * (weights * v.unsqueeze(2)).sum(dim=3) / weights.sum(dim=3)


def aft_simple_naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The formula without positions; arguments as `aft_simple`."""
    return aft_full_naive(q, k, v, k.new_zeros(k.shape[2], k.shape[2]))


def aft_local_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    u_query: torch.Tensor,
    u_key: torch.Tensor,
    grid_size: tuple[int, int],
    window_size: int,
) -> torch.Tensor:
    """AFT-full with its bias set to 0 between grid tokens outside the window; arguments as `aft_local`."""
    P = q.shape[2] - grid_size[0] * grid_size[1]
    y, x = (place.flatten() for place in torch.meshgrid(*map(torch.arange, grid_size), indexing='ij'))
    far = ((y[:, None] - y).abs() >= window_size) | ((x[:, None] - x).abs() >= window_size)
    bias = u_query @ u_key.T
    bias = bias.masked_fill(F.pad(far, (P, 0, P, 0)), 0.0)
    return aft_full_naive(q, k, v, bias)


def aft_conv_naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: torch.Tensor, grid_size: tuple[int, int]
) -> torch.Tensor:
    """AFT-full with the bias of the kernel written out; arguments as `aft_conv`."""
    N, size = q.shape[2], kernel.shape[-1]
    P = N - grid_size[0] * grid_size[1]
    y, x = (place.flatten() for place in torch.meshgrid(*map(torch.arange, grid_size), indexing='ij'))
    # offset of each key from each query, counted from the corner of the kernel
    dy, dx = y - y[:, None] + size // 2, x - x[:, None] + size // 2
    i, j = ((dy >= 0) & (dy < size) & (dx >= 0) & (dx < size)).nonzero(as_tuple=True)
    bias = kernel.new_zeros(kernel.shape[0], N, N)
    bias[:, P + i, P + j] = kernel[:, dy[i, j], dx[i, j]]
    return aft_full_naive(q, k, v, bias)


def aft_full(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """q, v (B, heads, N, d), k (B, heads, N, d or 1), bias (N, N) or (heads, N, N) -> (B, heads, N, d)."""
    with no_autocast(q):
        # a factor per row cancels in the ratio and keeps exp in range
        dtype = wide_dtype(v)
        weights = _exp(bias.to(dtype), dim=-1)
        if bias.ndim == 3:
            return _gated_ratio(q, _weighted_sum(weights, _terms(k, v)))
        if not weights.requires_grad:
            # a product for each sample, because its terms need no copy; its gradient would have one of N x N for each
            keys = _key_weights(k.transpose(1, 2), v, dim=1)  # (B, N, heads, d or 1)
            terms = keys * v.transpose(1, 2).to(keys.dtype), keys
            sums = [(weights.expand(x.shape[0], -1, -1) @ x.flatten(2)).view_as(x) for x in terms]
            return q.sigmoid() * (sums[0] / sums[1]).transpose(1, 2).to(q.dtype)
        # one matrix product for all samples and heads, with the tokens first in memory
        terms = _terms(k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3), dim=0)
        return _gated_ratio(q, (weights @ terms.flatten(1)).view_as(terms).permute(1, 2, 0, 3))


def aft_simple(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q, v (B, heads, N, d), k (B, heads, N, d or 1) -> (B, heads, N, d)."""
    with no_autocast(q):
        # (B, N, heads, d), as in memory
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if k.device.type != 'cpu' or _is_inference_on_cpu(k):
            # a softmax over tokens copies the keys on a CPU, and keeps most of a GPU idle
            weights = _key_weights(k, v, dim=1)
            mean = (weights * v.to(weights.dtype)).sum(dim=1) / weights.sum(dim=1)
        else:
            weights = k.softmax(dim=1, dtype=wide_dtype(v))
            mean = (weights * v.to(weights.dtype)).sum(dim=1)
        return q.sigmoid() * mean.unsqueeze(2).to(q.dtype)


def aft_local(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    u_query: torch.Tensor,
    u_key: torch.Tensor,
    grid_size: tuple[int, int],
    window_size: int,
) -> torch.Tensor:
    """q, k, v (B, heads, P + H*W, d) and factors (P + H*W, rank) of the bias -> (B, heads, P + H*W, d)."""
    P, d = q.shape[2] - grid_size[0] * grid_size[1], q.shape[3]
    size, halo = _tile_and_halo(grid_size, window_size)
    with no_autocast(q):
        dtype = wide_dtype(v)
        u_query, u_key = u_query.to(dtype), u_key.to(dtype)
        window = _window_bias(u_query[P:], u_key[P:], grid_size, window_size)  # (T, s, M)
        to_prefix = u_query[P:] @ u_key[:P].T  # (H*W, P)
        # a factor per row cancels in the ratio; the largest of the row, the 0 of the far tokens included, keeps exp in
        # range for any w
        largest = untile(window.detach().amax(dim=-1, keepdim=True)[None, None], grid_size, size)[0, 0]
        largest = torch.cat([largest, to_prefix.detach()], dim=1).amax(dim=1, keepdim=True)  # (H*W, 1)
        has_far = _sum_far(window.new_ones(1, 1, len(largest), 1), grid_size, window_size)[0, 0] > 0
        shift = torch.where(has_far, largest.clamp(min=0), largest)
        near = (window - tile(shift[None, None], grid_size, size)[0, 0]).exp()
        far = torch.where(has_far, -shift, 0.0).exp()
        prefix = (to_prefix - shift).exp()
        from_prefix = u_query[:P] @ u_key.T  # (P, P + H*W)
        from_prefix = _exp(from_prefix, dim=-1)

        def mix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            terms = _terms(k, v)
            prefix_keys, grid = terms.split([P, terms.shape[2] - P], dim=2)
            out = untile(near @ tile_with_halo(grid, grid_size, size, halo), grid_size, size)
            out = out + far * _sum_far(grid, grid_size, window_size) + _weighted_sum(prefix, prefix_keys)
            return _gated_ratio(q, torch.cat([_weighted_sum(from_prefix, terms), out], dim=2))

        # the terms with their halos, and about ten sums of them
        num_elements = 2 * d * (near.shape[0] * near.shape[2] + 10 * len(largest))
        return apply_to_heads(mix, (q, k, v), num_elements)


def aft_conv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: torch.Tensor, grid_size: tuple[int, int]
) -> torch.Tensor:
    """q, v (B, heads, P + H*W, d), k (B, heads, P + H*W, 1), kernel (heads, size, size) -> (B, heads, P + H*W, d)."""
    is_large = q.shape[2] >= _LEAST_TOKENS and q.shape[3] >= _LEAST_CHANNELS
    if use_kernel(q, is_faster=is_large and q.dtype == torch.bfloat16):
        from vitzoo.kernels import aft_conv as kernels

        if kernels.fits(q, k, v):
            return kernels.aft_conv_triton(q, k, v, kernel, grid_size)
    # terms, their image, three sums of them and the ratio
    num_elements = 6 * v.shape[2] * (v.shape[3] + 1)
    return recompute_heads(partial(_convolve, grid_size=grid_size), (q, k, v, kernel.unsqueeze(0)), num_elements)


def _convolve(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: torch.Tensor, grid_size: tuple[int, int]
) -> torch.Tensor:
    """AFT-conv with a kernel (1, heads, size, size)."""
    P = q.shape[2] - grid_size[0] * grid_size[1]
    with no_autocast(q):
        # all heads of a token next to each other, the order in memory
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        terms = _terms(k, v, dim=1)  # (B, P + H*W, heads, d + 1)
        kernel = kernel[0].to(terms.dtype)
        # a factor per head cancels in the ratio
        shift = kernel.detach().amax(dim=(1, 2), keepdim=True).clamp(min=0) - _HEADROOM
        factor, filters = (-shift).exp(), (kernel - shift).exp()
        sums_all = _sums_all_tokens(kernel)
        if sums_all:
            filters = filters - factor
        factor, filters = (x.repeat_interleave(terms.shape[3], dim=0) for x in (factor.flatten(), filters))
        prefix, grid = terms.flatten(2).split([P, terms.shape[1] - P], dim=1)
        # the channels stay last in memory, so that a CPU copies nothing
        image = grid.unflatten(1, grid_size).permute(0, 3, 1, 2)  # (B, heads * (d + 1), H, W)
        near = depthwise_conv(image, filters.unsqueeze(1))
        near = near.permute(0, 2, 3, 1).flatten(1, 2)
        prefix = prefix.sum(dim=1, keepdim=True)
        if sums_all or P:
            everything = factor * (grid.sum(dim=1, keepdim=True) + prefix)
        if sums_all:
            out = near + everything
        else:
            out = near + factor * (_sum_far(grid, grid_size, kernel.shape[-1] // 2 + 1) + prefix)
        if P:
            out = torch.cat([everything.expand(-1, P, -1), out], dim=1)
        return _gated_ratio(q, out.view_as(terms)).transpose(1, 2)


def _sums_all_tokens(kernel: torch.Tensor) -> bool:
    """True where every token has a weight of 1, and those near it exp(w) - 1 more, as in the authors' form.

    This needs no sums of the far tokens, but cancels where exp(w) is small. On a GPU, reading w would wait for it.
    """
    return kernel.device.type == 'cpu' and not is_traced() and bool(kernel.detach().amin() >= _LEAST_BIAS)


def _key_weights(k: torch.Tensor, v: torch.Tensor, dim: int = 2) -> torch.Tensor:
    """exp(k) in float32 or wider.

    Keys are shifted by their maximum over the tokens, per sample, head and channel; the factor cancels in the ratio.
    The tokens are in dimension `dim`.
    """
    return _exp(k.to(wide_dtype(v)), dim)


def _exp(x: torch.Tensor, dim: int) -> torch.Tensor:
    """exp(x - m) with the maximum m along a dimension, which has no gradient."""
    shifted = x - x.detach().amax(dim=dim, keepdim=True)
    return shifted.mul_(LOG2_E).exp2_() if _is_inference_on_cpu(x) else shifted.exp_()


def _is_inference_on_cpu(x: torch.Tensor) -> bool:
    """True where exponentials are fastest to base 2; their gradient and other devices would need further passes."""
    return x.device.type == 'cpu' and not needs_gradient(x) and not is_compiled()


def _terms(k: torch.Tensor, v: torch.Tensor, dim: int = 2) -> torch.Tensor:
    """Terms exp(k) * v of the numerator and exp(k) of the denominator, concatenated: (B, heads, N, d + d or d + 1)."""
    weights = _key_weights(k, v, dim)
    return torch.cat([weights * v.to(weights.dtype), weights], dim=-1)


def _weighted_sum(weights: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """Weights (N, M) or (heads, N, M) times terms (B, heads, M, c) -> (B, heads, N, c)."""
    # with weights (N, M) on the right this is one matrix product for all samples and heads
    return (terms.mT @ weights.mT).mT


def _gated_ratio(q: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """sigmoid(q) * numerator / denominator, which are concatenated in `sums`."""
    d = q.shape[-1]
    numerator, denominator = sums[..., :d], sums[..., d:]
    return q.sigmoid() * (numerator / denominator).to(q.dtype)


def _window_bias(
    u_query: torch.Tensor, u_key: torch.Tensor, grid_size: tuple[int, int], window_size: int
) -> torch.Tensor:
    """Bias between the s queries of each tile and the M keys around it, -inf outside the window: (T, s, M)."""
    window, halo = _tile_and_halo(grid_size, window_size)
    bias = tile(u_query[None, None], grid_size, window) @ tile_with_halo(u_key[None, None], grid_size, window, halo).mT
    near_rows, near_columns = (
        (torch.arange(w, device=bias.device)[:, None] - torch.arange(-h, w + h, device=bias.device)).abs() < window_size
        for w, h in zip(window, halo)
    )
    near = (near_rows[:, None, :, None] & near_columns[None, :, None, :]).flatten(2).flatten(0, 1)  # (s, M)
    keys = halo_mask(grid_size, window, halo, bias.device)
    return bias[0, 0].masked_fill(~(near & keys.unsqueeze(1)), float('-inf'))


def _sum_far(x: torch.Tensor, grid_size: tuple[int, int], window_size: int) -> torch.Tensor:
    """For each token of (..., H*W, c), the sum of those outside its window.

    Adds the rows above and below and the ends of the rows between. The total minus the window would cancel if the
    window has most of the sum.
    """
    x = x.unflatten(-2, grid_size)
    ends = F.pad(_sum_beyond(x, -2, window_size), (0, 0, 0, 0, window_size - 1, window_size - 1))
    between = ends.unfold(-3, 2 * window_size - 1, 1).sum(dim=-1)
    return (_sum_beyond(x.sum(dim=-2), -2, window_size).unsqueeze(-2) + between).flatten(-3, -2)


def _sum_beyond(x: torch.Tensor, dim: int, distance: int) -> torch.Tensor:
    """For each position along `dim`, the sum of those at least `distance` before or after it."""
    length = x.shape[dim]
    if distance >= length:
        return torch.zeros_like(x)
    none = torch.zeros_like(x.narrow(dim, 0, distance))
    before = x.narrow(dim, 0, length - distance).cumsum(dim)
    after = x.narrow(dim, distance, length - distance).flip(dim).cumsum(dim).flip(dim)
    return torch.cat([none, before], dim=dim) + torch.cat([after, none], dim=dim)


def _tile_and_halo(grid_size: tuple[int, int], window_size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Size of the tiles, that of the window, and the halo that its offsets below `window_size` need."""
    return fit_window(grid_size, window_size), fit_halo(grid_size, window_size, window_size - 1)


class _FactoredBias(QKVMixer):
    """AFT with the position bias w_ij = u_i . u'_j of equation 3, factors of rank `bias_dim` per token."""

    grid_bound = True
    # exp(k) weighs the values and q gates them; they are never multiplied
    has_rope = False
    # of the factors u of the bias, one of two is enough
    added_terms = ('u_query',)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        bias_dim: int = 128,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if bias_dim < 1:
            raise ValueError(f'bias_dim must be at least 1, not {bias_dim}.')
        num_tokens = self.num_prefix_tokens + self.grid_size[0] * self.grid_size[1]
        self.u_query = nn.Parameter(torch.empty(num_tokens, bias_dim, device=device, dtype=dtype))
        self.u_key = nn.Parameter(torch.empty(num_tokens, bias_dim, device=device, dtype=dtype))
        nn.init.normal_(self.u_query, std=0.01)
        nn.init.normal_(self.u_key, std=0.01)

    def set_input_size(self, grid_size: tuple[int, int]) -> None:
        old_size = self.grid_size
        super().set_input_size(grid_size)
        for name in ('u_query', 'u_key'):
            old = getattr(self, name)
            new = resample_abs_pos_embed(
                old.data.unsqueeze(0), self.grid_size, old_size, num_prefix_tokens=self.num_prefix_tokens
            )
            setattr(self, name, nn.Parameter(new.squeeze(0), requires_grad=old.requires_grad))

    def no_weight_decay(self) -> set[str]:
        return {'u_query', 'u_key'}


@register_mixer('aft_full')
class AFTFull(_FactoredBias):
    """AFT-full; the bias is shared by all channels, so `num_heads` has no effect."""

    op = staticmethod(aft_full)
    op_naive = staticmethod(aft_full_naive)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        self.check_grid(grid_size)
        # compute the bias in float32 under any autocast
        with no_autocast(q):
            bias = self.u_query @ self.u_key.T
        return self.op(q, k, v, bias)


@register_mixer('aft_local')
class AFTLocal(_FactoredBias):
    """AFT-local; `window_size` is the paper's s, so (2s - 1)^2 grid tokens have a bias for each token."""

    op = staticmethod(aft_local)
    op_naive = staticmethod(aft_local_naive)

    def __init__(self, dim: int, num_heads: int, *, window_size: int = 4, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if window_size < 1:
            raise ValueError(f'window_size must be at least 1, not {window_size}.')
        self.window_size = window_size

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        self.check_grid(grid_size)
        return self.op(q, k, v, self.u_query, self.u_key, grid_size, self.window_size)


@register_mixer('aft_simple')
class AFTSimple(QKVMixer):
    """AFT-simple: a softmax over tokens in each channel, gated by the query."""

    has_rope = False
    op = staticmethod(aft_simple)
    op_naive = staticmethod(aft_simple_naive)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v)


@register_mixer('aft_conv')
class AFTConv(QKVMixer):
    """AFT-conv with one `kernel_size` x `kernel_size` kernel per head, shared by the channels of the head.

    The kernel is w = gamma (w - mean(w)) / std(w) + beta with gamma and beta starting at 0 (paper, section 4.3), so a
    new layer is AFT-simple with one key per head.
    """

    has_rope = False
    op = staticmethod(aft_conv)
    op_naive = staticmethod(aft_conv_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        kernel_size: int = 11,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, k_dim=num_heads, device=device, dtype=dtype, **kwargs)
        if kernel_size < 3 or kernel_size % 2 == 0:
            raise ValueError(f'kernel_size of aft_conv must be odd and at least 3, not {kernel_size}.')
        self.kernel = nn.Parameter(torch.empty(num_heads, kernel_size, kernel_size, device=device, dtype=dtype))
        self.gamma = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))
        self.beta = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))
        nn.init.normal_(self.kernel)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v, self.normalized_kernel(), grid_size)

    def normalized_kernel(self) -> torch.Tensor:
        """The position bias, (heads, kernel_size, kernel_size)."""
        std, mean = torch.std_mean(self.kernel, dim=(1, 2), keepdim=True, correction=0)
        return self.gamma[:, None, None] * (self.kernel - mean) / (std + 1e-6) + self.beta[:, None, None]

    def no_weight_decay(self) -> set[str]:
        return {'kernel', 'gamma', 'beta'}
