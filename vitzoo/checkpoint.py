"""What an interrupted run continues from: a folder with the weights, the optimizer and where the run was.

    <run>/checkpoints/step-00001250/{model.safetensors, ema.safetensors, optimizer.pt, scaler.pt, state.json}

A checkpoint is written under another name and renamed when it is whole. It holds tensors and JSON only, in the same
files for any number of processes, and no random state, because training has none (see vitzoo.data.loader).
"""

import json
import shutil
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Optimizer

from vitzoo.errors import UserError


def save_checkpoint(
    accelerator: Accelerator,
    folder: Path,
    state: dict,
    model: nn.Module,
    ema: nn.Module | None,
    optimizer: Optimizer,
    keep: int,
) -> None:
    """Write the checkpoint of `state['step']` below `folder`, from the main process, and keep the last `keep` only."""
    if accelerator.is_main_process:
        final = folder / f'step-{state["step"]:08d}'
        partial = folder / f'.partial-{final.name}'
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file(_contiguous(model.state_dict()), partial / 'model.safetensors')
        if ema is not None:
            save_file(_contiguous(ema.state_dict()), partial / 'ema.safetensors')
        torch.save(optimizer.state_dict(), partial / 'optimizer.pt')
        if accelerator.scaler is not None:
            torch.save(accelerator.scaler.state_dict(), partial / 'scaler.pt')
        (partial / 'state.json').write_text(json.dumps(state))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in list_checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()


def load_checkpoint(
    accelerator: Accelerator, checkpoint: Path, model: nn.Module, ema: nn.Module | None, optimizer: Optimizer
) -> dict:
    """Load what `save_checkpoint` wrote into the model, its average and the optimizer, and return the state.

    Raises:
        UserError: A file cannot be read, or the weights are those of another model.
    """
    try:
        state = json.loads((checkpoint / 'state.json').read_text())
        model.load_state_dict(load_file(checkpoint / 'model.safetensors'))
        if ema is not None:
            ema.load_state_dict(load_file(checkpoint / 'ema.safetensors'))
        optimizer.load_state_dict(torch.load(checkpoint / 'optimizer.pt', map_location='cpu', weights_only=True))
        if accelerator.scaler is not None:
            accelerator.scaler.load_state_dict(torch.load(checkpoint / 'scaler.pt', weights_only=True))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f'cannot resume from {checkpoint}: {error}') from error
    return state


def find_checkpoint(source: Path) -> Path | None:
    """The newest checkpoint of a run folder, or the checkpoint folder that `source` itself is."""
    if (source / 'state.json').is_file():
        return source
    found = list_checkpoints(source / 'checkpoints') or list_checkpoints(source)
    return found[-1] if found else None


def list_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, oldest first."""
    return sorted(path.parent for path in folder.glob('step-*/state.json'))


def _contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
