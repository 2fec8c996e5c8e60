"""Softmax attention, the reference for every other mixer.

    out_i = sum_j softmax_j(scale * q_i . k_j + bias_ij) v_j

With talking heads, linear layers mix the heads of the scores before, and of the weights after the softmax. Quadratic in
the number of tokens: O(N^2 dim). Attention Is All You Need, https://arxiv.org/abs/1706.03762; relative bias as in ViL,
https://arxiv.org/abs/2103.15358, or as in MViTv2, https://arxiv.org/abs/2112.01526; Talking-Heads Attention,
https://arxiv.org/abs/2003.02436, with biases as in CaiT
"""

from typing import Any

import torch
from timm.layers import is_exporting, use_fused_attn
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._numerics import is_transformed, needs_gradient, wide_dtype
from ._rel_bias import DecomposedBias, OffsetBias, PrefixBias
from ._softmax_cpu import is_faster_than_fused, scaled_scores, softmax_attention_cpu
from .base import QKVMixer, register_mixer

__all__ = ['Softmax', 'prepend_global_tokens', 'softmax_attention', 'softmax_naive']

# scores of a head, beyond which their memory counts for more than the time
_MOST_SCORES = 2**19
# queries or keys that are few, and tokens that are many
_FEW, _MANY = 64, 1024


def softmax_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    proj_l: nn.Linear | None = None,
    proj_w: nn.Linear | None = None,
    attn_drop: nn.Module | None = None,
) -> torch.Tensor:
    """The textbook formula; arguments as `softmax_attention`."""
    scores = scale * q @ k.transpose(-2, -1)
    if bias is not None:
        scores = scores + bias
    if proj_l is not None:
        scores = torch.einsum('gh,bhij->bgij', proj_l.weight, scores) + proj_l.bias[:, None, None]
    scores = scores - scores.amax(dim=-1, keepdim=True)
    attn = scores.exp() / scores.exp().sum(dim=-1, keepdim=True)
    if proj_w is not None:
        attn = torch.einsum('gh,bhij->bgij', proj_w.weight, attn) + proj_w.bias[:, None, None]
    return F.dropout(attn, dropout_p) @ v


def softmax_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    proj_l: nn.Linear | None = None,
    proj_w: nn.Linear | None = None,
    attn_drop: nn.Module | None = None,
) -> torch.Tensor:
    """Queries (B, heads, N, d), keys and values (B, heads, M, d) -> (B, heads, N, d).

    The bias is (heads, N, M), or (B, heads, N, M) if it depends on the queries. `proj_l` and `proj_w` mix the heads of
    the scores and of the weights. `attn_drop` is the module with this dropout rate, whose hooks get the weights if they
    are formed.
    """
    # torch.export decomposes sdpa with a bias into operations whose output strides do not match
    is_unsuitable = (bias is not None and is_exporting()) or _is_fused_backward_slower(q, k, v, bias)
    if use_fused_attn() and proj_l is None and not is_unsuitable:
        bias = bias.unsqueeze(0) if bias is not None and bias.dim() == 3 else bias
        if dropout_p == 0 and is_faster_than_fused(q, k, v, bias):
            return softmax_attention_cpu(q, k, v, scale, bias)
        # sdpa requires the bias in the dtype of the queries, which autocast does not ensure, and on a GPU computes with
        # unfused operations in float32 if its rows are not contiguous
        if bias is not None:
            bias = bias.to(q.dtype)
            bias = bias.contiguous() if q.is_cuda and bias.stride(-1) != 1 else bias
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=scale)
    scores = scaled_scores(q, k, scale)
    if bias is not None:
        scores = scores + bias
    scores = _mix_heads(scores, proj_l)
    attn = scores.softmax(dim=-1, dtype=wide_dtype(scores)).to(v.dtype)
    attn = _mix_heads(attn, proj_w)
    attn = F.dropout(attn, dropout_p) if attn_drop is None else attn_drop(attn)
    return attn @ v


def prepend_global_tokens(
    grid: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, dropout_p: float = 0.0
) -> torch.Tensor:
    """Outputs of grid tokens (B, heads, H*W, d) after those of the prefix tokens of q, which attend all tokens."""
    P = q.shape[2] - grid.shape[2]
    if P == 0:
        return grid
    return torch.cat([softmax_attention(q[:, :, :P], k, v, scale, None, dropout_p), grid], dim=2)


