"""Images: where they come from, how they become tensors, and which of them a process gets."""

from vitzoo.data.dataset import Images, open_dataset
from vitzoo.data.loader import eval_loader, train_loader
from vitzoo.data.options import DataOptions
from vitzoo.data.transforms import (
    Normalize,
    eval_transform,
    resolve_data_config,
    split_eval_transform,
    train_transform,
)

__all__ = [
    'DataOptions',
    'Images',
    'Normalize',
    'eval_loader',
    'eval_transform',
    'open_dataset',
    'resolve_data_config',
    'split_eval_transform',
    'train_loader',
    'train_transform',
]
