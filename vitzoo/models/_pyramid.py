"""The multi-stage body of CvT and ViL: stages of blocks on shrinking grids, with timm's full model API."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from timm.layers import get_device_dtype, global_pool_nlc, to_2tuple
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import nn
from torch.types import Device

from ._block import Block
from ._recompute import recompute_block

__all__ = ['Pyramid', 'Stage', 'build_stages', 'per_stage_mixers']


def per_stage_mixers(
    mixer: str | Sequence[str], mixer_kwargs: dict | Sequence[dict] | None, num_stages: int
) -> list[tuple[str, dict]]:
    """Name and keyword arguments of the mixer of each stage.

    A single name is used in all stages. A single dict applies to all stages with the same mixer as the first; a
    sequence has one entry per stage. Raises ValueError if the number of entries is not that of the stages.
    """
    mixers = (mixer,) * num_stages if isinstance(mixer, str) else tuple(mixer)
    if mixer_kwargs is None or isinstance(mixer_kwargs, dict):
        mixer_kwargs = tuple((mixer_kwargs or {}) if name == mixers[0] else {} for name in mixers)
    for argument, entries in (('mixer', mixers), ('mixer_kwargs', mixer_kwargs)):
        if len(entries) != num_stages:
            raise ValueError(f'{argument} has {len(entries)} entries for {num_stages} stages.')
    return [(name, dict(kwargs)) for name, kwargs in zip(mixers, mixer_kwargs, strict=True)]


class Stage(nn.Module):
    """Patch embedding, optional prefix tokens and position embedding, then blocks.

    `embed` maps (B, C_in, H_in, W_in) to (B, H, W, C); `pos_embed`, if given, is called with the tokens and the grid
    size.
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
        device: Device = None,
        dtype: torch.dtype | None = None,
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
        """Map (B, C_in, H_in, W_in) -> tokens (B, P + H*W, C) and the grid size (H, W)."""
        x = self.embed(x)
        B, H, W, _ = x.shape
        x = x.flatten(1, 2)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(B, -1, -1), x], dim=1)
        if self.pos_embed is not None:
            x = self.pos_embed(x, (H, W))
        x = self.pos_drop(x)
        for block in self.blocks:
            x = recompute_block(block, x, (H, W)) if self.grad_checkpointing else block(x, (H, W))
        return x, (H, W)

    def to_map(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        """Tokens (B, P + H*W, C) -> map (B, C, H, W), prefix tokens dropped."""
        return x[:, self.num_prefix_tokens :].unflatten(1, grid_size).permute(0, 3, 1, 2)

    def set_input_size(self, grid_size: tuple[int, int]) -> None:
        """Adapt the position embedding and the mixers to a new grid."""
        if self.pos_embed is not None:
            self.pos_embed.set_input_size(grid_size)
        for block in self.blocks:
            block.attn.set_input_size(grid_size)


def build_stages(
    embed_layers: Sequence[Callable[[int, int], nn.Module]],
    embed_dims: Sequence[int],
    num_heads: Sequence[int],
    depths: Sequence[int],
    num_prefix_tokens: Sequence[int],
    grid_sizes: Sequence[tuple[int, int]],
    mixers: Sequence[tuple[str, dict]],
    *,
    in_chans: int,
    drop_path_rates: Sequence[float],
    pos_embed_layer: Callable[..., nn.Module] | None = None,
    pos_drop_rate: float = 0.0,
    device: Device = None,
    dtype: torch.dtype | None = None,
    **block_kwargs: Any,
) -> list[Stage]:
    """Stages of blocks, from one entry per stage in every positional argument.

    Args:
        embed_layers: Called with the channels before and in the stage.
        mixers: Names and keyword arguments, as `per_stage_mixers` returns them.
        drop_path_rates: One per block of the model.
        pos_embed_layer: Called with the stage's dim, grid size and number of prefix tokens.
        block_kwargs: Arguments of every `Block`.
    """
    dd: dict[str, Any] = {'device': device, 'dtype': dtype}
    stages, in_dim, layer = [], in_chans, 0
    per_stage = zip(embed_layers, embed_dims, num_heads, depths, num_prefix_tokens, grid_sizes, mixers, strict=True)
    for embed_layer, dim, heads, depth, P, grid_size, (mixer, mixer_kwargs) in per_stage:
        blocks = [
            Block(
                dim,
                heads,
                mixer=mixer,
                mixer_kwargs=mixer_kwargs,
                grid_size=grid_size,
                num_prefix_tokens=P,
                layer=i,
                drop_path=drop_path_rates[i],
                **block_kwargs,
                **dd,
            )
            for i in range(layer, layer + depth)
        ]
        embed = embed_layer(in_dim, dim, **dd)
        pos_embed = pos_embed_layer(dim, grid_size, P, **dd) if pos_embed_layer else None
        stages.append(Stage(embed, blocks, dim, num_prefix_tokens=P, pos_embed=pos_embed, pos_drop=pos_drop_rate, **dd))
        in_dim, layer = dim, layer + depth
    return stages


class Pyramid(nn.Module):
    """Stages, a final norm and a linear head.

    Subclasses pass their stages, made by `build_stages`, and define `grid_sizes`.
    """

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
        pool_include_prefix: bool = False,
        drop_rate: float,
        norm_layer: Callable[..., nn.Module],
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        dd: dict[str, Any] = {'device': device, 'dtype': dtype}
        self.img_size = to_2tuple(img_size)
        self.patch_size = reductions[0]
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.drop_rate = drop_rate
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dims[-1]
        self.num_prefix_tokens = stages[-1].num_prefix_tokens
        self.global_pool = self._checked_pool(global_pool)
        if pool_include_prefix and (global_pool != 'avg' or not self.num_prefix_tokens):
            raise ValueError(
                "pool_include_prefix averages the prefix tokens of the last stage: use it with global_pool='avg' and "
                'num_prefix_tokens of at least 1 there.'
            )
        self.pool_include_prefix = pool_include_prefix
        self.stages = nn.ModuleList(stages)
        self.feature_info: list[dict[str, Any]] = [
            {'module': f'stages.{i}', 'num_chs': dim, 'reduction': reduction}
            for i, (dim, reduction) in enumerate(zip(embed_dims, reductions, strict=True))
        ]
        self.norm = norm_layer(self.num_features, **dd)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(self.num_features, num_classes, **dd) if num_classes > 0 else nn.Identity()
        self.apply(_init_weights)

    @staticmethod
    def grid_sizes(img_size: tuple[int, int], num_stages: int, patch_size: int) -> list[tuple[int, int]]:
        """The (H, W) of each stage's tokens for an image of `img_size`, of which the first stage has patches."""
        raise NotImplementedError

    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resample everything bound to the image size, an int or (H, W)."""
        self.img_size = to_2tuple(img_size)
        grid_sizes = self.grid_sizes(self.img_size, len(self.stages), self.patch_size)
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
        for module in self.modules():
            if isinstance(module, Stage):
                module.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head; `global_pool` is 'token', 'avg' or '' (all tokens of the last stage)."""
        if global_pool is not None:
            self.global_pool = self._checked_pool(global_pool)
        self.num_classes = num_classes
        dd = get_device_dtype(self)
        self.head = nn.Linear(self.num_features, num_classes, **dd) if num_classes > 0 else nn.Identity()
        self.head.train(self.training)

    def _checked_pool(self, global_pool: str) -> str:
        if global_pool not in ('token', 'avg', ''):
            raise ValueError(f"global_pool is 'token', 'avg' or '', not {global_pool!r}.")
        if global_pool == 'token' and not self.num_prefix_tokens:
            raise ValueError("global_pool='token' needs a class token in the last stage; use global_pool='avg'.")
        return global_pool

    def forward_intermediates(
        self,
        x: torch.Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> list[torch.Tensor] | tuple[torch.Tensor, list[torch.Tensor]] | dict[str, Any]:
        """Final features and the map of each stage in `indices`; `norm` applies the final norm to the last one."""
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
            if stop_early and i == max_index and not last:
                break
            x = self.norm(x) if last else stage.to_map(x, grid_size)
        if output_dict:
            found = {'image_intermediates': intermediates}
            return found if intermediates_only else {**found, 'image_features': x}
        return intermediates if intermediates_only else (x, intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages after the last of `indices`, and the final norm and head with them."""
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
        """Images (B, in_chans, H, W) -> normalized tokens of the last stage, (B, P + H*W, C)."""
        for stage in self.stages[:-1]:
            x = stage.to_map(*stage(x))
        x, _ = self.stages[-1](x)
        return self.norm(x)

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        """Tokens -> logits (B, num_classes), or the pooled features before the head."""
        x = global_pool_nlc(
            x,
            pool_type=self.global_pool,
            num_prefix_tokens=self.num_prefix_tokens,
            reduce_include_prefix=self.pool_include_prefix,
        )
        x = self.head_drop(x)
        return x if pre_logits else self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))


def _init_weights(module: nn.Module) -> None:
    """Truncated normal of std 0.02 for linear layers, as in both papers' code; other layers keep their default."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
