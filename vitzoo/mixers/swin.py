"""Swin's window attention: windows that tile the grid, shifted by half a window in every other layer.

    out_i = sum_{j in prefix + window(i)} softmax_j(scale * q_i . k_j + bias_ij) v_j

The windows of an even layer start at the corner of the grid. In an odd layer they are shifted by w // 2 tokens down and
to the right: the grid is rolled, so that the number of windows stays the same, and tokens that only rolling brings
together do not attend each other. Along an axis that one window covers there is no shift, as in timm; the authors' code
then has none along the other axis either. The bias is learned for each offset inside a window. Swin pads a grid that is
not a multiple of the window with tokens that are attended; here they are masked, so the two are equal on grids of whole
windows, but for that shift. Prefix tokens are global and have no bias: every token attends them and they attend every
token. If one window covers the grid and there is no bias it is softmax attention. Linear in the number of tokens: O(N
(w^2 + P) dim). Swin Transformer, section 3.2, https://arxiv.org/abs/2103.14030
"""

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F
from torch.types import Device

from vitzoo.kernels import use_kernel

from ._numerics import mask_bias
from ._recompute import recompute_heads
from ._rel_bias import OffsetBias
from ._window import fit_halo, fit_window, tile, untile
from .base import QKVMixer, register_mixer
from .softmax import prepend_global_tokens, softmax_attention, softmax_naive

__all__ = ['Swin', 'shifted_window_attention', 'shifted_window_naive']


