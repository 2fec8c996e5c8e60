"""A folder of weights to be shipped: config.json, model.safetensors, and recipe.yaml and metrics.csv of a run.

Paths of the machine that trained the model are reduced to their last part.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import timm
import torch
import yaml
from timm.models._hub import load_model_config_from_path
from torch import Tensor

from vitzoo.about import find_file
from vitzoo.data import resolve_data_config
from vitzoo.data.held_out import HELD_OUT
from vitzoo.errors import UserError
from vitzoo.load import load_model
from vitzoo.models._swap_record import ARCHITECTURE
from vitzoo.options import read_yaml
from vitzoo.study.worker import OPTIONS_FILE
from vitzoo.transfer.origin import transfer_recipe
from vitzoo.transfer.record import RECORD

CONFIG = 'config.json'
RECIPE = 'recipe.yaml'
WEIGHTS = 'model.safetensors'


def write_folder(run: Path, folder: Path, license: str) -> None:
    """Write the folder, with the licence in its config.

    Raises:
        UserError: A file of the run cannot be read, or the run is of another library.
    """
    folder.mkdir()
    config = read_json(run / CONFIG)
    if 'pretrained_cfg' not in config or 'architecture' not in config:
        raise UserError(f"'{run / CONFIG}' is not of `vitzoo train` or `vitzoo convert`; give a folder that is")
    config['pretrained_cfg']['license'] = license
    config['vitzoo'] = without_paths(config.get('vitzoo', {}))
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding='utf-8')
    recipe = without_paths(read_recipe(run))
    if recipe:
        text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)
        (folder / RECIPE).write_text(text, encoding='utf-8')
    try:
        shutil.copyfile(run / WEIGHTS, folder / WEIGHTS)
    except OSError as error:
        raise UserError(f"cannot read '{run / WEIGHTS}': {error.strerror}") from error
    for name in ('metrics.csv', HELD_OUT):
        source = find_file(run, name)
        if source is not None:
            shutil.copyfile(source, folder / name)


def read_json(path: Path) -> Any:
    """The contents of a JSON file.

    Raises:
        UserError: It cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read '{path}': {error}") from error


def read_recipe(run: Path) -> dict:
    """The options of a training or a transfer, in a form for --config; empty for a model of `vitzoo convert`."""
    for name in (RECIPE, OPTIONS_FILE):
        path = find_file(run, name)
        if path is not None:
            return read_yaml(path, 'the recipe ') or {}
    return transfer_recipe(read_json(run / RECORD)['settings']) if (run / RECORD).is_file() else {}


def halve(weights: dict[str, Tensor], generator: torch.Generator | None = None) -> dict[str, Tensor] | None:
    """Weights with matrices and kernels in half precision; norms and biases, which are small, stay as they are.

    Args:
        weights: Those of a model.
        generator: Rounds each element up or down at random, so that the expected value is the element. Without it,
            each is rounded to the nearest number of half precision.

    Returns:
        None if one of them would not be finite.
    """
    halved = {
        name: _round(x, generator) if x.dtype == torch.float32 and x.ndim > 1 else x for name, x in weights.items()
    }
    is_finite = all(x.isfinite().all() for x in halved.values() if x.is_floating_point())
    return halved if is_finite else None


def _round(x: Tensor, generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return x.half()
    # half precision has 11 binary digits, and no number between 0 and 2 to the power of -24
    x = x.double()
    spacing = torch.ldexp(torch.ones_like(x), (x.frexp().exponent - 11).clamp(min=-24))
    return (torch.floor(x / spacing + torch.rand(x.shape, generator=generator)) * spacing).half()


def describe_precision(weights: dict[str, Tensor]) -> str:
    """The precision of the matrices among weights, in words; `halve` may have changed it."""
    dtypes = {x.dtype for x in weights.values()}
    names = {torch.float16: 'half precision', torch.bfloat16: 'bfloat16'}
    return next((name for dtype, name in names.items() if dtype in dtypes), 'single precision')


def without_paths(value: Any) -> Any:
    """The same value with absolute paths and those of other folders reduced to their last part."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    if isinstance(value, str) and value.startswith(('/', '~', '..')):
        return Path(value).name
    return value


@torch.no_grad()
def check_name(folder: Path) -> None:
    """Check that the model of a folder is the one that timm creates by the name of the folder.

    Raises:
        UserError: It is another, or has arguments that are not part of the name.
    """
    name = folder.name.partition('.')[0]
    config, architecture, arguments = load_model_config_from_path(folder)
    if architecture == ARCHITECTURE:
        # its name stands for the arguments in its config
        base = arguments['base_model'].partition('.')[0]
        if not name.startswith(f'{base}_to_') or name == f'{base}_to_':
            mixer = arguments['swap_mixer'][-1]['mixer']
            example = f'{base}_to_{mixer if isinstance(mixer, str) else "mixers"}'
            raise UserError(
                f"the folder of {base} with other mixers must be called such as {example}.TAG, not '{folder.name}'"
            )
        return
    if architecture != name:
        raise UserError(f"the folder of {architecture} must be called {architecture}.TAG, not '{folder.name}'")
    model = load_model(str(folder)).model
    images = torch.randn(2, *resolve_data_config(model)['input_size'], generator=torch.Generator().manual_seed(0))
    try:
        by_name = timm.create_model(name, pretrained=True, pretrained_cfg=config).eval()
        is_same = torch.equal(by_name(images), model(images))
    except (AssertionError, RuntimeError, TypeError, ValueError):
        is_same = False
    if not is_same:
        given = ', '.join(f'{key}={value}' for key, value in arguments.items())
        raise UserError(
            f'{name} created by its name is another model than that of the run, which was created with {given}; train'
            f' one without such arguments, or push to hf-hub:ORG/NAME, which keeps them'
        )
