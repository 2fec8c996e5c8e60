"""The folder of a run and its files, written by the main process.

<run>/recipe.yaml                        the effective recipe; `--config` replays it
<run>/held_out.csv                       the images held out for validation, if the dataset has no validation split
<run>/metrics.csv, curves.png            one row per epoch, and its plot
<run>/config.json, model.safetensors     the trained model, as written by timm.models.save_for_hf
<run>/best/                              the model of the epoch with the best eval_metric
<run>/checkpoints/                       see vitzoo.train.checkpoint
<run>/abandoned/                         run folders of what was trained after a checkpoint that was resumed later
<run>/.lock                              see vitzoo.train.lock
"""

import copy
import csv
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch import nn

from vitzoo._files import replace_file
from vitzoo._save import PARTIAL, save_model
from vitzoo.about import is_trained_folder
from vitzoo.data.held_out import HELD_OUT
from vitzoo.errors import DivergenceError, UserError
from vitzoo.train.lock import FolderLock, FolderLocked, LostLock
from vitzoo.train.recipe import Recipe

RUN_FILES = ('recipe.yaml', HELD_OUT, 'metrics.csv', 'curves.png', 'config.json', 'model.safetensors')
RUN_FOLDERS = ('checkpoints', 'best', 'abandoned')
# images held out, and options, which the new branch replaces in one step, so that it resumes if it is killed before
_OF_BOTH_BRANCHES = (HELD_OUT, 'recipe.yaml')
# the first words of the summary in recipe.yaml, by which a run is told from other folders
_MARK = '# model  '
# the line of the summary in recipe.yaml with the run or checkpoint of another folder that a run begins with
_ORIGIN = 'from   '
# raised by the libraries if the disk is full, or a file is not in their format
FILE_ERRORS = (OSError, ValueError, RuntimeError, SafetensorError)


def new_folder(recipe: Recipe) -> Path:
    """The folder of a new run: the recipe's output, or the first free of runs/<model>, runs/<model>-2, ...

    The name of a run with other mixers ends in theirs, as in runs/<model>_ls.

    Raises:
        UserError: The folder contains a run, and the recipe does not overwrite it, or files like those of a run.
    """
    folder = Path(recipe.output) if recipe.output else _free_folder(Path('runs') / _default_name(recipe))
    check_free(folder, recipe.overwrite)
    return folder


def _default_name(recipe: Recipe) -> str:
    """The model, and the mixers in the place of its own: 'ls' and 'softmax' of 'ls:0-9,softmax:10,11'."""
    mixers = re.findall(r'[a-z]\w*', recipe.mixer or '')
    return '_'.join([Path(recipe.model).name, *dict.fromkeys(mixers)])


def check_free(folder: Path, overwrite: bool) -> None:
    """Check that a run may be written to a folder from its beginning.

    Raises:
        UserError: The folder contains a run, and `overwrite` is false, or files of the user with the names of a run's.
    """
    check_own(folder)
    if _names_in(folder) and not overwrite:
        raise UserError(
            f"there is a run in '{folder}' already; continue it with --resume auto, replace it with --overwrite,"
            f' or choose another --output'
        )


def check_sources(sources: dict[str, str | None], folder: Path) -> None:
    """Check that a new run does not replace the model that it begins with, or its teacher.

    Args:
        sources: The names and files of these models, by option.

    Raises:
        UserError: It would.
    """
    folder = folder.resolve()
    replaced = {folder / name for name in RUN_FILES + RUN_FOLDERS}
    for name, source in sources.items():
        value = (source or '').removeprefix('local-dir:')
        path = Path(value).resolve()
        # another folder may have the name of a model of timm
        is_source = is_trained_folder(path) if path.is_dir() else path.is_file()
        if is_source and (path == folder or replaced.intersection([path, *path.parents])):
            raise UserError(f"{name} '{value}' is in '{folder}', which this run would replace; choose another --output")


def check_own(folder: Path) -> None:
    """Check that what has the names of a run's files was written by training.

    Raises:
        UserError: It was not.
    """
    names = _names_in(folder)
    if names and not _is_run(folder):
        raise UserError(f"'{folder}' contains {names[0]}, which is not of a training run; choose another --output")


