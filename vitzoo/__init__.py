"""vitzoo: vision backbones whose attention can be swapped for any efficient token mixer, registered with timm."""

from . import models
from .mixers import create_mixer, list_mixers, register_mixer

__all__ = ['create_mixer', 'list_mixers', 'models', 'register_mixer']
__version__ = '0.1.0'
