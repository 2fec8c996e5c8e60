"""Parameters with one row per token, taken to another grid."""

from timm.layers import resample_abs_pos_embed
from torch import nn

__all__ = ['resample_rows']


def resample_rows(
    old: nn.Parameter, new_size: tuple[int, int], old_size: tuple[int, int], num_prefix_tokens: int
) -> nn.Parameter:
    """Stretch rows (heads, P + H*W, C) over a new grid, bicubically in two dimensions; the prefix rows stay."""
    rows = old.data.transpose(0, 1).flatten(1).unsqueeze(0)  # (1, P + H*W, heads * C)
    rows = resample_abs_pos_embed(rows, new_size, old_size, num_prefix_tokens=num_prefix_tokens)
    rows = rows.squeeze(0).unflatten(1, (old.shape[0], -1)).transpose(0, 1)
    return nn.Parameter(rows.contiguous(), requires_grad=old.requires_grad)
