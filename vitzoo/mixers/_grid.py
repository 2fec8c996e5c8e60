"""Parameters that belong to one grid: the check that an input has that grid, and resampling to another."""

from timm.layers import register_notrace_function, resample_abs_pos_embed
from torch import nn

__all__ = ['check_grid', 'resample_rows']


@register_notrace_function
def check_grid(owner: str, expected: tuple[int, int], grid_size: tuple[int, int]) -> None:
    """Raise ValueError if `grid_size` is not the grid that the positions of `owner` are made for."""
    if tuple(expected) != tuple(grid_size):
        raise ValueError(
            f'The positions of {owner} are made for a {expected[0]} x {expected[1]} grid and got {grid_size[0]} x '
            f'{grid_size[1]}: build the model with img_size= or call model.set_input_size().'
        )


def resample_rows(
    old: nn.Parameter, new_size: tuple[int, int], old_size: tuple[int, int], num_prefix_tokens: int
) -> nn.Parameter:
    """Resample rows (heads, P + H*W, C) to a new grid by 2-D bicubic interpolation; prefix rows are kept."""
    rows = old.data.transpose(0, 1).flatten(1).unsqueeze(0)  # (1, P + H*W, heads * C)
    rows = resample_abs_pos_embed(rows, new_size, old_size, num_prefix_tokens=num_prefix_tokens)
    rows = rows.squeeze(0).unflatten(1, (old.shape[0], -1)).transpose(0, 1)
    return nn.Parameter(rows.contiguous(), requires_grad=old.requires_grad)
