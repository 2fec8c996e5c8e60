"""Loads a checkpoint in the layout of its authors, and says which of its tensors became which of ours."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitzoo.about import read_img_size
from vitzoo.classes import are_of_head, head_names, num_classes_in
from vitzoo.errors import UserError, count_of
from vitzoo.load import create_model, find_filter, find_model, read_weights
from vitzoo.mixers.base import named_mixers
from vitzoo.models._resample import find_sizes, is_resizable, resample_weights, without_size_warnings
from vitzoo.models.inherit import summarize_names

# the number of models in an average, which timm and torch count, and what masked pretraining has for its own task
_WITHOUT_EFFECT = ('n_averaged', 'mask_token', 'decoder')
# arguments of timm's ViT by parts of the names of tensors that only models with them have
_HINTS = {
    '.ls1.gamma': 'init_values=1e-5',
    '.attn.q_norm.': 'qk_norm=True',
    '.attn.qkv.bias': 'qkv_bias=True',
    'norm_pre.': 'pre_norm=True',
}


def load_official(path: str, name: str, model_kwargs: dict, any_classes: bool = False) -> nn.Module:
    """Create a model with the weights of a checkpoint in the official layout or ours, and print the mapping of tensors.

    Args:
        path: The checkpoint.
        name: A timm name, or a folder.
        model_kwargs: Arguments of the model.
        any_classes: Give the model a head for the number of classes of the checkpoint's, or none if that has none.

    Raises:
        UserError: The file cannot be read, the model cannot be created, or the checkpoint lacks some of its tensors or
            has others.
    """
    official = read_weights(path)
    size, others = model_kwargs.get('img_size'), {k: v for k, v in model_kwargs.items() if k != 'img_size'}
    # a model for images of any size has no such argument
    model: Any = create_model(find_model(name), img_size=size, model_kwargs=others)
    own_filter, known_size = find_filter(model), read_img_size(path)
    filter_fn = own_filter or partial(_resample, known_size)
    if 'img_size' in model_kwargs:
        # that of the weights too, if they fit
        model.pretrained_model_args = {'img_size': model_kwargs['img_size']}
    try:
        with without_size_warnings():
            ours = filter_fn(dict(official), model)
    except (AttributeError, IndexError, KeyError, RuntimeError, ValueError) as error:
        # given the weights of another model, a filter does not find the tensors that it expects
        unknown = [name for name in official if name not in model.state_dict()]
        has = f'; it has {summarize_names(unknown, 3)}, which {name} has not' if unknown else ''
        raise UserError(f"the checkpoint '{path}' is not of a {type(model).__name__}: {error!r}{has}") from error
    num_classes = num_classes_in(model, ours)
    # a model that does not name its head may have one
    if any_classes and head_names(model) and (num_classes or 0) != model.num_classes:
        model.reset_classifier(num_classes or 0)
    own = model.state_dict()
    _check_names(path, ours, model)
    wrong = [name for name in own if ours[name].shape != own[name].shape]
    if wrong and are_of_head(model, wrong):
        raise UserError(
            f"the checkpoint '{path}' has {num_classes} classes, and {name} {model.num_classes}; add --model-kwargs"
            f' num_classes={num_classes}'
        )
    if wrong:
        texts = [f'{name} is {tuple(ours[name].shape)}, not {tuple(own[name].shape)}' for name in wrong[:3]]
        raise UserError(f"the checkpoint '{path}' does not fit {type(model).__name__}: {'; '.join(texts)}")
    model.load_state_dict({name: ours[name] for name in own})
    with without_size_warnings():
        sources = trace_names(filter_fn, official, model)
        is_resampled = any(tensor.shape != ours[name].shape for name, tensor in official.items() if name in ours)
        sizes = find_sizes(official, model, None if own_filter else known_size) if is_resampled else None
    _print_mapping(sources, official, own)
    if sizes is not None:
        _print_resampling(path, name, *sizes, is_chosen=size is not None, is_parent=any_classes)
    if num_classes and not model.num_classes:
        print(f'the head for {num_classes} classes is dropped; --model-kwargs num_classes={num_classes} keeps it')
    return model


def _print_resampling(
    path: str, name: str, old: tuple[int, int], new: tuple[int, int], *, is_chosen: bool, is_parent: bool
) -> None:
    option = f'--model-kwargs img_size={old[0] if old[0] == old[1] else f"[{old[0]},{old[1]}]"}'
    # as an option of a conversion from a parent it is that of the new model
    advice = f'; {f"vitzoo convert {path} --model {name} {option} --out DIR" if is_parent else option} keeps them'
    print(
        f'the weights are taken to be for images of {old[0]} x {old[1]}, and resampled for {new[0]} x {new[1]}'
        f'{"" if is_chosen else advice}'
    )


def _check_names(path: str, weights: dict[str, Tensor], model: Any) -> None:
    """Check that weights are all of those of a model, and no others, which the model would compute without.

    Raises:
        UserError: They are not.
    """
    own = model.state_dict()
    missing = [name for name in own if name not in weights]
    if len(missing) == len(own):
        raise UserError(
            f"the checkpoint '{path}' has none of the {len(own)} tensors of a {type(model).__name__}, such as"
            f' {next(iter(own))}; it has {summarize_names([*weights], 3) or "no tensors"}'
        )
    heads = () if model.num_classes else tuple(f'{name}.' for name in head_names(model))
    # some tools also save buffers that follow from the settings of a model
    own |= dict(model.named_buffers())
    extra = [name for name in weights if name not in own and not name.startswith((*_WITHOUT_EFFECT, *heads))]
    if missing and not extra and are_of_head(model, missing):
        raise UserError(
            f"the checkpoint '{path}' has no head for the {model.num_classes} classes of this {type(model).__name__};"
            ' add --model-kwargs num_classes=0'
        )
    if missing:
        raise UserError(
            f"the checkpoint '{path}' leaves {len(missing)} of {len(own)} tensors without a value: "
            f'{summarize_names(missing)}; '
            f'if it is of another model, inherit from it with --from NAME --checkpoint {path} --to NAME'
        )
    if extra:
        number = count_of(len(extra), 'tensor')
        raise UserError(
            f"the checkpoint '{path}' has {number} that this {type(model).__name__} lacks:"
            f' {summarize_names(extra)}; {_advise_on_extra(extra, model)}'
        )


def _advise_on_extra(extra: list[str], model: nn.Module) -> str:
    """The arguments of a ViT with these tensors, too; they need not be all."""
    blocks = [re.match(r'blocks\.(\d+)\.', name) for name in extra]
    depth = len(getattr(model, 'blocks', ()))
    last = max((int(block[1]) for block in blocks if block), default=0)
    hints = [f'depth={last + 1}'] if 0 < depth <= last else []
    # blocks that the model lacks have everything
    others = [name for name, block in zip(extra, blocks) if block is None or int(block[1]) < depth]
    hints += [hint for part, hint in _HINTS.items() if any(part in name for name in others)]
    if not hints:
        return 'name the model that it is of, with its arguments'
    return f'add --model-kwargs {" ".join(hints)}, or name the model that it is of'


def _resample(img_size: tuple[int, int] | None, weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Weights of our layout for a swapped model, whose class has no filter, at the image size of the model."""
    return resample_weights(weights, model, img_size) if any(named_mixers(model)) and is_resizable(model) else weights


