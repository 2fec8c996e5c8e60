"""Metrics of a model: accuracy, multiply-accumulates, speed and memory, oversmoothing, health."""

from vitzoo.metrics.accuracy import evaluate, mark_hits, rank_classes, score_images, summarize
from vitzoo.metrics.health import HealthProbe, health
from vitzoo.metrics.macs import count_macs
from vitzoo.metrics.oversmoothing import OversmoothingProbe, oversmoothing, token_statistics

__all__ = [
    'HealthProbe',
    'OversmoothingProbe',
    'count_macs',
    'evaluate',
    'health',
    'mark_hits',
    'oversmoothing',
    'rank_classes',
    'score_images',
    'summarize',
    'token_statistics',
]
