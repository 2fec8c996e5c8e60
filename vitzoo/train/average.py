"""The exponential moving average of a model's weights and of its BatchNorm statistics."""

import torch
from timm.utils import ModelEmaV3
from torch import nn

_STATISTICS = ('running_mean', 'running_var')


class AveragedModel(ModelEmaV3):
    """timm's average of all parameters and running statistics; arguments as there.

    The statistics of the last weights are not those of averaged ones. Other buffers are copied, because an average of
    counters or of random projections is meaningless.
    """

    def apply_update_no_buffers_(self, model: nn.Module, decay: float) -> None:
        """Move to the weights of a model; the other method of timm, which this does not use, averages all buffers."""
        named = self.module.named_buffers()
        statistics = [buffer for name, buffer in named if name.rpartition('.')[2] in _STATISTICS]
        averages = [buffer.clone() for buffer in statistics]
        super().apply_update_no_buffers_(model, decay)
        for buffer, average in zip(statistics, averages):
            buffer.copy_(torch.lerp(average, buffer, 1 - decay))
