"""Oversmoothing: the similarity of an image's tokens after each block, by several measures.

The default is the mean cosine similarity: patch tokens only, self-pairs excluded, signed, measured on block outputs and
averaged over images, as in the first version of Gong et al. (https://arxiv.org/abs/2104.12753v1); their later version
averages |cos|, for which there is the option `absolute`. With unit tokens u the mean over the pairs i != j is
(|sum u|^2 - N) / (N (N - 1)), which costs O(N C) where the similarity matrix costs O(N^2 C). Options
select the conventions of other papers; `MEASURES` lists the other measures.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from vitzoo.errors import UserError, did_you_mean
from vitzoo.metrics._attention import attention_weights
from vitzoo.metrics._tokens import TokenBlocks, Tokens
from vitzoo.mixers._rope import Rope


def oversmoothing(model: nn.Module, images: Tensor, **options: Any) -> list[float]:
    """Measure the mean cosine similarity of the output tokens of each block, averaged over a batch of images.

    Takes the options of `OversmoothingProbe`. The value of a block that outputs a single token is nan.

    Raises:
        UserError: The model has neither vitzoo blocks nor timm feature maps.
    """
    return token_statistics(model, images, **options)['cosine']['mean']


@torch.no_grad()
def token_statistics(
    model: nn.Module, images: Tensor | Iterable, measures: Iterable[str] = ('cosine',), **options: bool
) -> dict:
    """Measure the tokens after each block, on a batch of images or on all batches of a loader, one at a time.

    Args:
        images: A batch (B, C, H, W), or an iterable of batches, or of tuples that begin with a batch.
        measures: A name from `MEASURES`, or several.
        options: Those of `OversmoothingProbe`.

    Returns:
        As `OversmoothingProbe.describe`.

    Raises:
        UserError: Unknown measure, or the model has neither vitzoo blocks nor timm feature maps.
    """
    device = next(model.parameters(), torch.empty(0)).device
    with OversmoothingProbe(model, measures=measures, **options) as probe:
        for batch in [images] if isinstance(images, Tensor) else images:
            model((batch if isinstance(batch, Tensor) else batch[0]).to(device))
    return probe.describe(probe.per_image())


def mean_cosine(tokens: Tensor, absolute: bool = False, include_self: bool = False) -> Tensor:
    """Average the cosine similarity over all pairs of tokens: (B, N, C) -> (B,), in float32."""
    unit = normalize(tokens.float(), dim=-1)  # (B, N, C)
    N = unit.shape[1]
    if absolute:
        # absolute values do not factor into a sum: N x N, one image at a time
        with torch.autocast(unit.device.type, enabled=False):
            total = torch.stack([(u @ u.T).abs().sum() for u in unit])
    else:
        total = unit.sum(dim=1).square().sum(dim=-1)
    if include_self:
        return total / N**2
    if N == 1:
        return _undefined(tokens)
    return (total - unit.square().sum(dim=(1, 2))) / (N * (N - 1))


def effective_rank(tokens: Tensor) -> Tensor:
    """Exponential of the entropy of the singular values, normalized to sum to 1: (B, N, C) -> (B,).

    1 if all tokens are multiples of one, min(N, C) if all singular values are equal, nan if a token is not finite.
    Costs O(N C min(N, C)). Roy and Vetterli, The effective rank, EUSIPCO 2007.
    """
    tokens = tokens.float()
    is_finite = tokens.isfinite().all(dim=(1, 2))
    # the decomposition raises an error for values that are not finite
    values = torch.linalg.svdvals(tokens.where(is_finite[:, None, None], 0))
    values = values / values.sum(dim=-1, keepdim=True)
    return torch.special.entr(values).sum(dim=-1).exp().where(is_finite, torch.nan)


def rank_one_residual(tokens: Tensor) -> Tensor:
    """Relative distance of the tokens to their mean x, |X - 1 x^T| / |X|: (B, N, C) -> (B,).

    In the Frobenius norm, where 1 x^T is the closest matrix of equal rows; 0 if all tokens are equal, 1 if
    their mean is zero. Dong et al., section 2.1, https://arxiv.org/abs/2103.03404. By Parseval it is also the relative
    amplitude of all frequencies but zero, Wang et al., https://arxiv.org/abs/2203.05962.
    """
    tokens = tokens.float()
    rest = tokens - tokens.mean(dim=1, keepdim=True)
    return rest.norm(dim=(1, 2)) / tokens.norm(dim=(1, 2))


def high_frequency_energy(image: Tensor) -> Tensor:
    """Fraction of the energy of a map in high spatial frequencies, over all channels: (B, H, W, C) -> (B,).

    High frequencies have a period below four tokens in either direction: |f| > 1/4 in cycles per token. 0 for a
    constant map that is not zero, 1 for a checkerboard, about 3/4 for white noise. After Park and Kim, section 2,
    https://arxiv.org/abs/2202.06709, with energies instead of log amplitudes.
    """
    energy = torch.fft.fft2(image.float(), dim=(1, 2)).abs().square().sum(dim=-1)  # (B, H, W)
    row, column = (torch.fft.fftfreq(size, device=image.device).abs() > 0.25 for size in image.shape[1:3])
    return energy[:, row[:, None] | column].sum(dim=-1) / energy.sum(dim=(1, 2))


def head_similarity(attn: nn.Module, x: Tensor, grid_size: tuple[int, int] | None = None, *rope: Rope) -> Tensor:
    """Mean cosine similarity between the attention maps of a layer's heads for its input x (B, N, C): (B,).

    nan if the layer has no attention map or a single head. Materializes N x N, one image at a time. The attention-level
    measure of Chen et al., https://arxiv.org/abs/2203.06345, without self-pairs.
    """
    values = []
    for image in x.split(1):
        weights = attention_weights(attn, image, grid_size, *rope)
        if weights is None or weights.values.shape[1] == 1:
            return _undefined(x)
        values.append(mean_cosine(weights.dense().flatten(2)))
    return torch.cat(values)


@dataclass(frozen=True)
class Measure:
    """A measure of the tokens after a block, with its title in figures and reports.

    Attributes:
        function: Maps its `input` to one value per image, (B,).
        label: Title, and label of an axis.
        about: The rest of the sentence that begins with the label.
        input: 'tokens' (B, N, C); 'map', the patch tokens on their grid (B, H, W, C); or 'attn', the attention layer
            of the block and its arguments.
    """

    function: Callable[..., Tensor]
    label: str
    about: str
    input: str = 'tokens'


def _unless_single(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return nan for a single token, whose value would not depend on the model."""
    return lambda tokens: function(tokens) if tokens.shape[1:-1].numel() > 1 else _undefined(tokens)


