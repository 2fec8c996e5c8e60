"""`vitzoo convert`: convert an official checkpoint, or a model with other mixers, to a folder that timm loads.

Examples:
    vitzoo convert model_best.pth --model vil_ls_medium.nvidia_in1k --out vil_ls_medium
    vitzoo convert --from deit_small_patch16_224 --to deit_performer_small --out deit_performer_small
    vitzoo convert --from vil_small --checkpoint model_best.pth --to vil_nystrom_small --out vil_nystrom_small
    vitzoo convert --from vit_small_patch14_dinov2 --swap ls:0-9,softmax:10,11 --out dinov2_ls
"""

import argparse
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from vitzoo._save import save_model
from vitzoo.about import DATA_FACTS, fit_config, read_about
from vitzoo.classes import label_names, num_classes_in
from vitzoo.data import resolve_data_config
from vitzoo.data.held_out import HELD_OUT
from vitzoo.errors import CommandParser, UserError, run_command
from vitzoo.load import accepted_arguments, build_on_meta, create_model, find_filter, find_model, load_model, swap_in
from vitzoo.mixers import TokenMixer
from vitzoo.mixers.ls import LongShort
from vitzoo.models._official import read_checkpoint, unwrap
from vitzoo.models._swap_models import SWAPPED_MODELS
from vitzoo.models.inherit import differing_settings, inherit_weights, summarize_names
from vitzoo.options import check_output, keyword

# of a model that inherits from another: its mixers, and what is set beside its parent's settings
OWN_ARGUMENTS = {'mixer', 'mixer_kwargs', 'img_size', 'in_chans', 'num_classes', 'device', 'dtype'}
# a model that inherits less than this fraction was given the wrong parent
LEAST_SHARE = 0.5


def main(argv: list[str] | None = None) -> None:
    """Run the command and exit with its exit code."""
    run_command(convert, argv)


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
    if args.swap:
        model, data_config, about = _swap_parent(args)
    elif args.parent:
        model, data_config, about = _start_from_parent(args)
    else:
        model = load_official(args.file, args.model, args.model_kwargs)
        if '.' not in args.model:
            # it is that of the published weights, which only a tag names
            model.pretrained_cfg.pop('license', None)
        # a file of a run folder is described there
        fit_config(find_model(args.model), model, args.file)
        data_config, about = _given_size(args), {'label_names': label_names(model) or None}
    _check_forward(model, data_config)
    save_model(
        folder,
        model,
        model_args=_bias_index(model),
        data_config=data_config,
        model_config=about,
    )
    held_out = _read_about(args).get('held_out')
    if held_out:
        # `vitzoo validate` must not evaluate the images that the parent was trained on
        shutil.copyfile(held_out, folder / HELD_OUT)
    print(f"wrote {folder}, which timm.create_model('local-dir:{folder}', pretrained=True) loads")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser('vitzoo convert', description=__doc__.partition('\n')[0])
    add = parser.add_argument
    add('file', nargs='?', metavar='OFFICIAL_FILE', help='official checkpoint, .pth, .bin or .safetensors')
    add('--model', metavar='NAME', help='its model; with a tag, such as cvt_13.msft_in1k, also its data config')
    add('--from', dest='parent', metavar='NAME', help='model or trained folder to inherit from, instead of a file')
    add('--checkpoint', metavar='FILE', help='weights of the --from model (default: its published ones)')
    add('--random-weights', action='store_true', help='initialise the --from model randomly')
    add('--to', metavar='NAME', help='model that inherits')
    add('--swap', metavar='MIXERS', help="replace the attention of the --from model: 'ls', or 'ls:0-9,softmax:10,11'")
    add('--blocks', metavar='N,N-N', help='blocks in which --swap replaces it, such as 2,3,5-11 (default: all)')
    add('--mixer-kwargs', nargs='+', type=keyword, default=[], metavar='KEY=VALUE', help='arguments of the mixer')
    add('--out', required=True, metavar='DIR', help='folder to write config.json and model.safetensors to')
    add('--model-kwargs', nargs='+', type=keyword, default=[], metavar='KEY=VALUE', help='arguments of the new model')
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
    args.model_kwargs, args.mixer_kwargs = dict(args.model_kwargs), dict(args.mixer_kwargs)
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


