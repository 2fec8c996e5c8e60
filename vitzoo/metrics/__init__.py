"""What is measured about a model: accuracy, multiply-accumulates, speed and memory, oversmoothing."""

from vitzoo.metrics.accuracy import evaluate
from vitzoo.metrics.flops import count_macs
from vitzoo.metrics.oversmoothing import OversmoothingProbe, oversmoothing

__all__ = ['OversmoothingProbe', 'count_macs', 'evaluate', 'oversmoothing']
