"""Agent attention: softmax attention in two steps, through a few agent tokens that are averages of the queries.

    out_i = sum_a softmax_a(scale * q_i . p_a + b_ia) u_a + DWC(v)_i
    u_a = sum_j softmax_j(scale * p_a . k_j + b'_aj) v_j

where the agents p_a are the averages of the queries over n x n cells of the grid. Linear in the number of tokens: O(N
n^2 dim). Cells are those of adaptive average pooling, which differ by a row or a column and overlap if n does not
divide the sides of the grid. Prefix tokens are part of no agent, and are ordinary queries and keys. The biases b and b'
of grid tokens are the sum of a 7 x 7 map for each agent and head, resampled to the grid, and of a value for each row
and each column; prefix tokens have their own. The convolution is on the grid, padded with zeros. A constant added to
all keys changes nothing. The official class for PVT can reduce keys and values by a strided convolution, which no
published configuration that we read does, and which is left out. On a GPU PyTorch's gradient of the averages of fewer
than 1,024 tokens is not deterministic, so `torch.use_deterministic_algorithms(True)` refuses it. Agent Attention,
https://arxiv.org/abs/2312.08874
"""

from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import nn
from torch.nn import functional as F
from torch.types import Device

from ._grid_conv import GridConv, grid_conv_naive
from ._kernel_mixer import KernelMixer
from ._numerics import wide_dtype
from .base import register_mixer
from .softmax import softmax_attention, softmax_naive

__all__ = ['Agent', 'agent_attention', 'agent_naive']

_MAP = 7
# the fewest tokens whose averages a product computes faster than pooling on a GPU
_LEAST_TOKENS = 1024


