"""Layers and models of vitzoo paired with those of other packages, for `vitzoo bench peers`.

Both sides of a pair do the same work: the same width and heads, projections without bias if the peer has none, and as
many features, landmarks, hashes or keys per query. If both define the same function, ours gets the peer's weights and
the outputs must agree. Otherwise the docstring names the difference, and our op must equal its own naive form.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import timm
import torch
from timm.layers import QuickGELU
from torch import nn

import vitzoo  # noqa: F401  registers the models
from vitzoo.mixers import create_mixer
from vitzoo.mixers._qkv import split_heads
from vitzoo.mixers.aft import AFTFull
from vitzoo.mixers.performer import orthogonal_features, performer_attention
from vitzoo.mixers.reformer import reformer_attention
from vitzoo.models.cvt import checkpoint_filter_fn


@dataclass(frozen=True)
class Shape:
    """Number of tokens, width and number of heads of a layer."""

    tokens: int
    dim: int
    heads: int

    @property
    def side(self) -> int:
        """Side of the square grid."""
        return math.isqrt(self.tokens)

    @property
    def head_dim(self) -> int:
        """Dimension of a head."""
        return self.dim // self.heads

    def block_size(self) -> int:
        """Largest side of square blocks, up to 8, that divides the grid evenly."""
        return next(size for size in (8, 7, 6, 5, 4, 3, 2, 1) if self.side % size == 0)

    def segment_size(self) -> int:
        """Largest square number of consecutive tokens, up to 64, that divides the sequence evenly."""
        return next(size for size in (64, 49, 36, 25, 16, 9, 4, 1) if self.tokens % size == 0)

    def num_clusters(self) -> int:
        """Number of clusters of equal size: 8 or near, or the side if there is none."""
        return next(number for number in (8, 7, 4, 5, 3, self.side) if self.tokens % number == 0)


class Layer(nn.Module):
    """A mixer with a fixed grid, called with the tokens only."""

    def __init__(self, name: str, shape: Shape, grid_size: tuple[int, int] | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.grid_size = grid_size or (shape.side, shape.side)
        # with the attributes of its class
        self.mixer: Any = create_mixer(name, shape.dim, shape.heads, grid_size=self.grid_size, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixer(x, self.grid_size)


# ours and theirs
MakePair = Callable[[Shape], tuple[nn.Module, nn.Module]]


@dataclass(frozen=True)
class Pair:
    """A layer or a model of vitzoo, and that of a package.

    `make` returns both for a shape, with the same weights if they define the same function. In this case `difference`
    is the relative difference of their results at a shape, which must stay below `tolerance`; else it is None. A model
    (`is_layer` False) does not depend on the number of tokens.
    """

    name: str
    package: str
    make: MakePair
    difference: Callable[[Shape], float] | None = None
    tolerance: float = 1e-4
    note: str = ''
    is_layer: bool = True


def output_difference(make: MakePair, tokens: int | None = None) -> Callable[[Shape], float]:
    """A function that compares the outputs of both sides for the same tokens, `tokens` of them or as in the shape."""

    @torch.no_grad()
    def difference(shape: Shape) -> float:
        shape = replace(shape, tokens=tokens or shape.tokens)
        ours, theirs = make(shape)
        x = torch.randn(1, shape.tokens, shape.dim)
        return relative_difference(ours.eval()(x), theirs.eval()(x))

    return difference


def _performer(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """FAVOR+ with 256 features; the peer adds 1e-4 to each feature."""
    from performer_pytorch import SelfAttention

    theirs = SelfAttention(shape.dim, heads=shape.heads, dim_head=shape.head_dim, nb_features=256)
    ours = Layer('performer', shape, num_features=256, qkv_bias=False)
    _copy_qkv(ours.mixer, theirs.to_q, theirs.to_k, theirs.to_v, out=theirs.to_out)
    ours.mixer.features.copy_(theirs.fast_attention.projection_matrix)
    return ours, theirs


def _performer_difference(shape: Shape) -> float:
    """Relative difference of the two ops with the same features, without the 1e-4 of the peer."""
    from performer_pytorch.performer_pytorch import linear_attention, softmax_kernel

    q, k, v = torch.randn(3, 2, shape.heads, 256, shape.head_dim)
    features = orthogonal_features(256, shape.head_dim)
    kernel = partial(softmax_kernel, projection_matrix=features, eps=0.0)
    theirs = linear_attention(kernel(q, is_query=True), kernel(k, is_query=False), v)
    return relative_difference(performer_attention(q, k, v, features, shape.head_dim**-0.5), theirs)


def _nystrom(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """64 landmarks and 6 iterations for the pseudo-inverse.

    The peer scales the first iterate by a norm over the whole batch, and pads with zeros if the number of tokens is not
    a multiple of 64.
    """
    from nystrom_attention import NystromAttention

    theirs = NystromAttention(shape.dim, shape.head_dim, shape.heads, num_landmarks=64, residual=False)
    ours = Layer('nystrom', shape, num_landmarks=64, num_iterations=6, qkv_bias=False)
    _copy_qkv(ours.mixer, theirs.to_qkv, out=theirs.to_out[0])
    return ours, theirs


def _linformer(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """Linformer with rank 256."""
    from linformer import LinformerSelfAttention

    theirs = LinformerSelfAttention(shape.dim, shape.tokens, k=256, heads=shape.heads)
    ours = Layer('linformer', shape, rank=256, qkv_bias=False)
    _copy_qkv(ours.mixer, theirs.to_q, theirs.to_k, theirs.to_v, out=theirs.to_out)
    ours.mixer.proj_k.data.copy_(theirs.proj_k)
    ours.mixer.proj_v.data.copy_(theirs.proj_v)
    return ours, theirs


def _linear(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """Linear attention; the peer applies a softmax to q and k, ours elu + 1 and a normalizer."""
    from linear_attention_transformer.linear_attention_transformer import SelfAttention

    return Layer('linear', shape, qkv_bias=False), SelfAttention(shape.dim, shape.heads)


def _linear_softmax(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """As `_linear`, with the peer's softmax of q and k on our side too."""
    ours, theirs = _linear(shape)
    _copy_qkv(ours.mixer, theirs.to_q, theirs.to_k, theirs.to_v, out=theirs.to_out)
    ours.mixer.op = _softmax_features
    return ours, theirs


