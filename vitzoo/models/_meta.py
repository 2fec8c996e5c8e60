"""Copies of models on the meta device."""

import copy

import torch
from torch import nn

__all__ = ['meta_copy']


def meta_copy(model: nn.Module) -> nn.Module:
    """Copy a model onto the meta device without copying its weights."""
    # deepcopy uses the copies in memo; vars() also has the tensors that are plain attributes
    memo: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, nn.Parameter):
                empty = torch.empty_like(tensor, device='meta')
                memo[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            elif isinstance(tensor, torch.Tensor):
                memo[id(tensor)] = torch.empty_like(tensor, device='meta')
    return copy.deepcopy(model, memo)