def trace_names(filter_fn: Callable[..., dict], official: dict[str, Tensor], model: nn.Module) -> dict[str, list[str]]:
    """The names of the official tensors that each converted tensor is made of.

    Every official tensor is filled with its index, which is then looked up in the output of the filter. The filter may
    also scale values, so it is called a second time with indices that are larger by their number. Values that add up
    several tensors look like another index, which a third call with random numbers shows.
    """
    names = list(official)
    random = torch.rand(len(names), generator=torch.Generator().manual_seed(0))

    def fill(values: Tensor) -> dict[str, Tensor]:
        return {name: value.expand(official[name].shape) for name, value in zip(names, values)}

    indices = torch.arange(len(names), dtype=torch.float32)
    numbered = fill(indices)
    fillings = numbered, fill(indices + len(names)), fill(random)
    converted, shifted, shuffled = (filter_fn(dict(filling), model) for filling in fillings)
    # most are only renamed, so their values need not be searched
    same = {id(tensor): name for name, tensor in numbered.items()}
    sources = {}
    for name, tensor in converted.items():
        if id(tensor) in same:
            sources[name] = [same[id(tensor)]]
            continue
        scale = (shifted[name] - tensor) / len(names)
        # elsewhere the filter has set a constant
        is_read = scale != 0
        found = (tensor[is_read] / scale[is_read]).round().long().clamp(0, len(names) - 1)
        if torch.allclose(shuffled[name][is_read], scale[is_read] * random[found], atol=1e-3):
            sources[name] = [names[i] for i in found.unique()]
        else:
            sources[name] = _search_sources(partial(filter_fn, model=model), name, official, names)
    return sources


def _search_sources(
    filter_fn: Callable[[dict], dict], converted: str, official: dict[str, Tensor], names: list[str]
) -> list[str]:
    """The official tensors among `names` that a converted tensor depends on, by halving those that are not zero."""
    zeros = {name: torch.tensor(0.0).expand(x.shape) for name, x in official.items()}
    constant = filter_fn(dict(zeros))[converted]

    def search(names: list[str]) -> list[str]:
        ones = {name: torch.tensor(1.0).expand(official[name].shape) for name in names}
        if torch.equal(filter_fn(zeros | ones)[converted], constant):
            return []
        half = len(names) // 2
        return names if not half else [*search(names[:half]), *search(names[half:])]

    return search(names)


def _print_mapping(sources: dict[str, list[str]], official: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    used = {source for name in own for source in sources[name]}
    renamed = [f'{" + ".join(sources[name]) or "constant"} -> {name}' for name in own if sources[name] != [name]]
    dropped = [name for name in official if name not in used]
    print(f'mapped {len(used)} of {len(official)} tensors to {len(own)}, {len(renamed)} of them renamed or merged')
    if renamed:
        print(f'  {summarize_names(renamed)}')
    print(f'dropped {len(dropped)}: {summarize_names(dropped)}' if dropped else 'dropped none')
    print('missing none')
