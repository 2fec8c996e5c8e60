"""Weights that come with vitzoo: folders `<model>.<tag>`, in weights/ of a checkout and in the package of a wheel.

`vitzoo push` writes such a folder. Each is a pretrained config of its model, so that `timm.create_model(name,
pretrained=True)` loads it without a network.
"""

import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from timm.models._hub import load_model_config_from_path

from vitzoo._resources import resource_folder

from ._swap_record import ARCHITECTURE

__all__ = ['shipped_configs', 'shipped_folders', 'shipped_swaps']


def shipped_configs(names: Iterable[str]) -> dict[str, dict]:
    """The pretrained configs of the shipped weights of these models, by `name.tag`, those of large images first.

    timm loads the first of a model if no tag is asked for.
    """
    known = set(names)
    configs = {
        full_name: _read_config(folder)
        for full_name, folder in shipped_folders().items()
        if full_name.partition('.')[0] in known
    }
    return dict(sorted(configs.items(), key=lambda item: -math.prod(item[1]['input_size'])))


def shipped_swaps() -> dict[str, dict]:
    """The arguments of `vitzoo_swapped` of the shipped models whose mixers were swapped, by `name.tag`."""
    found = {}
    for full_name, folder in shipped_folders().items():
        _, architecture, args = _read(folder)
        if architecture == ARCHITECTURE:
            found[full_name] = args
    return found


@cache
def shipped_folders() -> dict[str, Path]:
    """The folders of all shipped weights, by `name.tag`."""
    configs = sorted(resource_folder('weights').glob('*.*/config.json'))
    return {config.parent.name: config.parent for config in configs}


def _read_config(folder: Path) -> dict:
    config, _, _ = _read(folder)
    # a file, not a folder as for local-dir, so that pretrained_cfg_overlay={'file': …} replaces it
    return {**config, 'source': None, 'file': str(folder / 'model.safetensors')}


@cache
def _read(folder: Path) -> tuple[dict, str, dict]:
    """The pretrained config in a folder, the architecture, and its arguments, which several callers need on import."""
    return load_model_config_from_path(folder)
