"""Unwrapping official checkpoints, and loading them without executing pickled code."""

import argparse
import re
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models import clean_state_dict
from torch import Tensor

from vitzoo.errors import UserError

__all__ = ['has_two_sets', 'read_checkpoint', 'unwrap']

_AVERAGED, _PLAIN = ('state_dict_ema', 'model_ema', 'ema'), ('state_dict', 'model', 'net')
WRAPPERS = _AVERAGED + _PLAIN


def unwrap(checkpoint: dict) -> dict[str, Tensor]:
    """The weights in a checkpoint such as `{'model': …}`, EMA weights first, without a `module.` prefix."""
    for key in WRAPPERS:
        if isinstance(checkpoint.get(key), dict):
            return unwrap(checkpoint[key])
    weights = {name: value for name, value in checkpoint.items() if isinstance(value, Tensor)}
    return clean_state_dict(weights)


def has_two_sets(checkpoint: dict) -> bool:
    """Return True for a checkpoint with EMA weights, which `unwrap` takes, next to the raw weights."""
    return all(any(isinstance(checkpoint.get(key), dict) for key in keys) for keys in (_AVERAGED, _PLAIN))


def read_checkpoint(path: str | Path) -> dict:
    """The contents of a .safetensors or .pth file, restricted to tensors and plain values.

    In addition to the types that `torch.load(weights_only=True)` allows, a pickle may hold an argparse.Namespace and
    numpy scalars and arrays, as the checkpoints of DeiT and ViL do. Raises UserError if the file cannot be read or
    holds any other type.
    """
    if Path(path).is_dir():
        raise UserError(f"the checkpoint '{path}' is a folder; pass the file in it, or the folder as the model")
    if not Path(path).is_file():
        raise UserError(f"the checkpoint '{path}' does not exist, or is not a file")
    try:
        if Path(path).suffix == '.safetensors':
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace, *_numpy_globals()]):
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except UnpicklingError as error:
        forbidden = re.search(r'GLOBAL (\S+)', str(error))
        if forbidden is None:
            raise UserError(f"the checkpoint '{path}' is damaged") from error
        raise UserError(
            f"the checkpoint '{path}' is refused, because its pickle asks for {forbidden[1]}, which could run code; "
            'if you trust it, save the state_dict() of its model as .safetensors'
        ) from error
    except (EOFError, KeyError, OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise UserError(f"the checkpoint '{path}' is damaged, or not .safetensors or .pth") from error
    if not isinstance(checkpoint, dict):
        raise UserError(f"the checkpoint '{path}' holds a {type(checkpoint).__name__}, not weights by name")
    return checkpoint


def _numpy_globals() -> list:
    """The globals in pickled numpy scalars and arrays, under the module names of numpy 1 and 2."""
    constructors: list[Any] = [np.float64().__reduce__()[0], np.zeros(0).__reduce__()[0]]
    named = [(fn, f'numpy.{core}.multiarray.{fn.__name__}') for fn in constructors for core in ('core', '_core')]
    dtypes = {type(np.dtype(code)) for code in '?bhilqBHILQefd'}
    return [np.ndarray, np.dtype, *dtypes, *named]
