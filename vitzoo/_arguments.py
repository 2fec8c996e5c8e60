"""Arguments that users pass: which ones a class takes, and whole numbers of any library."""

import inspect
from collections.abc import Callable


def constructor_arguments(cls: type) -> set[str]:
    """The arguments that a class takes, itself or by passing them on to its parents."""
    accepted: set[str] = set()
    for base in cls.__mro__:
        if '__init__' not in vars(base):
            continue
        parameters = inspect.signature(vars(base)['__init__']).parameters
        accepted |= named_parameters(vars(base)['__init__'])
        # only **kwargs can pass an argument on to the parent class
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return accepted


def named_parameters(function: Callable) -> set[str]:
    """The parameters of a function that have a name for callers: without `self`, `*args` and `**kwargs`."""
    parameters = inspect.signature(function).parameters
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {name for name, parameter in parameters.items() if parameter.kind not in kinds} - {'self'}


def is_whole(value: object) -> bool:
    """Return True for a whole number, of Python or another library; True and False do not count."""
    return hasattr(value, '__index__') and not isinstance(value, bool)
