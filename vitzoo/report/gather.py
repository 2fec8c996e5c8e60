"""What a report shows of a model beyond its record: where it was measured, its errors, its scaling, where it looks."""

import argparse
import json
import os
from base64 import b64encode
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from vitzoo.bench._harness import describe_machine
from vitzoo.data import Images, eval_transform, resolve_data_config
from vitzoo.data.transforms import unnormalize
from vitzoo.data.variants import Found
from vitzoo.errors import UserError
from vitzoo.load import find_models, load_model, readable
from vitzoo.metrics import count_macs
from vitzoo.metrics.confusion import calibrate, most_confused
from vitzoo.metrics.explanation import explain
from vitzoo.validate.error_analysis import count_present
from vitzoo.validate.evaluation import open_validation_data, validate_model
from vitzoo.validate.predictions import Predictions, read_predictions
from vitzoo.validate.robustness import open_suite

# sizes of the scaling curve, as multiples of the model's own: patches and windows of the first divide the others
MULTIPLES = (1, 2, 3, 4, 6, 8)
NUM_PICTURES, PICTURE_SIZE = 4, 160
NUM_PAIRS, MOST_CLASSES = 5, 30


def gather(args: argparse.Namespace) -> Iterator[dict]:
    """Evaluate the models that the arguments of `vitzoo validate` name, and give what a report shows of each.

    Raises:
        UserError: A model or its data is not what it should be.
    """
    names = find_models(args.models)
    if args.checkpoint and len(names) > 1:
        raise UserError(f'--checkpoint {args.checkpoint} is for one model, and there are {len(names)}')
    suite = open_suite(args.data_root, args.allow_partial) if args.suite else []
    for name in names:
        # before the evaluation, whose peak of memory is to be that of one model
        about = describe(name, args)
        record = evaluate(name, args, suite, has_mistakes='explanations' in about)
        # after the evaluation, which ends with the time: the load is that of the last minute
        yield record | about | describe_place(args) | dict(data=args.data_dir)


def describe_place(args: argparse.Namespace) -> dict:
    """Where the models are measured, and the load of its cores if they run on these."""
    machine = describe_machine(args.device)
    threads = f'{machine["threads"]} thread{"s" if machine["threads"] > 1 else ""}'
    where = machine['gpu'] or f'{machine["cpu"]}, {threads}'
    versions = f'torch {machine["torch"]}, timm {machine["timm"]}, Python {machine["python"]}'
    cores = None if machine['gpu'] else os.cpu_count()
    return dict(measured_on=f'{where}, {args.amp_dtype}; {versions}', load=machine['load'], cores=cores)


def evaluate(name: str, args: argparse.Namespace, suite: Sequence[Found], has_mistakes: bool) -> dict:
    """The record of a model, with its mistakes where they are asked for."""
    if not has_mistakes:
        return validate_model(name, args, None, suite)
    with TemporaryDirectory() as folder:
        predictions = f'{folder}/predictions.csv'
        record = validate_model(
            name, argparse.Namespace(**{**vars(args), 'save_predictions': predictions}), None, suite
        )
        return record | find_mistakes(read_predictions(predictions))


def describe(name: str, args: argparse.Namespace) -> dict:
    """What is known of a model without an evaluation, and where it looks on a few images of one label each."""
    model, _ = load_model(
        name,
        img_size=args.img_size,
        num_classes=args.num_classes,
        checkpoint=args.checkpoint,
        pretrained=not (args.no_data or args.random_weights),
    )
    config = resolve_data_config(model, args.img_size)
    about = origin(name)
    if not args.no_data and args.data_dir is not None:
        images = open_validation_data(args.data_dir, model, eval_transform(config), run=name)
        if not images.is_multi_label:
            about['explanations'] = explain_some(model.to(args.device), images, config)
    return about | dict(scaling=dict(gmacs=measure_scaling(name, model, config['input_size'][1])))


