"""Token mixers. Importing this package imports all of its modules and plugins, which registers every mixer."""

from importlib import import_module
from pkgutil import iter_modules

from ._plugins import load_plugins
from .base import (
    ParameterFreeMixer,
    QKVMixer,
    TokenMixer,
    create_mixer,
    list_mixers,
    mixer_class,
    no_autocast,
    register_mixer,
    set_step,
)

__all__ = [
    'ParameterFreeMixer',
    'QKVMixer',
    'TokenMixer',
    'create_mixer',
    'list_mixers',
    'mixer_class',
    'no_autocast',
    'register_mixer',
    'set_step',
]

for _module in iter_modules(__path__):
    import_module(f'{__name__}.{_module.name}')
# last, so that a plugin cannot take the name of a built-in mixer
load_plugins()
