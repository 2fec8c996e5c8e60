"""The body that CvT and ViL share: stages of blocks on shrinking grids, with timm's whole contract."""

from collections.abc import Callable, Sequence

import torch
from timm.layers import get_device_dtype, global_pool_nlc, to_2tuple
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import nn

from ._block import Block

__all__ = ['Pyramid', 'Stage', 'per_stage_mixers']


def per_stage_mixers(
    mixer: str | Sequence[str], mixer_kwargs: dict | Sequence[dict] | None, num_stages: int
) -> list[tuple[str, dict]]:
    """(mixer, its keywords) for each stage.

    One mixer serves every stage. One dict of keywords goes to every stage that carries the first stage's mixer; a
    sequence has one per stage. Raises ValueError for a wrong number of either.
    """
    mixers = (mixer,) * num_stages if isinstance(mixer, str) else tuple(mixer)
    if mixer_kwargs is None or isinstance(mixer_kwargs, dict):
        mixer_kwargs = tuple((mixer_kwargs or {}) if name == mixers[0] else {} for name in mixers)
    for what, given in (('mixer', mixers), ('mixer_kwargs', mixer_kwargs)):
        if len(given) != num_stages:
            raise ValueError(f'{what} has {len(given)} entries for {num_stages} stages.')
    return [(name, dict(kwargs)) for name, kwargs in zip(mixers, mixer_kwargs, strict=True)]


