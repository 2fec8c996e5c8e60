"""Backbones; importing this package registers all models with timm."""

from . import converted, swapped
from .aft import AFT
from .cvt import CvT
from .deit import DeiT
from .vil import ViL

__all__ = ['AFT', 'CvT', 'DeiT', 'ViL']