def load_official(path: str, name: str, model_kwargs: dict, any_classes: bool = False) -> nn.Module:
    """Create a model with the weights of a checkpoint in the official layout or ours, and print the mapping of tensors.

    Args:
        path: The checkpoint.
        name: A timm name, or a folder.
        model_kwargs: Arguments of the model.
        any_classes: Give the model a head for the number of classes of the checkpoint's.

    Raises:
        UserError: The file cannot be read, the model cannot be created, or the checkpoint lacks some of its tensors.
    """
    official = unwrap(read_checkpoint(path))
    model: Any = create_model(find_model(name), model_kwargs=model_kwargs)
    filter_fn = find_filter(model) or (lambda weights, model: weights)
    if 'img_size' in model_kwargs:
        # that of the weights too, if they fit
        model.pretrained_model_args = {'img_size': model_kwargs['img_size']}
    try:
        ours = filter_fn(dict(official), model)
    except (AttributeError, IndexError, KeyError, RuntimeError, ValueError) as error:
        # given the weights of another model, a filter does not find the tensors that it expects
        raise UserError(f"the checkpoint '{path}' is not of a {type(model).__name__}: {error!r}") from error
    num_classes = num_classes_in(model, ours)
    if any_classes and num_classes is not None and num_classes != model.num_classes:
        model.reset_classifier(num_classes)
    own = model.state_dict()
    missing = [name for name in own if name not in ours]
    if missing:
        raise UserError(
            f"the checkpoint '{path}' leaves {len(missing)} of {len(own)} tensors without a value: "
            f'{summarize_names(missing)}; '
            f'if it is of another model, inherit from it with --from NAME --checkpoint {path} --to NAME'
        )
    wrong = [f'{name} is {tuple(ours[name].shape)}, not {tuple(own[name].shape)}' for name in own]
    wrong = [text for text, name in zip(wrong, own) if ours[name].shape != own[name].shape]
    if wrong:
        raise UserError(f"the checkpoint '{path}' does not fit {type(model).__name__}: {'; '.join(wrong[:3])}")
    model.load_state_dict({name: ours[name] for name in own})
    _print_mapping(trace_names(filter_fn, official, model), official, own)
    return model


def trace_names(filter_fn: Callable[..., dict], official: dict[str, Tensor], model: nn.Module) -> dict[str, list[str]]:
    """The names of the official tensors that each converted tensor is made of.

    Every official tensor is filled with its index, which is then looked up in the output of the filter. The filter may
    also scale values, so it is called a second time with indices that are larger by their number.
    """
    names = list(official)
    numbered, shifted = (
        {name: torch.tensor(float(start + i)).expand(official[name].shape) for i, name in enumerate(names)}
        for start in (0, len(names))
    )
    converted, converted_shifted = filter_fn(dict(numbered), model), filter_fn(dict(shifted), model)
    # most are only renamed, so their values need not be searched
    same = {id(tensor): name for name, tensor in numbered.items()}
    sources = {}
    for name, tensor in converted.items():
        if id(tensor) in same:
            sources[name] = [same[id(tensor)]]
            continue
        scale = (converted_shifted[name] - tensor) / len(names)
        # elsewhere the filter has set a constant
        is_read = scale != 0
        sources[name] = [names[int(i)] for i in (tensor[is_read] / scale[is_read]).round().unique()]
    return sources