class Stage(nn.Module):
    """Embeds a map, puts prefix tokens in front, adds positions where there are any, and runs blocks over the tokens.

    `embed` turns (B, C_in, H_in, W_in) into (B, H, W, C); `pos_embed`, where given, is called with the tokens and the
    grid.
    """

    def __init__(
        self,
        embed: nn.Module,
        blocks: Sequence[Block],
        dim: int,
        *,
        num_prefix_tokens: int = 0,
        pos_embed: nn.Module | None = None,
        pos_drop: float = 0.0,
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens
        self.grad_checkpointing = False
        self.embed = embed
        self.cls_token = None
        if num_prefix_tokens:
            self.cls_token = nn.Parameter(torch.empty(1, num_prefix_tokens, dim, device=device, dtype=dtype))
            nn.init.trunc_normal_(self.cls_token, std=0.02)
        self.pos_embed = pos_embed
        self.pos_drop = nn.Dropout(pos_drop)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int]]:
        """Map (B, C_in, H_in, W_in) -> tokens (B, P + H*W, C) and the grid (H, W)."""
        x = self.embed(x)
        B, H, W, _ = x.shape
        x = x.flatten(1, 2)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(B, -1, -1), x], dim=1)
        if self.pos_embed is not None:
            x = self.pos_embed(x, (H, W))
        x = self.pos_drop(x)
        for block in self.blocks:
            x = checkpoint(block, x, (H, W)) if self.grad_checkpointing else block(x, (H, W))
        return x, (H, W)

    def to_map(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        """Tokens (B, P + H*W, C) -> map (B, C, H, W) without the prefix tokens."""
        return x[:, self.num_prefix_tokens :].transpose(1, 2).unflatten(2, grid_size)

    def set_input_size(self, grid_size: tuple[int, int]) -> None:
        """Adapt positions and mixers to a new grid."""
        if self.pos_embed is not None:
            self.pos_embed.set_input_size(grid_size)
        for block in self.blocks:
            block.attn.set_input_size(grid_size)


class Pyramid(nn.Module):
    """Stages, a final norm and a linear head. Subclasses build `stages` and say how an image size becomes grid
    sizes."""

    def __init__(
        self,
        stages: Sequence[Stage],
        embed_dims: Sequence[int],
        reductions: Sequence[int],
        *,
        img_size: int | tuple[int, int],
        in_chans: int,
        num_classes: int,
        global_pool: str,
        drop_rate: float,
        norm_layer: Callable[..., nn.Module],
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.img_size = to_2tuple(img_size)
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.drop_rate = drop_rate
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dims[-1]
        self.num_prefix_tokens = stages[-1].num_prefix_tokens
        self.global_pool = self._checked_pool(global_pool)
        self.stages = nn.ModuleList(stages)
        self.feature_info = [
            {'module': f'stages.{i}', 'num_chs': dim, 'reduction': reduction}
            for i, (dim, reduction) in enumerate(zip(embed_dims, reductions, strict=True))
        ]
        self.norm = norm_layer(self.num_features, **dd)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(self.num_features, num_classes, **dd) if num_classes > 0 else nn.Identity()
        self.apply(_init_weights)

    @staticmethod
    def grid_sizes(img_size: tuple[int, int], num_stages: int) -> list[tuple[int, int]]:
        """The (H, W) of each stage's tokens for an image of `img_size`."""
        raise NotImplementedError

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resample everything that is bound to the size of the image, which may be rectangular."""
        self.img_size = to_2tuple(img_size)
        grid_sizes = self.grid_sizes(self.img_size, len(self.stages))
        for stage, grid_size in zip(self.stages, grid_sizes, strict=True):
            stage.set_input_size(grid_size)
        update_model_input_size(self, self.img_size)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        names = {name for name, _ in self.named_parameters() if name.endswith('cls_token') or '.pos_embed.' in name}
        for path, block in self.named_modules():
            if isinstance(block, Block):
                names |= {f'{path}.attn.{name}' for name in block.attn.no_weight_decay()}
        return names

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict:
        stem = r'^stages\.0\.(?:embed|cls_token|pos_embed)'
        if coarse:
            return {'stem': stem, 'blocks': [(r'^stages\.(\d+)', None), (r'^norm', (99999,))]}
        blocks = [
            (r'^stages\.(\d+)\.blocks\.(\d+)', None),
            (r'^stages\.(\d+)\.(?:embed|cls_token|pos_embed)', (0,)),
            (r'^norm', (99999,)),
        ]
        return {'stem': stem, 'blocks': blocks}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        for stage in self.stages:
            stage.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head; `global_pool` is 'token', 'avg' or '' (all tokens of the last stage)."""
        self.num_classes = num_classes
        if global_pool is not None:
            self.global_pool = self._checked_pool(global_pool)
        dd = get_device_dtype(self)
        self.head = nn.Linear(self.num_features, num_classes, **dd) if num_classes > 0 else nn.Identity()
        self.head.train(self.training)

    def _checked_pool(self, global_pool: str) -> str:
        if global_pool not in ('token', 'avg', ''):
            raise ValueError(f"global_pool is 'token', 'avg' or '', not {global_pool!r}.")
        if global_pool == 'token' and not self.num_prefix_tokens:
            raise ValueError("global_pool='token' needs a class token in the last stage; use 'avg'.")
        return global_pool

    def forward_intermediates(
        self,
        x: torch.Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
    ) -> list[torch.Tensor] | tuple[torch.Tensor, list[torch.Tensor]]:
        """The map of each stage in `indices`, and the final features; `norm` normalises the last stage's."""
        if output_fmt not in ('NCHW', 'NLC'):
            raise ValueError(f"output_fmt is 'NCHW' or 'NLC', not {output_fmt!r}.")
        take_indices, max_index = feature_take_indices(len(self.stages), indices)
        intermediates = []
        for i, stage in enumerate(self.stages):
            x, grid_size = stage(x)
            last = i == len(self.stages) - 1
            if i in take_indices:
                image = stage.to_map(self.norm(x) if norm and last else x, grid_size)
                intermediates.append(image if output_fmt == 'NCHW' else image.flatten(2).transpose(1, 2))
            if stop_early and i == max_index:
                break
            x = self.norm(x) if last else stage.to_map(x, grid_size)
        return intermediates if intermediates_only else (x, intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages behind the last of `indices`, and with them the norm and the head."""
        take_indices, max_index = feature_take_indices(len(self.stages), indices)
        pruned = max_index < len(self.stages) - 1
        self.stages = self.stages[: max_index + 1]
        if pruned:
            self.num_features = self.head_hidden_size = self.feature_info[max_index]['num_chs']
            self.num_prefix_tokens = self.stages[-1].num_prefix_tokens
        if prune_norm or pruned:
            self.norm = nn.Identity()
        if prune_head or pruned:
            self.reset_classifier(0, '')
        return take_indices

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """Images (B, in_chans, H, W) -> normalised tokens of the last stage, (B, P + H*W, C)."""
        for stage in self.stages[:-1]:
            x = stage.to_map(*stage(x))
        x, _ = self.stages[-1](x)
        return self.norm(x)

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        """Tokens -> logits (B, num_classes), or the pooled features before the head."""
        x = global_pool_nlc(x, pool_type=self.global_pool, num_prefix_tokens=self.num_prefix_tokens)
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))


def _init_weights(module: nn.Module) -> None:
    """Truncated normal of std 0.02 for linear layers, as in both papers' code; everything else initialises itself."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
