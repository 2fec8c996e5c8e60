"""Full, unsharded models and optimizer states, whether training uses DDP or FSDP.

Evaluation, weight averaging, checkpoints and export work on a full model. With DDP that is the raw model itself; with
FSDP it is a copy into which the sharded weights are gathered. Checkpoints are the same files for both.
"""

import copy
from typing import Any

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

from vitzoo.train.sharding import choose_layers

_FULL = StateDictOptions(full_state_dict=True)
# entries of timm's parameter groups that follow from the recipe; others, such as Prodigy's d, change during training
_SETTINGS = ('weight_decay', 'max_lr_snapshot', 'momentum', 'eps', 'betas', 'beta1', 'betas_1d')


class FullModel:
    """The full form of a model that Accelerate may shard; create it before `accelerator.prepare`.

    Raises:
        UserError: The model has no layers of a class that the launcher names for sharding.
    """

    def __init__(self, accelerator: Accelerator, raw_model: nn.Module) -> None:
        self.is_sharded = accelerator.distributed_type == DistributedType.FSDP
        if self.is_sharded:
            choose_layers(accelerator, raw_model)
        # FSDP shards in place, so copy before it does
        self.module = copy.deepcopy(raw_model) if self.is_sharded else raw_model
        self.raw_model = raw_model

    def gather(self) -> nn.Module:
        """Return the model with its current weights; all processes must call this."""
        if self.is_sharded:
            self.module.load_state_dict(get_model_state_dict(self.raw_model, options=_FULL))
        return self.module

    def scatter(self) -> None:
        """Copy the weights of `module` into the sharded model; all processes must call this."""
        if self.is_sharded:
            set_model_state_dict(self.raw_model, self.module.state_dict(), options=_FULL)

    def optimizer_state(self, optimizer: Optimizer) -> dict:
        """The optimizer's full state, keyed by parameter index as in `torch.optim`; all processes must call this."""
        if not self.is_sharded:
            return optimizer.state_dict()
        named: Any = get_optimizer_state_dict(self.raw_model, _unwrap(optimizer), options=_FULL)
        index_of = {name: index for index, name in enumerate(self._parameter_names(optimizer))}
        groups = [dict(group, params=[index_of[name] for name in group['params']]) for group in named['param_groups']]
        return dict(state={index_of[name]: state for name, state in named['state'].items()}, param_groups=groups)

    def load_optimizer_state(self, optimizer: Optimizer, state: dict) -> None:
        """The inverse of `optimizer_state`, except that settings such as weight decay and betas stay the recipe's.

        Raises:
            ValueError: The state is of other groups of parameters.
        """
        before, now = len(state['param_groups']), len(optimizer.param_groups)
        if before != now:
            raise ValueError(
                f'its optimizer has {before} instead of {now} groups of parameters, as earlier versions wrote it with'
                f' weight_decay 0; start again with --overwrite, not --resume'
            )
        groups = [
            dict(saved, **{name: group[name] for name in _SETTINGS if name in saved and name in group})
            for saved, group in zip(state['param_groups'], optimizer.param_groups)
        ]
        state = dict(state, param_groups=groups)
        if not self.is_sharded:
            optimizer.load_state_dict(state)
            return
        names = self._parameter_names(optimizer)
        groups = [dict(group, params=[names[index] for index in group['params']]) for group in state['param_groups']]
        named: Any = dict(state={names[index]: own for index, own in state['state'].items()}, param_groups=groups)
        set_optimizer_state_dict(self.raw_model, _unwrap(optimizer), named, options=_FULL)

    def _parameter_names(self, optimizer: Optimizer) -> list[str]:
        names = {id(parameter): name for name, parameter in self.raw_model.named_parameters()}
        return [names[id(parameter)] for group in optimizer.param_groups for parameter in group['params']]


def _unwrap(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer in Accelerate's wrapper."""
    return getattr(optimizer, 'optimizer', optimizer)
