"""A model as a folder that timm loads."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from timm.models import save_for_hf
from torch import nn

# within the folder of the model, which may be on another disk than its parent
PARTIAL = '.export'


def save_model(folder: Path, model: nn.Module, **options: Any) -> None:
    """Write config.json and model.safetensors; an interruption leaves those that were there.

    Args:
        options: Of timm's `save_for_hf`.

    Raises:
        OSError: The folder cannot be written, such as on a full disk.
    """
    partial = folder / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with _raise_os_errors(folder):
            save_for_hf(model, str(partial), safe_serialization=True, **options)
        unify_modes(partial, 'config.json')
        for path in partial.iterdir():
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _raise_os_errors(folder: Path) -> Iterator[None]:
    """Raise the errors of safetensors that are of the operating system, with its number in their text, as OSError."""
    try:
        yield
    except SafetensorError as error:
        found = re.search(r'os error (\d+)', str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(folder)) from error


def unify_modes(folder: Path, name: str) -> None:
    """Give all files in a folder the mode of one: safetensors writes files that only their owner may read."""
    mode = (folder / name).stat().st_mode
    for path in folder.iterdir():
        # some file systems have no modes to change
        with suppress(OSError):
            path.chmod(mode)
