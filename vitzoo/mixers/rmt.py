"""RMT's Manhattan attention: softmax attention that decays with the distance of two tokens along rows and columns.

    out_i = lepe(v)_i + sum_j softmax_j(scale * rot_i(q_i) . rot_j(k_j) + D_ij) v_j,
    D_ij = (|y_i - y_j| + |x_i - x_j|) log(gamma),  gamma = 1 - 2^(-initial_decay - decay_range * h / heads)

for head h. Decomposed by axes, the values are mixed first along each row and then along each column, each with a
softmax of its own and its part of D. rot is a rotary embedding of the position in raster order, and lepe a depthwise
5 x 5 convolution. The official code adds D to the scores; the paper multiplies the weights of the softmax by exp(D),
which `decay='weights'` does. Prefix tokens have no position: their scores have no rotation and no decay. They are keys
of every token, in the softmax along the column if decomposed, and attend every token. The 3 x 3 depthwise convolution
that the authors' blocks add to the tokens before the norm belongs to the block and is not here. Decomposed,
O(N (H + W + P) dim); whole, quadratic: O(N^2 dim). RMT: Retentive Networks Meet Vision Transformers, section 3.2,
https://arxiv.org/abs/2309.11523
"""

from typing import Any

import torch
from torch.nn import functional as F
from torch.types import Device

from ._grid_conv import GridConv, grid_conv_naive
from ._numerics import wide_dtype
from ._rope import rotate_pairs
from .base import QKVMixer, register_mixer
from .softmax import prepend_global_tokens

__all__ = ['RMT', 'manhattan_attention', 'manhattan_naive']


