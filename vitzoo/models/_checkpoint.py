"""What official checkpoints have around their weights, taken off."""

from timm.models import clean_state_dict
from torch import Tensor

__all__ = ['unwrap']

WRAPPERS = ('state_dict_ema', 'model_ema', 'ema', 'state_dict', 'model', 'net')


def unwrap(checkpoint: dict) -> dict[str, Tensor]:
    """The weights of a checkpoint: out of `{'model': …}` and its kin, EMA first, without `module.` in the names."""
    for key in WRAPPERS:
        if isinstance(checkpoint.get(key), dict):
            return unwrap(checkpoint[key])
    weights = {name: value for name, value in checkpoint.items() if isinstance(value, Tensor)}
    return clean_state_dict(weights)
