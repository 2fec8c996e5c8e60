"""Token mixers. Importing this package imports every file in it and every plugin, and so registers every mixer."""

from importlib import import_module
from pkgutil import iter_modules

from ._plugins import load_plugins
from .base import QKVMixer, TokenMixer, create_mixer, list_mixers, mixer_class, register_mixer, set_step

for _module in iter_modules(__path__):
    import_module(f'{__name__}.{_module.name}')
# plugins come last, so that no name of vitzoo's own is ever theirs
load_plugins()
