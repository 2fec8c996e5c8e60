"""Random feature attention: softmax attention of unit queries and keys through random Fourier features.

    out_i = phi(q_i) . (sum_j w_ij phi(k_j) v_j^T) / max(phi(q_i) . sum_j w_ij phi(k_j), eps sum_j w_ij)
    phi(x) = [sin(W x^), cos(W x^)] / sqrt(m),  x^ = x / |x|,  rows of W normal with learned standard deviations sigma

phi(q) . phi(k) estimates exp(-|sigma (q^ - k^)|^2 / 2), which for equal sigmas is exp(sigma^2 q^ . k^) up to a
constant. Linear in the number of tokens: O(N m dim) for m directions. Without the gate w_ij = 1: the sums do not depend
on the order of tokens, the formula applies to a grid unchanged, and prefix tokens are ordinary tokens. There is no
scale of the scores. In the limit of many directions, with equal sigmas and no gate, it is softmax attention of unit
queries and keys.

The kernel is at least exp(-2 sigma^2) = 0.14 at sigma = 1, but its estimate can be negative: eps = 0.01 keeps the
normalizer positive, per key, so that it does not depend on the image size. The authors' code (Noahs-ARK/RFA) bounds it
by a constant, 1 for features 0.1 [sin, cos], which is 100 / m for those above: 1.6 for m = 64, where ours is 2.0 for 14
x 14 tokens. With `floor=100 / m` the two are equal, but for the 1e-3 that their code adds to |x|, and the absolute
value of the normalizer in its cross-attention.

The gated form is the paper's recurrence S_t = g_t S_{t-1} + (1 - g_t) phi(k_t) v_t^T with one gate per token and head,
in which token j contributes to token i with the weight

    w_ij = (1 - g_j) * product of g_t over the tokens from j to i, without j and with i

Text has a direction and a grid has none: here the recurrence runs over the raster in both directions, so i attends the
tokens before and after it. Prefix tokens have no position in the raster: there is no decay towards them (w_ij = 1 -
g_j) or from them (w_ij = 1). Random Feature Attention, sections 3.1 and 3.2, https://arxiv.org/abs/2103.02143
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._numerics import wide_dtype
from ._random import RandomFeatureMixer
from ._recompute import recompute_heads
from .base import no_autocast, register_mixer
from .softmax import softmax_attention

__all__ = ['RFA', 'rfa', 'rfa_naive']

_EPS = 1e-2
_CHUNK = 64


def rfa_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    directions: torch.Tensor,
    sigma: torch.Tensor,
    gate: torch.Tensor | None = None,
    floor: float | None = None,
) -> torch.Tensor:
    """The N x N attention matrix, with the product of gates for each pair; arguments as `rfa`."""
    N, W = q.shape[2], sigma.unsqueeze(1) * directions

    def phi(x: torch.Tensor) -> torch.Tensor:
        projected = x / x.norm(dim=-1, keepdim=True) @ W.mT
        return torch.cat([projected.sin(), projected.cos()], dim=-1) / W.shape[1] ** 0.5

    w = torch.ones(*q.shape[:2], N, N, dtype=q.dtype, device=q.device)
    if gate is not None:
        P, g = N - gate.shape[2], gate.sigmoid()
        for i in range(N):
            for j in range(P, N):
                between = g[:, :, j - P + 1 : i - P + 1] if j < i else g[:, :, i - P : j - P]
                w[:, :, i, j] = (1 - g[:, :, j - P]) * (between.prod(dim=2) if i >= P else 1)
    attn = w * (phi(q) @ phi(k).mT)
    normalizer, least = attn.sum(dim=-1, keepdim=True), _EPS * w.sum(dim=-1, keepdim=True)
    return attn @ v / normalizer.maximum(least if floor is None else torch.full_like(normalizer, floor))


def rfa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    directions: torch.Tensor,
    sigma: torch.Tensor,
    gate: torch.Tensor | None = None,
    floor: float | None = None,
) -> torch.Tensor:
    """q, k, v (B, heads, N, d) -> (B, heads, N, d), in float32 or wider.

    `directions` (heads, m, d) times `sigma` (heads, d) is W; `gate` (B, heads, H*W) are the logits of g for the last
    H*W tokens; `floor` replaces eps sum_j w_ij.
    """
    # angles and features of queries and keys, their units, values and sums
    num_elements = q.shape[2] * (6 * directions.shape[1] + 4 * q.shape[3])
    with no_autocast(q):
        dtype = wide_dtype(q)
        directions = (sigma.unsqueeze(1).to(dtype) * directions.to(dtype)).unsqueeze(0)
    tensors = (q, k, v, directions) if gate is None else (q, k, v, directions, gate)
    return recompute_heads(partial(_attend, floor=floor), tensors, num_elements)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    directions: torch.Tensor,
    gate: torch.Tensor | None = None,
    *,
    floor: float | None,
) -> torch.Tensor:
    with no_autocast(q):
        dtype = directions.dtype
        q_features, k_features = _features(q.to(dtype), directions), _features(k.to(dtype), directions)
        # the normalizer is one more channel
        values = F.pad(v.to(dtype), (0, 1), value=1.0)  # (B, heads, N, d + 1)
        if gate is None:
            sums = q_features @ (k_features.mT @ values)
            total = sums.new_full((1,), q.shape[2])
        else:
            sums, total = _gated_sums(q_features, k_features, values, gate.to(dtype))
        normalizer = sums[..., -1:].maximum(_EPS * total) if floor is None else sums[..., -1:].clamp(min=floor)
        # the gradient of a quotient needs two more tensors
        return (sums[..., :-1] * normalizer.reciprocal()).to(v.dtype)


def _features(x: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """phi of the formula, (B, heads, N, 2m)."""
    projected = F.normalize(x, dim=-1) @ directions.mT
    return torch.cat([projected.sin(), projected.cos()], dim=-1) / directions.shape[-2] ** 0.5


def _gated_sums(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """sum_j w_ij phi(q_i) . phi(k_j) v_j, (B, heads, N, d + 1), and sum_j w_ij, (B, heads, N, 1)."""
    P = q.shape[2] - gate.shape[2]
    log_g, input_gate = F.logsigmoid(gate), (-gate).sigmoid().unsqueeze(-1)
    q_grid, k_grid, grid = q[:, :, P:], input_gate * k[:, :, P:], v[:, :, P:]
    backward = _scan(q_grid.flip(2), k_grid.flip(2), grid.flip(2), log_g.flip(2)).flip(2)
    diagonal = (q_grid * k_grid).sum(dim=-1, keepdim=True) * grid
    sums = _scan(q_grid, k_grid, grid, log_g) + backward - diagonal
    # 1 - g_j telescopes: the weights of one direction sum to 1 minus the product of all gates up to the token
    before, after = log_g.cumsum(dim=2), log_g.flip(2).cumsum(dim=2).flip(2)
    total = (-before.expm1() - after.expm1()).unsqueeze(-1) - input_gate
    sums = torch.cat([q[:, :, :P] @ (k_grid.mT @ grid), sums], dim=2) + q @ (k[:, :, :P].mT @ v[:, :, :P])
    total = torch.cat([input_gate.sum(dim=2, keepdim=True).expand(-1, -1, P, -1), total], dim=2) + P
    # all weights are 0 if every gate is 1
    return sums, total.clamp(min=1e-30)


def _scan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_g: torch.Tensor) -> torch.Tensor:
    """sum_{j <= i} (product of g over j < t <= i) (q_i . k_j) v_j, chunk by chunk with a carried state."""
    N = q.shape[2]
    size = min(_CHUNK, N)
    q, k, v = (F.pad(x, (0, 0, 0, -N % size)).unflatten(2, (-1, size)) for x in (q, k, v))
    # from the start of the chunk
    decay = F.pad(log_g, (0, -N % size)).unflatten(2, (-1, size)).cumsum(dim=-1).unsqueeze(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    within = (decay - decay.mT).masked_fill(later, -torch.inf).exp()  # (B, heads, chunks, size, size)
    out = (within * (q @ k.mT)) @ v
    total = decay[..., -1:, :]
    written = (k * (total - decay).exp()).mT @ v  # (B, heads, chunks, 2m, d + 1)
    states = [torch.zeros_like(written[:, :, 0])]
    for chunk in range(written.shape[2] - 1):
        states.append(total[:, :, chunk].exp() * states[-1] + written[:, :, chunk])
    out = out + (decay.exp() * q) @ torch.stack(states, dim=2)
    return out.flatten(2, 3)[:, :, :N]


@register_mixer('rfa')
class RFA(RandomFeatureMixer):
    """Random feature attention with `num_features` directions per head; `gate` adds the gated recurrence.

    `floor` bounds the normalizer by a constant, with the authors' 100 / `num_features`, instead of by 0.01 per key.
    The directions depend on `seed` and the layer, and are redrawn every `redraw_every` optimizer steps unless it is 0.
    A training loop other than `vitzoo train` calls `vitzoo.set_step` for this. The authors take new ones from a fixed
    pool in each training step.
    """

    directions: torch.Tensor
    buffer_name = 'directions'
    gate_bias = 1.0
    op = staticmethod(rfa)
    op_naive = staticmethod(rfa_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_features: int = 64,
        gate: bool = False,
        floor: float | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        if floor is not None and floor <= 0:
            raise ValueError(f'floor of rfa must be positive, not {floor}.')
        super().__init__(dim, num_heads, num_features=num_features, device=device, dtype=dtype, **kwargs)
        self.sigma = nn.Parameter(torch.ones(num_heads, self.head_dim, device=device, dtype=dtype))
        self.gate = nn.Linear(dim, num_heads, device=device, dtype=dtype) if gate else None
        self.floor = floor
        self.approximates_softmax = not gate

    def draw_features(self, generator: torch.Generator) -> torch.Tensor:
        shape = (self.num_heads, self.num_features, self.head_dim)
        return torch.randn(shape, generator=generator, device='cpu', dtype=torch.float32)

    def mix_input(
        self, x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]
    ) -> torch.Tensor:
        gate = None if self.gate is None else self.gate(x[:, self.num_prefix_tokens :]).mT
        return self.op(q, k, v, self.directions, self.sigma, gate, self.floor)

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        """The form without a gate, which depends only on q, k and v."""
        return self.op(q, k, v, self.directions, self.sigma, None, self.floor)

    def softmax_target(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Softmax attention with scores -|sigma (q^ - k^)|^2 / 2, which the features estimate."""
        sigma = self.sigma.unsqueeze(1).to(q.dtype)
        q, k = sigma * F.normalize(q, dim=-1), sigma * F.normalize(k, dim=-1)
        # the term of a score that depends only on the key is one more channel
        k = torch.cat([k, -k.square().sum(dim=-1, keepdim=True) / 2], dim=-1)
        return softmax_attention(F.pad(q, (0, 1), value=1.0), k, v, 1.0)

    def health(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]
    ) -> dict[str, torch.Tensor]:
        """Adds `normalizers_at_floor`, the share of queries whose normalizer is at its lower bound."""
        signs = super().health(q, k, v, grid_size)
        with no_autocast(q):
            dtype = wide_dtype(q)
            directions = self.sigma.unsqueeze(1).to(dtype) * self.directions.to(dtype)
            q, k = _features(q.to(dtype), directions), _features(k.to(dtype), directions)
            at_floor = q @ k.sum(dim=2).unsqueeze(-1) <= (_EPS * k.shape[2] if self.floor is None else self.floor)
        return {**signs, 'normalizers_at_floor': at_floor.to(dtype).flatten(1).mean(dim=1)}

    def no_weight_decay(self) -> set[str]:
        return {'sigma'}
