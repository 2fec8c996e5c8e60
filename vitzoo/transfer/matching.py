"""Block matching: each mixer learns the output of the attention that it replaces, from the teacher's own inputs.

The loss of a block is the mean squared error of its attention output, after the projection, divided by the variance of
the teacher's, so one learning rate serves all depths. All blocks are trained in one pass of the teacher, without a
graph between them. Queries, keys, values and the mixer's own parameters learn. After LoLCATs, section 3.2,
https://arxiv.org/abs/2410.10254, and ViT-AdaLA, stage 1, https://arxiv.org/abs/2603.16063
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitzoo.mixers import no_autocast
from vitzoo.models._mixer_paths import block_of, index_of
from vitzoo.transfer.attention import Call, attention_output, images_of, mixer_paths, visit_attention
from vitzoo.transfer.descent import StepBatches, descend
from vitzoo.transfer.outputs import Outputs, compare, widest_dtype

if TYPE_CHECKING:
    from accelerate import Accelerator

# parameters of a mixer that are the teacher's and stay so
_FROZEN = ('proj.', 'proj_global.')


def match_blocks(
    teacher: nn.Module,
    student: nn.Module,
    loader: Iterable | StepBatches,
    held_out: Iterable,
    *,
    steps: int = 500,
    lr: float = 1e-4,
    new_lr: float = 2e-3,
    eval_every: int = 25,
    seed: int = 0,
    accelerator: 'Accelerator | None' = None,
    state_file: Path | None = None,
    progress: Callable[[dict], None] | None = None,
    multi_label: bool = False,
) -> list[dict]:
    """Match the attention outputs of a student's mixers with the teacher's, in place, without labels.

    The student is left in the state with the smallest error of the outputs on the held-out images. The start is one of
    these states, so the student is never worse than before on these images.

    Args:
        teacher: The model before `vitzoo.swap_mixer`, in evaluation mode.
        student: The model after it, with the teacher's weights.
        loader: Batches (B, C, H, W) of training images, or tuples that begin with them.
        held_out: Other images, in the same form; read at each evaluation.
        lr: Learning rate of inherited parameters.
        new_lr: Learning rate of parameters that attention does not have, such as gates and feature maps.
        eval_every: Steps between evaluations.
        seed: Of dropout, stochastic depth and other random numbers of the forward pass.
        accelerator: The `Accelerator` whose processes share the batches and the held-out images.
        state_file: Where the state is kept, so that the same call continues after an interruption.
        progress: Called with each row of the result.
        multi_label: The models predict several labels per image.

    Returns:
        For each evaluation its `step`, `output_error` (that of `vitzoo.transfer.outputs.compare`), `errors` (by block,
        the squared error of the attention output as a fraction of its variance) and whether it is the `best` so far.

    Raises:
        ValueError: The student has no mixers, or a loader no images.
        DivergenceError: The learning rate is too high: the error is not finite. The student is in its best state.
    """
    paths = mixer_paths(student)
    device = next(student.parameters()).device
    variance = attention_variance(teacher, paths, held_out, device, accelerator)

    def backward(images: Tensor) -> None:
        def match(path: str, call: Call, output: Tensor) -> None:
            with torch.enable_grad():
                found = attention_output(student, path, call)
                if not found.requires_grad:
                    return
                error = F.mse_loss(found.float(), output.float()) / variance[path]
                with no_autocast(error):
                    error.backward()

        with torch.no_grad(), visit_attention(teacher, paths, match):
            teacher.forward_features(images)

    return descend(
        student,
        _parameter_groups(student, paths, lr, new_lr),
        loader,
        backward,
        lambda: measure_errors(teacher, student, held_out, variance, accelerator, multi_label),
        steps=steps,
        eval_every=eval_every,
        seed=seed,
        accelerator=accelerator,
        state_file=state_file,
        progress=progress,
    )


def _parameter_groups(student: nn.Module, paths: list[str], lr: float, new_lr: float) -> list[dict]:
    """Inherited and new parameters of the mixers with their learning rates, except the output projections."""
    new = new_parameters(student, paths)
    is_new = {id(parameter) for parameter in new}
    inherited = [
        parameter
        for path in paths
        for name, parameter in student.get_submodule(path).named_parameters()
        if id(parameter) not in is_new and not name.startswith(_FROZEN)
    ]
    groups = [dict(params=inherited, lr=lr), dict(params=new, lr=new_lr)]
    return [group for group in groups if group['params']]


def new_parameters(student: nn.Module, paths: list[str]) -> list[nn.Parameter]:
    """The parameters of the mixers that are not inherited from attention."""
    found, reports = [], getattr(student, 'inheritance', {})
    for path in paths:
        report = reports.get(index_of(student, path)) if reports else None
        names = set() if report is None else {*report.initialized}
        # a block with several attention layers has their names in its report
        place = path.removeprefix(f'{block_of(path)}.')
        found += [
            parameter
            for name, parameter in student.get_submodule(path).named_parameters()
            if names & {name, f'{place}.{name}'}
        ]
    return found


@torch.no_grad()
def attention_variance(
    teacher: nn.Module,
    paths: list[str],
    loader: Iterable,
    device: torch.device,
    accelerator: 'Accelerator | None' = None,
) -> dict[str, Tensor]:
    """Variance of the output of each attention layer around the mean of its channel, over tokens and images."""
    sums: dict[str, list[Tensor]] = {}

    def add(path: str, call: Call, output: Tensor) -> None:
        tokens = output.flatten(0, -2).to(widest_dtype(output.device))
        found = tokens.new_tensor(len(tokens)), tokens.sum(dim=0), tokens.square().sum(dim=0)
        sums[path] = [old + value for old, value in zip(sums[path], found)] if path in sums else list(found)

    with visit_attention(teacher, paths, add):
        for batch in loader:
            teacher.forward_features(images_of(batch).to(device))
    if not sums:
        raise ValueError('There are no held-out images.')
    variance = {}
    for path in paths:
        count, total, square = (_reduce(value, accelerator) for value in sums[path])
        variance[path] = (square / count - (total / count).square()).mean().clamp(min=1e-12).float()
    return variance


@torch.no_grad()
def measure_errors(
    teacher: nn.Module,
    student: nn.Module,
    loader: Iterable,
    variance: dict[str, Tensor],
    accelerator: 'Accelerator | None' = None,
    multi_label: bool = False,
) -> dict:
    """`errors` of the attention outputs, by block, and `output_error`, as in `match_blocks`."""
    device = next(student.parameters()).device
    student.eval()
    sums = torch.zeros(len(variance) + 1, dtype=widest_dtype(device), device=device)
    positions = {path: number for number, path in enumerate(variance, start=1)}
    num_images = sums.new_zeros(())

    def add(path: str, call: Call, output: Tensor) -> None:
        found = attention_output(student, path, call)
        error = F.mse_loss(found.float(), output.float()).to(sums.dtype)
        sums[positions[path]] += len(output) * error / variance[path]

    for batch in loader:
        images = images_of(batch).to(device)
        with visit_attention(teacher, variance, add):
            expected = Outputs.of(teacher, images)
        sums[0] += len(images) * compare(Outputs.of(student, images), expected, multi_label).to(sums.dtype)
        num_images += len(images)
    output_error, *errors = (_reduce(sums, accelerator) / _reduce(num_images, accelerator)).tolist()
    return dict(output_error=output_error, errors=dict(zip(variance, errors)))


def _reduce(value: Tensor, accelerator: 'Accelerator | None') -> Tensor:
    return value if accelerator is None else accelerator.reduce(value, reduction='sum')
