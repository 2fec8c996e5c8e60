"""Evaluates models for a report: their records, with the machine, errors, scaling and saliency maps."""

import json
import shlex
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from torch import Tensor, nn

from vitzoo.about import describe_architecture, is_trained_folder, read_config
from vitzoo.classes import readable
from vitzoo.data import Images, eval_transform, resolve_data_config
from vitzoo.data.transforms import unnormalize
from vitzoo.data.variants import FoundVariant
from vitzoo.errors import UserError
from vitzoo.load import find_models, load_as_chosen
from vitzoo.machine import describe_place
from vitzoo.metrics import count_macs
from vitzoo.metrics.confusion import calibrate, most_confused
from vitzoo.metrics.explanation import explain
from vitzoo.options import read_yaml, to_words
from vitzoo.report.transfers import read_transfer
from vitzoo.transfer.origin import find_command, transfer_recipe
from vitzoo.transfer.record import RECORD
from vitzoo.validate.data import open_validation_data
from vitzoo.validate.error_analysis import count_confusions
from vitzoo.validate.evaluation import validate_model
from vitzoo.validate.options import EvalOptions, check_models
from vitzoo.validate.predictions import Predictions, read_predictions
from vitzoo.validate.robustness import open_suite

# image sizes of the scaling curve, as multiples of the model's own, so that patches and windows still divide them
_MULTIPLES = (1, 2, 3, 4, 6, 8)
_NUM_PICTURES, _PICTURE_SIZE = 4, 160
_NUM_PAIRS, _MAX_CLASSES = 5, 30
# in the config.json of every run
_USUAL_ARGUMENTS = {'num_classes', 'in_chans', 'img_size', 'global_pool'}


def gather(options: EvalOptions) -> Iterator[dict]:
    """Evaluate models, and yield the record of each with the additions of a report.

    Raises:
        UserError: A model or its data is invalid.
    """
    names = find_models(options.models)
    check_models(options, names)
    suite = open_suite(options.data_root, options.allow_partial) if options.suite and options.data_root else []
    for name in names:
        # before the evaluation, so that its peak memory is that of one model
        about = describe_model(name, options)
        record = _validate(name, options, suite, with_errors='explanations' in about)
        # after the evaluation, which ends with the timing: the load is an average of the last minute
        yield record | about | describe_place(options.device, options.amp_dtype) | dict(data=options.data_dir)


def _validate(name: str, options: EvalOptions, suite: Sequence[FoundVariant], with_errors: bool) -> dict:
    """The record of a model, optionally with its error analysis."""
    if not with_errors:
        return validate_model(name, options, None, suite)
    with TemporaryDirectory() as folder:
        predictions = f'{folder}/predictions.csv'
        record = validate_model(name, replace(options, save_predictions=predictions), None, suite)
        return record | summarize_errors(read_predictions(predictions))


def describe_model(name: str, options: EvalOptions) -> dict:
    """Origin, scaling, and saliency maps of a few images if the data has one label per image."""
    loaded = load_as_chosen(name, options, options.pretrained)
    model, config = loaded.model, resolve_data_config(loaded.model, options.img_size, options.crop_pct)
    about = find_origin(name)
    about['arguments'] = sorted({*about['arguments'], *set(options.model_kwargs) - _USUAL_ARGUMENTS})
    # other weights were not made by the commands of the folder
    about |= read_transfer(name) if loaded.weights == 'trained' else dict(commands=[])
    if options.has_data and not options.ignore_labels:
        images = open_validation_data(options.data, loaded, eval_transform(config), options.data_options)
        if not images.is_multi_label:
            about['explanations'] = explain_some(model.to(options.device), images, config)
    return about | dict(scaling=dict(gmacs=measure_scaling(name, model, config['input_size'][1])))


def find_origin(name: str) -> dict:
    """The architecture of a model, and for the folder of a run or a transfer its arguments and the command."""
    if not is_trained_folder(name):
        return dict(architecture=name, arguments=[], commands=[])
    config = read_config(name)
    teacher = config.get('vitzoo', {}).get('teacher', 'TEACHER')
    arguments = sorted(set(config.get('model_args', {})) - _USUAL_ARGUMENTS)
    commands = _find_commands(Path(name), teacher)
    return dict(architecture=describe_architecture(config), arguments=arguments, commands=commands)


