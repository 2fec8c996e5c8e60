"""The folder of a run: where it is, and what ends up in it besides checkpoints.

<run>/recipe.yaml                        the effective recipe, replayed by --config
<run>/held_out.csv                       the images held out for validation, where the data has none for it
<run>/metrics.csv, curves.png            one row per epoch, and its picture
<run>/config.json, model.safetensors     the trained model, as timm.models.save_for_hf writes it
<run>/best/                              the same of the epoch with the best top-1
"""

import csv
import shutil
from pathlib import Path

from timm.models import save_for_hf
from torch import nn

from vitzoo.data.held_out import HELD_OUT
from vitzoo.errors import UserError
from vitzoo.train.checkpoint import find_checkpoints
from vitzoo.train.recipe import Recipe

FILES = ('recipe.yaml', HELD_OUT, 'metrics.csv', 'curves.png', 'config.json', 'model.safetensors')
FOLDERS = ('checkpoints', 'best')


def choose_folder(recipe: Recipe) -> tuple[Path, list[Path]]:
    """The folder of the run, and the checkpoints that it may continue from, newest first.

    Every process chooses for itself, so nothing is created here.

    Raises:
        UserError: There is nothing to resume, or another run is in the folder.
    """
    if recipe.resume == 'auto':
        if recipe.output is None:
            raise UserError('--resume auto needs the folder of the run: add --output FOLDER, or say --resume FOLDER')
        return Path(recipe.output), find_checkpoints(Path(recipe.output))
    if recipe.resume is not None:
        return _resumed_folder(recipe)
    folder = Path(recipe.output) if recipe.output else _free_folder(Path('runs') / Path(recipe.model).name)
    if _holds_run(folder) and not recipe.overwrite:
        raise UserError(
            f"there is a run in '{folder}' already; continue it with --resume auto, replace it with --overwrite,"
            f' or choose another --output'
        )
    return folder, []


def prepare_folder(folder: Path, is_new: bool) -> None:
    """Create the folder; of an older run, remove what this one writes, unless it continues that."""
    folder.mkdir(parents=True, exist_ok=True)
    if is_new:
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        for name in FOLDERS:
            shutil.rmtree(folder / name, ignore_errors=True)


def write_metrics(folder: Path, history: list[dict]) -> None:
    """Write metrics.csv anew, so that a resumed run has no row twice."""
    partial = folder / '.metrics.csv'
    with partial.open('w', newline='') as file:
        writer = csv.DictWriter(file, fieldnames=list(history[-1]))
        writer.writeheader()
        writer.writerows(history)
    partial.replace(folder / 'metrics.csv')


def export_model(folder: Path, model: nn.Module, class_names: list[str], data_config: dict, about: dict) -> None:
    """Write the model so that `timm.create_model('local-dir:<folder>', pretrained=True)` gives it back."""
    partial = folder.parent / f'.export-{folder.name}'
    shutil.rmtree(partial, ignore_errors=True)
    save_for_hf(
        model,
        str(partial),
        model_config=dict(label_names=class_names, vitzoo=about),
        safe_serialization=True,
        data_config=data_config,
    )
    folder.mkdir(exist_ok=True)
    for path in partial.iterdir():
        path.replace(folder / path.name)
    partial.rmdir()


def _resumed_folder(recipe: Recipe) -> tuple[Path, list[Path]]:
    source = Path(recipe.resume)
    checkpoints = find_checkpoints(source)
    if not checkpoints:
        raise UserError(f"there is no checkpoint in '{source}' to resume from")
    # <run>/checkpoints/<checkpoint>
    return Path(recipe.output) if recipe.output else checkpoints[0].resolve().parent.parent, checkpoints


def _holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in FILES + FOLDERS)


def _free_folder(folder: Path) -> Path:
    candidates = [folder] + [folder.with_name(f'{folder.name}-{number}') for number in range(2, 1000)]
    return next(candidate for candidate in candidates if not _holds_run(candidate))
