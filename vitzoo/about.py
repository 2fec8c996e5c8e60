"""Facts about a model from the config.json of its folder: its architecture, its images and its data."""

import json
from pathlib import Path
from typing import Any

import timm
from timm.layers import to_2tuple
from timm.models._hub import download_from_hf

from vitzoo.data.held_out import HELD_OUT
from vitzoo.data.options import DATA_OPTIONS
from vitzoo.errors import UserError
from vitzoo.models._shipped import shipped_folders
from vitzoo.models._swap_record import ARCHITECTURE, describe_swaps
from vitzoo.options import read_yaml

# facts about its data that a run records
DATA_FACTS = ('multi_label', 'data_dir', *DATA_OPTIONS)
# of a model's config, what its weights expect of images
_PREPROCESSING = ('mean', 'std', 'interpolation', 'crop_pct', 'crop_mode')


def is_trained_folder(name: str | Path) -> bool:
    """Return True for a folder with a config.json, as training and `vitzoo convert` write it."""
    return (Path(name) / 'config.json').is_file()


def read_config(folder: str | Path) -> dict:
    """The config.json of a folder of a trained model.

    Raises:
        UserError: It is damaged.
    """
    file = Path(folder) / 'config.json'
    try:
        config = json.loads(file.read_text(encoding='utf-8'))
    # of JSON, or of letters that are not UTF-8
    except ValueError as error:
        raise UserError(f"'{file}' is not JSON ({error}); correct it, or copy it again") from error
    if not isinstance(config, dict):
        raise UserError(
            f"'{file}' does not describe a model; give a folder of `vitzoo train`, `vitzoo convert` or timm"
        )
    return config


def find_file(run: Path, name: str) -> Path | None:
    """A file of a run; the best epoch has a folder of its own inside that of the run."""
    folders = [run, run.resolve().parent] if run.resolve().name == 'best' else [run]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def find_shipped(name: str) -> Path | None:
    """The folder of the published weights of a name in timm, if they come with vitzoo."""
    config = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
    return None if config is None else shipped_folders().get(f'{name.partition(".")[0]}.{config.tag}')


def describe_architecture(config: dict) -> str:
    """The architecture in a folder's config.json, and mixers that are arguments; or a swapped model's base."""
    args = config.get('model_args', {})
    if config['architecture'] != ARCHITECTURE:
        mixer = args.get('mixer', '')
        mixers = mixer if isinstance(mixer, str) else f'{", ".join(mixer)} in its stages'
        return f'{config["architecture"]} with {mixers}' if mixers else config['architecture']
    return f'{args["base_model"]} with {describe_swaps(args["swap_mixer"])}'


def read_about(name: str, weights: str = 'published', checkpoint: str | None = None) -> dict:
    """Facts about the data (multi_label, held_out, …) from the folder or repository of a model; empty for others.

    Args:
        weights: Origin of its weights, as of `load_model`. If it is not 'published', the facts of a name do not apply.
        checkpoint: The file of the weights; if training wrote it to a folder, the facts are those of that folder.

    Raises:
        UserError: The list of held-out images cannot be fetched.
    """
    if checkpoint is not None:
        written_to, run = _folder_of(checkpoint), _run_of(checkpoint)
        if written_to is not None:
            return read_about(str(written_to))
        if run is not None and (run / HELD_OUT).is_file():
            return _facts_of_unfinished(run)
    folder = Path(name.removeprefix('local-dir:')).expanduser()
    if not is_trained_folder(folder):
        if weights != 'published':
            return {}
        if name.startswith('hf-hub:'):
            return _fetch_about(name)
        shipped = find_shipped(name)
        return {} if shipped is None else read_about(str(shipped))
    about = _facts(folder)
    held_out = find_file(folder, HELD_OUT)
    if held_out is not None:
        return about | {'held_out': held_out}
    # a repository of the hub names the file, which may not have been copied
    return {key: value for key, value in about.items() if key != 'held_out'}


def fit_config(name: str, model: Any, checkpoint: str | None) -> None:
    """Describe other weights than those of a model's name in its config: their classes and images, if they are known.

    Args:
        checkpoint: The file of the weights; the names, and mean, std, interpolation and crop of the images, are those
            in the folder that training wrote it to.
    """
    config = model.pretrained_cfg
    found = (checkpoint and _config_beside(checkpoint)) or {}
    if not found and is_trained_folder(name) and model.num_classes == config.get('num_classes'):
        return
    config.pop('label_names', None)
    config.update({key: value for key, value in found.get('pretrained_cfg', {}).items() if key in _PREPROCESSING})
    if found.get('num_classes') == model.num_classes:
        config['label_names'] = found.get('label_names')


def read_label_names(path: str, num_classes: int) -> list[str]:
    """The names of the classes of the weights in a file, in label order; empty if they are of another number."""
    config = _config_beside(path) or {}
    names = (config.get('label_names') or []) if config.get('num_classes') == num_classes else []
    return [names[label] for label in sorted(names, key=int)] if isinstance(names, dict) else names


def read_img_size(path: str) -> tuple[int, int] | None:
    """The image size of the weights in a file, from the config.json of the folder that training wrote them to."""
    config = _config_beside(path) or {}
    size = config.get('model_args', {}).get('img_size') or config.get('pretrained_cfg', {}).get('input_size')
    return to_2tuple(size)[-2:] if size else None


def _fetch_about(name: str) -> dict:
    """The facts in a repository of the hub."""
    repository = name.removeprefix('hf-hub:')
    try:
        about = _facts(Path(download_from_hf(repository, 'config.json')).parent)
        return about | {key: Path(download_from_hf(repository, about[key])) for key in ('held_out',) if key in about}
    except OSError as error:
        raise UserError(f'cannot fetch what {name} knows of its data ({error}); try again') from error


def _facts(folder: Path) -> dict:
    return read_config(folder).get('vitzoo', {})


def _config_beside(path: str) -> dict | None:
    """The config.json of the folder that training wrote the weights in a file to."""
    folder = _folder_of(path)
    return None if folder is None else read_config(folder)


def _facts_of_unfinished(run: Path) -> dict:
    """The facts in the recipe of a run that has no config.json yet."""
    recipe = read_yaml(run / 'recipe.yaml') if (run / 'recipe.yaml').is_file() else {}
    return {key: recipe[key] for key in DATA_FACTS if recipe.get(key)} | {'held_out': run / HELD_OUT}


def _folder_of(path: str) -> Path | None:
    """The folder, with a config.json, that training wrote the weights in a file to."""
    folders, run = [Path(path).resolve().parent], _run_of(path)
    if run is not None:
        # a run that has not ended has a config of its best epoch only
        folders += [run, run / 'best']
    for folder in folders:
        if is_trained_folder(folder):
            return folder
    return None


def _run_of(path: str) -> Path | None:
    """The run of a file in one of its checkpoints, such as <run>/checkpoints/step-00001250/model.safetensors."""
    folder = Path(path).resolve().parent
    return folder.parents[1] if folder.parent.name == 'checkpoints' else None
