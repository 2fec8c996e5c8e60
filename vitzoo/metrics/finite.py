"""Logits that are not finite are an error: `topk` would rank nan like any other value, and score it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitzoo.errors import UserError


def check_logits(
    logits: Tensor, model: nn.Module, images: Tensor, describe_image: Callable[[int], str], name: str | None = None
) -> None:
    """Check the logits (B, num_classes) of a model for a batch of images (B, C, H, W).

    Args:
        describe_image: Maps a row of the batch to the name of its image.
        name: Name of the model; by default its architecture.

    Raises:
        UserError: The logits of an image are not finite; the message names the image and the first layer.
    """
    is_finite = logits.flatten(1).isfinite().all(dim=1)
    if is_finite.all():
        return
    row = int(is_finite.logical_not().nonzero()[0])
    source = find_non_finite(model, images[row : row + 1]) or 'all layer outputs are finite, only the logits are not'
    name = name or (getattr(model, 'pretrained_cfg', None) or {}).get('architecture') or type(model).__name__
    hint = ''
    if torch.is_autocast_enabled(images.device.type):
        dtype = str(torch.get_autocast_dtype(images.device.type)).removeprefix('torch.')
        hint = f'. They were computed in {dtype}: try --amp-dtype bfloat16 or float32'
    raise UserError(f'{name}: the logits of {describe_image(row)} are not finite: {source}{hint}')


@torch.no_grad()
def find_non_finite(model: nn.Module, images: Tensor) -> str:
    """Describe the first tensor of a forward pass that is not finite: images, weights or an output; '' if all are."""
    if not images.isfinite().all():
        return 'the images are not finite'
    broken = [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]
    if broken:
        return f'the weights {broken[0]} are not finite'
    found: list[str] = []
    # forward hooks of the model itself, which may cast its input, are not called below
    dtype = next(model.parameters(), images).dtype

    def check(name: str, output: Any) -> None:
        if not found and isinstance(output, Tensor) and output.is_floating_point() and not output.isfinite().all():
            found.append(f'the first layer with an output that is not finite is {name}')

    hooks = [
        module.register_forward_hook(lambda module, inputs, output, name=name: check(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        # not __call__, which torch.compile may have replaced by a graph without hooks
        model.forward(images.to(dtype))
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else ''
