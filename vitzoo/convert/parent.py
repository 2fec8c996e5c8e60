"""Makes a model of another that has weights: by inheriting them, or by replacing its attention."""

import argparse
from collections.abc import Sequence
from inspect import signature
from statistics import fmean
from typing import Any

import torch
from timm.layers import to_2tuple
from timm.models import adapt_input_conv
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitzoo.about import fit_config
from vitzoo.convert.official import load_official
from vitzoo.data import resolve_data_config
from vitzoo.errors import UserError
from vitzoo.load import accepted_arguments, build_on_meta, create_model, find_model, load_model, swap_in
from vitzoo.mixers.base import named_mixers
from vitzoo.models._mixer_paths import block_of
from vitzoo.models._pyramid import per_stage_mixers
from vitzoo.models._swap_models import SWAPPED_MODELS, SwappedModel
from vitzoo.models._swap_record import describe_blocks, recorded_swaps
from vitzoo.models.inherit import differing_settings, inherit_weights

# of a model that inherits from another: its mixers, and the settings that its parent does not share
OWN_ARGUMENTS = {'mixer', 'mixer_kwargs', 'img_size', 'in_chans', 'num_classes', 'device', 'dtype'}
# settings in the record of a swap that the mixer does not take, that evaluation ignores, or that are compared elsewhere
_NOT_OF_THE_MIXER = ('mixer', 'blocks', 'attn_drop', 'proj_drop', 'num_heads', 'qkv_bias')
# a model that inherits less than this fraction was given the wrong parent
LEAST_SHARE = 0.5


def start_from_parent(args: argparse.Namespace) -> tuple[nn.Module, dict, dict]:
    """The model with its parent's weights, the parent's data config, and further entries of config.json."""
    parent, source = _load_parent(args)
    data_config = resolve_data_config(parent)
    in_chans, *img_size = data_config['input_size']
    data_config = {key: data_config[key] for key in ('interpolation', 'mean', 'std', 'crop_pct', 'crop_mode')}
    data_config.update({'img_size': img_size, **given_size(args.model_kwargs)})
    if data_config['img_size'] != img_size and hasattr(parent, 'set_input_size'):
        # the parent's own resampling also handles what `fit_from` does not
        parent.set_input_size(data_config['img_size'])
    name = find_model(args.to)
    kwargs = dict(img_size=data_config['img_size'], in_chans=in_chans, num_classes=parent.num_classes)
    settings = _settings_of(parent, name, args.model_kwargs)
    model = create_model(name, model_kwargs={**settings, **args.model_kwargs}, **kwargs)
    own_chans = args.model_kwargs.get('in_chans', in_chans)
    weights = parent.state_dict()
    if own_chans != in_chans:
        data_config |= {key: (fmean(data_config[key]),) * own_chans for key in ('mean', 'std')}
        weights |= _for_channels(own_chans, weights, parent)
    inheritance = inherit_weights(model, weights)
    if inheritance.share < LEAST_SHARE:
        raise UserError(
            f'{args.to} can inherit only {inheritance.share:.1%} of the parameters of {args.parent}: choose a parent '
            'of the same backbone and size'
        )
    print(f'{args.to} from {args.parent} ({source})\n{inheritance}')
    differing = [*differing_settings(model, parent), *_differing_arguments(model, parent)]
    if differing:
        print(f'computed otherwise than in the parent: {"; ".join(differing)}')
    about = _describe_origin(args, source, inheritance.share)
    model.pretrained_cfg['license'] = parent.pretrained_cfg.get('license')
    # another number of classes has other names
    names = parent.pretrained_cfg.get('label_names') if model.num_classes == parent.num_classes else None
    return model, data_config, {'label_names': names, 'vitzoo': about}


def _for_channels(in_chans: int, weights: dict[str, torch.Tensor], parent: nn.Module) -> dict[str, torch.Tensor]:
    """The first convolutions for other channels, as timm adapts those of color images, the only ones that it can."""
    first = parent.pretrained_cfg.get('first_conv') or ()
    names = [f'{name}.weight' for name in ([first] if isinstance(first, str) else first)]
    return {name: adapt_input_conv(in_chans, weights[name]) for name in names if weights[name].shape[1] == 3}


