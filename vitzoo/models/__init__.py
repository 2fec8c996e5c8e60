"""Backbones. Importing this package registers every model with timm."""

from .aft import AFT
from .cvt import CvT
from .deit import DeiT
from .vil import ViL
