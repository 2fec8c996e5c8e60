"""Oversmoothing: how alike the tokens of an image are after each block, by several measures.

The first is their mean cosine similarity: patch tokens only, self-pairs excluded, signed, measured on block outputs and
averaged over images, as first defined by Gong et al. (https://arxiv.org/abs/2104.12753). With unit tokens u the mean
over the pairs i != j is (|sum u|^2 - N) / (N (N - 1)), which costs O(N C) where the similarity matrix costs O(N^2 C).
Options give the conventions of other papers, `MEASURES` has the other quantities of the literature.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from vitzoo.errors import UserError, did_you_mean
from vitzoo.metrics._attention import attention_weights
from vitzoo.metrics._tokens import TokenBlocks, Tokens


def oversmoothing(model: nn.Module, images: Tensor, **options: bool) -> list[float]:
    """Measure the mean inter-token cosine similarity of each block's output, averaged over a batch of images.

    Takes the options of `OversmoothingProbe`. A block whose output is a single token gives nan: it has no pairs.

    Raises:
        UserError: The model has neither vitzoo's blocks nor timm's feature maps.
    """
    return token_statistics(model, images, **options)['cosine']['mean']


@torch.no_grad()
def token_statistics(
    model: nn.Module, images: Tensor | Iterable, measures: Iterable[str] = ('cosine',), **options: bool
) -> dict:
    """Measure the tokens after each block, on a batch of images or on all batches of a loader, one at a time.

    Args:
        images: A batch (B, C, H, W), or an iterable of batches, alone or in front of their labels.
        measures: Names from `MEASURES`.
        options: Those of `OversmoothingProbe`.

    Returns:
        What `OversmoothingProbe.describe` does.

    Raises:
        UserError: There is no such measure, or the model has neither vitzoo's blocks nor timm's feature maps.
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
        # the absolute value does not factor into a sum, so this needs N x N, for one image at a time
        total = torch.stack([(u @ u.T).abs().sum() for u in unit])
    else:
        total = unit.sum(dim=1).square().sum(dim=-1)
    if include_self:
        return total / N**2
    if N == 1:
        return _undefined(tokens)
    return (total - unit.square().sum(dim=(1, 2))) / (N * (N - 1))


def effective_rank(tokens: Tensor) -> Tensor:
    """Exponential of the entropy of the singular values, taken as shares of their sum: (B, N, C) -> (B,).

    1 where all tokens are multiples of one, min(N, C) where all directions are equally strong. Costs O(N C min(N, C)).
    Roy and Vetterli, The effective rank, EUSIPCO 2007.
    """
    shares = torch.linalg.svdvals(tokens.float())
    shares = shares / shares.sum(dim=-1, keepdim=True)
    return torch.special.entr(shares).sum(dim=-1).exp()


def rank_one_residual(tokens: Tensor) -> Tensor:
    """How far the tokens are from being one and the same, |X - 1 x^T| / |X| with their mean x: (B, N, C) -> (B,).

    In the Frobenius norm, in which the mean is the nearest; 0 where all tokens are equal, near 1 where they cancel.
    Dong et al., section 2.1, https://arxiv.org/abs/2103.03404. By Parseval it is also the share of all frequencies but
    zero in the amplitude, Wang et al., https://arxiv.org/abs/2203.05962.
    """
    tokens = tokens.float()
    rest = tokens - tokens.mean(dim=1, keepdim=True)
    return rest.norm(dim=(1, 2)) / tokens.norm(dim=(1, 2))


def high_frequency_energy(image: Tensor) -> Tensor:
    """Share of a map's energy in its high spatial frequencies, of all channels together: (B, H, W, C) -> (B,).

    High is what has a period below four tokens, down or across: |f| > 1/4 in cycles per token. 0 for a constant map,
    1 for a chequerboard, about 3/4 for white noise. After Park and Kim, section 2,
    https://arxiv.org/abs/2202.06709, with energies in the place of log amplitudes.
    """
    energy = torch.fft.fft2(image.float(), dim=(1, 2)).abs().square().sum(dim=-1)  # (B, H, W)
    row, column = (torch.fft.fftfreq(size, device=image.device).abs() > 0.25 for size in image.shape[1:3])
    return energy[:, row[:, None] | column].sum(dim=-1) / energy.sum(dim=(1, 2))


def head_similarity(attn: nn.Module, x: Tensor, grid_size: tuple[int, int] | None = None) -> Tensor:
    """Mean cosine similarity between the attention maps of the heads of a layer with input x (B, N, C): (B,).

    nan where the layer has no map, or one head. Needs N x N, for one image at a time. The attention-level measure of
    Chen et al., https://arxiv.org/abs/2203.06345, without self-pairs.
    """
    values = []
    for image in x.split(1):
        weights = attention_weights(attn, image, grid_size)
        if weights is None or weights.values.shape[1] == 1:
            return _undefined(x)
        values.append(mean_cosine(weights.dense().flatten(2)))
    return torch.cat(values)


