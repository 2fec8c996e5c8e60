"""Converted models that come with vitzoo: folders `<base>_to_<mixer>.<tag>` of weights, each a model of that name.

Such a name exists only where the folder does, because its arguments are those in the folder's config.json.
"""

import sys
from collections.abc import Callable
from typing import Any

from timm.models import generate_default_cfgs, register_model, resolve_pretrained_cfg
from timm.models._input import update_model_args
from timm.models._pretrained import PretrainedCfg
from torch import nn

from ._shipped import shipped_configs, shipped_swaps
from ._swap_record import ARCHITECTURE
from .swapped import vitzoo_swapped

__all__ = ['register_converted']

default_cfgs: dict = {}


def register_converted() -> None:
    """Register an entrypoint for each name of a shipped model whose mixers were swapped."""
    swaps = shipped_swaps()
    names = list(dict.fromkeys(full_name.partition('.')[0] for full_name in swaps))
    default_cfgs.update(generate_default_cfgs({**shipped_configs(names)}))
    for name in names:
        entrypoint = _entrypoint(name, {key: args for key, args in swaps.items() if key.partition('.')[0] == name})
        setattr(sys.modules[__name__], name, entrypoint)
        register_model(entrypoint)


def _entrypoint(name: str, swaps: dict[str, dict]) -> Callable[..., nn.Module]:
    """The entrypoint of a name, whose tags may differ in their arguments."""

    def entrypoint(
        pretrained: bool = False,
        pretrained_cfg: Any = None,
        pretrained_cfg_overlay: dict | None = None,
        **kwargs: Any,
    ) -> nn.Module:
        config: PretrainedCfg = resolve_pretrained_cfg(name, pretrained_cfg, pretrained_cfg_overlay)
        # a config of the caller's need not have a tag
        args = swaps.get(f'{name}.{config.tag}', swaps[min(swaps)])
        # as of the same folder loaded by its path, so that what is saved of it loads without the name
        source = {**config.to_dict(), 'architecture': ARCHITECTURE}
        model = vitzoo_swapped(pretrained, pretrained_cfg=source, pretrained_model_args=args, **{**args, **kwargs})
        update_model_args(model, **args)
        return model

    entrypoint.__name__ = entrypoint.__qualname__ = name
    entrypoint.__module__ = __name__
    entrypoint.__doc__ = f'{name}: vitzoo_swapped with the arguments of the folders {", ".join(swaps)}.'
    return entrypoint


register_converted()