def _settings_of(parent: nn.Module, name: str, model_kwargs: dict) -> dict:
    """Arguments that the parent was made with, other than its name's, for a model of the same class.

    `model_kwargs` are those that the user gives.
    """
    model = build_on_meta(name)
    classes = {swapped: cls for cls, swapped in SWAPPED_MODELS.items()}
    cls = classes.get(type(parent), type(parent))
    # its base has the same arguments, and lacks only the token of the distillation
    cls = VisionTransformer if cls is VisionTransformerDistilled else cls
    if not isinstance(model, cls):
        return {}
    given = getattr(parent, '_model_args', {})
    taken = accepted_arguments(cls) & accepted_arguments(type(model)) - OWN_ARGUMENTS
    settings = {key: value for key, value in given.items() if key in taken and not key.endswith('_rate')}
    usual = build_on_meta(given.get('base_model') or parent.pretrained_cfg['architecture'])
    if settings.get('global_pool') == usual.global_pool:
        # it is in the config of every folder
        del settings['global_pool']
    if 'mixer_kwargs' in accepted_arguments(type(model)) and not recorded_swaps(model):
        with torch.device('meta'):
            model = create_model(name, model_kwargs={**settings, **model_kwargs})
        uniform = _uniform_arguments(parent)
        if uniform is not None and _kinds_of_mixers(model) == _kinds_of_mixers(parent):
            settings['mixer_kwargs'] = uniform
    return settings


def _uniform_arguments(parent: nn.Module) -> dict | Sequence[dict] | None:
    """`mixer_kwargs` of all mixers of the parent, None if they differ from block to block, or it was given none."""
    of_block = _arguments_of_blocks(parent)
    if of_block == _own_arguments_of_blocks(parent):
        return getattr(parent, '_model_args', {}).get('mixer_kwargs')
    first = next(iter(of_block.values()))
    is_uniform = len(_kinds_of_mixers(parent)) == 1 and all(kwargs == first for kwargs in of_block.values())
    return first if is_uniform else None


def _arguments_of_blocks(model: nn.Module) -> dict[str, dict]:
    """The arguments of the mixer of each block, by the path of the block."""
    of_block = _own_arguments_of_blocks(model)
    paths = list(of_block)
    for swap in recorded_swaps(model):
        kwargs = {key: value for key, value in swap.items() if key not in _NOT_OF_THE_MIXER}
        of_block |= dict.fromkeys([paths[i] for i in swap['blocks']], kwargs)
    return of_block


def _own_arguments_of_blocks(model: nn.Module) -> dict[str, dict]:
    """The arguments that the mixer of each block was built with before any swap."""
    given = getattr(model, '_model_args', {})
    family: Any = SWAPPED_MODELS.get(type(model), type(model))
    paths = list(family.token_blocks(model)) if issubclass(family, SwappedModel) else []
    if 'mixer_kwargs' not in given:
        return {path: {} for path in paths}
    stages = [int(path.split('.')[1]) if path.startswith('stages.') else 0 for path in paths]
    mixer = given.get('mixer', signature(type(model)).parameters['mixer'].default)
    of_stage = per_stage_mixers(mixer, given['mixer_kwargs'], max(stages) + 1)
    return {path: of_stage[stage][1] for path, stage in zip(paths, stages, strict=True)}


