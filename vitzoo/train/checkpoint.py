"""Checkpoints: weights, optimizer state and progress of a run, in the same files for any number of processes.

    <run>/checkpoints/step-00001250/{model.safetensors, ema.safetensors, optimizer.pt, scaler.pt, state.json}

A checkpoint is written under a temporary name and renamed when it is complete. state.json has the size and checksum of
every other file, so damage is detected. The files hold tensors and JSON only, and no random states, because training
has none (see vitzoo.data.loader).
"""

import json
import shutil
import zlib
from pathlib import Path
from pickle import UnpicklingError

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Optimizer

from vitzoo._save import unify_modes
from vitzoo.errors import DivergenceError, UserError, content_error
from vitzoo.train.full_model import FullModel
from vitzoo.train.lock import FolderLock
from vitzoo.train.run_folder import FILE_ERRORS, write_on_main


class DamagedCheckpoint(UserError):
    """A file of a checkpoint is missing or has changed since it was written."""


def save_checkpoint(
    accelerator: Accelerator,
    lock: FolderLock,
    state: dict,
    full_model: FullModel,
    ema: nn.Module | None,
    optimizer: Optimizer,
    keep: int,
) -> None:
    """Write a checkpoint of step `state['step']` to the locked run folder, and delete all but the last `keep`.

    Raises:
        DivergenceError: On every process, if a weight is not finite. Earlier checkpoints are not touched.
        UserError: On every process, if the main process could not write; neither are they then.
    """
    folder = lock.folder / 'checkpoints'
    final = folder / f'step-{state["step"]:08d}'
    partial = folder / f'.partial-{final.name}'
    # collective operations, so before the main process writes alone
    model, optimizer_state = full_model.gather(), full_model.optimizer_state(optimizer)

    def write() -> None:
        _check_finite(state['step'], model, ema)
        try:
            _write(partial, accelerator, state, model, ema, optimizer_state)
            old = [_hide(final)] if final.exists() else []
            partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        old += [_hide(checkpoint) for checkpoint in list_checkpoints(folder)[:-keep]]
        for path in old:
            shutil.rmtree(path)

    write_on_main(accelerator, lock, write, lambda error: _explain_failure(folder, error))


def load_checkpoint(
    accelerator: Accelerator, checkpoint: Path, full_model: FullModel, ema: nn.Module | None, optimizer: Optimizer
) -> None:
    """Load an intact checkpoint into the model, its moving average and the optimizer.

    Raises:
        UserError: The weights or the optimizer state do not fit.
    """
    try:
        full_model.module.load_state_dict(load_file(checkpoint / 'model.safetensors'))
        full_model.scatter()
        if ema is not None:
            ema.load_state_dict(load_file(checkpoint / 'ema.safetensors'))
        optimizer_state = torch.load(checkpoint / 'optimizer.pt', map_location='cpu', weights_only=True)
        full_model.load_optimizer_state(optimizer, optimizer_state)
        # a run that continues in float16 starts with a new scaler
        if accelerator.scaler is not None and (checkpoint / 'scaler.pt').is_file():
            accelerator.scaler.load_state_dict(torch.load(checkpoint / 'scaler.pt', weights_only=True))
    except UnpicklingError as error:
        raise UserError(
            f'cannot resume from {checkpoint}: a file in it contains more than tensors, such as code, which was not run'
        ) from error
    except FILE_ERRORS as error:
        raise UserError(f'cannot resume from {checkpoint}: {error}') from error


def read_state(checkpoint: Path) -> dict:
    """The state of a checkpoint, after comparing all files with their checksums.

    Raises:
        DamagedCheckpoint: A file is missing or damaged.
    """
    try:
        state = json.loads((checkpoint / 'state.json').read_text(encoding='utf-8'))
        changed = [name for name, written in state['files'].items() if _fingerprint(checkpoint / name) != written]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f'{checkpoint} is damaged: {content_error(error, "state.json")}') from error
    if changed:
        raise DamagedCheckpoint(f'{checkpoint} is damaged: {changed[0]} does not match its checksum')
    return state


def check_weights(checkpoint: Path) -> None:
    """Check that the weights in a checkpoint are finite.

    Raises:
        DamagedCheckpoint: One is not.
    """
    for file in sorted(checkpoint.glob('*.safetensors')):
        try:
            name = first_non_finite(load_file(file))
        except FILE_ERRORS:
            # left to `load_checkpoint`, which explains it
            continue
        if name:
            raise DamagedCheckpoint(f'{checkpoint} cannot be used: {name} in {file.name} is not finite')


def first_non_finite(tensors: dict[str, torch.Tensor]) -> str | None:
    """The name of the first tensor with an infinite or NaN element."""
    return next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), None)


def find_checkpoints(source: Path) -> list[Path]:
    """The checkpoints of a run folder or checkpoints folder, newest first, or `source` if it is itself a checkpoint."""
    if (source / 'state.json').is_file():
        return [source]
    return (list_checkpoints(source / 'checkpoints') or list_checkpoints(source))[::-1]


def list_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in a folder, oldest first."""
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
    unify_modes(folder, 'state.json')


def _hide(checkpoint: Path) -> Path:
    """Rename a checkpoint that is to be deleted, so that a kill leaves none of it that is not removed later."""
    hidden = checkpoint.with_name(f'.partial-{checkpoint.name}-old')
    shutil.rmtree(hidden, ignore_errors=True)
    return checkpoint.rename(hidden)


def _fingerprint(path: Path) -> list[int]:
    """Size and CRC-32 of a file, which detect accidents but not forgery."""
    size = checksum = 0
    with path.open('rb') as file:
        while chunk := file.read(1 << 20):
            size, checksum = size + len(chunk), zlib.crc32(chunk, checksum)
    return [size, checksum]


def _check_finite(step: int, model: nn.Module, ema: nn.Module | None) -> None:
    for kind, module in {'weights': model, 'averaged weights': ema}.items():
        name = first_non_finite({} if module is None else module.state_dict())
        if name:
            raise DivergenceError(f'the {kind} {name} are not finite after step {step}')


def _explain_failure(folder: Path, error: Exception) -> str:
    last = list_checkpoints(folder)
    intact = f'{last[-1]} is intact' if last else 'there is no earlier checkpoint'
    if isinstance(error, DivergenceError):
        again = 'continue from it with --resume' if last else 'start again'
        return f'{error}; {intact}; {again}, with half the lr, --clip-grad 1 or a longer warm-up'
    # torch's errors do not mention a full disk
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free / 1e6
    again = 'continue with --resume' if last else 'start again'
    return (
        f'cannot write a checkpoint to {folder} ({error}; {free:.0f} MB free); {intact}; free some space or choose'
        f' another --output, and {again}'
    )


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
