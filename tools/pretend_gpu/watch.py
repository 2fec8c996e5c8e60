"""Watches operations: copies between host and device, values that the host reads, and calls of fused attention."""

from collections.abc import Callable, Iterable
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# the largest number of blocks in the second and third dimension of a CUDA grid
MAX_HEADS = 65_535
# modules whose lines do not tell where a fault is: torch, and this check
_PASSED_OVER = {'torch', 'contextlib', 'watch', '__main__'}


class Watch(TorchDispatchMode):
    """Calls `add_wait` with the operation and the place of each host wait, and raises on wrong attention."""

    def __init__(self, add_wait: Callable[[str], None]) -> None:
        super().__init__()
        self.add_wait = add_wait

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        inputs = tensors_of((args, kwargs))
        if name == '_local_scalar_dense' and inputs[0].is_cuda:
            self.add_wait(f'{place(walk_stack(None))} reads a value')
            # any value, so that the rest of the pass is seen, too
            return True if inputs[0].dtype == torch.bool else 1
        if name.startswith('_scaled_dot_product') and not name.endswith('backward'):
            check_attention(*args[:4])
        out = func(*args, **kwargs)
        # of other operations, tensors without dimensions are numbers that the host passes on
        moved = [x for x in (*inputs, *tensors_of(out)) if x.ndim or name in ('copy_', '_to_copy')]
        if len({x.device.type for x in moved}) > 1:
            self.add_wait(f'{place(walk_stack(None))} copies from one device to another')
        return out


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors among nested arguments or results."""
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> None:
    """Raise if fused attention refuses its arguments on a GPU; `mask` is a number if an operation has none."""
    if isinstance(mask, torch.Tensor) and mask.dtype != q.dtype:
        raise TypeError(f'attention with a mask of {mask.dtype} for queries of {q.dtype}')
    if max(q.shape[:-2]) > MAX_HEADS:
        raise ValueError(f'attention of queries of shape {tuple(q.shape)}: a CUDA grid has at most {MAX_HEADS} blocks')


def place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The first of some frames outside of torch, and of timm if there is one, such as 'vitzoo/mixers/ls.py:80'.

    There is none in the backward pass of an operation of torch.
    """
    places = {}
    for frame, line in frames:
        module = frame.f_globals.get('__name__', '')
        package = module.partition('.')[0]
        if package not in _PASSED_OVER:
            file = '/'.join(Path(frame.f_code.co_filename).parts[-1 - module.count('.') :])
            places.setdefault(package == 'timm', f'{file}:{line}')
    return places.get(False) or places.get(True) or 'autograd'
