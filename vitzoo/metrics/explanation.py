"""Saliency maps of a classifier: attention rollout, gradient x input and Grad-CAM.

rollout    attention flow into the class token, into the mean of the class and the distillation token of DeiT, which
           its prediction averages, or into the mean of the patches: its row of the product over the blocks of the last
           stage of (A + I) / 2, with attention weights A averaged over heads. Independent of the class.
           Abnar and Zuidema, https://arxiv.org/abs/2005.00928
gradient   sum over blocks of |g . (x - mean of x)|, where x are the tokens that enter the mixer and g is the gradient
           of a class's logit, plus the same for the tokens that the head pools. To first order, the change of the
           logit if a token is replaced by the mean token. Works with any mixer and covers the whole depth.
gradcam    relu(sum_c a_c x_c), where x are the features that the head pools and a_c is the mean gradient of the logit
           with respect to channel c; the common choice for a CNN. If the head reads the class token alone, x are the
           tokens that enter the last mixer. Selvaraju et al., https://arxiv.org/abs/1610.02391
"""

from functools import partial, reduce
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitzoo.errors import UserError
from vitzoo.metrics._attention import attention_weights
from vitzoo.metrics._tokens import TokenBlocks, Tokens

METHODS = ('auto', 'rollout', 'gradient', 'gradcam')


def explain(model: nn.Module, images: Tensor, method: str = 'auto', target: Tensor | None = None) -> tuple[Tensor, str]:
    """Explain a model's predictions: images (B, C, H, W) -> maps (B, H, W) from 0 to 1, and the method used.

    Each map is resized to its image and rescaled to [0, 1]; a constant map is 0.

    Args:
        model: The raw model, in eval mode.
        method: One of `METHODS`; 'auto' is gradient for models whose blocks have a mixer and gradcam for CNNs.
        target: The classes (B,) to explain, by default each image's prediction; not used by rollout.

    Raises:
        UserError: The model has neither vitzoo blocks nor timm feature maps, or no attention weights for a rollout.
    """
    if method == 'auto':
        has_mixers = any(hasattr(block, 'attn') for block in TokenBlocks(model).modules.values())
        method = 'gradient' if has_mixers else 'gradcam'
    if method == 'rollout':
        maps = rollout(model, images)
    else:
        maps = {'gradient': gradient, 'gradcam': gradcam}[method](model, images, target)
    return _stretch(maps, images.shape[2:]), method


def _stretch(maps: Tensor, size: torch.Size) -> Tensor:
    """Maps (B, h, w) resized to `size` and rescaled to [0, 1], 0 where all values are the same but for rounding."""
    low, high = maps.amin(dim=(1, 2), keepdim=True), maps.amax(dim=(1, 2), keepdim=True)
    is_flat = high - low <= 8 * torch.finfo(maps.dtype).eps * torch.maximum(low.abs(), high.abs())
    maps = F.interpolate(maps.unsqueeze(1), size=size, mode='bicubic').squeeze(1)
    maps = maps - maps.amin(dim=(1, 2), keepdim=True)
    return (maps / maps.amax(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(maps.dtype).tiny)).masked_fill(is_flat, 0)


def rollout(model: nn.Module, images: Tensor) -> Tensor:
    """Attention rollout through the blocks of the last stage: (B, C, H, W) -> (B, h, w).

    The values of an image, and those of its prefix tokens, which are left out, sum to 1. No N x N matrix is stored
    unless the attention itself stores one. Under autocast, only the tokens have its precision, because maps are mostly
    nearly even. Raises UserError if a block of the last stage has no attention weights between all its tokens.
    """
    layers, tokens = _last_stage(model, images)
    N, P = tokens.x.shape[1], tokens.num_prefix_tokens
    place = torch.arange(N, device=images.device)
    # a distilled model has a head for each of two tokens
    num_read = 2 if hasattr(model, 'head_dist') else 1
    is_pooled = place < num_read if getattr(model, 'global_pool', None) == 'token' else place >= P
    row = is_pooled.to(torch.promote_types(tokens.x.dtype, torch.float32)) / is_pooled.sum()
    row = row.expand(len(images), -1)
    with torch.autocast(images.device.type, enabled=False):
        for attn, args in reversed(layers):
            weights = attention_weights(attn, *args)
            if weights is None or weights.values.shape[2] != N:
                raise UserError(
                    f'cannot compute the rollout of {type(model).__name__}: {type(attn).__name__} in its last stage'
                    f' has no attention weights between all tokens; use gradient or gradcam'
                )
            row = (row + weights.pull_back(row)) / 2
    return tokens.to_map(row[:, P:])


