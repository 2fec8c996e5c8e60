"""Test-time training of ViT^3: each image trains a small network from keys to values, and applies it to the queries.

    out_i = [f(q_i; W1', W2'), conv(q', w3')_i],  f(x; W1, W2) = (x W1) * silu(x W2)
    W'  = W - clip(G),  G = gradient of -1/3 mean_i f(k_i; W1, W2) . v_i,  clip(G) = G / (|G| + 1)
    w3' = w3 - clip(g), g = gradient of -1/3 mean_i conv(k', w3)_i * v'_i, per channel

There is one gradient step, with W1 and W2 per head and a 3 x 3 depthwise convolution on an additional head q', k', v'.
|G| is the norm of each column of W, and of each 3 x 3 kernel. The factor 1/3 is fixed, as in the official code, which
has no scale by head_dim. With `rope`, queries and keys are rotated by their row and column over all channels, as in the
authors' hierarchical models. Prefix tokens are ordinary tokens of f, without rotation; for the convolution, which is
trained on the grid alone, a prefix token is an image of one pixel. The 3 x 3 depthwise convolution that the authors'
blocks add to the tokens before the norm belongs to the block and is not here. Linear in the number of tokens: O(N dim
head_dim). ViT^3: Unlocking Test-Time Training in Vision, section 4, https://arxiv.org/abs/2512.01643
"""

from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._grid_conv import convolve_samples, near_tokens
from ._numerics import sum_products, wide_dtype
from ._recompute import recompute_heads
from ._rope import rotate_pairs
from .base import QKVMixer, no_autocast, register_mixer

__all__ = ['TTT', 'train_and_apply', 'train_and_apply_naive']

_LOSS_SCALE = 1 / 3