MEASURES = {
    'cosine': Measure(mean_cosine, 'Mean cosine similarity', 'over all pairs of tokens.'),
    'effective_rank': Measure(
        _unless_single(effective_rank),
        'Effective rank',
        'of the tokens: the exponential of the entropy of their singular values.',
    ),
    'rank_one_residual': Measure(
        _unless_single(rank_one_residual),
        'Rank-one residual',
        'of the tokens: their relative distance to their mean.',
    ),
    'high_frequency_energy': Measure(
        _unless_single(high_frequency_energy),
        'High-frequency energy',
        'of the tokens: the fraction with a period below four tokens.',
        input='map',
    ),
    'head_similarity': Measure(
        head_similarity,
        'Similarity of attention heads',
        'as the mean cosine similarity between their attention maps.',
        input='attn',
    ),
}


class OversmoothingProbe:
    """Hooks the blocks of a model while the context is open, and measures the tokens of every image.

    The blocks are those of `TokenBlocks`. Only one number per image, block and measure is kept.

    Args:
        model: The raw model, not a wrapper.
        measures: A name from `MEASURES`, or several.
        absolute: For cosine, average |cos| instead of cos; costs O(N^2 C).
        include_self: For cosine, include the similarity of each token with itself, as the mean of the N x N matrix.
        include_cls: Include the prefix tokens (class, distillation, registers), except in high_frequency_energy.

    Raises:
        UserError: Unknown measure, or the model has neither vitzoo blocks nor timm feature maps.
    """

    key = 'oversmoothing'

    def __init__(
        self,
        model: nn.Module,
        *,
        measures: Iterable[str] = ('cosine',),
        absolute: bool = False,
        include_self: bool = False,
        include_cls: bool = False,
    ) -> None:
        self.model = model
        self.measures = (measures,) if isinstance(measures, str) else tuple(measures)
        for name in self.measures:
            if name not in MEASURES:
                hint = did_you_mean(name, MEASURES) or f'; choose from {", ".join(MEASURES)}'
                raise UserError(f"unknown measure '{name}'{hint}")
        self.include_cls = include_cls
        options = dict(absolute=absolute, include_self=include_self, include_cls=include_cls)
        self.options = [name for name, is_on in options.items() if is_on]
        self.blocks = TokenBlocks(model)
        self._functions = {name: MEASURES[name].function for name in self.measures}
        if 'cosine' in self._functions:
            self._functions['cosine'] = partial(mean_cosine, absolute=absolute, include_self=include_self)
        self._image_size, self._num_images, self._has_images = (0, 0), 0, False
        self._grids = dict.fromkeys(self.blocks.names)
        self._values: dict[tuple[str, str], list[Tensor]] = {name: [] for name in self.names}

    def __enter__(self) -> 'OversmoothingProbe':
        self._hooks = [self.model.register_forward_pre_hook(self._keep_image_size)]
        for name, block in self.blocks.modules.items():
            self._hooks.append(block.register_forward_hook(partial(self._measure_output, name)))
            if hasattr(block, 'attn'):
                self._hooks.append(block.attn.register_forward_pre_hook(partial(self._measure_attention, name)))
        return self

    def __exit__(self, *exc_info: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def names(self) -> list[tuple[str, str]]:
        """The (measure, block) of each column."""
        return [(measure, name) for measure in self.measures for name in self.blocks.names]

    def per_image(self) -> Tensor:
        """Return and clear the values since the last call: (images, columns), in the order of the images.

        Raises:
            UserError: The model has computed blocks without calling them, as some of timm do with gradient
                checkpointing.
        """
        if self._has_images:
            self.blocks.check_called(block for (_, block), values in self._values.items() if not values)
        self._has_images = False
        columns = [torch.cat(values) if values else torch.empty(0) for values in self._values.values()]
        self._values = {name: [] for name in self.names}
        return torch.stack(columns, dim=1)

    def describe(self, rows: Tensor) -> dict:
        """Summarize rows of `per_image` over images, in plain lists.

        Returns:
            blocks: the names of the blocks; stages: the stage of each, from 0; grids: the (H, W) of their tokens in the
            last batch; options: the names of the options that are set; and for each measure, its mean and std over
            images. All but options have one value per block, nan if a measure is undefined for it.
        """
        summary: dict[str, Any] = dict(
            blocks=self.blocks.names, stages=self.blocks.stages, grids=list(self._grids.values())
        )
        summary['options'] = self.options
        for measure, values in zip(self.measures, rows.cpu().double().split(len(self.blocks.names), dim=1)):
            summary[measure] = dict(mean=values.mean(dim=0).tolist(), std=values.std(dim=0, correction=0).tolist())
        return summary

    def _keep_image_size(self, model: nn.Module, args: tuple) -> None:
        H, W = args[0].shape[-2:]
        self._image_size, self._num_images, self._has_images = (H, W), len(args[0]), True

    @torch.no_grad()
    def _measure_output(self, name: str, block: nn.Module, args: tuple, output: Tensor) -> None:
        tokens = self.blocks.read(name, args, output, self._image_size)
        self._grids[name] = tokens.grid_size and list(tokens.grid_size)
        for measure, function in self._functions.items():
            if MEASURES[measure].input == 'attn':
                if not hasattr(block, 'attn'):
                    self._values[measure, name].append(_undefined(tokens.x))
                continue
            self._values[measure, name].append(function(self._read(tokens, MEASURES[measure].input)))

    def _read(self, tokens: Tokens, kind: str) -> Tensor:
        if kind == 'map':
            return tokens.to_map(tokens.patches)
        return tokens.x if self.include_cls else tokens.patches

    @torch.no_grad()
    def _measure_attention(self, name: str, attn: nn.Module, args: tuple) -> None:
        for measure, function in self._functions.items():
            if MEASURES[measure].input == 'attn':
                values = function(attn, *args)
                # attention within windows has a value for each window
                self._values[measure, name].append(
                    values if len(values) == self._num_images else values.new_full((self._num_images,), torch.nan)
                )


def _undefined(tokens: Tensor) -> Tensor:
    """nan for every image: (B, ...) -> (B,)."""
    return tokens.new_full(tokens.shape[:1], torch.nan, dtype=torch.float32)