def agent_naive(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias_q: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    conv: GridConv | None,
    grid_size: tuple[int, int],
    num_cells: int,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Each agent the mean of its cell; arguments as `agent_attention`."""
    H, W = grid_size
    image = q[:, :, q.shape[2] - H * W :].unflatten(2, grid_size)

    def cell(i: int, size: int) -> slice:
        return slice(i * size // num_cells, -(-(i + 1) * size // num_cells))

    cells = [(cell(y, H), cell(x, W)) for y in range(num_cells) for x in range(num_cells)]
    agents = torch.stack([image[:, :, rows, columns].mean(dim=(2, 3)) for rows, columns in cells], dim=2)
    values = softmax_naive(agents, k, v, scale, bias_k, dropout_p)
    out = softmax_naive(q, agents, values, scale, bias_q, dropout_p)
    return out if conv is None else out + grid_conv_naive(conv, v, grid_size)


def agent_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias_q: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    conv: GridConv | None,
    grid_size: tuple[int, int],
    num_cells: int,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """q, k, v (B, heads, N, d), biases of queries (heads, N, A) and of agents (heads, A, N) -> (B, heads, N, d).

    The last H*W tokens are the grid; there are A = `num_cells`^2 agents.
    """
    H, W = grid_size
    agents = _average_cells(q[:, :, q.shape[2] - H * W :], grid_size, num_cells)
    values = softmax_attention(agents, k, v, scale, bias_k, dropout_p)
    out = softmax_attention(q, agents, values, scale, bias_q, dropout_p)
    return out if conv is None else out + conv(v, grid_size).to(out.dtype)


def _average_cells(x: torch.Tensor, grid_size: tuple[int, int], num_cells: int) -> torch.Tensor:
    """The averages of grid tokens (B, heads, H*W, d) over cells, (B, heads, num_cells^2, d)."""
    if x.is_cuda and x.shape[2] >= _LEAST_TOKENS:
        return _cell_weights(grid_size, num_cells, x) @ x
    image = x.mT.unflatten(3, grid_size).flatten(1, 2)  # (B, heads * d, H, W)
    return F.adaptive_avg_pool2d(image, num_cells).unflatten(1, (x.shape[1], x.shape[3])).flatten(3).mT


def _cell_weights(grid_size: tuple[int, int], num_cells: int, like: torch.Tensor) -> torch.Tensor:
    """The weight of each token in the average of each cell, (num_cells^2, H*W)."""
    cell, dtype, weights = torch.arange(num_cells, device=like.device).unsqueeze(1), wide_dtype(like), []
    for size in grid_size:
        token = torch.arange(size, device=like.device)
        # the first token, and the first after the last
        start, end = cell * size // num_cells, -(-(cell + 1) * size // num_cells)
        weights.append(((token >= start) & (token < end)).to(dtype) / (end - start))
    rows, columns = weights
    return (rows[:, None, :, None] * columns[None, :, None, :]).flatten(2).flatten(0, 1).to(like.dtype)


class _AgentBias(nn.Module):
    """The bias of each pair of an agent and a token, (heads, A, P + H*W)."""

    def __init__(
        self,
        num_heads: int,
        num_agents: int,
        grid_size: tuple[int, int],
        num_prefix_tokens: int,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        H, W = grid_size
        self.grid_size = (H, W)

        def table(*shape: int) -> nn.Parameter:
            return nn.Parameter(
                trunc_normal_(torch.empty(num_heads, num_agents, *shape, device=device, dtype=dtype), std=0.02)
            )

        self.map, self.rows, self.columns = table(_MAP, _MAP), table(H), table(W)
        self.prefix = table(num_prefix_tokens) if num_prefix_tokens else None

    def forward(self) -> torch.Tensor:
        dtype = wide_dtype(self.map)
        bias = F.interpolate(self.map.to(dtype), size=self.grid_size, mode='bilinear')
        bias = (bias + self.rows.unsqueeze(-1) + self.columns.unsqueeze(-2)).flatten(2).to(self.map.dtype)
        return bias if self.prefix is None else torch.cat([self.prefix, bias], dim=-1)

    def set_input_size(self, grid_size: tuple[int, int]) -> None:
        """Resample the values of rows and columns; the map is resampled in each forward pass."""
        H, W = grid_size
        self.grid_size = (H, W)
        for name, size in zip(('rows', 'columns'), self.grid_size):
            old = getattr(self, name)
            new = F.interpolate(old.data.float(), size=size, mode='linear').to(old.dtype)
            setattr(self, name, nn.Parameter(new, requires_grad=old.requires_grad))


@register_mixer('agent')
class Agent(KernelMixer):
    """Agent attention with `num_cells` x `num_cells` agents.

    `agent_bias=False` leaves out the biases, which bind the layer to its grid; `conv_size` is the side of the
    convolution, or 0 for none.
    """

    attn_weights = True
    ignores_mean_key = True
    grid_bound = True
    start_arguments = {}
    added_terms = ('bias_q.', 'bias_k.', 'conv.')
    op = staticmethod(agent_attention)
    op_naive = staticmethod(agent_naive)

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_cells: int = 7,
        agent_bias: bool = True,
        conv_size: int = 3,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        if num_cells < 1:
            raise ValueError(f'num_cells of agent must be at least 1, not {num_cells}.')
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.num_cells = num_cells
        self.bias_q = self.bias_k = None
        self.grid_bound = agent_bias
        if agent_bias:
            shape = (num_heads, num_cells**2, self.grid_size, self.num_prefix_tokens)
            self.bias_q, self.bias_k = _AgentBias(*shape, **dd), _AgentBias(*shape, **dd)
        self.conv = GridConv(dim, conv_size, **dd) if conv_size else None
        self.token_weights = self.conv is None and self.dwc_v is None

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        bias_q = bias_k = None
        if self.bias_q is not None and self.bias_k is not None:
            self.check_grid(grid_size)
            bias_q, bias_k = self.bias_q().mT, self.bias_k()
        return self.op(q, k, v, bias_q, bias_k, self.conv, grid_size, self.num_cells, self.scale, self.dropout_p)

    def set_input_size(self, grid_size: tuple[int, int]) -> None:
        super().set_input_size(grid_size)
        for bias in (self.bias_q, self.bias_k):
            if bias is not None:
                bias.set_input_size(self.grid_size)

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.startswith(('bias_q.', 'bias_k.'))}
