"""Models whose weights are spread over the processes by FSDP: whole copies of them, and of their optimizer's state.

Everything outside of the training step (evaluation, averaging, checkpoints, export) works with a plain model. With DDP
that is the model itself; with FSDP it is a copy that is filled anew. Checkpoints are the same files for both.
"""

import copy

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

WHOLE = StateDictOptions(full_state_dict=True)


class PlainModel:
    """The plain form of a model that Accelerate prepares; `module` is brought up to date by `pull`."""

    def __init__(self, accelerator: Accelerator, bare: nn.Module):
        self.is_sharded = accelerator.distributed_type == DistributedType.FSDP
        # sharding happens in place, so the copy is made before
        self.module = copy.deepcopy(bare) if self.is_sharded else bare
        self.trained = bare

    def pull(self) -> nn.Module:
        """Fetch the weights from all processes; every process must call this."""
        if self.is_sharded:
            self.module.load_state_dict(get_model_state_dict(self.trained, options=WHOLE))
        return self.module

    def push(self) -> None:
        """Give each process its share of the weights that were loaded into `module`."""
        if self.is_sharded:
            set_model_state_dict(self.trained, self.module.state_dict(), options=WHOLE)

    def optimizer_state(self, optimizer: Optimizer) -> dict:
        """The optimizer's state as torch numbers it, with whole tensors; every process must call this."""
        if not self.is_sharded:
            return optimizer.state_dict()
        named = get_optimizer_state_dict(self.trained, _inner(optimizer), options=WHOLE)
        number = {name: index for index, name in enumerate(self._names(optimizer))}
        groups = [dict(group, params=[number[name] for name in group['params']]) for group in named['param_groups']]
        return dict(state={number[name]: state for name, state in named['state'].items()}, param_groups=groups)

    def load_optimizer_state(self, optimizer: Optimizer, state: dict) -> None:
        """The inverse of `optimizer_state`."""
        if not self.is_sharded:
            optimizer.load_state_dict(state)
            return
        names = self._names(optimizer)
        groups = [dict(group, params=[names[number] for number in group['params']]) for group in state['param_groups']]
        named = dict(state={names[number]: own for number, own in state['state'].items()}, param_groups=groups)
        set_optimizer_state_dict(self.trained, _inner(optimizer), named, options=WHOLE)

    def _names(self, optimizer: Optimizer) -> list[str]:
        names = {id(parameter): name for name, parameter in self.trained.named_parameters()}
        return [names[id(parameter)] for group in optimizer.param_groups for parameter in group['params']]


def _inner(optimizer: Optimizer) -> Optimizer:
    """torch's optimizer inside of Accelerate's."""
    return getattr(optimizer, 'optimizer', optimizer)