def train_and_apply_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_conv: torch.Tensor,
    k_conv: torch.Tensor,
    v_conv: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor,
    grid_size: tuple[int, int],
) -> torch.Tensor:
    """Image by image, with gradients by autograd; arguments as `train_and_apply`."""
    P = q.shape[2] - grid_size[0] * grid_size[1]

    def apply(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        return (x @ w1) * F.silu(x @ w2)

    def convolve(x: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x[P:].T.unflatten(1, grid_size), w3, padding=1, groups=len(w3)).flatten(1).T

    outs = []
    for i in range(len(q)):
        with torch.enable_grad():
            # leaves of the inner gradient, which stay functions of the parameters
            own = [w + torch.zeros_like(w, requires_grad=True) for w in (w1, w2, w3)]
            inner = (apply(k[i], own[0], own[1]) * v[i]).sum(dim=(0, 2)).mean(dim=0)
            inner = inner + (convolve(k_conv[i], own[2]) * v_conv[i, P:]).mean(dim=0).sum()
            gradients = torch.autograd.grad(-_LOSS_SCALE * inner, own, create_graph=True)
        norms = [gradients[0].norm(dim=1, keepdim=True), gradients[1].norm(dim=1, keepdim=True)]
        norms.append(gradients[2].flatten(1).norm(dim=1).reshape(-1, 1, 1, 1))
        w1_new, w2_new, w3_new = (w - g / (norm + 1) for w, g, norm in zip(own, gradients, norms))
        mixed = apply(q[i], w1_new, w2_new).transpose(0, 1).flatten(1)
        local = torch.cat([q_conv[i, :P] * w3_new[:, 0, 1, 1], convolve(q_conv[i], w3_new)])
        outs.append(torch.cat([mixed, local], dim=1))
    return torch.stack(outs)


def train_and_apply(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_conv: torch.Tensor,
    k_conv: torch.Tensor,
    v_conv: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor,
    grid_size: tuple[int, int],
) -> torch.Tensor:
    """q, k, v (B, heads, P + H*W, d) and those of the convolution (B, P + H*W, d) -> (B, P + H*W, heads * d + d).

    W1 and W2 are (heads, d, d), w3 is (d, 1, 3, 3). Gradients are written out, in float32 or wider.
    """
    num_grid = grid_size[0] * grid_size[1]
    P, out_dtype = q.shape[2] - num_grid, v.dtype
    with no_autocast(q):
        dtype = wide_dtype(q)
        q_conv, k_conv, v_conv, w1, w2, w3 = (x.to(dtype) for x in (q_conv, k_conv, v_conv, w1, w2, w3))
        # two layers of keys and of queries, and the derivatives of the former
        tensors, num_elements = (q, k, v, w1.unsqueeze(0), w2.unsqueeze(0)), 10 * q.shape[2] * q.shape[3]
        mixed = recompute_heads(_train_heads, tensors, num_elements).transpose(1, 2).flatten(2)
        target = v_conv[:, P:].unflatten(1, grid_size)
        sums = [(near * target).sum(dim=(1, 2)) for near in near_tokens(k_conv[:, P:], grid_size)]
        w3 = w3.flatten(1).T - _clip(-_LOSS_SCALE / num_grid * torch.stack(sums, dim=1))  # (B, 9, d)
        local = convolve_samples(q_conv[:, P:], w3, grid_size)
        if P:
            # a prefix token is an image of one pixel
            local = torch.cat([q_conv[:, :P] * w3[:, 4].unsqueeze(1), local], dim=1)
        return torch.cat([mixed, local], dim=2).to(out_dtype)


def _train_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """f of the queries after the step, (B, heads, N, d), in the dtype of the weights (1, heads, d, d)."""
    with no_autocast(q):
        q, k, v = q.to(w1.dtype), k.to(w1.dtype).contiguous(), v.to(w1.dtype)
        linear, logit = k @ w1, k @ w2
        gate, silu = logit.sigmoid(), F.silu(logit)
        # the derivative of silu is gate + silu * (1 - gate)
        slope = torch.addcmul(gate + silu, gate, silu, value=-1)
        rate = _LOSS_SCALE / k.shape[2]
        gradient1 = -rate * sum_products(k, v * silu)
        gradient2 = -rate * sum_products(k, v * linear * slope)
        w1, w2 = w1 - _clip(gradient1), w2 - _clip(gradient2)  # (B, heads, d, d)
        return (q @ w1) * F.silu(q @ w2)


def _clip(gradient: torch.Tensor) -> torch.Tensor:
    """Gradients whose columns have a norm below 1."""
    return gradient / (torch.linalg.vector_norm(gradient, dim=-2, keepdim=True) + 1)


@register_mixer('ttt')
class TTT(QKVMixer):
    """One step of test-time training per image; `rope` rotates queries and keys by their position.

    The official layers `qkv` and `proj` are divided into the parts of f (`qkv`, `proj`) and of the convolution
    (`qkv_conv`, `proj_conv`), so that a layer inherits those of attention. Raises ValueError if `rope` has no pairs of
    channels to rotate.
    """

    has_rope = False
    has_own_rope = True
    op = staticmethod(train_and_apply)
    op_naive = staticmethod(train_and_apply_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        rope: bool = False,
        qkv_bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias=qkv_bias, device=device, dtype=dtype, **kwargs)
        if rope and (dim % 4 or self.head_dim % 2):
            raise ValueError(
                f'rope of ttt rotates pairs of channels, half of them by row, so dim must be divisible by 4 and '
                f'head_dim by 2, not {dim} and {self.head_dim}.'
            )
        self.rope = rope
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.qkv_conv = nn.Linear(dim, 3 * self.head_dim, bias=qkv_bias, **dd)
        self.proj_conv = nn.Linear(self.head_dim, dim, bias=False, **dd)
        self.w1 = nn.Parameter(torch.empty(num_heads, self.head_dim, self.head_dim, **dd))
        self.w2 = nn.Parameter(torch.empty(num_heads, self.head_dim, self.head_dim, **dd))
        self.w3 = nn.Parameter(torch.empty(self.head_dim, 1, 3, 3, **dd))
        for weight in (self.w1, self.w2, self.w3):
            trunc_normal_(weight, std=0.02)

    # has_rope is False: there is no rope to take
    def forward(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:  # type: ignore[override]
        q, k, v = self.to_qkv(x, grid_size)
        if self.rope:
            q, k = self._rotate(q, grid_size), self._rotate(k, grid_size)
        q_conv, k_conv, v_conv = self.qkv_conv(x).chunk(3, dim=-1)
        out = self.op(q, k, v, q_conv, k_conv, v_conv, self.w1, self.w2, self.w3, grid_size)
        mixed, local = out.split([self.dim, self.head_dim], dim=-1)
        return self.proj_drop(self.proj(self.scale_norm(mixed)) + self.proj_conv(local))

    def _rotate(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        """Rotate half of the pairs of the channels of all heads by the row of a token, the other half by its column."""
        token = torch.arange(grid_size[0] * grid_size[1], device=x.device)
        num_pairs = self.dim // 4
        steps = torch.arange(num_pairs, device=x.device, dtype=wide_dtype(x))
        speed = 10000 ** -(steps / num_pairs)
        angle = torch.cat([place[:, None] * speed for place in (token // grid_size[1], token % grid_size[1])], dim=1)
        angle = angle.unflatten(1, (self.num_heads, -1)).transpose(0, 1)  # (heads, H*W, d / 2)
        P = self.num_prefix_tokens
        return torch.cat([x[:, :, :P], rotate_pairs(x[:, :, P:], angle)], dim=2)