def origin(name: str) -> dict:
    """The architecture of a model, and the command that trained it where it is a run's folder."""
    config, recipe = Path(name) / 'config.json', Path(name) / 'recipe.yaml'
    architecture = json.loads(config.read_text())['architecture'] if config.is_file() else name
    commands = [f'vitzoo train --config {recipe} --output {name}'] if recipe.is_file() else []
    return dict(architecture=architecture, commands=commands)


def find_mistakes(predictions: Predictions) -> dict:
    """The calibration, the pairs of classes confused most, and of few classes the confusion matrix."""
    label, answer = predictions.columns['label'], predictions.columns['top'][:, 0]
    matrix, names, _ = count_present(predictions)
    found = calibrate(predictions.columns['prob'][:, 0], label == answer)
    calibration = {key: getattr(found, key).tolist() for key in ('counts', 'confidence', 'accuracy')}
    pairs = [(names[i], names[j], times) for i, j, times in most_confused(matrix, NUM_PAIRS)]
    mistakes = dict(calibration=calibration, pairs=pairs)
    if len(names) <= MOST_CLASSES:
        mistakes |= dict(class_names=names, confusion=matrix.tolist())
    return dict(ece=100 * found.error, mistakes=mistakes)


def measure_scaling(name: str, model: nn.Module, side: int) -> dict[int, float]:
    """GMACs by height and width of the image, from `side` on; the model is left at another size."""
    console = Console(stderr=True)
    gmacs = {}
    for multiple in track(MULTIPLES, f'{name}, scaling', console=console, disable=not console.is_terminal):
        size = multiple * side
        try:
            if hasattr(model, 'set_input_size'):
                model.set_input_size(img_size=(size, size))
            gmacs[size] = count_macs(model, size) / 1e9
        except (UserError, RuntimeError, AssertionError, ValueError):
            # a model of a fixed size, or one of timm whose size cannot change so far
            break
    return gmacs


def explain_some(model: nn.Module, images: Images, config: dict) -> list[dict]:
    """What the model's answer rests on, for a few images evenly spread over the data; nothing where it has no map."""
    device = next(model.parameters()).device
    chosen = torch.linspace(0, len(images) - 1, min(NUM_PICTURES, len(images))).long().unique().tolist()
    inputs = torch.stack([images[i][0] for i in chosen]).to(device)
    try:
        maps, method = explain(model, inputs)
    except UserError:
        return []
    with torch.no_grad():
        confidence, answer = model(inputs).softmax(dim=1).max(dim=1)
    names = readable(images.class_names)
    found = []
    for k, i in enumerate(chosen):
        pixels = unnormalize(inputs[k].cpu(), config)
        answers = dict(prediction=names[answer[k]], confidence=confidence[k].item(), method=method)
        pictures = dict(picture=to_address(pixels), overlay=to_address(overlay(pixels, maps[k].cpu())))
        found.append(dict(file=images.filename(i), label=names[images[i][1]], **answers, **pictures))
    return found


def overlay(pixels: Tensor, heat: Tensor) -> Tensor:
    """An image (3, H, W) under a map (H, W), both from 0 to 1; where the map is dark the image stays visible."""
    # a second that only a report takes
    from matplotlib import colormaps

    colours = torch.from_numpy(colormaps['inferno'](heat.detach().numpy())[..., :3]).permute(2, 0, 1).float()
    opacity = 0.35 + 0.35 * heat
    return pixels * (1 - opacity) + colours * opacity


def to_address(pixels: Tensor) -> str:
    """An image (3, H, W) from 0 to 1 as a data address of a JPEG."""
    image = Image.fromarray((255 * pixels).round().byte().permute(1, 2, 0).contiguous().numpy())
    file = BytesIO()
    image.resize((PICTURE_SIZE, PICTURE_SIZE), Image.Resampling.BICUBIC).save(file, 'JPEG', quality=80, optimize=True)
    return f'data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}'
