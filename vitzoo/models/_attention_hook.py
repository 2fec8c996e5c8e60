"""Hooks on the attention layers of models of timm and vitzoo, for the output of the whole image."""

from collections.abc import Callable
from typing import Any, Protocol

from timm.models.swin_transformer import SwinTransformerBlock
from torch import Tensor, nn

from ._swap_blocks import SwappedTimmBlock

__all__ = ['Handle', 'hook_attention']


class Handle(Protocol):
    """The hook that `hook_attention` registers."""

    def remove(self) -> None:
        """Remove the hook."""


def hook_attention(model: nn.Module, path: str, function: Callable[[Tensor], None]) -> Handle:
    """Call a function with each output (B, N, C) of the attention layer at `path`, such as `blocks.0.attn`.

    The layer of timm's Swin has windows for samples: its output is that of its block after the windows are merged.
    """
    block: Any = model.get_submodule(path.rpartition('.')[0])
    if isinstance(block, SwinTransformerBlock) and not isinstance(block, SwappedTimmBlock):
        return _BlockHook(block, function)

    def call_function(attn: nn.Module, args: tuple, output: Tensor) -> None:
        # that of Segment Anything is an image (B, H, W, C)
        function(output.flatten(1, -2))

    return model.get_submodule(path).register_forward_hook(call_function)


class _BlockHook:
    """A hook on the attention of a block of Swin; several are removed in the reverse order."""

    def __init__(self, block: Any, function: Callable[[Tensor], None]) -> None:
        self.block, self.before, attend = block, vars(block).get('_attn'), block._attn

        def attend_and_call(x: Tensor) -> Tensor:
            out = attend(x)
            function(out.flatten(1, 2))
            return out

        block._attn = attend_and_call

    def remove(self) -> None:
        del self.block._attn
        if self.before is not None:
            self.block._attn = self.before
