"""Freezes parts of a model, and finds the modules that belong in eval mode with them."""

from torch import nn

from vitzoo.errors import UserError, did_you_mean


def freeze(model: nn.Module, names: str | None) -> list[nn.Module]:
    """Freeze parameters, and return the frozen modules, which belong in eval mode.

    A module is frozen if it has parameters and all of them are. Its submodules go into eval mode with it; dropout and
    stochastic depth of a module that is trained at least in part stay active. With 'backbone', modules without
    parameters outside the head are frozen too.

    Args:
        names: Names of modules or parameters, separated by commas, or 'backbone' for all but the classifier.

    Raises:
        UserError: A name does not exist, or nothing is left to train.
    """
    if not names:
        return []
    frozen = _backbone_parameters(model) if names == 'backbone' else _named_parameters(model, names.split(','))
    for parameter in frozen:
        parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"freeze '{names}' leaves nothing to train")
    modules = [module for module in model.modules() if _is_frozen(module)]
    if names == 'backbone':
        # dropout before the blocks, but not timm's head_drop
        children = [child for name, child in model.named_children() if not name.startswith('head')]
        modules += [child for child in children if next(child.parameters(), None) is None]
    return modules


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _backbone_parameters(model: nn.Module) -> list[nn.Parameter]:
    classifier = model.get_classifier()
    # DeiT's distilled models have two heads
    heads = classifier if isinstance(classifier, tuple | list) else [classifier]
    head_ids = {id(parameter) for head in heads for parameter in head.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in head_ids]


def _named_parameters(model: nn.Module, names: list[str]) -> list[nn.Parameter]:
    parameters = []
    for prefix in map(str.strip, names):
        found = [p for name, p in model.named_parameters() if name == prefix or name.startswith(f'{prefix}.')]
        if not found:
            hint = did_you_mean(prefix, [name for name, _ in model.named_modules() if name])
            raise UserError(f"freeze: the model has no parameters in '{prefix}'{hint}")
        parameters += found
    return parameters