def check_restart(folder: Path, overwrite: bool) -> None:
    """Check that a run without checkpoints has no results yet, so that it may start again.

    Raises:
        UserError: It has, or it was to begin with a checkpoint of another run, and `overwrite` is false.
    """
    check_own(folder)
    results = [name for name in ('metrics.csv', 'model.safetensors', 'best') if (folder / name).exists()]
    if results and not overwrite:
        raise UserError(
            f"the run in '{folder}' has {results[0]} but no checkpoint to resume from; replace it with --overwrite, or"
            f' choose another --output'
        )
    origin = _read_origin(folder)
    if origin and not overwrite:
        raise UserError(
            f"the run in '{folder}' ended before it had a checkpoint of its own, and would start again without that of"
            f" '{origin}', which it began with; use --resume {origin} --overwrite, or choose another --output"
        )


@contextmanager
def claim_folder(accelerator: Accelerator, folder: Path, is_named: bool) -> Iterator[FolderLock]:
    """Create the folder and lock it; at the end, release it, and remove it if nothing was written.

    Args:
        is_named: Whether the user named the folder. If not, and another start has created it in the meantime, the next
            free one is used.

    Raises:
        UserError: On every process, if another run is in progress in the folder, or it cannot be written.
    """
    lock, is_created = FolderLock(folder), not (is_named and folder.exists())

    def acquire() -> None:
        nonlocal lock
        lock = FolderLock(folder if is_named else _create_free(folder))
        lock.folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(wait=accelerator.print)

    def explain(error: Exception) -> str:
        return str(error) if isinstance(error, FolderLocked) else f"cannot write to '{folder}': {error}"

    try:
        write_on_main(accelerator, lock, acquire, explain)
        if not is_named:
            # processes may have chosen before and after the other start
            (chosen,) = broadcast_object_list([str(lock.folder)])
            lock = lock if accelerator.is_main_process else FolderLock(Path(chosen))
        yield lock
    finally:
        lock.release()
        if is_created and accelerator.is_main_process:
            with suppress(OSError):
                lock.folder.rmdir()


def remove_old_run(folder: Path) -> None:
    """Remove what an older run wrote, except recipe.yaml, which will be replaced."""
    written = [folder / name for name in RUN_FILES if name != 'recipe.yaml']
    written += [folder / 'best' / name for name in ('config.json', 'model.safetensors')]
    written += (folder / 'vitzoo').rglob('events.out.tfevents*')
    for file in written:
        file.unlink(missing_ok=True)
    for pattern in ('checkpoints/step-*', 'abandoned/step-*'):
        for path in folder.glob(pattern):
            shutil.rmtree(path)
    remove_partial_files(folder)
    for name in RUN_FOLDERS:
        # not empty if somebody has put other files there
        with suppress(OSError):
            (folder / name).rmdir()


def remove_partial_files(folder: Path) -> None:
    """Remove what a process has left that was killed while it wrote or deleted a checkpoint, or wrote a model."""
    for pattern in ('checkpoints/.partial-step-*', PARTIAL, f'best/{PARTIAL}'):
        for path in folder.glob(pattern):
            shutil.rmtree(path)


def set_aside(folder: Path, later: list[Path], epochs: int) -> Path:
    """Move later checkpoints, and the models made from them, to a run folder of their own in abandoned/.

    Args:
        later: Checkpoints after the one that the run goes back to, oldest first.
        epochs: Finished epochs that both branches share.
    """
    names = [later[-1].name] + [f'{later[-1].name}-{number}' for number in range(2, 1000)]
    aside = next(folder / 'abandoned' / name for name in names if not (folder / 'abandoned' / name).exists())
    (aside / 'checkpoints').mkdir(parents=True)
    for checkpoint in reversed(later):
        checkpoint.rename(aside / 'checkpoints' / checkpoint.name)
    moved = [name for name in RUN_FILES if (folder / name).exists()]
    if best_epoch(folder) > epochs:
        moved.append('best')
    for name in moved:
        if name in _OF_BOTH_BRANCHES:
            shutil.copyfile(folder / name, aside / name)
        else:
            (folder / name).rename(aside / name)
    return aside