def shifted_window_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grid_size: tuple[int, int],
    window_size: int,
    shift: int,
    scale: float,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Softmax attention under a dense N x N mask; arguments as `shifted_window_attention`."""
    (H, W), w = grid_size, window_size
    P, token = q.shape[2] - H * W, torch.arange(H * W, device=q.device)
    # coordinates from the corner of a window
    y, x = (place - shift * (size > w) for place, size in ((token // W, H), (token % W, W)))
    same = (y[:, None] // w == y // w) & (x[:, None] // w == x // w)
    dense = q.new_zeros(q.shape[1], P + H * W, P + H * W)
    if bias is not None:
        inside = y % w * w + x % w
        dense[:, P:, P:] = bias[:, inside[:, None], inside]
    dense[:, P:, P:] = dense[:, P:, P:].masked_fill(~same, float('-inf'))
    return softmax_naive(q, k, v, scale, dense, dropout_p)


def shifted_window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grid_size: tuple[int, int],
    window_size: int,
    shift: int,
    scale: float,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """q, k, v (B, heads, P + H*W, d), the first P tokens global -> (B, heads, P + H*W, d).

    `bias` (heads, w*w, w*w) is between the tokens of a window. Without dropout it runs as a Triton kernel if
    `use_kernel` allows it.
    """
    P = q.shape[2] - grid_size[0] * grid_size[1]
    sizes, shifts = fit_window(grid_size, window_size), fit_halo(grid_size, window_size, shift)
    bias = None if bias is None else _crop(bias, window_size, sizes)
    if dropout_p == 0 and use_kernel(q):
        from vitzoo.kernels import window as kernels

        if kernels.fits(q, k, v):
            # the first windows begin before the grid, which is not rolled
            offset = -shifts[0] % sizes[0], -shifts[1] % sizes[1]
            tokens = q[:, :, P:], k[:, :, P:], v[:, :, P:], k[:, :, :P], v[:, :, :P]
            grid = kernels.window_attention_triton(*tokens, grid_size, sizes, (0, 0), offset, scale, bias)
            return prepend_global_tokens(grid, q, k, v, scale)
    attend = partial(_attend_windows, grid_size=grid_size, sizes=sizes, shifts=shifts, scale=scale, dropout_p=dropout_p)
    tensors = (q, k, v) if bias is None else (q, k, v, bias.unsqueeze(0))
    # queries, keys, values and outputs in windows
    grid = recompute_heads(attend, tensors, 4 * q.shape[2] * q.shape[3], dropout_p)
    return prepend_global_tokens(grid, q, k, v, scale, dropout_p)


def _attend_windows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    grid_size: tuple[int, int],
    sizes: tuple[int, int],
    shifts: tuple[int, int],
    scale: float,
    dropout_p: float,
) -> torch.Tensor:
    """The outputs of grid tokens, (B, heads, H*W, d), for windows of s tokens and a bias (1, heads, s, s)."""
    heads, P = q.shape[1], q.shape[2] - grid_size[0] * grid_size[1]
    tiles = [tile(x[:, :, P:], grid_size, sizes, shifts) for x in (q, k, v)]  # (B, heads, T, s, d)
    T = tiles[0].shape[2]
    grid_q, grid_k, grid_v = (x.flatten(1, 2) for x in tiles)
    if P:
        shared = (x[:, :, None, :P].expand(-1, -1, T, -1, -1).flatten(1, 2) for x in (k, v))
        grid_k, grid_v = (torch.cat(pair, dim=2) for pair in zip(shared, (grid_k, grid_v)))
    mask = F.pad(_window_mask(grid_size, sizes, shifts, q), (P, 0))
    if bias is not None:
        mask = mask + F.pad(bias[0], (P, 0)).unsqueeze(1)
    mask = mask.expand(heads, T, -1, -1).flatten(0, 1)
    grid = softmax_attention(grid_q, grid_k, grid_v, scale, mask, dropout_p)
    return untile(grid.unflatten(1, (heads, T)), grid_size, sizes, shifts)


def _window_mask(
    grid_size: tuple[int, int], sizes: tuple[int, int], shifts: tuple[int, int], like: torch.Tensor
) -> torch.Tensor:
    """0 between tokens that attend each other and -inf between others, (1, T, s, s).

    Padded queries attend everything, so that no row is empty.
    """
    windows, real = [], []
    for size, w, shift in zip(grid_size, sizes, shifts):
        padded = -(-size // w) * w
        place = (torch.arange(padded, device=like.device) + shift) % padded
        windows.append((place - shift).div(w, rounding_mode='floor').unflatten(0, (-1, w)))
        real.append((place < size).unflatten(0, (-1, w)))
    (y, x), (real_y, real_x) = windows, real
    same_y, same_x = (window.unsqueeze(2) == window.unsqueeze(1) for window in (y, x))  # (tiles, w, w)
    same = same_y[:, None, :, None, :, None] & same_x[None, :, None, :, None, :]
    is_real = (real_y[:, None, :, None] & real_x[None, :, None, :]).flatten(2).flatten(0, 1)  # (T, s)
    same = same.flatten(4).flatten(2, 3).flatten(0, 1) & is_real.unsqueeze(1) | ~is_real.unsqueeze(2)
    return mask_bias(same, like).unsqueeze(0)


def _crop(bias: torch.Tensor, window_size: int, sizes: tuple[int, int]) -> torch.Tensor:
    """The bias (heads, w*w, w*w) of the windows of a grid smaller than w, which have `sizes`."""
    square = (window_size, window_size)
    bias = bias.unflatten(2, square).unflatten(1, square)
    return bias[:, : sizes[0], : sizes[1], : sizes[0], : sizes[1]].flatten(3).flatten(1, 2)


@register_mixer('swin')
class Swin(QKVMixer):
    """Attention in `window_size` x `window_size` windows, shifted if `shift`, by default in layers of odd index.

    `rel_bias` is 'table' (a learned bias per head for each 2-D offset in a window) or 'none'.
    """

    attn_weights = True
    token_weights = True
    has_rel_bias = True
    op = staticmethod(shifted_window_attention)
    op_naive = staticmethod(shifted_window_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        window_size: int = 7,
        shift: bool | None = None,
        rel_bias: str = 'table',
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if window_size < 1:
            raise ValueError(f'window_size of swin must be at least 1, not {window_size}.')
        if rel_bias not in ('none', 'table'):
            raise ValueError(f"rel_bias of swin is 'none' or 'table', not {rel_bias!r}.")
        self.window_size = window_size
        self.shift = window_size // 2 if (self.layer % 2 if shift is None else shift) else 0
        self.rel_bias = None
        if rel_bias == 'table':
            self.rel_bias = OffsetBias(num_heads, (window_size, window_size), device=device, dtype=dtype)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        bias = None if self.rel_bias is None else self.rel_bias()
        return self.op(q, k, v, grid_size, self.window_size, self.shift, self.scale, bias, self.dropout_p)
