"""BiFormer's bi-level routing: each window attends the tokens of the windows whose mean key its mean query prefers.

    out_i = lepe(v)_i + sum_{j in prefix + R(i)} softmax_j(scale * q_i . k_j) v_j,  scale = dim^(-1/2)

The grid is divided into at most n x n windows. R(i) has the tokens of the k windows with the largest product of their
mean key and the mean query of the window of i, over all heads together; the choice has no gradient. lepe is a depthwise
convolution. The authors pad a grid that n does not divide, and attend the padding; here windows have ceil(H / n) x
ceil(W / n) tokens, fewer at the border, so that a side may have fewer than n of them, and the means are over their
tokens. Prefix tokens are global: every token attends them and they attend every token. The 3 x 3 depthwise convolution
that the authors' blocks add to the tokens before the norm belongs to the block and is not here. If all windows are
chosen, and without lepe, it is softmax attention with this scale. `swap_mixer` keeps the scale of the attention. With
windows of s tokens, O(N (k s + P) dim).
BiFormer: Vision Transformer with Bi-Level Routing Attention, section 3.2, https://arxiv.org/abs/2303.08810
"""

from typing import Any

import torch
from torch.nn import functional as F
from torch.types import Device

from ._grid_conv import GridConv, grid_conv_naive
from ._numerics import mask_bias, wide_dtype
from ._window import halo_mask, take_rows, tile, untile
from .base import QKVMixer, no_autocast, register_mixer
from .softmax import prepend_global_tokens, softmax_attention, softmax_naive

__all__ = ['BiFormer', 'routed_window_attention', 'routed_window_naive']


def routed_window_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lepe: GridConv,
    grid_size: tuple[int, int],
    num_windows: int,
    topk: int,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Softmax attention under a dense mask for each image; arguments as `routed_window_attention`."""
    P, token = q.shape[2] - grid_size[0] * grid_size[1], torch.arange(grid_size[0] * grid_size[1], device=q.device)
    h, w = (-(-size // num_windows) for size in grid_size)
    window = token // grid_size[1] // h * num_windows + token % grid_size[1] // w
    names = window.unique()
    member = (window == names[:, None]).to(q.dtype)  # (T, H*W)
    q_mean, k_mean = (
        member @ x[:, :, P:].detach().transpose(1, 2).flatten(2) / member.sum(dim=1, keepdim=True) for x in (q, k)
    )
    affinity = q_mean @ k_mean.mT
    chosen = torch.zeros_like(affinity).scatter(2, affinity.topk(min(topk, len(names)), dim=2).indices, 1.0)
    dense = q.new_zeros(len(q), 1, q.shape[2], q.shape[2])
    dense[:, 0, P:, P:].masked_fill_(member.T @ chosen @ member == 0, float('-inf'))
    return softmax_naive(q, k, v, scale, dense, dropout_p) + grid_conv_naive(lepe, v, grid_size)


def routed_window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lepe: GridConv,
    grid_size: tuple[int, int],
    num_windows: int,
    topk: int,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """q, k, v (B, heads, P + H*W, d), the first P tokens global -> (B, heads, P + H*W, d)."""
    (B, heads), P = q.shape[:2], q.shape[2] - grid_size[0] * grid_size[1]
    sizes = -(-grid_size[0] // num_windows), -(-grid_size[1] // num_windows)
    grid_q, grid_k, grid_v = (tile(x[:, :, P:], grid_size, sizes) for x in (q, k, v))
    T, is_real = grid_q.shape[2], halo_mask(grid_size, sizes, (0, 0), q.device)  # (T, s)
    chosen = _route(grid_q, grid_k, is_real, min(topk, T))  # (B, T, k)
    num_keys = chosen.shape[2] * grid_k.shape[3]
    keys, values = (
        take_rows(x, chosen.flatten(1).unsqueeze(1)).view(B, heads * T, num_keys, x.shape[-1]) for x in (grid_k, grid_v)
    )  # (B, heads * T, k * s, d)
    if P:
        keys, values = (
            torch.cat([x[:, :, None, :P].expand(-1, -1, T, -1, -1).flatten(1, 2), grid], dim=2)
            for x, grid in ((k, keys), (v, values))
        )
    bias = None
    if any(size % side for size, side in zip(grid_size, sizes)):
        bias = F.pad(mask_bias(is_real[chosen].flatten(2), q), (P, 0))  # (B, T, P + k * s)
        bias = bias.repeat(1, heads, 1).unsqueeze(2).expand(-1, -1, grid_q.shape[3], -1)
    # windows are heads of their image: a GPU takes 65,535 images and as many heads, but a batch may have more windows
    out = softmax_attention(grid_q.flatten(1, 2), keys, values, scale, bias, dropout_p)
    out = untile(out.unflatten(1, (heads, T)), grid_size, sizes)
    out = prepend_global_tokens(out, q, k, v, scale, dropout_p)
    return out + lepe(v, grid_size).to(out.dtype)


@torch.no_grad()
def _route(q: torch.Tensor, k: torch.Tensor, is_real: torch.Tensor, topk: int) -> torch.Tensor:
    """The `topk` windows of keys with the largest product of means for each window of queries, (B, T, topk).

    Windows of queries and keys (B, heads, T, s, d), with padding where `is_real` (T, s) is false.
    """
    with no_autocast(q):
        dtype = wide_dtype(q)
        share = (is_real.to(dtype) / is_real.sum(dim=1, keepdim=True)).unsqueeze(2)  # (T, s, 1)
        means = [(x.to(dtype).masked_fill(share == 0, 0) * share).sum(dim=3) for x in (q, k)]  # (B, heads, T, d)
        q_mean, k_mean = (mean.transpose(1, 2).flatten(2) for mean in means)
        return (q_mean @ k_mean.mT).topk(topk, dim=2).indices


@register_mixer('biformer')
class BiFormer(QKVMixer):
    """Bi-level routing attention in up to `num_windows` windows per side, of which each attends `topk`.

    `lepe_size` is the side of the convolution.
    """

    attn_weights = True
    added_terms = ('lepe.',)
    op = staticmethod(routed_window_attention)
    op_naive = staticmethod(routed_window_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_windows: int = 7,
        topk: int = 4,
        lepe_size: int = 5,
        scale: float | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        scale = dim**-0.5 if scale is None else scale
        super().__init__(dim, num_heads, scale=scale, device=device, dtype=dtype, **kwargs)
        if num_windows < 1 or topk < 1:
            raise ValueError(f'num_windows and topk of biformer must be at least 1, not {num_windows} and {topk}.')
        self.num_windows = num_windows
        self.topk = topk
        self.lepe = GridConv(dim, lepe_size, device=device, dtype=dtype)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v, self.lepe, grid_size, self.num_windows, self.topk, self.scale, self.dropout_p)
