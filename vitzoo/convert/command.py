"""The command `vitzoo convert`: its options, and the folder that it writes."""

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from vitzoo._save import save_model
from vitzoo.about import DATA_FACTS, fit_config, read_about
from vitzoo.classes import label_names
from vitzoo.convert.official import load_official
from vitzoo.convert.parent import given_size, start_from_parent, swap_parent
from vitzoo.data.held_out import HELD_OUT
from vitzoo.errors import CommandParser, UserError
from vitzoo.load import find_model, fit_data_config
from vitzoo.mixers.base import named_mixers
from vitzoo.options import add_keywords, check_output


def convert(argv: list[str] | None = None) -> None:
    """Run `vitzoo convert` with these arguments.

    Raises:
        UserError: The model does not exist, the checkpoint cannot be read or does not fit, or there already is a model
            in the folder.
    """
    args = parse_args(argv)
    folder = Path(args.out)
    _check_folder(folder)
    if any((folder / name).exists() for name in ('config.json', 'model.safetensors')):
        raise UserError(f"'{folder}' already contains a model; choose another --out")
    about: dict[str, Any]
    if args.swap:
        model, data_config, about = swap_parent(args)
    elif args.parent:
        model, data_config, about = start_from_parent(args)
    else:
        model = load_official(args.file, args.model, args.model_kwargs)
        if '.' not in args.model or not timm.is_model(args.model):
            # it is that of the published weights, which only a tag names; the path of a folder may have dots, too
            model.pretrained_cfg.pop('license', None)
        # a file of a run folder is described there
        fit_config(find_model(args.model), model, args.file)
        data_config, about = given_size(args.model_kwargs), {'label_names': label_names(model) or None}
    facts = _read_about(args)
    # a config of published weights has none
    kept = {key: value for key, value in facts.items() if key in DATA_FACTS} | about.get('vitzoo', {})
    about |= {'vitzoo': kept} if kept else {}
    _check_forward(args.to or args.parent or args.model, model, data_config)
    held_out = facts.get('held_out')
    if held_out:
        # the first, because a model without its list would be validated on images that its parent was trained on
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(held_out, folder / HELD_OUT)
    save_model(
        folder,
        model,
        model_args=_implied_arguments(model),
        data_config=data_config,
        model_config=about,
    )
    print(f"wrote {folder}, which timm.create_model('local-dir:{folder}', pretrained=True) loads")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser('vitzoo convert', description='Convert a model to a folder that timm loads.')
    add = parser.add_argument
    add('file', nargs='?', metavar='OFFICIAL_FILE', help='official checkpoint, .pth, .bin or .safetensors')
    add('--model', metavar='NAME', help='its model; with a tag, such as cvt_13.msft_in1k, also its data config')
    add('--from', dest='parent', metavar='NAME', help='model or trained folder to inherit from, instead of a file')
    add('--checkpoint', metavar='FILE', help='weights of the --from model (default: its published ones)')
    add('--random-weights', action='store_true', help='initialise the --from model randomly')
    add('--to', metavar='NAME', help='model that inherits')
    add('--swap', metavar='MIXERS', help="replace the attention of the --from model: 'ls', or 'ls:0-9,softmax:10,11'")
    add('--blocks', metavar='N,N-N', help='blocks in which --swap replaces it, such as 2,3,5-11 (default: all)')
    add_keywords(parser, '--mixer-kwargs', 'arguments of the mixer')
    add('--out', required=True, metavar='DIR', help='folder to write config.json and model.safetensors to')
    add_keywords(parser, '--model-kwargs', 'arguments of the new model')
    args = parser.parse_args(argv)
    if not (args.file and args.model) and not (args.parent and (args.to or args.swap)):
        parser.error('either OFFICIAL_FILE and --model, or --from and --to or --swap, are required')
    if (args.file or args.model) and (args.parent or args.to or args.swap or args.checkpoint or args.random_weights):
        parser.error(
            'OFFICIAL_FILE and --model cannot be combined with --from, --to, --swap, --checkpoint and --random-weights'
        )
    if args.to and args.swap:
        parser.error('--to and --swap cannot be combined')
    if not args.swap and (args.blocks or args.mixer_kwargs):
        parser.error('--blocks and --mixer-kwargs need --swap')
    if args.random_weights and args.checkpoint:
        parser.error('--random-weights and --checkpoint cannot be combined')
    return args


def _check_folder(folder: Path) -> None:
    """Check that files can be written to a folder, which may not exist yet."""
    if os.path.isfile(folder):
        raise UserError(f"--out '{folder}' is a file; choose a folder")
    is_new = not os.path.exists(folder)
    check_output(f'{folder}/config.json', ('.json',))
    if is_new:
        # a conversion that fails leaves none
        folder.rmdir()


def _read_about(args: argparse.Namespace) -> dict:
    """Facts about the data of the weights that are converted."""
    if args.random_weights:
        return {}
    checkpoint = args.checkpoint or args.file
    return read_about(find_model(args.parent or args.model), 'checkpoint' if checkpoint else 'published', checkpoint)


@torch.no_grad()
def _check_forward(name: str, model: nn.Module, data_config: dict) -> None:
    # models for images of any size are built for one that they do not take, too
    input_size = fit_data_config(name, model, data_config.get('img_size'))['input_size']
    images = torch.randn(1, *input_size, generator=torch.Generator().manual_seed(0))
    if not model.eval()(images).isfinite().all():
        raise UserError('the weights are damaged: the logits of a random image are not finite')


def _implied_arguments(model: nn.Module) -> dict:
    """The arguments of the mixers that the model's name may only imply, written out."""
    first = next((mixer for _, mixer in named_mixers(model)), None)
    model_args = getattr(model, '_model_args', {})
    if 'swap_mixer' in model_args:
        # the config of a swapped model has the arguments of its mixers
        return {}
    given = model_args.get('mixer_kwargs') or {}
    # a sequence is exported as given; a dict applies to the mixer of the first stage
    implied = first.implied_arguments() if first is not None and isinstance(given, dict) else {}
    return {'mixer_kwargs': {**given, **implied}} if implied else {}
