"""The final tokens of models of timm and vitzoo in one order of dimensions."""

from torch import Tensor, nn

__all__ = ['channels_last']


def channels_last(model: nn.Module, features: Tensor) -> Tensor:
    """The output of `forward_features`, (B, N, C), (B, H, W, C) or in some models (B, C, H, W), with C as the last."""
    is_image = features.ndim == 4 and getattr(model, 'output_fmt', 'NCHW') == 'NCHW'
    return features.movedim(1, -1) if is_image else features
