"""What official checkpoints have around their weights, taken off, and how they are read without running anything."""

import argparse
import re
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models import clean_state_dict
from torch import Tensor

from vitzoo.errors import UserError

__all__ = ['read_checkpoint', 'unwrap']

WRAPPERS = ('state_dict_ema', 'model_ema', 'ema', 'state_dict', 'model', 'net')


def unwrap(checkpoint: dict) -> dict[str, Tensor]:
    """The weights of a checkpoint: out of `{'model': …}` and its kin, EMA first, without `module.` in the names."""
    for key in WRAPPERS:
        if isinstance(checkpoint.get(key), dict):
            return unwrap(checkpoint[key])
    weights = {name: value for name, value in checkpoint.items() if isinstance(value, Tensor)}
    return clean_state_dict(weights)


def read_checkpoint(path: str | Path) -> dict:
    """All that is in a .safetensors file or a pickle, of which only tensors and plain values are read.

    Besides what `torch.load(weights_only=True)` allows, that is argparse.Namespace and numpy's numbers and arrays, as
    in the checkpoints of DeiT and ViL. Raises UserError for a file that cannot be read, or asks for anything else.
    """
    if Path(path).is_dir():
        raise UserError(f"the checkpoint '{path}' is a folder; give the file in it, or the folder as the model")
    if not Path(path).is_file():
        raise UserError(f"the checkpoint '{path}' does not exist, or is not a file")
    try:
        if Path(path).suffix == '.safetensors':
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace, *_numpy_globals()]):
            checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except UnpicklingError as error:
        asked = re.search(r'GLOBAL (\S+)', str(error))
        if asked is None:
            raise UserError(f"the checkpoint '{path}' is damaged") from error
        raise UserError(
            f"the checkpoint '{path}' is refused, because its pickle asks for {asked[1]}, which could run code; where "
            'you trust it, save the state_dict() of its model as .safetensors'
        ) from error
    except (EOFError, KeyError, OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise UserError(f"the checkpoint '{path}' is damaged, or not .safetensors or .pth") from error
    if not isinstance(checkpoint, dict):
        raise UserError(f"the checkpoint '{path}' holds a {type(checkpoint).__name__}, not weights by name")
    return checkpoint


def _numpy_globals() -> list:
    """What pickled numbers and arrays of numpy are made of, under the module names of numpy 1 and 2."""
    makers = [np.float64().__reduce__()[0], np.zeros(0).__reduce__()[0]]
    named = [(maker, f'numpy.{core}.multiarray.{maker.__name__}') for maker in makers for core in ('core', '_core')]
    dtypes = {type(np.dtype(code)) for code in '?bhilqBHILQefd'}
    return [np.ndarray, np.dtype, *dtypes, *named]
