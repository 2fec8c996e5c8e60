"""What is measured about a model: accuracy, multiply-accumulates, speed and memory, oversmoothing, health."""

from vitzoo.metrics.accuracy import evaluate
from vitzoo.metrics.flops import count_macs
from vitzoo.metrics.health import HealthProbe, health
from vitzoo.metrics.oversmoothing import OversmoothingProbe, oversmoothing

__all__ = ['HealthProbe', 'OversmoothingProbe', 'count_macs', 'evaluate', 'health', 'oversmoothing']
