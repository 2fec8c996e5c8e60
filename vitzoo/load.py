"""Turns what a user calls a model into a model: a timm name, a wildcard, a folder that training wrote, a checkpoint."""

import json
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import timm
import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import Tensor, nn

import vitzoo  # noqa: F401  registers the models
from vitzoo.data import resolve_data_config
from vitzoo.data.held_out import HELD_OUT
from vitzoo.errors import UserError, did_you_mean
from vitzoo.models._official import read_checkpoint, unwrap

SOURCES = ('local-dir:', 'hf-hub:')


def find_models(patterns: list[str]) -> list[str]:
    """Expand names, wildcards and folders of trained models to the names that `load_model` takes.

    Raises:
        UserError: A name is unknown, a wildcard matches nothing, or a folder holds no model.
    """
    return list(dict.fromkeys(name for pattern in patterns for name in _expand(pattern)))


def find_model(name: str) -> str:
    """The one model that a name, a wildcard or a folder stands for, as `load_model` takes it.

    Raises:
        UserError: It stands for none, or for several.
    """
    names = find_models([name])
    if len(names) > 1:
        raise UserError(f"'{name}' stands for {len(names)} models ({_first(names)}), and this command takes one")
    return names[0]


def load_model(
    name: str,
    *,
    img_size: tuple[int, int] | None = None,
    num_classes: int | None = None,
    checkpoint: str | None = None,
    pretrained: bool = True,
) -> tuple[nn.Module, str]:
    """Create a model with the best weights there are: a checkpoint's, its folder's, its published ones, else random.

    Args:
        name: One of those that `find_models` gives.
        img_size: Height and width, for models that are made for one size.
        num_classes: A new number of classes, whose head is random unless the checkpoint has one.
        checkpoint: A .safetensors or .pth file.
        pretrained: Whether to fetch published weights.

    Returns:
        The model in eval mode, and whose weights it has: 'checkpoint', 'trained', 'published' or 'random weights'.

    Raises:
        UserError: The size does not suit the model, the weights do not fit it, or they cannot be read or fetched.
    """
    source = 'random weights'
    if (Path(name) / 'config.json').is_file():
        name, source = f'local-dir:{name}', 'trained'
    elif name.startswith(SOURCES) or timm.is_model_pretrained(name):
        source = 'published' if pretrained else source
    if checkpoint is not None:
        source = 'checkpoint'
    elif num_classes is not None:
        source = 'random weights'
    model = _create(name, img_size, num_classes, pretrained=source in ('trained', 'published'))
    if checkpoint is not None:
        load_checkpoint(model, checkpoint)
    return model.eval(), source


def fit_data_config(name: str, model: nn.Module, img_size: tuple[int, int] | int | None = None) -> dict:
    """The model's data config, at another image size where one is given, which the model is tried on.

    Raises:
        UserError: The model cannot take images of this size.
    """
    try:
        data_config = resolve_data_config(model, img_size)
    except ValueError as error:
        raise UserError(f'{name} cannot take another image size: {error}') from error
    if img_size is not None:
        _try_one_image(name, model, data_config['input_size'])
    return data_config


def label_names(model: nn.Module) -> list[str]:
    """Names of the classes that the model was trained on, in label order; empty where its config has none that fit."""
    names = (getattr(model, 'pretrained_cfg', None) or {}).get('label_names') or []
    names = [names[label] for label in sorted(names, key=int)] if isinstance(names, dict) else list(names)
    # fewer are right, because training may have been told to leave room for more classes
    return names if len(names) <= model.num_classes else []


def class_names(model: nn.Module) -> list[str]:
    """What to call each class: the name it was trained by, else ImageNet's if there are as many, else its number."""
    names, subset = label_names(model), infer_imagenet_subset(model)
    if not names and subset:
        info = ImageNetInfo(subset)
        count = Counter(info.label_descriptions())
        # a crane is a bird and a machine
        names = [
            f'{text} ({wnid})' if count[text] > 1 else text
            for wnid, text in info.label_descriptions(as_dict=True).items()
        ]
    return names + [str(label) for label in range(len(names), model.num_classes)]


def readable(class_names: list[str]) -> list[str]:
    """What ImageNet's WordNet ids stand for, in a word or two; other names stay as they are."""
    info = ImageNetInfo()
    if not set(class_names) <= set(info.label_names()):
        return class_names
    words = [info.label_name_to_description(name).partition(',')[0] for name in class_names]
    # a crane is a bird and a machine
    count = Counter(words)
    return [word if count[word] == 1 else f'{word} ({name})' for word, name in zip(words, class_names)]