def _differing_arguments(model: nn.Module, parent: nn.Module) -> list[str]:
    """Arguments of mixers in the parent that the same mixers in the same blocks of the model do not have."""
    parents, new, old = dict(named_mixers(parent)), _arguments_of_blocks(model), _arguments_of_blocks(parent)
    differing: dict[str, list[int]] = {}
    for path, mixer in named_mixers(model):
        block, before = block_of(path), parents.get(path)
        if block not in new or block not in old or type(before) is not type(mixer):
            continue
        # arguments that a model chooses for its mixers are not among those that they were given
        own, parents_own = ({**given[block], **x.implied_arguments()} for given, x in ((new, mixer), (old, before)))
        if own != parents_own:
            shown = {key for key in (*own, *parents_own) if own.get(key) != parents_own.get(key)}
            shown |= new[block].keys() | old[block].keys()
            texts = [{key: value for key, value in kwargs.items() if key in shown} for kwargs in (own, parents_own)]
            differing.setdefault(f'mixer_kwargs: {texts[0]}, not {texts[1]}', []).append(list(old).index(block))
    return [f'{text} in {describe_blocks(blocks)}' for text, blocks in differing.items()]


def _kinds_of_mixers(model: nn.Module) -> set[type]:
    return {type(mixer) for _, mixer in named_mixers(model)}


def swap_parent(args: argparse.Namespace) -> tuple[nn.Module, dict, dict]:
    """The parent with other mixers, the data config that is given, and further entries of config.json."""
    model, weights = _load_parent(args)
    num_classes = model.pretrained_cfg.get('num_classes', model.num_classes)
    if weights in ('published', 'trained') and model.num_classes != num_classes:
        raise UserError(
            f'num_classes={model.num_classes} does not fit the weights of {args.parent}, which are for {num_classes} '
            'classes; leave it out, `vitzoo train` makes a head for the classes of its data'
        )
    img_size = args.model_kwargs.get('img_size')
    swapped = swap_in(args.parent, model, args.swap, args.mixer_kwargs, args.blocks, img_size)
    reports = list(model.inheritance.values())
    share = sum(report.share for report in reports) / len(reports)
    new = ', '.join(dict.fromkeys(name for report in reports for name in report.initialized)) or 'none'
    print(f"{args.parent} ({weights}) with {swapped}\ninherited {share:.2%} of the attention's parameters")
    print(f'initialized in the mixers: {new}')
    about = {'label_names': model.pretrained_cfg.get('label_names'), 'vitzoo': _describe_origin(args, weights, share)}
    return model, given_size(args.model_kwargs), about


def _load_parent(args: argparse.Namespace) -> tuple[nn.Module, str]:
    # those of the model that inherits are not the parent's
    kwargs = args.model_kwargs if args.swap else {}
    if 'img_size' in kwargs and not _has_image_size(build_on_meta(find_model(args.parent))):
        # only its mixers have one
        kwargs = {key: value for key, value in kwargs.items() if key != 'img_size'}
    if args.checkpoint:
        # a parent only gives its weights, so its head may be for any classes
        parent = load_official(args.checkpoint, args.parent, kwargs, any_classes=not args.swap)
        fit_config(find_model(args.parent), parent, args.checkpoint)
        weights = args.checkpoint
    elif args.random_weights:
        # those of a folder are loaded by `load_model` in any case
        parent, weights = create_model(find_model(args.parent), model_kwargs=kwargs).eval(), 'random weights'
        fit_config(find_model(args.parent), parent, None)
    else:
        loaded = load_model(find_model(args.parent), model_kwargs=kwargs)
        parent, weights = loaded.model, loaded.weights
    if weights == 'random weights' and not args.random_weights:
        raise UserError(f'there are no published weights of {args.parent}; pass a --checkpoint')
    if weights not in ('published', 'trained'):
        # it is that of the published weights
        parent.pretrained_cfg.pop('license', None)
    return parent, weights


def _has_image_size(model: nn.Module) -> bool:
    """Return True if a model is built for an image size, or has a method to change it."""
    return 'img_size' in accepted_arguments(type(model)) or hasattr(model, 'set_input_size')


def _describe_origin(args: argparse.Namespace, weights: str, share: float) -> dict:
    """Facts for config.json about the parent and the inherited share of its weights."""
    return {'parent': args.parent, 'weights': weights, 'inherited': round(share, 4)}


def given_size(model_kwargs: dict) -> dict:
    """The image size among the arguments of a model, as a data config."""
    size = model_kwargs.get('img_size')
    return {} if size is None else {'img_size': list(to_2tuple(size))}
