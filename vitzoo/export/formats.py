"""The file formats of exported models: how each is written, with facts about the model as metadata, and run.

All compute in float32, on as many threads as PyTorch.
"""

import importlib.util
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from vitzoo.errors import UserError
from vitzoo.mixers import mixer_class
from vitzoo.mixers.base import named_mixers

OPSET = 18
INPUT, OUTPUT = 'images', 'logits'
# its key in the runtime information of OpenVINO, and its file in that of torch.export
FACTS = 'vitzoo'

_Run = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Format:
    """A format: the suffix of its files, the packages it needs, and functions that write and open a file."""

    suffix: str
    packages: tuple[str, ...]
    write: Callable[[ExportedProgram, Path, dict], None]
    open: Callable[[Path], _Run]


def check_packages(purpose: str, file_format: str) -> None:
    """Check that the packages of a format are installed; `purpose` is the option that needs them.

    Raises:
        UserError: Some are not.
    """
    missing = [name for name in FILE_FORMATS[file_format].packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f'{purpose} needs packages that are not installed: pip install {" ".join(missing)}')


def trace(model: nn.Module, images: torch.Tensor) -> ExportedProgram:
    """The program of a model in evaluation mode for images of this size, and for any number of them.

    Args:
        images: At least two, because the program of one image is for one only.
    """
    # torch 2.6 requires a limit
    batch = Dim('batch', max=2**31 - 1)
    with torch.no_grad():
        return torch.export.export(model, (images,), dynamic_shapes=({0: batch},), strict=False)


# whose sorting PyTorch's exporter does not translate
NOT_IN_ONNX = ('reformer',)
# whose Fourier transforms torch 2.6 leaves out of a program
NOT_IN_TORCH_2_6 = ('circulant', 'fourier')


def write_file(file_format: str, model: nn.Module, images: torch.Tensor, path: Path, facts: dict) -> None:
    """Write a model for images of the size of `images`.

    Raises:
        UserError: The exporter cannot translate the model.
    """
    refused = _mixers_of(model, NOT_IN_ONNX)
    if refused and file_format != 'torch':
        raise UserError(f'{file_format} has no form of {refused[0]}, as docs/export.md says; choose --to torch')
    refused = _mixers_of(model, NOT_IN_TORCH_2_6)
    if refused and torch.__version__.startswith('2.6.'):
        raise UserError(f'torch {torch.__version__} cannot export {refused[0]}; use torch 2.7')
    try:
        with warnings.catch_warnings():
            # exporters warn of their own future versions
            warnings.simplefilter('ignore')
            FILE_FORMATS[file_format].write(trace(model, images), path, facts)
    except (RuntimeError, ValueError) as error:
        raise UserError(f'{type(model).__name__} cannot be exported to {file_format}: {_reason(error)}') from error


def _mixers_of(model: nn.Module, names: tuple[str, ...]) -> list[str]:
    """Those of the named mixers that a model has."""
    mixers = [mixer for _, mixer in named_mixers(model)]
    return [name for name in names if any(isinstance(mixer, mixer_class(name)) for mixer in mixers)]


def _reason(error: BaseException) -> str:
    """The first line of what caused an error, without colours; PyTorch's exporter explains its steps around it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return re.sub('\x1b\\[[0-9;]*m', '', str(error)).strip().partition('\n')[0]


def _write_onnx(program: ExportedProgram, path: Path, facts: dict) -> None:
    exported: Any = torch.onnx.export(
        program, input_names=[INPUT], output_names=[OUTPUT], opset_version=OPSET, dynamo=True, verbose=False
    )
    exported.model.metadata_props.update(_to_text(facts))
    exported.save(path)


def _open_onnx(path: Path) -> _Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # idle threads would spin on and slow down whatever runs next
    options.add_session_config_entry('session.force_spinning_stop', '1')
    session = onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
    return lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])


def _write_openvino(program: ExportedProgram, path: Path, facts: dict) -> None:
    import openvino

    # by way of ONNX, because OpenVINO itself translates fewer operations of torch
    onnx_file = path.with_suffix('.onnx')
    _write_onnx(program, onnx_file, {})
    model = openvino.convert_model(onnx_file)
    for key, value in _to_text(facts).items():
        model.set_rt_info(value, [FACTS, key])
    openvino.save_model(model, path, compress_to_fp16=False)
    onnx_file.unlink()


def _open_openvino(path: Path) -> _Run:
    import openvino

    # without the hint, processors with bfloat16 use it
    options = dict(INFERENCE_PRECISION_HINT='f32', INFERENCE_NUM_THREADS=torch.get_num_threads())
    compiled = openvino.Core().compile_model(path, 'CPU', options)
    return lambda images: torch.from_numpy(compiled({INPUT: images.numpy()})[OUTPUT])


def _write_torch(program: ExportedProgram, path: Path, facts: dict) -> None:
    torch.export.save(program, path, extra_files={FACTS: json.dumps(facts, ensure_ascii=False)})


def _open_torch(path: Path) -> _Run:
    try:
        return torch.export.load(path).module()
    # torch 2.6 raises RuntimeError if a part of the model is in float32 under autocast, later ones errors of their own
    except Exception as error:
        advice = 'torch 2.7 or --to onnx' if torch.__version__.startswith('2.6.') else '--to onnx'
        raise UserError(f'torch {torch.__version__} cannot read its file ({_reason(error)}); use {advice}') from error


def _to_text(facts: dict) -> dict[str, str]:
    """The facts as text; all but texts as JSON."""
    return {k: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for k, v in facts.items()}


FILE_FORMATS = {
    'onnx': Format('.onnx', ('onnx', 'onnxscript', 'onnxruntime'), _write_onnx, _open_onnx),
    'openvino': Format('.xml', ('openvino', 'onnx', 'onnxscript'), _write_openvino, _open_openvino),
    'torch': Format('.pt2', (), _write_torch, _open_torch),
}