def _reformer(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """Two hashing rounds with 64 keys per query; the peer is set to the paper's form.

    In that form attention stays within buckets, and a key found in both rounds counts once. Each side draws its own
    rotations.
    """
    from reformer_pytorch import Autopadder, LSHSelfAttention

    paper = dict(attend_across_buckets=False, allow_duplicate_attention=False)
    theirs = LSHSelfAttention(shape.dim, heads=shape.heads, bucket_size=32, n_hashes=2, **paper)
    return Layer('reformer', shape, num_hashes=2, bucket_size=16, qkv_bias=False), Autopadder(theirs)


def _reformer_defaults(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """As `_reformer`, with the peer's defaults: attention across buckets, and keys found in both rounds count twice."""
    from reformer_pytorch import Autopadder, LSHSelfAttention

    theirs = LSHSelfAttention(shape.dim, heads=shape.heads, bucket_size=32, n_hashes=2)
    return Layer('reformer', shape, num_hashes=2, bucket_size=16, qkv_bias=False), Autopadder(theirs)


def _reformer_difference(shape: Shape) -> float:
    """Relative difference of the two ops with the same rotations, in chunks of 32 tokens."""
    from reformer_pytorch import LSHAttention

    shape = Shape(256, shape.dim, shape.heads)
    q, v = torch.randn(2, 2, shape.heads, shape.tokens, shape.head_dim)
    attention = LSHAttention(bucket_size=32, n_hashes=2, attend_across_buckets=False, allow_duplicate_attention=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = attention.eval()(q.flatten(0, 1), v.flatten(0, 1))[0].view_as(q)
        torch.manual_seed(0)
        rotations = torch.randn(1, shape.head_dim, 2, shape.tokens // 64)[0].transpose(0, 1)
    # the peer's keys have the length 1
    ours = reformer_attention(q, v, rotations, (shape.side, shape.side), 32, 1 / shape.head_dim)
    return relative_difference(ours, theirs)


def _sinkhorn(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """Blocks of 64 tokens (49 at 14 x 14), 8 iterations; the peer sorts segments of the sequence."""
    from sinkhorn_transformer import SinkhornSelfAttention

    block = shape.block_size()
    theirs = SinkhornSelfAttention(
        shape.dim, block**2, shape.tokens, heads=shape.heads, non_permutative=False, sinkhorn_iter=8
    )
    return Layer('sinkhorn', shape, block_size=block, num_iterations=8, qkv_bias=False), theirs


def _sinkhorn_segments(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """As `_sinkhorn`, with the peer's segments on our side too: our grid is a single row.

    The peer takes the sorted keys for the sorted values.
    """
    ours = Layer('sinkhorn', shape, (1, shape.tokens), block_size=shape.block_size() ** 2, qkv_bias=False)
    return ours, _sinkhorn(shape)[1]


def _routing(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """Clusters of about 1/8 of the tokens (1/7 at 14 x 14); the peer averages over clusters, ours has one softmax."""
    from routing_transformer.routing_transformer import SelfAttention

    clusters = shape.num_clusters()
    size = shape.tokens // clusters
    theirs = _First(SelfAttention(shape.dim, 1, shape.tokens, shape.heads, 0, size))
    return Layer('routing', shape, num_clusters=clusters, cluster_size=size, qkv_bias=False), theirs


def _aft_simple(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """AFT-simple with a hidden width of `dim`."""
    from aft_pytorch.aft_pytorch import AFTSimple

    theirs, ours = AFTSimple(shape.tokens, shape.dim, hidden_dim=shape.dim), Layer('aft_simple', shape)
    _copy_qkv(ours.mixer, theirs.to_q, theirs.to_k, theirs.to_v, out=theirs.project)
    return ours, theirs


def _aft_full(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """AFT-full with a hidden width of `dim`; the peer's position biases are the product of our factors."""
    from aft_pytorch.aft_pytorch import AFTFull

    theirs, ours = AFTFull(shape.tokens, shape.dim, hidden_dim=shape.dim), Layer('aft_full', shape)
    _copy_qkv(ours.mixer, theirs.to_q, theirs.to_k, theirs.to_v, out=theirs.project)
    theirs.wbias.data.copy_(ours.mixer.u_query @ ours.mixer.u_key.T)
    return ours, theirs


def _aft_full_given_bias(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """As `_aft_full`, with a parameter for the bias on our side too, in place of the paper's factors."""
    ours, theirs = _aft_full(shape)
    del ours.mixer.u_query, ours.mixer.u_key
    ours.mixer.__class__ = _GivenBias
    ours.mixer.bias = nn.Parameter(theirs.wbias.detach().clone())
    return ours, theirs


def _local(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """Segments of 64 tokens (49 of 196), each attending to its two neighbours too; our grid is a single row."""
    from local_attention.transformer import LocalMHA

    theirs = LocalMHA(
        dim=shape.dim,
        window_size=shape.segment_size(),
        dim_head=shape.head_dim,
        heads=shape.heads,
        exact_windowsize=False,
        use_rotary_pos_emb=False,
    )
    ours = Layer(
        'local',
        shape,
        (1, shape.tokens),
        block_size=shape.segment_size(),
        memory_halo=shape.segment_size(),
        qkv_bias=False,
    )
    _copy_qkv(ours.mixer, theirs.to_qkv, out=theirs.to_out)
    return ours, theirs


def _ls(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """8 landmarks and 169 keys per query; the peer has 192 keys in segments (147 of 196 tokens).

    The peer uses keys as values, which saves a projection, and has rotary positions.
    """
    from long_short_transformer.long_short_transformer import LongShortAttention

    theirs = LongShortAttention(
        dim=shape.dim, heads=shape.heads, dim_head=shape.head_dim, causal=False, window_size=shape.segment_size(), r=8
    )
    return Layer('ls', shape, window_size=7, rank=8, qkv_bias=False), theirs


def _ls_keys_as_values(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """As `_ls`, with keys for values on our side too."""
    ours, theirs = _ls(shape)
    ours.mixer.qkv, ours.mixer.qkv_sizes = _KeysAsValues(shape), None
    return ours, theirs


def _cvt_13(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """CvT-13 at 224 x 224; the peer has GELU in place of the paper's QuickGELU."""
    from transformers import CvtConfig, CvtForImageClassification

    config = CvtConfig(drop_path_rate=(0.0, 0.0, 0.0))
    config.num_labels = 1000
    theirs = _Logits(CvtForImageClassification(config))
    ours = timm.create_model('cvt_13')
    ours.load_state_dict(checkpoint_filter_fn(theirs.net.state_dict(), ours))
    return ours, theirs


def _cvt_13_difference(shape: Shape) -> float:
    """Relative difference of the logits, with the peer's activation replaced by the paper's."""
    ours, theirs = _cvt_13(shape)
    for module in theirs.modules():
        if isinstance(getattr(module, 'activation', None), nn.GELU):
            module.activation = QuickGELU()
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        return relative_difference(ours.eval()(images), theirs.eval()(images))


class _KeysAsValues(nn.Linear):
    """A projection to queries and to keys, which are the values too."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape.dim, 2 * shape.dim, bias=False)
        self.num_heads = shape.heads

    # other arguments than nn.Linear's
    def forward(  # type: ignore[override]
        self, x: torch.Tensor, grid_size: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k = (split_heads(part, self.num_heads) for part in super().forward(x).chunk(2, dim=-1))
        return q, k, k


class _GivenBias(AFTFull):
    """AFT-full with a bias for every pair of tokens."""

    bias: nn.Parameter

    def mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        return self.op(q, k, v, self.bias)


def _softmax_features(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Linear attention with a softmax of each query over its channels, and of each channel of the keys over tokens."""
    return (q.softmax(dim=-1) * q.shape[-1] ** -0.5) @ (k.softmax(dim=2).mT @ v)


class _First(nn.Module):
    """Returns the first output of a module."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)[0]


class _Logits(_First):
    """Returns the logits of a model of the transformers package."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).logits


@torch.no_grad()
def _copy_qkv(mixer: Any, *qkv: nn.Linear, out: nn.Linear) -> None:
    """Copy a peer's projections into a mixer; `qkv` are layers for q, k and v, or one for all of them."""
    mixer.qkv.weight.copy_(torch.cat([layer.weight for layer in qkv]))
    if mixer.qkv.bias is not None:
        mixer.qkv.bias.copy_(torch.cat([layer.bias for layer in qkv]))
    mixer.proj.weight.copy_(out.weight)
    if out.bias is None:
        mixer.proj.bias.zero_()
    else:
        mixer.proj.bias.copy_(out.bias)


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference over the norm of `theirs`, whose mean over tokens (or classes) is subtracted."""
    scale = (theirs - theirs.mean(dim=-2 if theirs.ndim > 2 else -1, keepdim=True)).norm()
    return ((ours - theirs).norm() / scale).item()


PAIRS = (
    Pair('performer', 'performer-pytorch', _performer, _performer_difference),
    Pair('nystrom', 'nystrom-attention', _nystrom, output_difference(_nystrom, tokens=256), tolerance=0.02),
    Pair('linformer', 'linformer', _linformer, output_difference(_linformer)),
    Pair('linear', 'linear-attention-transformer', _linear),
    Pair(
        'linear',
        'linear-attention-transformer',
        _linear_softmax,
        output_difference(_linear_softmax),
        note='its softmax of q and k',
    ),
    Pair('reformer', 'reformer-pytorch', _reformer, _reformer_difference),
    Pair('reformer', 'reformer-pytorch', _reformer_defaults, note='its defaults'),
    Pair('sinkhorn', 'sinkhorn-transformer', _sinkhorn),
    Pair('sinkhorn', 'sinkhorn-transformer', _sinkhorn_segments, note='its segments'),
    Pair('routing', 'routing-transformer', _routing),
    Pair('aft_simple', 'aft-pytorch', _aft_simple, output_difference(_aft_simple)),
    Pair('aft_full', 'aft-pytorch', _aft_full, output_difference(_aft_full)),
    Pair(
        'aft_full',
        'aft-pytorch',
        _aft_full_given_bias,
        output_difference(_aft_full_given_bias),
        note='its bias without factors',
    ),
    Pair('local', 'local-attention', _local, output_difference(_local)),
    Pair('ls', 'long-short-transformer', _ls),
    Pair('ls', 'long-short-transformer', _ls_keys_as_values, note='keys as values'),
    Pair('cvt_13', 'transformers', _cvt_13, _cvt_13_difference, is_layer=False),
)
