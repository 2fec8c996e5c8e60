"""ViL's random shift: in training, the tokens of a window attend that window and one of the 8 windows around it.

One neighbour, the same for all windows, is drawn in each forward pass. Multi-Scale Vision Longformer,
https://arxiv.org/abs/2103.15358, and "Implementation.md" of its code.
"""

import torch

from ._window import attend_tiles, halo_mask, take_rows, tile, untile

__all__ = ['draw_neighbor', 'shifted_attention']


def draw_neighbor(device: torch.device) -> torch.Tensor:
    """Draw one of the 8 neighbours, a 0-d tensor: its raster index from 0 to 8, without 4, the window itself.

    Drawn from torch's generator, whose state gradient checkpointing restores.
    """
    neighbor = torch.randint(8, (), device=device)
    return neighbor + (neighbor >= 4)


def shifted_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_shared: torch.Tensor,
    v_shared: torch.Tensor,
    grid_size: tuple[int, int],
    window_size: int,
    neighbor: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None = None,
    bias_shared: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """`window_attention` with a halo as wide as the window, of which only the window `neighbor` is attended."""
    tile_size = (window_size, window_size)
    source, exists = _neighbors(neighbor, grid_size, window_size)
    on_grid = halo_mask(grid_size, tile_size, (0, 0), q.device)  # (T, w*w)
    mask = torch.cat([on_grid, on_grid[source] & exists.unsqueeze(1)], dim=1)

    def with_neighbor(x: torch.Tensor) -> torch.Tensor:
        tiles = tile(x, grid_size, tile_size)
        return torch.cat([tiles, take_rows(tiles, source.view(1, 1, -1))], dim=3)

    if bias is not None:
        bias = bias.unflatten(2, (3, window_size, 3, window_size)).transpose(3, 4)  # (heads, w*w, 3, 3, w, w)
        bias = bias.flatten(4, 5).flatten(2, 3)  # (heads, w*w, 9, w*w)
        bias = torch.cat([bias[:, :, 4], bias.index_select(2, neighbor.reshape(1)).squeeze(2)], dim=2)
    q = tile(scale * q, grid_size, tile_size)
    out = attend_tiles(q, with_neighbor(k), with_neighbor(v), k_shared, v_shared, mask, bias, bias_shared, dropout_p)
    return untile(out, grid_size, tile_size)


def _neighbors(
    neighbor: torch.Tensor, grid_size: tuple[int, int], window_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each window the index of its neighbour, (T,), and a mask of the windows that have one."""
    rows, columns = (-(-size // window_size) for size in grid_size)
    window = torch.arange(rows * columns, device=neighbor.device)
    y = window // columns + neighbor // 3 - 1
    x = window % columns + neighbor % 3 - 1
    exists = (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
    return torch.where(exists, y * columns + x, window), exists