def _find_commands(folder: Path, teacher: str) -> list[str]:
    record, path = folder / RECORD, folder / 'recipe.yaml'
    if record.is_file():
        settings = json.loads(record.read_text(encoding='utf-8'))['settings']
        command, words = 'transfer', [settings['teacher'], *to_words(transfer_recipe(settings))]
    else:
        command = find_command(read_yaml(path, 'the recipe ') or {}) if path.is_file() else ''
        words = [*([teacher] if command == 'transfer' else []), '--config', str(path)]
    return [shlex.join(['vitzoo', command, *words, '--output', str(folder)])] if command else []


def summarize_errors(predictions: Predictions) -> dict:
    """Calibration, the most confused pairs of classes, and the confusion matrix if there are few classes."""
    label, predicted = predictions.columns['label'], predictions.columns['top'][:, 0]
    matrix, names, _ = count_confusions(predictions)
    found = calibrate(predictions.columns['prob'][:, 0], label == predicted)
    calibration = {key: getattr(found, key).tolist() for key in ('counts', 'confidence', 'accuracy')}
    pairs = [(names[i], names[j], times) for i, j, times in most_confused(matrix, _NUM_PAIRS)]
    errors = dict(calibration=calibration, pairs=pairs)
    if len(names) <= _MAX_CLASSES:
        errors |= dict(class_names=names, confusion=matrix.tolist())
    return dict(ece=100 * found.error, mistakes=errors)


def measure_scaling(name: str, model: nn.Module, side: int) -> dict[int, float]:
    """GMACs by the side of a square image, from `side` upwards; leaves the model at another size."""
    console = Console(stderr=True)
    gmacs = {}
    for multiple in track(_MULTIPLES, f'{escape(name)}, scaling', console=console, disable=not console.is_terminal):
        size = multiple * side
        try:
            if hasattr(model, 'set_input_size'):
                model.set_input_size(img_size=(size, size))
            gmacs[size] = count_macs(model, size) / 1e9
        except (UserError, RuntimeError, AssertionError, ValueError):
            # the model's size is fixed, or cannot grow as far
            break
    return gmacs


def explain_some(model: nn.Module, images: Images, config: dict) -> list[dict]:
    """Saliency maps of a few images, evenly spaced in the data; empty if the model cannot be explained."""
    device = next(model.parameters()).device
    chosen = torch.linspace(0, len(images) - 1, min(_NUM_PICTURES, len(images))).long().unique().tolist()
    inputs = torch.stack([images[i][0] for i in chosen]).to(device)
    try:
        maps, method = explain(model, inputs)
    except UserError:
        return []
    with torch.no_grad():
        confidence, predicted = model(inputs).softmax(dim=1).max(dim=1)
    names = readable(images.class_names)
    found = []
    for k, i in enumerate(chosen):
        pixels = unnormalize(inputs[k].cpu(), config)
        answers = dict(prediction=names[predicted[k]], confidence=confidence[k].item(), method=method)
        pictures = dict(picture=to_data_url(pixels), overlay=to_data_url(overlay(pixels, maps[k].cpu())))
        found.append(dict(file=images.filename(i), label=names[images[i][1]], **answers, **pictures))
    return found


def overlay(pixels: Tensor, heat: Tensor) -> Tensor:
    """Overlay a map (H, W) on an image (3, H, W), both from 0 to 1."""
    # lazy: importing matplotlib takes a second
    from matplotlib import colormaps

    colors = torch.from_numpy(colormaps['inferno'](heat.detach().numpy())[..., :3]).permute(2, 0, 1).float()
    opacity = 0.35 + 0.35 * heat
    return pixels * (1 - opacity) + colors * opacity


def to_data_url(pixels: Tensor) -> str:
    """Encode an image (3, H, W) from 0 to 1 as the data URL of a JPEG."""
    image = Image.fromarray((255 * pixels).round().byte().permute(1, 2, 0).contiguous().numpy())
    file = BytesIO()
    image.resize((_PICTURE_SIZE, _PICTURE_SIZE), Image.Resampling.BICUBIC).save(file, 'JPEG', quality=80, optimize=True)
    return f'data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}'
