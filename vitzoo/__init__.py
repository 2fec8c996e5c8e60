"""vitzoo: vision backbones whose attention can be swapped for any efficient token mixer, registered with timm."""

# _process is first, because its settings have no effect once torch is imported
from . import _process, models
from .mixers import create_mixer, list_mixers, register_mixer, set_step
from .models._attn_layer import attn_layer
from .models.inherit import Inheritance, inherit_weights
from .models.swap import swap_mixer

__all__ = [
    'Inheritance',
    'attn_layer',
    'create_mixer',
    'inherit_weights',
    'list_mixers',
    'models',
    'register_mixer',
    'set_step',
    'swap_mixer',
]
__version__ = '0.2.0'