def manhattan_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lepe: GridConv,
    log_gamma: torch.Tensor,
    grid_size: tuple[int, int],
    decomposed: bool,
    in_weights: bool,
    rope: bool,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """The scores of all pairs of tokens, masked to rows and to columns if decomposed; arguments as
    `manhattan_attention`."""
    P, token = q.shape[2] - grid_size[0] * grid_size[1], torch.arange(grid_size[0] * grid_size[1], device=q.device)
    y, x = token // grid_size[1], token % grid_size[1]
    q_rot, k_rot = (torch.cat([t[:, :, :P], _rotate(t[:, :, P:], token)], dim=2) if rope else t for t in (q, k))
    scores = scale * q @ k.mT
    scores[:, :, P:, P:] = scale * q_rot[:, :, P:] @ k_rot[:, :, P:].mT
    down, right = (F.pad((place[:, None] - place).abs(), (P, 0, P, 0)) for place in (y, x))

    def attend(distance: torch.Tensor, allowed: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        decay = distance * log_gamma[:, None, None]
        weights = (scores + decay * (not in_weights)).masked_fill(~allowed, -torch.inf).softmax(dim=-1)
        return F.dropout(weights * (decay.exp() if in_weights else 1), dropout_p) @ values

    is_prefix = torch.arange(P + len(token), device=q.device) < P
    if decomposed:
        pairs = ~is_prefix & ~is_prefix[:, None]
        same_row, same_column = pairs & (down == 0), pairs & (right == 0)
        itself = torch.eye(len(is_prefix), dtype=torch.bool, device=q.device)
        v_rows = attend(right, torch.where(is_prefix[:, None], itself, same_row), v)
        out = attend(down, same_column | is_prefix | is_prefix[:, None], v_rows)
        out = torch.cat([attend(down, is_prefix | ~is_prefix, v)[:, :, :P], out[:, :, P:]], dim=2)
    else:
        out = attend(down + right, is_prefix | ~is_prefix, v)
    return out + grid_conv_naive(lepe, v, grid_size)


def manhattan_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lepe: GridConv,
    log_gamma: torch.Tensor,
    grid_size: tuple[int, int],
    decomposed: bool,
    in_weights: bool,
    rope: bool,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """q, k, v (B, heads, P + H*W, d) and log_gamma (heads,) -> (B, heads, P + H*W, d).

    With `in_weights` the decay multiplies the weights of the softmax.
    """
    num_grid = grid_size[0] * grid_size[1]
    P = q.shape[2] - num_grid
    token = torch.arange(num_grid, device=q.device)
    grid_q, grid_k, grid_v = q[:, :, P:], k[:, :, P:], v[:, :, P:]
    rot_q, rot_k = (_rotate(x, token) if rope else x for x in (grid_q, grid_k))
    down, right = (log_gamma[:, None, None] * _distances(torch.arange(n, device=q.device)) for n in grid_size)
    if decomposed:
        rot_q, rot_k, grid_q, grid_v = (x.unflatten(2, grid_size) for x in (rot_q, rot_k, grid_q, grid_v))
        row_scores = scale * rot_q @ rot_k.mT  # (B, heads, H, W, W)
        grid_v = _decayed_softmax(row_scores, right.unsqueeze(1), in_weights, dropout_p) @ grid_v
        rot_q, rot_k, grid_q, grid_v = (x.transpose(2, 3) for x in (rot_q, rot_k, grid_q, grid_v))
        decay = down.unsqueeze(1)
        k_prefix, v_prefix = (x[:, :, None, :P].expand(-1, -1, grid_size[1], -1, -1) for x in (k, v))
    else:
        decay = (down[:, :, None, :, None] + right[:, None, :, None, :]).flatten(3).flatten(1, 2)
        k_prefix, v_prefix = k[:, :, :P], v[:, :, :P]
    # (B, heads, W, H, P + H), or (B, heads, H*W, P + H*W)
    scores = torch.cat([scale * grid_q @ k_prefix.mT, scale * rot_q @ rot_k.mT], dim=-1)
    weights = _decayed_softmax(scores, F.pad(decay, (P, 0)), in_weights, dropout_p)
    out = weights @ torch.cat([v_prefix, grid_v], dim=-2)
    if decomposed:
        out = out.transpose(2, 3).flatten(2, 3)
    out = prepend_global_tokens(out, q, k, v, scale, dropout_p)
    return out + lepe(v, grid_size).to(out.dtype)


def _distances(place: torch.Tensor) -> torch.Tensor:
    return (place[:, None] - place).abs()


def _decayed_softmax(scores: torch.Tensor, decay: torch.Tensor, in_weights: bool, dropout_p: float) -> torch.Tensor:
    """softmax(scores + decay), or softmax(scores) * exp(decay), in the dtype of the scores."""
    dtype = wide_dtype(scores)
    decay = decay.to(dtype)
    weights = (scores.to(dtype) + (0 if in_weights else decay)).softmax(dim=-1)
    return F.dropout(weights * decay.exp() if in_weights else weights, dropout_p).to(scores.dtype)


def _rotate(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs of channels of x (B, heads, N, d) by angles that grow with the position (N,)."""
    dtype = wide_dtype(x)
    speed = 10000 ** -torch.linspace(0, 1, x.shape[-1] // 2, dtype=dtype, device=x.device)
    return rotate_pairs(x, position[:, None] * speed)


@register_mixer('rmt')
class RMT(QKVMixer):
    """Manhattan attention, `decomposed` by axes as in the first stages of RMT, or whole as in the last one or two.

    The decay, set by `initial_decay` and `decay_range`, is added to the scores (`decay='scores'`, the official code) or
    multiplies the weights of the softmax (`decay='weights'`, the paper). `rope=False` leaves out the rotations, without
    which head_dim may be odd; otherwise an odd one raises ValueError.
    """

    log_gamma: torch.Tensor
    attn_weights = True
    has_own_rope = True
    start_arguments = {'rope': False}
    added_terms = ('lepe.',)
    op = staticmethod(manhattan_attention)
    op_naive = staticmethod(manhattan_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        decomposed: bool = True,
        decay: str = 'scores',
        rope: bool = True,
        initial_decay: float = 2.0,
        decay_range: float = 4.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if rope and self.head_dim % 2:
            raise ValueError(f'rmt rotates pairs of channels, so head_dim must be even, not {self.head_dim}.')
        if decay not in ('scores', 'weights'):
            raise ValueError(f"decay of rmt is 'scores' or 'weights', not {decay!r}.")
        if initial_decay <= 0 or decay_range < 0:
            raise ValueError(
                f'rmt needs initial_decay > 0 and decay_range >= 0, not {initial_decay} and {decay_range}.'
            )
        self.decomposed = decomposed
        self.decay = decay
        self.rope = rope
        self.initial_decay = initial_decay
        self.decay_range = decay_range
        self.register_buffer('log_gamma', self._log_gamma().to(self.proj.weight), persistent=False)
        self.lepe = GridConv(dim, 5, device=device, dtype=dtype)

    def init_non_persistent_buffers(self) -> None:
        """Compute the decays again, for timm's `reinit_non_persistent_buffers`."""
        self.log_gamma = self._log_gamma().to(self.proj.weight.device, self.log_gamma.dtype)

    def _log_gamma(self) -> torch.Tensor:
        heads = torch.arange(self.num_heads, dtype=torch.float32, device='cpu')
        return torch.log1p(-(2 ** -(self.initial_decay + self.decay_range * heads / self.num_heads)))

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        in_weights = self.decay == 'weights'
        return self.op(
            q,
            k,
            v,
            self.lepe,
            self.log_gamma,
            grid_size,
            self.decomposed,
            in_weights,
            self.rope,
            self.scale,
            self.dropout_p,
        )
