"""The runtimes that `vitzoo bench models --backend` compares: PyTorch, compiled models and exported files."""

import argparse
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from vitzoo.bench._harness import CUDA_GRAPHS
from vitzoo.errors import UserError, did_you_mean
from vitzoo.export.formats import FILE_FORMATS, check_packages, write_file
from vitzoo.options import autocast

# the file format that a runtime needs; None for those of PyTorch, which also train
BACKENDS: dict[str, str | None] = {
    'eager': None,
    'compile': None,
    CUDA_GRAPHS: None,
    'onnxruntime': 'onnx',
    'openvino': 'openvino',
}
# modes of torch.compile
_MODES = {'compile': None, CUDA_GRAPHS: 'reduce-overhead'}


def backends(text: str) -> list[str]:
    """Parse names of backends, separated by commas."""
    names = text.split(',')
    for name in names:
        if name not in BACKENDS:
            hint = did_you_mean(name, BACKENDS) or f'; they are {", ".join(BACKENDS)}'
            raise argparse.ArgumentTypeError(f"unknown backend '{name}'{hint}")
    return list(dict.fromkeys(names))


def check_backends(args: argparse.Namespace) -> None:
    """Check that all backends can run with the other options.

    Raises:
        UserError: A package is missing, a backend is for other devices or precisions, or none can run the passes.
    """
    if set(args.passes) == {'training step'} and not any(map(can_train, args.backend)):
        raise UserError(f'{" and ".join(args.backend)} cannot train; add --backend eager, or leave out --what')
    if CUDA_GRAPHS in args.backend and args.device.type != 'cuda':
        raise UserError(f'the backend {CUDA_GRAPHS} needs an NVIDIA GPU, not {args.device}; leave it out')
    if not _MODES.keys().isdisjoint(args.backend):
        _check_compiler(args.device)
    for name in args.backend:
        file_format = BACKENDS[name]
        if file_format is None:
            continue
        check_packages(f'--backend {name}', file_format)
        if args.device.type != 'cpu':
            raise UserError(f'the backend {name} runs on the CPU here, not on {args.device}; pass --device cpu')
        if args.dtype != ['float32']:
            raise UserError(f'the backend {name} runs in float32, not {" ".join(args.dtype)}; leave out --dtype')


def _check_compiler(device: torch.device) -> None:
    """Compile a trivial function, which fails without a C++ compiler or, on a GPU, Triton."""
    try:
        torch.compile(torch.sin)(torch.zeros(2, device=device))
    except RuntimeError as error:
        reason = str(error).strip().partition('\n')[0]
        raise UserError(
            f'torch.compile does not work on this machine, leave out the backends that compile: {reason}'
        ) from error


def can_train(backend: str) -> bool:
    """Return True for a backend that has a backward pass."""
    return BACKENDS[backend] is None


def run_with(backend: str, model: nn.Module, images: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A model in evaluation mode as a function of images of the size of `images`, of which there are at least two."""
    file_format = BACKENDS[backend]
    if file_format is None:
        return torch.compile(model, dynamic=False, mode=_MODES[backend]) if backend in _MODES else model
    with TemporaryDirectory() as folder:
        path = Path(folder, f'model{FILE_FORMATS[file_format].suffix}')
        write_file(file_format, model, images, path, {})
        return FILE_FORMATS[file_format].open(path)


@torch.no_grad()
def largest_difference(
    run: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, images: torch.Tensor, dtype: str
) -> float:
    """The largest absolute difference between the logits of a backend and of the model in the same precision."""
    model.eval()
    with autocast(images.device, dtype):
        return (run(images).float() - model(images).float()).abs().max().item()
