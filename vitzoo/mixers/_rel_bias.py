"""Learned relative position biases of attention scores, shared by softmax, window and long-short attention."""

import math

import torch
from timm.layers import trunc_normal_
from torch import nn
from torch.nn import functional as F
from torch.types import Device

__all__ = ['DecomposedBias', 'OffsetBias', 'PrefixBias', 'resample_offsets']


class OffsetBias(nn.Module):
    """One learned bias per head for each 2-D offset between a query and a key.

    Queries fill a block of `query_size` = (h, w) tokens; keys fill that block and a `halo` of tokens around it. Without
    a halo this is Swin's window bias (https://arxiv.org/abs/2103.14030, equation 4). `row_stride` is the number of
    table rows between two vertical neighbours; with a stride below the number of horizontal offsets, offsets share
    rows, as in the published ViL long-short models.
    """

    index: torch.Tensor

    def __init__(
        self,
        num_heads: int,
        query_size: tuple[int, int],
        *,
        halo: int = 0,
        row_stride: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.query_size = tuple(query_size)
        self.halo = halo
        self.row_stride = row_stride
        index = self._offset_index()
        self.table = nn.Parameter(torch.empty(int(index.max()) + 1, num_heads, device=device, dtype=dtype))
        self.register_buffer('index', index.to(self.table.device), persistent=False)
        trunc_normal_(self.table, std=0.02)

    def init_non_persistent_buffers(self) -> None:
        """Compute the index again, for timm's `reinit_non_persistent_buffers`."""
        self.index = self._offset_index().to(self.table.device)

    def _offset_index(self) -> torch.Tensor:
        """Table row of each (query, key) pair, (h*w, (h + 2 halo) * (w + 2 halo))."""
        offsets = []
        for size in self.query_size:
            query, key = torch.arange(size, device='cpu'), torch.arange(-self.halo, size + self.halo, device='cpu')
            offsets.append(query[:, None] - key[None, :] + size + self.halo - 1)
        dy, dx = offsets
        stride = self.row_stride or int(dx.max()) + 1
        index = dy[:, None, :, None] * stride + dx[None, :, None, :]  # (h, w, key h, key w)
        return index.flatten(2).flatten(0, 1)

    def forward(self) -> torch.Tensor:
        """The bias of every pair, (heads, queries, keys)."""
        # on a CPU, 3 to 20 times as fast in the backward pass as table[index]
        return self.table.T.index_select(1, self.index.flatten()).unflatten(1, self.index.shape)

    def set_query_size(self, query_size: tuple[int, int]) -> None:
        """Resample the table to the offsets of a new block of queries by bilinear interpolation; requires `halo` 0.

        As ViL's code loads tables of another image size.
        """
        old_size, self.query_size = self.query_size, tuple(query_size)
        num_old, num_new = (tuple(2 * size - 1 for size in sizes) for sizes in (old_size, self.query_size))
        table = self.table.data.T.unflatten(1, num_old).unsqueeze(0)  # (1, heads, dy, dx)
        table = F.interpolate(table.float(), size=num_new, mode='bilinear').to(table.dtype)
        self.table = nn.Parameter(table.squeeze(0).flatten(1).T.contiguous(), requires_grad=self.table.requires_grad)
        self.init_non_persistent_buffers()

    def fit_from(self, name: str, parent: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int] | None:
        """The table of another block of queries or halo, and how many values are inherited.

        Every offset keeps its value, and an offset beyond the parent's range takes the nearest one. None for a table in
        which offsets share rows, or for another number of heads.
        """
        old = parent[name]
        side = math.isqrt(len(old))
        if side**2 != len(old) or side % 2 == 0 or self.row_stride is not None or old.shape[1] != self.table.shape[1]:
            return None
        sizes = [2 * (size + self.halo) - 1 for size in self.query_size]
        rows, columns = ((torch.arange(size) + (side - size) // 2).clamp(0, side - 1) for size in sizes)
        new = old.unflatten(0, (side, side))[rows][:, columns].flatten(0, 1)
        return new, min(old.numel(), new.numel())


class DecomposedBias(nn.Module):
    """A bias that depends on the query: q_i . (r_dy + c_dx) for the offset (dy, dx) between query and key.

    The vectors of `rows` r, (2 H - 1, head_dim), and `columns` c, (2 W - 1, head_dim), serve all heads. MViTv2, section
    4.1, https://arxiv.org/abs/2112.01526; used by Segment Anything, https://arxiv.org/abs/2304.02643
    """

    def __init__(
        self, head_dim: int, grid_size: tuple[int, int], *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.grid_size = tuple(grid_size)
        self.rows, self.columns = (
            nn.Parameter(torch.empty(2 * size - 1, head_dim, device=device, dtype=dtype)) for size in grid_size
        )
        trunc_normal_(self.rows, std=0.02)
        trunc_normal_(self.columns, std=0.02)

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        """Queries (B, heads, P + H*W, head_dim) -> (B, heads, P + H*W, P + H*W), 0 for pairs with prefix tokens."""
        H, W = self.grid_size
        P = q.shape[2] - H * W
        grid = q[:, :, P:].flatten(0, 1).unflatten(1, (H, W))
        rows = torch.einsum('byxc,ykc->byxk', grid, self.rows[_offsets(H, self.rows.device)])
        columns = torch.einsum('byxc,xkc->byxk', grid, self.columns[_offsets(W, self.columns.device)])
        bias = rows.unsqueeze(4) + columns.unsqueeze(3)  # (B * heads, H, W, key H, key W)
        return F.pad(bias.flatten(3).flatten(1, 2).unflatten(0, q.shape[:2]), (P, 0, P, 0))

    def set_query_size(self, query_size: tuple[int, int]) -> None:
        """Resample the vectors to the offsets of a new grid by linear interpolation, as Segment Anything does."""
        self.grid_size = tuple(query_size)
        for name, size in zip(('rows', 'columns'), query_size):
            old = getattr(self, name)
            new = resample_offsets(old.data, size)
            setattr(self, name, nn.Parameter(new, requires_grad=old.requires_grad))


def resample_offsets(vectors: torch.Tensor, size: int) -> torch.Tensor:
    """Vectors (L, C) of the offsets on an axis -> (2 size - 1, C)."""
    new = F.interpolate(vectors.T.unsqueeze(0).float(), size=2 * size - 1, mode='linear')
    return new.squeeze(0).T.contiguous().to(vectors.dtype)


def _offsets(size: int, device: torch.device) -> torch.Tensor:
    """Index of the offset of every (query, key) on an axis, (size, size)."""
    positions = torch.arange(size, device=device)
    return positions[:, None] - positions[None, :] + size - 1


class PrefixBias(nn.Module):
    """One learned bias per head for each pair with a prefix token, independent of the position in the grid.

    `prefix_prefix` is (heads, P, P); `prefix_grid` is (2, heads, P), first for prefix queries, then for prefix keys.
    Multi-Scale Vision Longformer, section 3.2, https://arxiv.org/abs/2103.15358
    """

    def __init__(
        self, num_heads: int, num_prefix_tokens: int, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        P = num_prefix_tokens
        self.prefix_prefix = nn.Parameter(torch.empty(num_heads, P, P, device=device, dtype=dtype))
        self.prefix_grid = nn.Parameter(torch.empty(2, num_heads, P, device=device, dtype=dtype))
        trunc_normal_(self.prefix_prefix, std=0.02)
        trunc_normal_(self.prefix_grid, std=0.02)

    def queries(self, num_grid_tokens: int) -> torch.Tensor:
        """Bias of prefix queries on all keys, (heads, P, P + num_grid_tokens)."""
        grid = self.prefix_grid[0].unsqueeze(-1).expand(-1, -1, num_grid_tokens)
        return torch.cat([self.prefix_prefix, grid], dim=-1)

    def keys(self) -> torch.Tensor:
        """Bias of grid queries on the prefix keys, (heads, P)."""
        return self.prefix_grid[1]