MEASURES = ('cosine', 'effective_rank', 'rank_one_residual', 'high_frequency_energy', 'head_similarity')


class OversmoothingProbe:
    """Watches a model's blocks while the context is open and measures each image that passes.

    The blocks are those of `TokenBlocks`. Nothing of an image is kept but one number per block and measure.

    Args:
        model: The bare model, not a wrapper.
        measures: Names from `MEASURES`.
        absolute: For cosine, average |cos| instead of cos; costs O(N^2 C).
        include_self: For cosine, count each token's similarity of 1 with itself, as 1/N^2 times the whole matrix does.
        include_cls: Count the prefix tokens (class, distillation, registers) among the tokens; they have no frequency.

    Raises:
        UserError: There is no such measure, or the model has neither vitzoo's blocks nor timm's feature maps.
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
    ):
        self.model = model
        self.measures = tuple(measures)
        for name in self.measures:
            if name not in MEASURES:
                hint = did_you_mean(name, MEASURES) or f'; there are {", ".join(MEASURES)}'
                raise UserError(f"unknown measure '{name}'{hint}")
        self.include_cls = include_cls
        options = dict(absolute=absolute, include_self=include_self, include_cls=include_cls)
        self.options = [name for name, is_on in options.items() if is_on]
        self.blocks = TokenBlocks(model)
        self._cosine = partial(mean_cosine, absolute=absolute, include_self=include_self)
        self._image_size = None
        self._grids = dict.fromkeys(self.blocks.names)
        self._values = {name: [] for name in self.names}

    def __enter__(self) -> 'OversmoothingProbe':
        self._hooks = [self.model.register_forward_pre_hook(self._see_images)]
        for name, block in self.blocks.modules.items():
            self._hooks.append(block.register_forward_hook(partial(self._measure_output, name)))
            if 'head_similarity' in self.measures and hasattr(block, 'attn'):
                self._hooks.append(block.attn.register_forward_pre_hook(partial(self._measure_heads, name)))
        return self

    def __exit__(self, *exc_info) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def names(self) -> list[tuple[str, str]]:
        """The (measure, block) of each column."""
        return [(measure, name) for measure in self.measures for name in self.blocks.names]

    def per_image(self) -> Tensor:
        """Take what was measured since the last call: (images, columns), in the order the images passed."""
        columns = [torch.cat(values) if values else torch.empty(0) for values in self._values.values()]
        self._values = {name: [] for name in self.names}
        return torch.stack(columns, dim=1)

    def describe(self, rows: Tensor) -> dict:
        """Summarise rows of `per_image` over images, in plain lists.

        Returns:
            blocks: the names of the blocks; stages: the stage of each, from 0; grids: the (H, W) of their tokens in the
            last batch; options: the names of those in force; and for each measure a dict of its mean over the images
            and its std among them. All but options have one value per block, nan where a measure is not defined.
        """
        summary = dict(blocks=self.blocks.names, stages=self.blocks.stages, grids=list(self._grids.values()))
        summary['options'] = self.options
        for measure, values in zip(self.measures, rows.double().split(len(self.blocks.names), dim=1)):
            summary[measure] = dict(mean=values.mean(dim=0).tolist(), std=values.std(dim=0, correction=0).tolist())
        return summary

    def _see_images(self, model: nn.Module, args: tuple) -> None:
        self._image_size = args[0].shape[-2:]

    @torch.no_grad()
    def _measure_output(self, name: str, block: nn.Module, args: tuple, output: Tensor) -> None:
        tokens = self.blocks.read(name, args, output, self._image_size)
        self._grids[name] = tokens.grid_size and list(tokens.grid_size)
        for measure in self.measures:
            if measure != 'head_similarity':
                self._values[measure, name].append(self._measure(measure, tokens))
            elif not hasattr(block, 'attn'):
                self._values[measure, name].append(_undefined(tokens.x))

    def _measure(self, measure: str, tokens: Tokens) -> Tensor:
        x = tokens.x if self.include_cls else tokens.patches
        if measure == 'cosine':
            return self._cosine(x)
        x = tokens.patches if measure == 'high_frequency_energy' else x
        if x.shape[1] == 1:
            # it is like itself, whatever the model does
            return _undefined(x)
        if measure == 'high_frequency_energy':
            return high_frequency_energy(tokens.to_map(x))
        return effective_rank(x) if measure == 'effective_rank' else rank_one_residual(x)

    @torch.no_grad()
    def _measure_heads(self, name: str, attn: nn.Module, args: tuple) -> None:
        self._values['head_similarity', name].append(head_similarity(attn, *args))


def _undefined(tokens: Tensor) -> Tensor:
    """A value of no image: (B, ...) -> (B,)."""
    return tokens.new_full(tokens.shape[:1], torch.nan, dtype=torch.float32)