def _print_mapping(sources: dict[str, list[str]], official: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    used = {source for name in own for source in sources[name]}
    renamed = [f'{" + ".join(sources[name]) or "constant"} -> {name}' for name in own if sources[name] != [name]]
    dropped = [name for name in official if name not in used]
    print(f'mapped {len(used)} of {len(official)} tensors to {len(own)}, {len(renamed)} of them renamed or merged')
    if renamed:
        print(f'  {summarize_names(renamed)}')
    print(f'dropped {len(dropped)}: {summarize_names(dropped)}' if dropped else 'dropped none')
    print('missing none')


def _start_from_parent(args: argparse.Namespace) -> tuple[nn.Module, dict, dict]:
    """The model with its parent's weights, the parent's data config, and further entries of config.json."""
    parent, source = _load_parent(args)
    data_config = resolve_data_config(parent)
    in_chans, *img_size = data_config['input_size']
    data_config = {key: data_config[key] for key in ('interpolation', 'mean', 'std', 'crop_pct', 'crop_mode')}
    data_config.update({'img_size': img_size, **_given_size(args)})
    if data_config['img_size'] != img_size and hasattr(parent, 'set_input_size'):
        # the parent's own resampling also handles what `fit_from` does not
        parent.set_input_size(data_config['img_size'])
    name = find_model(args.to)
    kwargs = dict(img_size=data_config['img_size'], in_chans=in_chans, num_classes=parent.num_classes)
    model = create_model(name, model_kwargs={**_settings_of(parent, name), **args.model_kwargs}, **kwargs)
    own_chans = args.model_kwargs.get('in_chans', in_chans)
    if own_chans != in_chans:
        data_config |= {key: (fmean(data_config[key]),) * own_chans for key in ('mean', 'std')}
    inheritance = inherit_weights(model, parent.state_dict())
    if inheritance.share < LEAST_SHARE:
        raise UserError(
            f'{args.to} can inherit only {inheritance.share:.1%} of the parameters of {args.parent}: choose a parent '
            'of the same backbone and size'
        )
    print(f'{args.to} from {args.parent} ({source})\n{inheritance}')
    differing = differing_settings(model, parent)
    if differing:
        print(f'computed otherwise than in the parent: {"; ".join(differing)}')
    about = _describe_origin(args, source, inheritance.share)
    model.pretrained_cfg['license'] = parent.pretrained_cfg.get('license')
    # another number of classes has other names
    names = parent.pretrained_cfg.get('label_names') if model.num_classes == parent.num_classes else None
    return model, data_config, {'label_names': names, 'vitzoo': about}


def _settings_of(parent: nn.Module, name: str) -> dict:
    """Arguments that the parent was made with, other than its name's, for a model of the same class."""
    model = build_on_meta(name)
    classes = {swapped: cls for cls, swapped in SWAPPED_MODELS.items()}
    cls = classes.get(type(parent), type(parent))
    if not isinstance(model, cls):
        return {}
    given = getattr(parent, '_model_args', {})
    taken = accepted_arguments(cls) & accepted_arguments(type(model)) - OWN_ARGUMENTS
    if _kinds_of_mixers(model) == _kinds_of_mixers(parent) and 'swap_mixer' not in given:
        taken.add('mixer_kwargs')
    settings = {key: value for key, value in given.items() if key in taken and not key.endswith('_rate')}
    usual = build_on_meta(given.get('base_model') or parent.pretrained_cfg['architecture'])
    if settings.get('global_pool') == usual.global_pool:
        # it is in the config of every folder
        del settings['global_pool']
    return settings


def _kinds_of_mixers(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules() if isinstance(module, TokenMixer)}


def _swap_parent(args: argparse.Namespace) -> tuple[nn.Module, dict, dict]:
    """The parent with other mixers, the data config that is given, and further entries of config.json."""
    model, source = _load_parent(args)
    num_classes = model.pretrained_cfg.get('num_classes', model.num_classes)
    if source in ('published', 'trained') and model.num_classes != num_classes:
        raise UserError(
            f'num_classes={model.num_classes} does not fit the weights of {args.parent}, which are for {num_classes} '
            'classes; leave it out, `vitzoo train` makes a head for the classes of its data'
        )
    swapped = swap_in(args.parent, model, args.swap, args.mixer_kwargs, args.blocks)
    reports = list(model.inheritance.values())
    share = sum(report.share for report in reports) / len(reports)
    new = ', '.join(dict.fromkeys(name for report in reports for name in report.initialized)) or 'none'
    print(f"{args.parent} ({source}) with {swapped}\ninherited {share:.2%} of the attention's parameters")
    print(f'initialized in the mixers: {new}')
    about = _describe_origin(args, source, share)
    return model, _given_size(args), {'label_names': model.pretrained_cfg.get('label_names'), 'vitzoo': about}


def _describe_origin(args: argparse.Namespace, source: str, share: float) -> dict:
    """Facts for config.json about the parent, the inherited share of its weights, and the data of its training."""
    about = {key: value for key, value in _read_about(args).items() if key in DATA_FACTS}
    return about | {'parent': args.parent, 'weights': source, 'inherited': round(share, 4)}


def _read_about(args: argparse.Namespace) -> dict:
    """Facts about the data of the weights that are converted."""
    if args.random_weights:
        return {}
    checkpoint = args.checkpoint or args.file
    return read_about(find_model(args.parent or args.model), 'checkpoint' if checkpoint else 'published', checkpoint)


def _given_size(args: argparse.Namespace) -> dict:
    """The image size among the model's arguments, as a data config."""
    size = args.model_kwargs.get('img_size')
    return {} if size is None else {'img_size': list(to_2tuple(size))}


def _load_parent(args: argparse.Namespace) -> tuple[nn.Module, str]:
    # those of the model that inherits are not the parent's
    kwargs = args.model_kwargs if args.swap else {}
    if args.checkpoint:
        # a parent only gives its weights, so its head may be for any classes
        parent = load_official(args.checkpoint, args.parent, kwargs, any_classes=not args.swap)
        fit_config(find_model(args.parent), parent, args.checkpoint)
        source = args.checkpoint
    elif args.random_weights:
        # those of a folder are loaded by `load_model` in any case
        parent, source = create_model(find_model(args.parent), model_kwargs=kwargs).eval(), 'random weights'
    else:
        parent, source = load_model(find_model(args.parent), model_kwargs=kwargs)
    if source == 'random weights' and not args.random_weights:
        raise UserError(f'there are no published weights of {args.parent}; pass a --checkpoint')
    if source not in ('published', 'trained'):
        # it is that of the published weights
        parent.pretrained_cfg.pop('license', None)
    return parent, source


@torch.no_grad()
def _check_forward(model: nn.Module, data_config: dict) -> None:
    input_size = resolve_data_config(model, data_config.get('img_size'))['input_size']
    images = torch.randn(1, *input_size, generator=torch.Generator().manual_seed(0))
    if not model.eval()(images).isfinite().all():
        raise UserError('the weights are damaged: the logits of a random image are not finite')


def _bias_index(model: nn.Module) -> dict:
    """The `rel_bias` argument of a long-short model, written out because its name may only imply it."""
    first = next((module for module in model.modules() if isinstance(module, TokenMixer)), None)
    model_args = getattr(model, '_model_args', {})
    if 'swap_mixer' in model_args:
        # the config of a swapped model has the arguments of its mixers
        return {}
    given = model_args.get('mixer_kwargs') or {}
    # a sequence is exported as given; a dict applies to the mixer of the first stage
    if not isinstance(first, LongShort) or not isinstance(given, dict):
        return {}
    index = 'none'
    if first.rel_bias is not None:
        index = 'table' if first.rel_bias.row_stride is None else 'nvidia'
    return {'mixer_kwargs': {**given, 'rel_bias': index}}


if __name__ == '__main__':
    main()
