"""Oversmoothing: how alike the tokens of an image are after each block, as their mean cosine similarity.

Patch tokens only, self-pairs excluded, signed, measured on block outputs and averaged over images, as first defined by
Gong et al. (https://arxiv.org/abs/2104.12753). With unit tokens u the mean over the pairs i != j is
(|sum u|^2 - N) / (N (N - 1)), which costs O(N C) where the similarity matrix costs O(N^2 C). Options give the
conventions of other papers.
"""

from math import ceil, prod

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from vitzoo.errors import UserError
from vitzoo.models._block import Block


def oversmoothing(model: nn.Module, images: Tensor, **options: bool) -> list[float]:
    """Measure the mean inter-token cosine similarity of each block's output, averaged over a batch of images.

    Takes the options of `OversmoothingProbe`. A block whose output is a single token gives nan: it has no pairs.

    Raises:
        UserError: The model has neither vitzoo's blocks nor timm's feature maps.
    """
    with torch.no_grad(), OversmoothingProbe(model, **options) as probe:
        model(images)
    return probe.curve()


def mean_cosine(tokens: Tensor, absolute: bool = False, include_self: bool = False) -> Tensor:
    """Average the cosine similarity over all pairs of tokens: (B, N, C) -> (B,), in float32."""
    unit = normalize(tokens.float(), dim=-1)  # (B, N, C)
    N = unit.shape[1]
    if absolute:
        # the absolute value does not factor into a sum, so this needs N x N, for one image at a time
        total = torch.stack([(u @ u.T).abs().sum() for u in unit])
    else:
        total = unit.sum(dim=1).square().sum(dim=-1)
    if include_self:
        return total / N**2
    if N == 1:
        return torch.full_like(total, torch.nan)
    return (total - unit.square().sum(dim=(1, 2))) / (N * (N - 1))


class OversmoothingProbe:
    """Watches a model's blocks while the context is open and measures each image that passes.

    The blocks are vitzoo's, or what timm lists in `feature_info`: every block of a ViT, every stage of a CNN or of a
    pyramid, whose H x W positions are then the tokens.

    Args:
        model: The bare model, not a wrapper.
        absolute: Average |cos| instead of cos; costs O(N^2 C).
        include_self: Count each token's similarity of 1 with itself, as 1/N^2 times the whole matrix does.
        include_cls: Count the prefix tokens (class, distillation, registers) among the tokens.

    Raises:
        UserError: The model has neither kind of block.
    """

    key = 'oversmoothing'

    def __init__(
        self, model: nn.Module, *, absolute: bool = False, include_self: bool = False, include_cls: bool = False
    ):
        self.model = model
        self.options = dict(absolute=absolute, include_self=include_self)
        self.include_cls = include_cls
        self.blocks = {name: block for name, block in model.named_modules() if isinstance(block, Block)}
        self.features = {} if self.blocks else _timm_features(model)
        self.blocks = self.blocks or {name: model.get_submodule(name) for name in self.features}
        self.names = list(self.blocks)
        self.image_size = None
        self._values = {name: [] for name in self.names}

    def __enter__(self) -> 'OversmoothingProbe':
        self._hooks = [self.model.register_forward_pre_hook(self._see_images)]
        for name, block in self.blocks.items():
            self._hooks.append(block.register_forward_hook(self._measurer(name)))
        return self

    def __exit__(self, *exc_info) -> None:
        for hook in self._hooks:
            hook.remove()

    def per_image(self) -> Tensor:
        """Take what was measured since the last call: (images, blocks), in the order the images passed."""
        columns = [torch.cat(values) if values else torch.empty(0) for values in self._values.values()]
        self._values = {name: [] for name in self.names}
        return torch.stack(columns, dim=1)

    def curve(self) -> list[float]:
        """Average what was measured since the last call over its images: one value per block."""
        return self.per_image().double().mean(dim=0).tolist()

    def _see_images(self, model: nn.Module, args: tuple) -> None:
        self.image_size = args[0].shape[-2:]

    def _measurer(self, name: str):
        @torch.no_grad()
        def measure(block: nn.Module, args: tuple, output: Tensor) -> None:
            tokens = output if isinstance(block, Block) else self._timm_tokens(name, output)
            if not self.include_cls:
                tokens = tokens[:, self._num_prefix_tokens(name, tokens.shape[1]) :]
            self._values[name].append(mean_cosine(tokens, **self.options))

        return measure

    def _timm_tokens(self, name: str, output: Tensor) -> Tensor:
        """Lay a feature map out as tokens (B, N, C)."""
        if not isinstance(output, Tensor) or output.ndim not in (3, 4):
            raise UserError(
                f'no oversmoothing curve for {type(self.model).__name__}: {name} gives no single feature map'
            )
        # a map may be NHWC inside a model that does not say so (VOLO): trust the number of channels
        num_chs, last = self.features[name]['num_chs'], getattr(self.model, 'output_fmt', 'NCHW') == 'NHWC'
        if output.ndim == 4 and output.shape[1] == num_chs and not (last and output.shape[3] == num_chs):
            output = output.movedim(1, -1)
        return output.flatten(1, -2)

    def _num_prefix_tokens(self, name: str, num_tokens: int) -> int:
        """How many of a block's tokens are prefix tokens; in CaiT and XCiT the class token joins later."""
        num_prefix_tokens = getattr(self.blocks[name], 'num_prefix_tokens', None)
        if num_prefix_tokens is not None:
            return num_prefix_tokens
        num_prefix_tokens = getattr(self.model, 'num_prefix_tokens', 0)
        num_patches = prod(ceil(size / self.features[name]['reduction']) for size in self.image_size)
        return num_prefix_tokens if num_tokens == num_patches + num_prefix_tokens else 0


def _timm_features(model: nn.Module) -> dict[str, dict]:
    """Find the modules whose outputs timm lists as a model's features, with their num_chs and reduction (stride)."""
    info = getattr(model, 'feature_info', None) or []
    features = {feature['module']: feature for feature in getattr(info, 'info', info)}
    modules = dict(model.named_modules())
    if not features or not all(name in modules for name in features):
        raise UserError(
            f'no oversmoothing curve for {type(model).__name__}: it has neither vitzoo blocks nor timm feature maps'
        )
    return features
