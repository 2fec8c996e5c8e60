"""The folder of a run and its files, written by the main process.

<run>/recipe.yaml                        the effective recipe; `--config` replays it
<run>/held_out.csv                       the images held out for validation, if the dataset has no validation split
<run>/metrics.csv, curves.png            one row per epoch, and its plot
<run>/config.json, model.safetensors     the trained model, as written by timm.models.save_for_hf
<run>/best/                              the model of the epoch with the best top-1
<run>/checkpoints/                       see vitzoo.train.checkpoint
"""

import csv
import shutil
from collections.abc import Callable
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from timm.models import save_for_hf
from torch import nn

from vitzoo.data.held_out import HELD_OUT
from vitzoo.errors import UserError
from vitzoo.train.recipe import Recipe

RUN_FILES = ('recipe.yaml', HELD_OUT, 'metrics.csv', 'curves.png', 'config.json', 'model.safetensors')
RUN_FOLDERS = ('checkpoints', 'best')
# raised by the libraries if the disk is full, or a file is not in their format
FILE_ERRORS = (OSError, ValueError, RuntimeError, SafetensorError)


def new_folder(recipe: Recipe) -> Path:
    """The folder of a new run: the recipe's output, or the first free of runs/<model>, runs/<model>-2, ...

    Raises:
        UserError: The folder contains a run, and the recipe does not overwrite it.
    """
    folder = Path(recipe.output) if recipe.output else _free_folder(Path('runs') / Path(recipe.model).name)
    if _contains_run(folder) and not recipe.overwrite:
        raise UserError(
            f"there is a run in '{folder}' already; continue it with --resume auto, replace it with --overwrite,"
            f' or choose another --output'
        )
    return folder


def prepare_folder(folder: Path, is_new: bool) -> None:
    """Create the folder; for a new run, remove the files of an older run."""
    folder.mkdir(parents=True, exist_ok=True)
    if is_new:
        for name in RUN_FILES:
            (folder / name).unlink(missing_ok=True)
        for name in RUN_FOLDERS:
            shutil.rmtree(folder / name, ignore_errors=True)


def write_on_main(accelerator: Accelerator, write: Callable[[], None], explain: Callable[[Exception], str]) -> None:
    """Call `write` on the main process, and wait for it on the others.

    Raises:
        UserError: On every process, if the main process could not write; `explain` turns its error into the message.
    """
    message = None
    if accelerator.is_main_process:
        try:
            write()
        except FILE_ERRORS as error:
            message = explain(error)
    # this broadcast is also the barrier that keeps the others from looking for files that do not exist yet
    (message,) = broadcast_object_list([message])
    if message:
        raise UserError(message)


def write_metrics(folder: Path, history: list[dict]) -> None:
    """Rewrite metrics.csv, so that a resumed run does not repeat a row."""
    partial = folder / '.metrics.csv'
    with partial.open('w', newline='') as file:
        writer = csv.DictWriter(file, fieldnames=list(history[-1]))
        writer.writeheader()
        writer.writerows(history)
    partial.replace(folder / 'metrics.csv')


def export_model(folder: Path, model: nn.Module, class_names: list[str], data_config: dict, info: dict) -> None:
    """Write a model that `timm.create_model('local-dir:<folder>', pretrained=True)` loads.

    Args:
        info: Stored in config.json under 'vitzoo'.
    """
    partial = folder.parent / f'.export-{folder.name}'
    shutil.rmtree(partial, ignore_errors=True)
    save_for_hf(
        model,
        str(partial),
        model_config=dict(label_names=class_names, vitzoo=info),
        safe_serialization=True,
        data_config=data_config,
    )
    folder.mkdir(exist_ok=True)
    for path in partial.iterdir():
        path.replace(folder / path.name)
    partial.rmdir()


def _contains_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in RUN_FILES + RUN_FOLDERS)


def _free_folder(folder: Path) -> Path:
    candidates = [folder] + [folder.with_name(f'{folder.name}-{number}') for number in range(2, 1000)]
    return next(candidate for candidate in candidates if not _contains_run(candidate))