def _is_fused_backward_slower(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """True on a CPU for a learned bias, and in half precision; on a GPU for a bias between few and many tokens.

    On a CPU sdpa has no fused kernel for a learned bias, and scales copies of both queries and keys. In half precision
    sdpa and its backward pass take 1.4 to 5 times as long as the formula. On a GPU the backward pass of sdpa with a
    bias has one program for each sample and head if queries or keys are few, which leaves most of the GPU idle.
    """
    if q.is_cuda:
        # the compiler cannot sort sizes that vary
        few, many = min(q.shape[2], k.shape[2]), max(q.shape[2], k.shape[2])
        return bias is not None and needs_gradient(q, k, v, bias) and few <= _FEW and many >= _MANY
    if q.device.type != 'cpu':
        return False
    if bias is not None and is_transformed():
        # torch.func hides what needs a gradient
        return torch.is_grad_enabled()
    if not needs_gradient(q, k, v):
        return False
    if bias is not None and bias.requires_grad:
        return True
    return q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] * k.shape[2] <= _MOST_SCORES


def _mix_heads(scores: torch.Tensor, proj: nn.Linear | None) -> torch.Tensor:
    """A linear layer over the heads of (B, heads, N, M)."""
    return scores if proj is None else proj(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@register_mixer('softmax')
class Softmax(QKVMixer):
    """Softmax attention, with PyTorch's fused kernel if timm's `use_fused_attn` allows it.

    On a CPU the formula is used instead in bfloat16, and in training in float16, where the kernel was found slower.

    `rel_bias` is 'none', 'table' (a learned bias per head for each 2-D offset, and for pairs with prefix tokens), or
    'decomposed' (the product of the query with a vector of the row offset plus one of the column offset, as in MViTv2
    and Segment Anything, which forms all N x N biases of each image). `talking_heads` adds the layers that mix the
    heads, and forms all N x N scores.
    """

    attn_weights = True
    token_weights = True
    subsampled_kv = True
    has_rel_bias = True
    has_decomposed_bias = True
    has_talking_heads = True
    op = staticmethod(softmax_attention)
    op_naive = staticmethod(softmax_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        rel_bias: str = 'none',
        talking_heads: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if rel_bias not in ('none', 'table', 'decomposed'):
            raise ValueError(f"rel_bias of softmax is 'none', 'table' or 'decomposed', not {rel_bias!r}.")
        stride_kv = getattr(self.qkv, 'stride_kv', 1)
        if rel_bias != 'none' and stride_kv > 1:
            raise ValueError(
                f'rel_bias={rel_bias!r} needs a key for each query, but stride_kv={stride_kv} leaves fewer keys; '
                f"choose stride_kv=1 or rel_bias='none'."
            )
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.rel_bias: OffsetBias | DecomposedBias | None = None
        if rel_bias == 'table':
            self.rel_bias = OffsetBias(num_heads, self.grid_size, **dd)
        elif rel_bias == 'decomposed':
            self.rel_bias = DecomposedBias(self.head_dim, self.grid_size, **dd)
        has_prefix = rel_bias == 'table' and self.num_prefix_tokens
        self.prefix_bias = PrefixBias(num_heads, self.num_prefix_tokens, **dd) if has_prefix else None
        self.proj_l = nn.Linear(num_heads, num_heads, **dd) if talking_heads else None
        self.proj_w = nn.Linear(num_heads, num_heads, **dd) if talking_heads else None
        # mixed weights do not sum to 1
        self.token_weights = not talking_heads

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        heads = self.proj_l, self.proj_w, self.attn_drop
        return self.op(q, k, v, self.scale, self.bias(q, grid_size), self.dropout_p, *heads)

    def bias(self, q: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor | None:
        """Relative bias of every pair of tokens, (heads, P + H*W, P + H*W); (B, heads, …) if it is of the queries."""
        if self.rel_bias is None:
            return None
        self.check_grid(grid_size)
        if isinstance(self.rel_bias, DecomposedBias):
            return self.rel_bias(q)
        bias = self.rel_bias()
        if self.prefix_bias is None:
            return bias
        num_grid = bias.shape[-1]
        prefix_keys = self.prefix_bias.keys().unsqueeze(1).expand(-1, num_grid, -1)
        grid_rows = torch.cat([prefix_keys, bias], dim=-1)
        return torch.cat([self.prefix_bias.queries(num_grid), grid_rows], dim=1)

    def set_input_size(self, grid_size: tuple[int, int]) -> None:
        super().set_input_size(grid_size)
        if self.rel_bias is not None:
            self.rel_bias.set_query_size(self.grid_size)
