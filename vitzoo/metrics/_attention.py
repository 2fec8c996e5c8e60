"""Attention weights of a layer as a linear map; the N x N matrix is only materialized on request."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from timm.layers import Attention
from torch import Tensor, nn

from vitzoo.mixers import QKVMixer
from vitzoo.mixers._rope import Rope


@dataclass
class AttentionWeights:
    """Attention weights A of N queries over M keys, (B, heads, N, M); `apply` maps values (B, heads, M, c) to A v."""

    apply: Callable[[Tensor], Tensor]
    values: Tensor  # (B, heads, M, head_dim)

    def dense(self) -> Tensor:
        """Materialize A: (B, heads, N, M)."""
        B, heads, M, _ = self.values.shape
        return self.apply(torch.eye(M, device=self.values.device, dtype=self.values.dtype).expand(B, heads, M, M))

    @torch.enable_grad()
    def pull_back(self, row: Tensor) -> Tensor:
        """row A, averaged over heads: weights of the queries (B, N) -> weights of the keys (B, M).

        Computed as a vector-Jacobian product, in the memory of the layer's backward pass with a single channel.
        """
        channel = torch.zeros_like(self.values[..., :1]).requires_grad_()
        out = self.apply(channel).squeeze(-1).mean(dim=1)  # (B, N)
        (weights,) = torch.autograd.grad(out, channel, row.to(out.dtype))
        return weights.squeeze(-1).sum(dim=1)


@torch.no_grad()
def attention_weights(
    attn: nn.Module, x: Tensor, grid_size: tuple[int, int] | None = None, *rope: Rope
) -> AttentionWeights | None:
    """Attention weights of a layer for its input x (B, N, C); None if its output is not a weighted mean of tokens."""
    if isinstance(attn, QKVMixer | Attention):
        # under autocast, tokens may have another precision than the weights
        x = x.to(next(attn.parameters()).dtype)
    if isinstance(attn, QKVMixer) and attn.token_weights and grid_size is not None:
        q, k, v = attn.to_qkv(x, grid_size, *rope)
        return AttentionWeights(lambda values: attn.mix(q, k, values, grid_size), v)
    if isinstance(attn, Attention):
        return _timm_weights(attn, x)
    return None


def _timm_weights(attn: Attention, x: Tensor) -> AttentionWeights:
    qkv = attn.qkv(x).unflatten(2, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k, v = qkv.unbind(0)
    weights = (attn.scale * attn.q_norm(q) @ attn.k_norm(k).mT).softmax(dim=-1)
    return AttentionWeights(lambda values: weights @ values, v)
