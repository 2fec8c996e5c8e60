"""Plugin of mypy: an attribute that a module of timm or torch does not declare may have any type.

torch annotates `nn.Module.__getattr__` as returning a tensor or a module. Most attributes of a model, such as
`num_classes`, `pretrained_cfg` and `forward_features`, are neither. Modules of vitzoo declare their attributes, so they
are still checked.
"""

from collections.abc import Callable
from functools import partial

from mypy.plugin import AttributeContext, Plugin
from mypy.types import AnyType, Instance, Type, TypeOfAny

_MODULE = 'torch.nn.modules.module.Module'


class ModulePlugin(Plugin):
    """Replaces the type that `nn.Module.__getattr__` returns."""

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        """The function that gives the type of an attribute, by the name of the class that defines it and its own."""
        owner, _, name = fullname.rpartition('.')
        return partial(_attribute_type, name) if owner == _MODULE else None


def _attribute_type(name: str, context: AttributeContext) -> Type:
    if isinstance(context.type, Instance):
        module = context.type.type
        if module.get(name) is not None or module.fullname.startswith('vitzoo.'):
            return context.default_attr_type
    return AnyType(TypeOfAny.explicit)


def plugin(version: str) -> type[Plugin]:
    """The entry point of the plugin."""
    return ModulePlugin