def best_epoch(folder: Path) -> int:
    """The epoch of the model in best/, 0 if there is none."""
    try:
        return json.loads((folder / 'best' / 'config.json').read_text(encoding='utf-8'))['vitzoo']['epochs']
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def write_on_main(
    accelerator: Accelerator, lock: FolderLock, write: Callable[[], None], explain: Callable[[Exception], str]
) -> None:
    """Call `write` on the main process, and wait for it on the others.

    Raises:
        UserError: On every process, if the main process could not write, or its lock was taken over; `explain` turns an
            error of `write` into the message.
        DivergenceError: The same, if `write` raised one.
    """
    failure = None
    if accelerator.is_main_process:
        try:
            lock.check()
            write()
        except LostLock as error:
            failure = UserError(str(error))
        except DivergenceError as error:
            failure = DivergenceError(explain(error))
        except FILE_ERRORS as error:
            failure = UserError(explain(error))
    # this broadcast is also the barrier that keeps the others from looking for files that do not exist yet
    (failure,) = broadcast_object_list([failure])
    if failure is not None:
        raise failure


def write_metrics(folder: Path, history: list[dict]) -> None:
    """Rewrite metrics.csv, so that a resumed run does not repeat a row."""
    with replace_file(folder / 'metrics.csv') as partial, partial.open('w', newline='', encoding='utf-8') as file:
        writer = csv.DictWriter(file, fieldnames=list(dict.fromkeys(chain(*history))))
        writer.writeheader()
        writer.writerows(history)


def export_model(folder: Path, model: nn.Module, class_names: list[str], data_config: dict, info: dict) -> None:
    """Write a model that `timm.create_model('local-dir:<folder>', pretrained=True)` loads.

    Args:
        info: Stored in config.json under 'vitzoo'.
    """
    if not all(tensor.is_contiguous() for tensor in model.state_dict().values()):
        # safetensors has no memory formats
        model = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    save_model(folder, model, model_config=dict(label_names=class_names, vitzoo=info), data_config=data_config)


def describe_origin(resume: str) -> str:
    """The line of the summary in recipe.yaml of a run that begins with a checkpoint of another, for `check_restart`."""
    return f'{_ORIGIN}{resume}'


def _read_origin(folder: Path) -> str | None:
    """The run or checkpoint in the line of `describe_origin`, None if there is no such line."""
    mark = f'# {_ORIGIN}'
    return next((line.removeprefix(mark) for line in _recipe_lines(folder) if line.startswith(mark)), None)


def _recipe_lines(folder: Path) -> list[str]:
    """The lines of the recipe in a folder, none if there is none that can be read."""
    try:
        return (folder / 'recipe.yaml').read_text(encoding='utf-8').splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _names_in(folder: Path) -> list[str]:
    """The names of a run's files and folders that exist in a folder."""
    return [name for name in RUN_FILES + RUN_FOLDERS if (folder / name).exists()]


def _is_run(folder: Path) -> bool:
    """Return True if training wrote the recipe or a checkpoint in a folder."""
    is_marked = any(line.startswith(_MARK) for line in _recipe_lines(folder)[:1])
    return is_marked or any((folder / 'checkpoints').glob('step-*/state.json'))


def _free_folder(folder: Path) -> Path:
    return next(candidate for candidate in _candidates(folder) if not candidate.exists())


def _create_free(folder: Path) -> Path:
    """Create the first of the candidates that does not exist; of two processes, only one succeeds in creating it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for candidate in _candidates(folder):
        with suppress(FileExistsError):
            candidate.mkdir()
            return candidate
    raise FileExistsError(f'all of {folder} to {candidate.name} exist')


def _candidates(folder: Path) -> list[Path]:
    return [folder] + [folder.with_name(f'{folder.name}-{number}') for number in range(2, 1000)]
