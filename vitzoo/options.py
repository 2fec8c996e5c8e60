"""Options that commands have in common: how they are spelled, and what their values may be."""

import argparse
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from vitzoo.errors import UserError

AMP_DTYPES = {'float32': None, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a command that runs a model on images."""
    add = parser.add_argument
    add('--checkpoint', metavar='FILE', help='weights to load, .safetensors or .pth')
    add('--num-classes', type=positive, metavar='N', help='number of classes of the checkpoint, where not the usual')
    add('--img-size', type=size, metavar='N', help='size of the images, N or HxW (default: the size of the model)')
    add('--batch-size', type=positive, default=64, metavar='N', help='images per process and batch (default: 64)')
    add('--workers', type=natural, default=min(4, os.cpu_count() or 1), metavar='N', help='processes that read images')
    add('--device', type=device, default=default_device(), help='where to run (default: the GPU if there is one)')
    add('--amp-dtype', choices=AMP_DTYPES, default='float32', help='precision of the forward pass (default: float32)')


def autocast(device: torch.device, amp_dtype: str) -> AbstractContextManager:
    """The context for a forward pass in the precision that --amp-dtype names."""
    dtype = AMP_DTYPES[amp_dtype]
    return torch.autocast(device.type, dtype) if dtype else nullcontext()


def default_device() -> torch.device:
    """The GPU if there is one."""
    if torch.cuda.is_available():
        return torch.device('cuda')
    return torch.device('mps' if torch.backends.mps.is_available() else 'cpu')


def device(text: str) -> torch.device:
    """A device that works here, such as 'cpu' or 'cuda:1'."""
    try:
        return torch.empty(0, device=text).device
    except (AssertionError, RuntimeError) as error:
        raise argparse.ArgumentTypeError(f"cannot use the device '{text}'") from error


def natural(text: str) -> int:
    """A whole number of 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of 0 or more")
    return int(text)


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of 1 or more")
    return int(text)


def size(text: str) -> tuple[int, int]:
    """Height and width, from '224' or '224x288'."""
    sizes = [positive(side) for side in text.lower().split('x')]
    if len(sizes) > 2:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 224 or 224x288")
    return sizes[0], sizes[-1]


def check_output(path: str, suffixes: tuple[str, ...]) -> None:
    """Raise UserError unless a file of one of these formats can be written at `path`, whose folder is made.

    Called before an evaluation that may take hours.
    """
    if Path(path).suffix.lower() not in suffixes:
        raise UserError(f"cannot tell the format of '{path}': its name must end in {' or '.join(suffixes)}")
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder of '{path}': {error.strerror}") from error
    if Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK):
        raise UserError(f"cannot write '{path}': it is a folder, or lies in one that you may not write to")
