"""MonarchAttention: softmax attention restricted to products of block-diagonal matrices, found by alternating steps.

    out[y, x] = sum_y' L[y, y'; x] sum_x' R[y', x'; x] v[y', x'],  rows of L and R sum to 1
    L = softmax_y'(sum_x' R[y', x'; x] (s[y, x; y', x'] - log R[y', x'; x]))
    R = softmax_x'(sum_y L[y, y'; x] s[y, x; y', x'] / sum_y L[y, y'; x]),  s[i; j] = scale * q_i . k_j

for a query in row y and column x and a key in row y' and column x'. Each update is the maximum of <A, s> + entropy(A)
over one of the factors of A = L R; softmax attention is its maximum over all A. The first L is the identity, and each
of `num_steps` steps updates R, then L. There are no parameters beyond those of softmax attention. The paper divides a
sequence into about sqrt(N) blocks; here the blocks are the rows of the grid, so no grid needs padding. Prefix tokens
are further keys of L, one each, and attend every token by softmax attention. On a grid of one column it is softmax
attention. Each step is O(N (H + W + P) dim). The updates are derived from this objective, not taken from the authors'
code, which only non-profit academic institutions may use; so there is no recording to compare with, and a test checks
that each update is the maximum over its factor.
MonarchAttention: Zero-Shot Conversion to Fast, Hardware-Aware Structured Attention, section 3,
https://arxiv.org/abs/2505.18698
"""

from typing import Any

import torch

from ._numerics import wide_dtype
from .base import QKVMixer, no_autocast, register_mixer
from .softmax import prepend_global_tokens, softmax_naive

__all__ = ['Monarch', 'monarch_attention', 'monarch_naive']

# the share of all queries in a row of keys below which the row is left as it is
_EPS = 1e-12


def monarch_naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int], num_steps: int, scale: float
) -> torch.Tensor:
    """The formula with the scores of all pairs of tokens; arguments as `monarch_attention`."""
    (H, W), P = grid_size, q.shape[2] - grid_size[0] * grid_size[1]
    scores = scale * q[:, :, P:] @ k[:, :, P:].mT
    scores = scores.unflatten(3, grid_size).unflatten(2, grid_size)  # (B, heads, y, x, y', x')
    prefix_scores = (scale * q[:, :, P:] @ k[:, :, :P].mT).unflatten(2, grid_size)  # (B, heads, y, x, P)
    left = torch.eye(H, dtype=q.dtype, device=q.device)[:, None].expand(*q.shape[:2], H, W, H)
    for _ in range(num_steps):
        total = left.sum(dim=2).clamp(min=_EPS)  # (B, heads, x, y')
        mean = (left.unsqueeze(5) * scores).sum(dim=2) / total.unsqueeze(4)
        log_right = mean.log_softmax(dim=4)  # (B, heads, x, y', x')
        right = log_right.exp()
        rows = (right.unsqueeze(2) * (scores - log_right.unsqueeze(2))).sum(dim=5)
        weights = torch.cat([prefix_scores, rows], dim=4).softmax(dim=4)
        left = weights[..., P:]
    attn = (left.unsqueeze(5) * right.unsqueeze(2)).flatten(4).flatten(2, 3)
    attn = torch.cat([weights[..., :P].flatten(2, 3), attn], dim=3)
    return torch.cat([softmax_naive(q[:, :, :P], k, v, scale), attn @ v], dim=2)


def monarch_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int], num_steps: int, scale: float
) -> torch.Tensor:
    """q, k, v (B, heads, P + H*W, d) -> (B, heads, P + H*W, d); the weights are computed in float32 or wider."""
    (H, W), P = grid_size, q.shape[2] - grid_size[0] * grid_size[1]
    with no_autocast(q):
        dtype = wide_dtype(q)
        wide_q, wide_k, wide_v = (x.to(dtype) for x in (scale * q, k, v))
        columns = wide_q[:, :, P:].unflatten(2, grid_size).transpose(2, 3)  # (B, heads, x, y, d)
        rows_k, rows_v = (x[:, :, P:].unflatten(2, grid_size) for x in (wide_k, wide_v))  # (B, heads, y', x', d)
        prefix_scores = columns @ wide_k[:, :, None, :P].mT  # (B, heads, x, y, P)
        left = torch.eye(H, dtype=dtype, device=q.device).expand(*q.shape[:2], W, H, H)
        for _ in range(num_steps):
            # the mean query of each column that attends each row
            total = left.sum(dim=3).clamp(min=_EPS).unsqueeze(4)
            means = (left.mT @ columns / total).transpose(2, 3)  # (B, heads, y', x, d)
            log_right = (means @ rows_k.mT).log_softmax(dim=-1)  # (B, heads, y', x, x')
            right = log_right.exp()
            entropy = -(right * log_right).sum(dim=-1).mT.unsqueeze(3)  # (B, heads, x, 1, y')
            keys = (right @ rows_k).transpose(2, 3)  # (B, heads, x, y', d)
            weights = torch.cat([prefix_scores, columns @ keys.mT + entropy], dim=4).softmax(dim=-1)
            left = weights[..., P:]
        values = (right @ rows_v).transpose(2, 3)
        out = left @ values + weights[..., :P] @ wide_v[:, :, None, :P]
        out = out.transpose(2, 3).flatten(2, 3).to(v.dtype)
    return prepend_global_tokens(out, q, k, v, scale)


@register_mixer('monarch')
class Monarch(QKVMixer):
    """MonarchAttention along rows and columns, with `num_steps` alternating steps."""

    approximates_softmax = True
    op = staticmethod(monarch_attention)
    op_naive = staticmethod(monarch_naive)

    def __init__(self, dim: int, num_heads: int, *, num_steps: int = 2, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if num_steps < 1:
            raise ValueError(f'num_steps of monarch must be at least 1, not {num_steps}.')
        self.num_steps = num_steps

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v, grid_size, self.num_steps, self.scale)
