"""The command line of `vitzoo push`."""

import argparse
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from safetensors.torch import load_file, save, save_file
from timm.models import push_to_hf_hub
from timm.models._hub import generate_readme
from torch import Tensor

from vitzoo._resources import resource_folder
from vitzoo.about import is_trained_folder, read_about
from vitzoo.data.held_out import HELD_OUT
from vitzoo.errors import CommandParser, UserError
from vitzoo.load import check_source, load_model
from vitzoo.options import add_workers, default_device
from vitzoo.push.card import LOCAL, make_card, read_facts
from vitzoo.push.folder import CONFIG, WEIGHTS, check_name, describe_precision, halve, read_json, write_folder
from vitzoo.validate.evaluation import validate_model
from vitzoo.validate.options import EvalOptions

HUB = 'hf-hub:'
CARD = 'README.md'
# tries of --half to round the weights at random, if rounding to the nearest numbers changes an accuracy
_RANDOM_ROUNDINGS = 8


def push(argv: list[str] | None = None) -> None:
    """Run `vitzoo push` with these arguments.

    Raises:
        UserError: The run, the target or the data is invalid, or the upload failed.
    """
    args = parse_args(argv)
    _check_target(args)
    parent = None if args.to.startswith(HUB) else Path(args.to).parent
    with _open_scratch(parent) as scratch:
        # the card is named after the target
        folder = Path(scratch, Path(args.to).name)
        write_folder(Path(args.run), folder, args.license)
        if read_json(folder / CONFIG).get('num_classes') == 0:
            raise UserError(
                f"'{args.run}' has no classifier, so there is no accuracy for its card; train it on classes first"
            )
        if parent is not None:
            check_name(folder)
        data_dir = _find_data(args)
        options = EvalOptions(
            device=default_device(), amp_dtype='float32', batch_size=64, workers=args.workers, data_dir=data_dir
        )
        record = validate_model(args.run, options)
        if args.half:
            record = _store_in_half(args.run, folder, options, record)
        name = _name_of(args.to)
        card = make_card(name, folder, record, read_facts(Path(args.run)), data_dir)
        if parent is None:
            _upload(args, folder, card)
            return
        (folder / CARD).write_text(generate_readme(card, folder.name), encoding='utf-8')
        folder.rename(args.to)
    print(f"wrote {args.to}; timm.create_model('{name}', pretrained=True) loads it")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(
        'vitzoo push', description='Upload a trained model with its model card, or write it to weights/.'
    )
    add = parser.add_argument
    add('run', metavar='RUN', help='folder of a training run, a transfer, or a cell of a study')
    add('--to', required=True, metavar='TARGET',
        help='hf-hub:ORG/NAME, or a new folder weights/MODEL.TAG, of a conversion BASE_to_MIXER.TAG')  # fmt: skip
    add('--license', required=True, metavar='NAME',
        help="licence of the weights, which depends on their images: 'apache-2.0', or in words")  # fmt: skip
    add('--half', action='store_true', help='matrices in half precision, if that keeps the accuracies to the image')
    add('--data-dir', metavar='DIR', help='the data of the run, if it has been moved')
    add_workers(parser)
    add('--private', action='store_true', help='create a private repository on the hub')
    args = parser.parse_args(argv)
    if not args.to.startswith(HUB):
        # without a slash at its end
        args.to = str(Path(args.to))
    return args


def _check_target(args: argparse.Namespace) -> None:
    """Check the run and the target before the evaluation."""
    if not is_trained_folder(args.run):
        raise UserError(f"'{args.run}' has no config.json, so it is not a trained model")
    if not args.license.strip():
        raise UserError('--license is empty; name the licence of the weights')
    if args.to.startswith(HUB):
        check_source(args.to)
        if '/' not in args.to or '@' in args.to:
            raise UserError(f"--to '{args.to}' must be hf-hub:ORG/NAME")
        return
    if args.private:
        raise UserError(f"--private is for the hub, and --to '{args.to}' is a folder; leave it out")
    if not re.fullmatch(r'\w+\.\w+', Path(args.to).name):
        raise UserError(f"--to '{args.to}' must be hf-hub:ORG/NAME, or a folder called MODEL.TAG")
    if os.path.lexists(args.to):
        raise UserError(f"'{args.to}' exists already; remove it, or choose another tag")


def _name_of(target: str) -> str:
    """The name by which timm loads what is pushed to a target."""
    if target.startswith(HUB):
        return target
    is_found = Path(target).parent.resolve() == resource_folder('weights').resolve()
    return Path(target).name if is_found else f'{LOCAL}{target}'


