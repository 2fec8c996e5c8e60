"""What an interrupted run continues from: a folder with the weights, the optimizer and where the run was.

    <run>/checkpoints/step-00001250/{model.safetensors, ema.safetensors, optimizer.pt, scaler.pt, state.json}

A checkpoint is written under another name and renamed when it is whole, and state.json has the size and checksum of
every other file, so a damaged one is noticed. It holds tensors and JSON only, in the same files for any number of
processes, and no random state, because training has none (see vitzoo.data.loader).
"""

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Optimizer

from vitzoo.errors import UserError
from vitzoo.train.full_model import PlainModel

# what the libraries raise where the disk is full or the file is none of theirs
FILE_ERRORS = (OSError, ValueError, RuntimeError, SafetensorError)


class DamagedCheckpoint(UserError):
    """A checkpoint that is not as it was written."""


def save_checkpoint(
    accelerator: Accelerator,
    folder: Path,
    state: dict,
    plain: PlainModel,
    ema: nn.Module | None,
    optimizer: Optimizer,
    keep: int,
) -> None:
    """Write the checkpoint of `state['step']` below `folder`, from the main process, and keep the last `keep` only.

    Raises:
        UserError: In every process where the main one could not write. The checkpoints before are as they were.
    """
    final = folder / f'step-{state["step"]:08d}'
    partial = folder / f'.partial-{final.name}'
    # all processes have a part of these
    model, optimizer_state = plain.pull(), plain.optimizer_state(optimizer)

    def write() -> None:
        try:
            _write(partial, accelerator, state, model, ema, optimizer_state)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        for old in list_checkpoints(folder)[:-keep]:
            shutil.rmtree(old)

    on_main(accelerator, write, lambda error: _why_not_saved(folder, error))


def on_main(accelerator: Accelerator, write: Callable[[], None], explain: Callable[[Exception], str]) -> None:
    """Let the main process write files, and let every process raise where it could not.

    Raises:
        UserError: With what `explain` makes of the error.
    """
    mistake = None
    if accelerator.is_main_process:
        try:
            write()
        except FILE_ERRORS as error:
            mistake = explain(error)
    # also keeps the others from looking for files that are not there yet
    (mistake,) = broadcast_object_list([mistake])
    if mistake:
        raise UserError(mistake)


def load_checkpoint(
    accelerator: Accelerator, checkpoint: Path, plain: PlainModel, ema: nn.Module | None, optimizer: Optimizer
) -> dict:
    """Load what `save_checkpoint` wrote into the model, its average and the optimizer, and return the state.

    Raises:
        DamagedCheckpoint: A file is missing or is not as it was written; nothing was loaded then.
        UserError: The weights are those of another model.
    """
    state = _check_files(checkpoint)
    try:
        plain.module.load_state_dict(load_file(checkpoint / 'model.safetensors'))
        plain.push()
        if ema is not None:
            ema.load_state_dict(load_file(checkpoint / 'ema.safetensors'))
        optimizer_state = torch.load(checkpoint / 'optimizer.pt', map_location='cpu', weights_only=True)
        plain.load_optimizer_state(optimizer, optimizer_state)
        if accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(torch.load(checkpoint / 'scaler.pt', weights_only=True))
    except UnpicklingError as error:
        raise UserError(
            f'cannot resume from {checkpoint}: a file in it holds more than tensors, and code in it was not run'
        ) from error
    except FILE_ERRORS as error:
        raise UserError(f'cannot resume from {checkpoint}: {error}') from error
    return state


def find_checkpoints(source: Path) -> list[Path]:
    """The checkpoints of a run folder, newest first, or the checkpoint folder that `source` itself is."""
    if (source / 'state.json').is_file():
        return [source]
    return (list_checkpoints(source / 'checkpoints') or list_checkpoints(source))[::-1]


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first, without those that were never finished."""
    return sorted(path.parent for path in folder.glob('step-*/state.json'))


def _write(
    folder: Path,
    accelerator: Accelerator,
    state: dict,
    model: nn.Module,
    ema: nn.Module | None,
    optimizer_state: dict,
) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file(_contiguous(model.state_dict()), folder / 'model.safetensors')
    if ema is not None:
        save_file(_contiguous(ema.state_dict()), folder / 'ema.safetensors')
    torch.save(optimizer_state, folder / 'optimizer.pt')
    if accelerator.scaler is not None:
        torch.save(accelerator.scaler.state_dict(), folder / 'scaler.pt')
    files = {path.name: _fingerprint(path) for path in sorted(folder.iterdir())}
    (folder / 'state.json').write_text(json.dumps(dict(state, files=files)))


def _check_files(checkpoint: Path) -> dict:
    """The state of a checkpoint whose files are all as they were written."""
    try:
        state = json.loads((checkpoint / 'state.json').read_text())
        changed = [name for name, written in state['files'].items() if _fingerprint(checkpoint / name) != written]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f'{checkpoint} is damaged: {error}') from error
    if changed:
        raise DamagedCheckpoint(f'{checkpoint} is damaged: {changed[0]} is not as it was written')
    return state


def _fingerprint(path: Path) -> list[int]:
    """Size and CRC-32 of a file: a guard against accidents, not against forgery."""
    size = checksum = 0
    with path.open('rb') as file:
        while chunk := file.read(1 << 20):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]


def _why_not_saved(folder: Path, error: Exception) -> str:
    last = list_checkpoints(folder)
    kept = f'{last[-1]} is intact' if last else 'there is none before it'
    # torch does not say when a disk is full
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free / 1e6
    return (
        f'cannot write a checkpoint to {folder} ({error}; {free:.0f} MB are free there); {kept}; make room, or choose'
        f' another --output, and continue with --resume'
    )


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
