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
        # safetensors writes a file that only its owner may read; some file systems have no modes to change
        mode = (partial / 'config.json').stat().st_mode
        for path in partial.iterdir():
            with suppress(OSError):
                path.chmod(mode)
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
