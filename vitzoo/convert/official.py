"""Loads a checkpoint in the layout of its authors, and says which of its tensors became which of ours."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitzoo.about import read_img_size
from vitzoo.classes import are_of_head, num_classes_in
from vitzoo.errors import UserError
from vitzoo.load import create_model, find_filter, find_model, read_weights
from vitzoo.mixers.base import named_mixers
from vitzoo.models._resample import is_resizable, resample_weights
from vitzoo.models.inherit import summarize_names


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
    official = read_weights(path)
    model: Any = create_model(find_model(name), model_kwargs=model_kwargs)
    filter_fn = find_filter(model) or partial(_resample, read_img_size(path))
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
    _print_mapping(trace_names(filter_fn, official, model), official, own)
    if num_classes and not model.num_classes:
        print(f'the head for {num_classes} classes is dropped; --model-kwargs num_classes={num_classes} keeps it')
    return model


def _resample(img_size: tuple[int, int] | None, weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Weights of our layout for a swapped model, whose class has no filter, at the image size of the model."""
    return resample_weights(weights, model, img_size) if any(named_mixers(model)) and is_resizable(model) else weights


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
