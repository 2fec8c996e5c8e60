"""ViL's random shift: in training, the tokens of a window attend it and one of the 8 windows around it.

One neighbour, the same for all windows, is drawn for each forward pass. Multi-Scale Vision Longformer,
https://arxiv.org/abs/2103.15358, and "Implementation.md" of its code.
"""

import torch

from ._window import attend_tiles, halo_mask, tile, untile

__all__ = ['draw_neighbour', 'shifted_attention']


def draw_neighbour(device: torch.device) -> torch.Tensor:
    """One of the 8 neighbours, numbered in raster order from 0 to 8 without 4, the window itself; a tensor of no
    dimension.

    Of torch's generator, whose state gradient checkpointing keeps.
    """
    neighbour = torch.randint(8, (), device=device)
    return neighbour + (neighbour >= 4)


def shifted_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_shared: torch.Tensor,
    v_shared: torch.Tensor,
    grid_size: tuple[int, int],
    window_size: int,
    neighbour: torch.Tensor,
    scale: float,
    bias: torch.Tensor | None = None,
    bias_shared: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """`window_attention` of a halo as wide as the window, with all of the halo masked but one `neighbour`."""
    window = (window_size, window_size)
    source, exists = _neighbours(neighbour, grid_size, window_size)
    inside = halo_mask(grid_size, window, (0, 0), q.device)  # (T, w*w)
    mask = torch.cat([inside, inside[source] & exists.unsqueeze(1)], dim=1)

    def gather(x):
        tiles = tile(x, grid_size, window)
        return torch.cat([tiles, tiles[:, :, source]], dim=3)

    if bias is not None:
        bias = bias.unflatten(2, (3, window_size, 3, window_size)).transpose(3, 4)  # (heads, w*w, 3, 3, w, w)
        bias = bias.flatten(4, 5).flatten(2, 3)  # (heads, w*w, windows, w*w)
        bias = torch.cat([bias[:, :, 4], bias.index_select(2, neighbour.reshape(1)).squeeze(2)], dim=2)
    q = tile(scale * q, grid_size, window)
    return untile(
        attend_tiles(q, k, v, k_shared, v_shared, mask, gather, bias, bias_shared, dropout_p), grid_size, window
    )


def _neighbours(
    neighbour: torch.Tensor, grid_size: tuple[int, int], window_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which window lies there beside each, (T,), and whether there is one."""
    rows, columns = (-(-size // window_size) for size in grid_size)
    window = torch.arange(rows * columns, device=neighbour.device)
    y = window // columns + neighbour // 3 - 1
    x = window % columns + neighbour % 3 - 1
    exists = (y >= 0) & (y < rows) & (x >= 0) & (x < columns)
    return torch.where(exists, y * columns + x, window), exists
