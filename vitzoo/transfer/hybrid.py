"""Students that keep softmax attention in some blocks, chosen one at a time by their effect on the whole network.

Greedy replacement with validation feedback after Distill-then-Replace, https://arxiv.org/abs/2601.11667; two of twelve
blocks are often enough (JetViT).
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING

import torch
from timm.models._input import update_model_args
from torch import nn

from vitzoo._modes import restored_modes
from vitzoo.models._mixer_paths import block_of, index_of
from vitzoo.models._swap_record import recorded_swaps
from vitzoo.models.swap import freeze_unused_rope
from vitzoo.transfer.attention import blocks_of_teacher, lost_shared_bias, mixer_paths
from vitzoo.transfer.outputs import output_error, output_gap

if TYPE_CHECKING:
    from accelerate import Accelerator


@torch.no_grad()
def keep_softmax(
    teacher: nn.Module,
    student: nn.Module,
    loader: Iterable,
    count: int | str = 'auto',
    *,
    tolerance: float = 0.5,
    gap: Callable[[nn.Module], float] | None = None,
    accelerator: 'Accelerator | None' = None,
    progress: Callable[[dict], None] | None = None,
    done: list[dict] | None = None,
    multi_label: bool = False,
) -> list[dict]:
    """Give blocks of a student back to softmax attention, in place, the most useful first.

    In each round every remaining block is tried, and the one that leaves the smallest error of the outputs is
    kept. The blocks are copies of the teacher's, without mixers.

    Args:
        teacher: The model before `vitzoo.swap_mixer`, in evaluation mode.
        student: The model after it.
        loader: Held-out images, batches (B, C, H, W) or tuples that begin with them; read once per trial.
        count: Number of blocks, or 'auto' to stop as soon as the gap is at most `tolerance`. One block at least keeps
            its mixer.
        tolerance: Percentage points.
        gap: The loss of a student in percentage points; by default the share of images with another top class, or other
            labels, than the teacher's, or without a head 100 times 1 - the cosine similarity of the final tokens.
        accelerator: The `Accelerator` whose processes share the images.
        progress: Called with each row of the result.
        done: The rows of a call that was interrupted, which continues.
        multi_label: The models predict several labels per image.

    Returns:
        A row for the start and one for each block: `kept` (paths so far), `output_error` and `gap`.

    Raises:
        ValueError: There are not as many blocks with mixers, or the loader has no images.
    """
    paths = first_paths(student)
    limit = len(paths) - 1 if count == 'auto' else count
    if not isinstance(limit, int) or not 0 <= limit < len(paths):
        raise ValueError(f"keep_softmax takes 'auto' or 0 to {len(paths) - 1} of {len(paths)} blocks, not {count!r}.")
    gap = gap or (lambda model: output_gap(teacher, model, loader, accelerator, multi_label))
    error = partial(output_error, teacher, loader=loader, accelerator=accelerator, multi_label=multi_label)
    rows = list(done or [])

    def add_row(kept: list[str]) -> None:
        with blocks_of_teacher(student, teacher, kept) as hybrid:
            rows.append(dict(kept=kept, output_error=error(hybrid), gap=gap(hybrid)))
        if progress is not None:
            progress(rows[-1])

    with restored_modes(student):
        student.eval()
        if not rows:
            add_row([])
        while len(rows) <= limit and not (count == 'auto' and rows[-1]['gap'] <= tolerance):
            kept = rows[-1]['kept']
            add_row([*kept, _most_useful(teacher, student, error, kept, paths)])
    restore_softmax_blocks(teacher, student, rows[-1]['kept'])
    return rows


def first_paths(student: nn.Module) -> list[str]:
    """The path of the first mixer of each block; a block has several if its layers are parallel."""
    return list({block_of(path): path for path in reversed(mixer_paths(student))}.values())[::-1]


def restore_softmax_blocks(teacher: nn.Module, student: nn.Module, paths: list[str]) -> None:
    """Replace blocks of a student by copies of the teacher's, in place and in the record of its swaps."""
    lost_bias = lost_shared_bias(student, teacher) if paths else None
    if lost_bias:
        setattr(student, lost_bias, deepcopy(getattr(teacher, lost_bias)))
    for path in paths:
        block = deepcopy(teacher.get_submodule(block_of(path)))
        student.set_submodule(block_of(path), block.train(student.training))
    freeze_unused_rope(student)
    _forget_swaps(teacher, student, paths)


def _most_useful(
    teacher: nn.Module, student: nn.Module, error: Callable[[nn.Module], float], kept: list[str], paths: list[str]
) -> str:
    """The block that leaves the smallest error if it is kept in addition."""
    errors = {}
    for path in paths:
        if path not in kept:
            with blocks_of_teacher(student, teacher, [*kept, path]) as hybrid:
                errors[path] = error(hybrid)
    return min(errors, key=lambda path: errors[path])


def _forget_swaps(teacher: nn.Module, student: nn.Module, paths: list[str]) -> None:
    """Remove blocks from the record of the student's own swaps, so that a saved model is built again without them."""
    indices = {index_of(student, path) for path in paths}
    old, swaps = recorded_swaps(teacher), recorded_swaps(student)
    own = [_without_blocks(swap, indices) for swap in swaps[len(old) :]]
    update_model_args(student, swap_mixer=[*old, *(swap for swap in own if swap['blocks'])])
    for index in indices:
        getattr(student, 'inheritance', {}).pop(index, None)


def _without_blocks(swap: dict, indices: set[int]) -> dict:
    """The arguments of a swap without some of its blocks."""
    kept = [position for position, index in enumerate(swap['blocks']) if index not in indices]
    mixer = swap['mixer']
    if not isinstance(mixer, str):
        mixer = [mixer[position] for position in kept]
    return {**swap, 'mixer': mixer, 'blocks': [swap['blocks'][position] for position in kept]}