def read_about(name: str) -> dict:
    """What training left in its folder about the data: multi_label, held_out (a path) …; nothing of another model."""
    folder = Path(name.removeprefix('local-dir:')).expanduser()
    if not (folder / 'config.json').is_file():
        return {}
    about = json.loads((folder / 'config.json').read_text(encoding='utf-8')).get('vitzoo', {})
    # the best epoch of a run lies in a folder of its own, below the run's
    lists = [place / HELD_OUT for place in (folder, folder.resolve().parent) if (place / HELD_OUT).is_file()]
    return about | (dict(held_out=lists[0]) if lists else {})


def load_checkpoint(model: nn.Module, path: str) -> None:
    """Load weights that fit the model exactly, also from under 'model', 'state_dict' (EMA first) and 'module.'.

    Weights in the layout of the model's official release go through its `checkpoint_filter_fn`.

    Raises:
        UserError: The file cannot be read, or does not fit (and which keys do not).
    """
    state_dict = unwrap(read_checkpoint(path))
    misfit = _load_if_fits(model, state_dict)
    convert = getattr(sys.modules[type(model).__module__], 'checkpoint_filter_fn', None)
    if misfit and convert is not None:
        # on the weights of another model a converter may fail in any way: then they do not fit
        with suppress(Exception):
            misfit = _load_if_fits(model, convert(state_dict, model)) and misfit
    if misfit:
        raise UserError(f'the checkpoint {path} does not fit {type(model).__name__}: {misfit}')


def _expand(pattern: str) -> list[str]:
    if pattern.startswith(SOURCES):
        return [pattern]
    path = Path(pattern).expanduser()
    if path.name in ('config.json', 'model.safetensors') and path.is_file():
        path = path.parent
    if (path / 'config.json').is_file():
        return [str(path)]
    if any(character in pattern for character in '*?['):
        names = timm.list_models(pattern, include_tags='.' in pattern)
        if not names:
            raise UserError(f"no model matches '{pattern}'; `vitzoo list --all` shows their names")
        return names
    if path.is_dir() and not timm.is_model(pattern):
        raise UserError(f"the folder '{pattern}' has no config.json, so it is not a trained model")
    if not timm.is_model(pattern):
        names = timm.list_models()
        raise UserError(f"unknown model '{pattern}'{did_you_mean(pattern, names) or '; `vitzoo list` shows the names'}")
    architecture, _, tag = pattern.partition('.')
    tags = timm.list_models(f'{architecture}.*', include_tags=True)
    if tag and pattern not in tags:
        raise UserError(f"{architecture} has no weights '{tag}', it has {', '.join(tags) or 'none at all'}")
    return [pattern]


def _create(name: str, img_size: tuple[int, int] | None, num_classes: int | None, pretrained: bool) -> nn.Module:
    kwargs = dict(pretrained=pretrained, num_classes=num_classes, img_size=img_size)
    try:
        return timm.create_model(name, **kwargs)
    except TypeError as error:
        # a convolutional network takes any size and no img_size
        if "'img_size'" not in str(error):
            raise
        return timm.create_model(name, **{**kwargs, 'img_size': None})
    except (AssertionError, RuntimeError, ValueError, ZeroDivisionError) as error:
        if img_size is None:
            raise
        height, width = img_size
        raise UserError(f'{name} cannot be made for images of {height} x {width}: {error}') from error
    except OSError as error:
        raise UserError(f'cannot fetch the weights of {name} ({error}); give them as a --checkpoint') from error


@torch.no_grad()
def _try_one_image(name: str, model: nn.Module, input_size: tuple[int, int, int]) -> None:
    image = torch.zeros(1, *input_size, device=next(model.parameters()).device)
    try:
        model.eval()(image)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise UserError(f'{name} cannot take images of {input_size[1]} x {input_size[2]}: {error}') from error


def _load_if_fits(model: nn.Module, state_dict: dict[str, Tensor]) -> str:
    """Load a state dict, and say what of it does not fit."""
    own = model.state_dict()
    wrong = [key for key in own if key in state_dict and own[key].shape != state_dict[key].shape]
    keys = model.load_state_dict({key: state_dict[key] for key in state_dict if key not in wrong}, strict=False)
    missing = [key for key in keys.missing_keys if key not in wrong]
    wrong = [f'{key} ({tuple(state_dict[key].shape)}, not {tuple(own[key].shape)})' for key in wrong]
    problems = {'missing': missing, 'unexpected': keys.unexpected_keys, 'of another shape': wrong}
    return '; '.join(f'{len(keys)} {problem} ({_first(keys)})' for problem, keys in problems.items() if keys)


def _first(keys: list[str]) -> str:
    return ', '.join(keys[:3]) + (', …' if len(keys) > 3 else '')
