"""Token mixers. Importing this package imports every file in it, and so registers every mixer."""

from importlib import import_module
from pkgutil import iter_modules

from .base import QKVMixer, TokenMixer, create_mixer, list_mixers, mixer_class, register_mixer, set_step

for _module in iter_modules(__path__):
    import_module(f'{__name__}.{_module.name}')