def gradient(model: nn.Module, images: Tensor, target: Tensor | None = None) -> Tensor:
    """First-order effect of each token on a class's logit, over all blocks: (B, C, H, W) -> (B, h, w), finest grid."""
    maps = []
    for tokens, gradients in _gradients(model, images, target):
        x = tokens.patches - tokens.patches.mean(dim=1, keepdim=True)
        maps.append(tokens.to_map((x * gradients.patches).sum(dim=-1).abs()).unsqueeze(1))
    size = max((found.shape[2:] for found in maps), key=prod)
    return reduce(torch.add, (F.interpolate(found, size=size, mode='bilinear') for found in maps)).squeeze(1)


def gradcam(model: nn.Module, images: Tensor, target: Tensor | None = None) -> Tensor:
    """Grad-CAM of a class: (B, C, H, W) -> (B, h, w), non-negative, on the grid of the last stage."""
    entered, pooled = _gradients(model, images, target)[-2:]
    # the patches have no gradient if the head reads the class token alone
    tokens, gradients = pooled if pooled[1].patches.any() else entered
    weights = gradients.patches.mean(dim=1, keepdim=True)
    return tokens.to_map((weights * tokens.patches).sum(dim=-1)).relu()


@torch.no_grad()
def _last_stage(model: nn.Module, images: Tensor) -> tuple[list[tuple[nn.Module, tuple]], Tokens]:
    """The attention layer of each block of the last stage with its arguments, and the output tokens of the stage.

    A block without `attn` is used in place of its attention layer.
    """
    blocks = TokenBlocks(model)
    names = [name for name, stage in zip(blocks.names, blocks.stages) if stage == blocks.stages[-1]]
    layers = [getattr(blocks.modules[name], 'attn', blocks.modules[name]) for name in names]
    calls: list[tuple[nn.Module, tuple]] = []
    last: dict[str, tuple] = {}
    hooks = [layer.register_forward_pre_hook(lambda layer, args: calls.append((layer, args))) for layer in layers]
    hooks.append(blocks.modules[names[-1]].register_forward_hook(lambda block, *call: last.update({names[-1]: call})))
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    blocks.check_called(name for name in names[-1:] if name not in last)
    (args, output), (H, W) = last[names[-1]], images.shape[2:]
    return calls, blocks.read(names[-1], args, output, (H, W))


class _Seen(NamedTuple):
    """Tokens x that a block got, or that came out of it, with the arguments of the call."""

    name: str
    args: tuple
    x: Tensor
    # of the features that the head reads; by default that of the block
    num_chs: int | None = None


@torch.enable_grad()
def _gradients(model: nn.Module, images: Tensor, target: Tensor | None) -> list[tuple[Tokens, Tokens]]:
    """The input tokens of each block's mixer, then those that the head pools, each with the gradients of the logits.

    All are outputs of a norm: before a norm, the product of a token and its gradient is always zero. For a block
    without `attn`, such as a stage of a CNN, its output tokens are used.
    """
    B, blocks = len(images), TokenBlocks(model)
    if B == 1:
        # at batch size 1, torch's CPU batch norm computes wrong gradients for channels-last inputs, as in CvT
        images = images.expand(2, -1, -1, -1)
        target = None if target is None else target.expand(2)
    seen: list[_Seen] = []

    def keep(name: str, module: nn.Module, args: tuple, output: Tensor | None = None) -> None:
        seen.append(_Seen(name, args, args[0] if output is None else output))

    hooks = [
        block.attn.register_forward_pre_hook(partial(keep, name))
        if hasattr(block, 'attn')
        else block.register_forward_hook(partial(keep, name))
        for name, block in blocks.modules.items()
    ]
    try:
        # images require grad, because weights may be frozen
        features = model.forward_features(images.detach().requires_grad_())
    finally:
        for hook in hooks:
            hook.remove()
    called = {found.name for found in seen}
    blocks.check_called(name for name in blocks.names if name not in called)
    seen.append(_Seen(blocks.names[-1], seen[-1].args, features, model.num_features))
    H, W = images.shape[2:]

    def read(found: _Seen, x: Tensor) -> Tokens:
        return blocks.read(found.name, found.args, x, (H, W), found.num_chs)

    # some models return several tensors, which have no single gradient
    for found in seen:
        read(found, found.x)
    # clone, because the head may change the features in place
    logits = model.forward_head(features.clone())
    target = logits.argmax(dim=1) if target is None else target
    # logits do not depend on other images, so one backward pass of their sum serves the batch
    score = logits.gather(1, target[:, None]).sum()
    gradients = torch.autograd.grad(score, [found.x for found in seen])
    return [
        (read(found, found.x[:B].detach()), read(found, gradient[:B].detach()))
        for found, gradient in zip(seen, gradients)
    ]
