"""The final tokens of models of timm and vitzoo, in one order of dimensions and on one scale."""

from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ['channels_last', 'normalize_tokens']


def channels_last(model: nn.Module, features: Tensor) -> Tensor:
    """The output of `forward_features`, (B, N, C), (B, H, W, C) or in some models (B, C, H, W), with C as the last."""
    is_image = features.ndim == 4 and getattr(model, 'output_fmt', 'NCHW') == 'NCHW'
    return features.movedim(1, -1) if is_image else features


def normalize_tokens(tokens: Tensor) -> Tensor:
    """Zero mean and unit variance over the channels, the last dimension, in float32."""
    return F.layer_norm(tokens.float(), tokens.shape[-1:])
