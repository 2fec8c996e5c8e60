"""The blocks of a model and the tokens that enter and leave them, for the models of vitzoo and timm."""

from collections.abc import Iterable
from math import ceil, floor, prod
from typing import Any, NamedTuple

from torch import Tensor, nn

from vitzoo.errors import UserError
from vitzoo.models._block import Block


class Tokens(NamedTuple):
    """Tokens x (B, P + N, C), their number P of prefix tokens, and their grid (H, W) with H * W = N, or None.

    `source` names the block and the model of tokens without a grid.
    """

    x: Tensor
    num_prefix_tokens: int
    grid_size: tuple[int, int] | None
    source: str = ''

    @property
    def patches(self) -> Tensor:
        """The patch tokens, (B, N, C)."""
        return self.x[:, self.num_prefix_tokens :]

    def to_map(self, values: Tensor) -> Tensor:
        """Values of the patch tokens (B, N, ...) -> (B, H, W, ...)."""
        if self.grid_size is None:
            raise UserError(
                f'the {values.shape[1]} patch tokens of {self.source} do not lie on a grid, which explanations and '
                f'high_frequency_energy need'
            )
        return values.unflatten(1, self.grid_size)


class TokenBlocks:
    """The blocks of a model, by name, in order.

    These are the `Block` modules of a vitzoo model, or the modules listed in timm's `feature_info`: every block of a
    ViT, every stage of a CNN or a pyramid, where each of the H x W positions is a token. Raises UserError if the model
    has neither.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = {
            name: block for name, block in model.named_modules() if isinstance(block, Block)
        }
        self.features = {} if self.modules else _timm_features(model)
        self.modules = self.modules or {name: model.get_submodule(name) for name in self.features}
        self.names = list(self.modules)

    @property
    def stages(self) -> list[int]:
        """Index of the stage of each block; blocks of one width and one grid form a stage."""
        if self.features:
            keys = [(info['reduction'], info['num_chs']) for info in self.features.values()]
        else:
            keys = [name.rpartition('blocks.')[0] for name in self.names]
        order = list(dict.fromkeys(keys))
        return [order.index(key) for key in keys]

    def read(
        self, name: str, args: tuple, x: Tensor, image_size: tuple[int, int], num_chs: int | None = None
    ) -> Tokens:
        """Read x, the output of a block or a tensor on its grid, as tokens; `args` are the arguments of the block.

        `num_chs` is the width of x if it differs from the block's. Raises UserError if x is not a feature map, or if
        its prefix tokens cannot be told from its patches.
        """
        if not self.features:
            return Tokens(x, self.modules[name].num_prefix_tokens, tuple(args[1]))
        if not isinstance(x, Tensor) or x.ndim not in (3, 4):
            raise UserError(
                f'cannot read the tokens of {type(self.model).__name__}: {name} does not return a single feature map'
            )
        if x.ndim == 4:
            x = self._channels_last(x, num_chs or self.features[name]['num_chs'])
            H, W = x.shape[1:3]
            return Tokens(x.flatten(1, 2), 0, (H, W))
        num_prefix_tokens = getattr(self.model, 'num_prefix_tokens', 0)
        grid_sizes = self._grid_sizes(self.features[name]['reduction'], image_size)
        # CaiT, XCiT and VOLO append the class token after these blocks, and VOLO does not count it
        for count in dict.fromkeys((num_prefix_tokens, 0, int(hasattr(self.model, 'cls_token')))):
            for grid_size in grid_sizes:
                if x.shape[1] == prod(grid_size) + count:
                    return Tokens(self._in_rows(name, x), count, grid_size)
        if num_prefix_tokens:
            raise UserError(
                f'cannot tell the {num_prefix_tokens} prefix tokens of {type(self.model).__name__} from its patches: '
                f'{name} returns {x.shape[1]} tokens for an image of {image_size[0]} x {image_size[1]} pixels'
            )
        return Tokens(x, 0, None, f'{name} of {type(self.model).__name__}')

    def check_called(self, missing: Iterable[str]) -> None:
        """Raise UserError if the model has computed blocks without calling them."""
        names = ', '.join(dict.fromkeys(missing))
        if names:
            raise UserError(
                f'cannot read the tokens of {type(self.model).__name__}: it does not call its blocks {names}; if'
                f' gradient checkpointing is on, turn it off by set_grad_checkpointing(False)'
            )

    def _grid_sizes(self, reduction: int, image_size: tuple[int, int]) -> list[tuple[int, int]]:
        """Possible grids of a feature map: that of the patch embedding, or else rounded up and rounded down."""
        patch_embed: Any = getattr(self.model, 'patch_embed', None)
        if hasattr(patch_embed, 'dynamic_feat_size') and patch_embed.feat_ratio() == reduction:
            return [tuple(patch_embed.dynamic_feat_size(image_size))]
        H, W = image_size
        return [(rounded(H / reduction), rounded(W / reduction)) for rounded in (ceil, floor)]

    def _in_rows(self, name: str, x: Tensor) -> Tensor:
        """Tokens in the order of the rows of their grid; those of Hiera are in the order of its windows."""
        reroll: Any = getattr(self.model, 'reroll', None)
        return x if reroll is None else reroll(x, int(name.rpartition('.')[2])).flatten(1, 2)

    def _channels_last(self, x: Tensor, num_chs: int) -> Tensor:
        # some models (VOLO) are NHWC inside without declaring it in output_fmt: trust the number of channels
        last = getattr(self.model, 'output_fmt', 'NCHW') == 'NHWC'
        return x.movedim(1, -1) if x.shape[1] == num_chs and not (last and x.shape[3] == num_chs) else x


def _timm_features(model: nn.Module) -> dict[str, dict]:
    """The modules that timm lists in `feature_info`, with their num_chs and reduction (stride)."""
    info = getattr(model, 'feature_info', None) or []
    features = {feature['module']: feature for feature in getattr(info, 'info', info)}
    modules = dict(model.named_modules())
    if not features or not all(name in modules for name in features):
        raise UserError(
            f'cannot read the tokens of {type(model).__name__}: it has neither vitzoo blocks nor timm feature maps'
        )
    return features
