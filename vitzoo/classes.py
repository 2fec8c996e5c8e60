"""The classes of a model: their names, their number and the layers that predict them."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import Tensor, nn


def label_names(model: nn.Module) -> list[str]:
    """Names of the classes that the model was trained on, in label order; empty if its config has none that fit.

    Names of several classes have their numbers added.
    """
    names = (getattr(model, 'pretrained_cfg', None) or {}).get('label_names') or []
    names = [names[label] for label in sorted(names, key=int)] if isinstance(names, dict) else list(names)
    # fewer are fine: training may have been given a larger num_classes than the dataset has
    return _disambiguate(names, map(str, range(len(names)))) if len(names) <= model.num_classes else []


def class_names(model: nn.Module) -> list[str]:
    """The name of each class: from the model's config, else ImageNet's if the head fits it, else its number."""
    names, subset = label_names(model), infer_imagenet_subset(model)
    if not names and subset:
        descriptions: Any = ImageNetInfo(subset).label_descriptions(as_dict=True)
        names = _disambiguate(list(descriptions.values()), list(descriptions))
    return number_rest(names, model.num_classes)


def number_rest(names: list[str], num_classes: int) -> list[str]:
    """Add names for the classes without one: their numbers, which no other class has for a name."""
    rest, taken = range(len(names), num_classes), set(names)
    return names + [f'class {label}' if str(label) in taken else str(label) for label in rest]


def readable(class_names: list[str]) -> list[str]:
    """Replace ImageNet's WordNet ids by the first word or two of their descriptions; other names are unchanged."""
    info = ImageNetInfo()
    if not set(class_names) <= set(info.label_names()):
        return class_names
    return _disambiguate([info.label_name_to_description(name).partition(',')[0] for name in class_names], class_names)


def num_classes_in(model: nn.Module, weights: dict[str, Tensor]) -> int | None:
    """The number of classes of a checkpoint's head; None if it has no head of the model's name."""
    heads = [weights.get(f'{name}.weight') for name in head_names(model)]
    return None if not heads or heads[0] is None else len(heads[0])


def are_of_head(model: nn.Module, names: Iterable[str]) -> bool:
    """Return True if all of these tensors belong to the classifier of a model."""
    return all(name.rpartition('.')[0] in head_names(model) for name in names)


def head_names(model: Any) -> list[str]:
    """Names of the layers that classify; distilled models have one for each token."""
    names = model.pretrained_cfg.get('classifier') or []
    return [names] if isinstance(names, str) else list(names)


def _disambiguate(words: list[str], ids: Iterable[str]) -> list[str]:
    """Add the id to words that occur more than once, such as the bird and the machine called crane."""
    counts = Counter(words)
    return [word if counts[word] == 1 else f'{word} ({id_})' for word, id_ in zip(words, ids, strict=True)]