def _open_scratch(parent: Path | None) -> TemporaryDirectory:
    """A temporary folder next to the target, whose folder is created, or anywhere for the hub."""
    if parent is None:
        return TemporaryDirectory()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return TemporaryDirectory(dir=parent, prefix='.push-')
    except OSError as error:
        raise UserError(f"cannot create a folder in '{parent}': {error.strerror}; choose another --to") from error


def _find_data(args: argparse.Namespace) -> str:
    data_dir = args.data_dir or read_about(args.run).get('data_dir')
    if data_dir is None:
        raise UserError(f"'{args.run}' does not name its data; give --data-dir")
    return data_dir


def _store_in_half(run: str, folder: Path, options: EvalOptions, record: dict) -> dict:
    """Store weights in half precision if a rounding leaves the accuracies the same; the record of those stored."""
    weights = load_file(folder / WEIGHTS)
    if describe_precision(weights) != 'single precision':
        print(f'kept {describe_precision(weights)}, which is as small')
        return record
    found = _find_rounding(run, weights, options, record)
    if found is None:
        return record
    halved, rounded = found
    # `save_file` would replace it by a file that only its owner may read
    (folder / WEIGHTS).write_bytes(save(halved))
    return rounded


def _find_rounding(
    run: str, weights: dict[str, Tensor], options: EvalOptions, record: dict
) -> tuple[dict[str, Tensor], dict] | None:
    """The weights in half precision with the accuracies of `record`, and their record; None if no rounding has them.

    Raises:
        UserError: The validation images have changed.
    """
    reason = ''
    for seed in range(_RANDOM_ROUNDINGS + 1):
        halved = halve(weights, torch.Generator().manual_seed(seed) if seed else None)
        if halved is None:
            print('kept single precision, because a weight is too large for half precision')
            return None
        rounded = _evaluate_weights(run, halved, options)
        if rounded['images'] != record['images']:
            raise UserError(
                f"the validation images in '{options.data_dir}' have changed between two evaluations; "
                'push the run again'
            )
        changed = [key for key in ('top1', 'top5', 'map') if rounded[key] != record[key]]
        if not changed:
            if seed:
                print(f'rounded at random with seed {seed}, because {reason}')
            return halved, rounded
        reason = reason or (
            f'the nearest numbers of half precision have {changed[0]} {rounded[changed[0]]:.4f}, '
            f'not {record[changed[0]]:.4f}'
        )
    print(f'kept single precision, because {reason}, and {_RANDOM_ROUNDINGS} random roundings change an accuracy, too')
    return None


def _evaluate_weights(run: str, weights: dict[str, Tensor], options: EvalOptions) -> dict:
    """The record of the model of a run with other weights."""
    with TemporaryDirectory() as scratch:
        save_file(weights, f'{scratch}/{WEIGHTS}')
        # the image size of the weights, the options of the data, and the images that the run held out
        for source in (Path(run, CONFIG), read_about(run).get('held_out')):
            if source is not None:
                shutil.copyfile(source, Path(scratch, source.name))
        return validate_model(run, replace(options, checkpoint=f'{scratch}/{WEIGHTS}'))


def _upload(args: argparse.Namespace, folder: Path, card: dict) -> None:
    """Upload the model of a folder by timm's own function, with the card also if the repository has another."""
    model = load_model(str(folder)).model
    stored = load_file(folder / WEIGHTS)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in stored:
            tensor.data = tensor.data.to(stored[name].dtype)
    config = read_json(folder / CONFIG)
    held_out = folder / HELD_OUT
    if held_out.is_file():
        # a repository is not listed to find it
        config['vitzoo']['held_out'] = HELD_OUT
    repo_id = args.to.removeprefix(HUB)
    try:
        push_to_hf_hub(
            model,
            repo_id,
            private=args.private,
            model_config={key: config[key] for key in ('label_names', 'vitzoo') if key in config},
            model_card=card,
            safe_serialization=True,
        )
        files = {CARD: generate_readme(card, folder.name).encode()}
        if held_out.is_file():
            files[HELD_OUT] = held_out.read_bytes()
        for name, content in files.items():
            HfApi().upload_file(path_or_fileobj=content, path_in_repo=name, repo_id=repo_id)
    except (OSError, HTTPError) as error:
        raise UserError(
            f'cannot upload to {args.to}: {error}; log in with hf auth login, and check the name'
        ) from error
    print(f"uploaded {args.run}; timm.create_model('{args.to}', pretrained=True) loads it after import vitzoo")
