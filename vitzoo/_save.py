"""A model as a folder that timm loads."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from timm.models import save_for_hf
from torch import nn

# within the folder of the model, which may be on another disk than its parent
PARTIAL = '.export'


def save_model(folder: Path, model: nn.Module, **options: Any) -> None:
    """Write config.json and model.safetensors; an interruption leaves those that were there.

    Args:
        options: Of timm's `save_for_hf`.
    """
    partial = folder / PARTIAL
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_for_hf(model, str(partial), safe_serialization=True, **options)
        unify_modes(partial, 'config.json')
        for path in partial.iterdir():
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def unify_modes(folder: Path, name: str) -> None:
    """Give all files in a folder the mode of one: safetensors writes files that only their owner may read."""
    mode = (folder / name).stat().st_mode
    for path in folder.iterdir():
        # some file systems have no modes to change
        with suppress(OSError):
            path.chmod(mode)
