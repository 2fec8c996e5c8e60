"""Unwrapping official checkpoints, and loading them without executing pickled code."""

import argparse
import re
from pathlib import Path, PurePosixPath
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

_AVERAGED = ('state_dict_ema', 'model_ema', 'ema')
_PLAIN = ('state_dict', 'model', 'net', 'student', 'model_state_dict', 'module', 'weights', 'params')
# put before the names of a model by what trained it, such as Lightning and DINO
_PREFIXES = ('model.', 'backbone.')
# tensors that such training has next to the model
_OF_TRAINING = ('head.', 'criterion.', 'loss.')
_OTHER_FORMATS = {
    '.npz': 'of NumPy; load it with timm.models.load_checkpoint, and save the state_dict() as .safetensors',
    '.json': 'not weights, but perhaps a list of the files that have them; give one file with all weights',
}


def unwrap(checkpoint: dict) -> dict[str, Tensor]:
    """The weights in a checkpoint such as `{'model': …}`, EMA weights first, without prefixes such as `module.`."""
    found = _averaged(checkpoint) or _in_wrapper(checkpoint, _PLAIN)
    own = {name: value for name, value in checkpoint.items() if isinstance(value, Tensor)}
    return found or _without_prefixes(own)


def has_two_sets(checkpoint: dict) -> bool:
    """Return True for a checkpoint with EMA weights, which `unwrap` takes, next to the raw weights."""
    return bool(_averaged(checkpoint) and _in_wrapper(checkpoint, _PLAIN))


def _averaged(checkpoint: dict) -> dict[str, Tensor]:
    """The EMA weights in a checkpoint, empty if there are none."""
    teacher, student = (_in_wrapper(checkpoint, (key,)) for key in ('teacher', 'student'))
    # in DINO, the teacher is the average of the student; in other distillation it is another model
    is_average = bool(teacher) and {k: x.shape for k, x in teacher.items()} == {k: x.shape for k, x in student.items()}
    return _in_wrapper(checkpoint, _AVERAGED) or (teacher if is_average else {})


def _in_wrapper(checkpoint: dict, keys: tuple[str, ...]) -> dict[str, Tensor]:
    """The weights under the first of the keys that has some."""
    for key in keys:
        if isinstance(checkpoint.get(key), dict) and (weights := unwrap(checkpoint[key])):
            return weights
    return {}


def _without_prefixes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    weights = clean_state_dict(weights)
    for prefix in _PREFIXES:
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        if own and all(name.startswith((prefix, *_OF_TRAINING)) for name in weights):
            # a linear classifier; those of self-supervised training have more layers
            head = {name: weights[name] for name in ('head.weight', 'head.bias') if name in weights}
            return _without_prefixes({**head, **own})
    return weights


def read_checkpoint(path: str | Path) -> dict:
    """The contents of a .safetensors or .pth file, restricted to tensors and plain values.

    In addition to the types that `torch.load(weights_only=True)` allows, a pickle may hold an argparse.Namespace, paths
    and numpy scalars and arrays, as the checkpoints of DeiT and ViL do. Raises UserError if the file cannot be read or
    holds any other type.
    """
    if Path(path).is_dir():
        raise UserError(f"the checkpoint '{path}' is a folder; pass the file in it, or the folder as the model")
    if not Path(path).is_file():
        raise UserError(f"the checkpoint '{path}' does not exist, or is not a file")
    if Path(path).suffix in _OTHER_FORMATS:
        raise UserError(f"the checkpoint '{path}' is {_OTHER_FORMATS[Path(path).suffix]}")
    # safetensors says of a file that may not be read that there is none
    Path(path).open('rb').close()
    try:
        if Path(path).suffix == '.safetensors':
            return load_file(path)
        with torch.serialization.safe_globals([argparse.Namespace, *_path_globals(), *_numpy_globals()]):
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
        if 'TorchScript' in str(error):
            raise UserError(
                f"the checkpoint '{path}' is a TorchScript program; save the state_dict() of torch.jit.load('{path}')"
                f' as .safetensors'
            ) from error
        raise UserError(f"the checkpoint '{path}' is damaged, or not .safetensors or .pth") from error
    if not isinstance(checkpoint, dict):
        raise UserError(f"the checkpoint '{path}' holds a {type(checkpoint).__name__}, not weights by name")
    return checkpoint


def _path_globals() -> list:
    """The classes of paths, under the module names of Python before 3.13 and of later ones."""
    classes: list[Any] = [type(Path()), PurePosixPath]
    return [(cls, f'{module}.{cls.__name__}') for cls in classes for module in ('pathlib', 'pathlib._local')]


def _numpy_globals() -> list:
    """The globals in pickled numpy scalars and arrays, under the module names of numpy 1 and 2."""
    constructors: list[Any] = [np.float64().__reduce__()[0], np.zeros(0).__reduce__()[0]]
    named = [(fn, f'numpy.{core}.multiarray.{fn.__name__}') for fn in constructors for core in ('core', '_core')]
    dtypes = {type(np.dtype(code)) for code in '?bhilqBHILQefd'}
    return [np.ndarray, np.dtype, *dtypes, *named]
