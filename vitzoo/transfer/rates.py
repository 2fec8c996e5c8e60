"""Learning rates of the network stage: chosen by the error of the student or by trials, and given to its parameters."""

from collections.abc import Callable

from torch import nn

from vitzoo.transfer.attention import mixer_paths
from vitzoo.transfer.matching import new_parameters

# learning rate of inherited parameters for an error of the outputs of 1, and its limit; the trials begin with it. The
# first steps of Adam are as long as the learning rate, however small the error is: at a rate for distant students they
# take a close one further away than the rest of the training brings it back (docs/transfer.md)
_LR_PER_ERROR, _MAX_LR = 1e-4, 3e-5
# from one trial to the next
_LR_FACTOR = 3
# a trial has this part of the steps, or this number if it is larger
_TRIAL_PART, _TRIAL_STEPS = 0.05, 10
# a stage of this many trials makes up for the harm of a large rate, whose trial must lower the error by this share of
# what the best one does
_LONG, _ENOUGH = 10, 0.5
# learning rate of the mixers' own parameters, over that of inherited ones
_NEW_OVER_INHERITED = 10


def choose_rates(
    lr: float | str, new_lr: float | str, steps: int, error: Callable[[], float], trial: Callable[..., float]
) -> dict[str, float]:
    """The arguments `lr` and `new_lr` of `distil` as numbers.

    The trials triple the rate as long as each lowers the error more than those before, and in a stage of ten trials or
    more as long as each lowers it at least half as much as the best. A large rate harms the student at first, so that
    the trial of a smaller one may end better, although the stage does not (docs/transfer.md).

    Args:
        steps: Those of the stage.
        error: Measures that of the student's outputs.
        trial: Measures it after a short training of a copy with `lr` and `new_lr`.

    Raises:
        ValueError: One is a string that it does not know.
    """
    for name, rate, known in (('lr', lr, ('auto', 'scaled')), ('new_lr', new_lr, ('auto',))):
        if isinstance(rate, str) and rate not in known:
            raise ValueError(f'{name} is a number or {" or ".join(map(repr, known))}, not {rate!r}.')

    def both(lr: float) -> dict[str, float]:
        return dict(lr=lr, new_lr=_NEW_OVER_INHERITED * lr if isinstance(new_lr, str) else new_lr)

    if not isinstance(lr, str):
        return both(lr)
    start = error()
    # in this order nan gives a number
    found = both(min(_MAX_LR, _LR_PER_ERROR * start))
    if lr == 'scaled':
        return found
    enough = _ENOUGH if steps >= _LONG * trial_steps(steps) else 1
    best = max(0.0, start - trial(**found))
    while True:
        larger = both(_LR_FACTOR * found['lr'])
        gain = start - trial(**larger)
        if not gain > enough * best:
            return found
        found, best = larger, max(best, gain)


def trial_steps(steps: int) -> int:
    """The number of steps of a trial, for a training of `steps`."""
    return min(steps, max(_TRIAL_STEPS, round(_TRIAL_PART * steps)))


def parameter_groups(student: nn.Module, lr: float, new_lr: float) -> list[dict]:
    """The parameters that require a gradient, inherited and new, with their learning rates.

    Raises:
        ValueError: The student has no mixers.
    """
    new = [parameter for parameter in new_parameters(student, mixer_paths(student)) if parameter.requires_grad]
    is_new = {id(parameter) for parameter in new}
    inherited = [p for p in student.parameters() if p.requires_grad and id(p) not in is_new]
    groups = [dict(params=inherited, lr=lr), dict(params=new, lr=new_lr)]
    return [group for group in groups if group['params']]
