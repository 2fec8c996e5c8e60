"""What `vitzoo bench peers` compares: a layer or model of ours, the same of another package, and how they must agree.

Everything is set to the same work: the same width and heads, projections without bias where the peer has none, and as
many features, landmarks, hashes or keys per query on both sides. Where the two define the same function, ours gets the
peer's weights and must give its outputs; where a peer defines another function (its docstring here says how), our op
must equal its own naive form instead.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import timm
import torch
from timm.layers import QuickGELU
from torch import nn

import vitzoo  # noqa: F401  registers the models
from vitzoo.mixers import TokenMixer, create_mixer
from vitzoo.mixers.performer import orthogonal_features, performer_attention
from vitzoo.mixers.reformer import reformer_attention
from vitzoo.models.cvt import checkpoint_filter_fn


@dataclass(frozen=True)
class Shape:
    """The tokens that a layer is made for, and its width."""

    tokens: int
    dim: int
    heads: int

    @property
    def side(self) -> int:
        """Tokens along a side of the square grid."""
        return math.isqrt(self.tokens)

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.heads

    def block(self) -> int:
        """The side of the blocks that cut the grid evenly, 8 where that is possible."""
        return next(size for size in (8, 7, 6, 5, 4, 3, 2, 1) if self.side % size == 0)

    def run(self) -> int:
        """The length of the runs of tokens that cut the raster evenly, 64 where that is possible."""
        return next(size for size in (64, 49, 36, 25, 16, 9, 4, 1) if self.tokens % size == 0)


class Layer(nn.Module):
    """A mixer of ours on its grid, as a function of the tokens alone."""

    def __init__(self, name: str, shape: Shape, grid_size: tuple[int, int] | None = None, **kwargs) -> None:
        super().__init__()
        self.grid_size = grid_size or (shape.side, shape.side)
        self.mixer: TokenMixer = create_mixer(name, shape.dim, shape.heads, grid_size=self.grid_size, **kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixer(x, self.grid_size)


@dataclass(frozen=True)
class Pair:
    """Something of ours and the same of a package; `make` gives both for a shape, with the same weights if they map.

    Outputs of the same weights may differ by `tolerance`, relative to what varies in them; None where the functions
    differ. They are compared at `check_tokens` where that is given, and by `check` where a plain comparison would not
    do. A pair without `is_layer` is a model, for which there is no number of tokens.
    """

    name: str
    package: str
    make: Callable[[Shape], tuple[nn.Module, nn.Module]]
    tolerance: float | None = 1e-4
    check_tokens: int | None = None
    check: Callable[[Shape], float] | None = None
    note: str = ''
    is_layer: bool = True


def performer(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """FAVOR+ with 256 features; the peer adds 1e-4 to each of them."""
    from performer_pytorch import SelfAttention

    theirs = SelfAttention(shape.dim, heads=shape.heads, dim_head=shape.head_dim, nb_features=256)
    ours = Layer('performer', shape, num_features=256, qkv_bias=False)
    copy_qkv(ours.mixer, theirs.to_q, theirs.to_k, theirs.to_v, theirs.to_out)
    ours.mixer.features.copy_(theirs.fast_attention.projection_matrix)
    return ours, theirs


def check_performer(shape: Shape) -> float:
    """The relative difference of the two ops with the same features, none of them raised by the peer."""
    from performer_pytorch.performer_pytorch import linear_attention, softmax_kernel

    q, k, v = torch.randn(3, 2, shape.heads, 256, shape.head_dim)
    features = orthogonal_features(256, shape.head_dim)
    kernel = partial(softmax_kernel, projection_matrix=features, eps=0.0)
    theirs = linear_attention(kernel(q, is_query=True), kernel(k, is_query=False), v)
    return relative_difference(performer_attention(q, k, v, features, shape.head_dim**-0.5), theirs)


def nystrom(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """64 landmarks, 6 steps of the pseudo-inverse, which the peer starts from a norm over the whole batch.

    Where 64 does not divide the tokens the peer fills up with zeros, which ours does not.
    """
    from nystrom_attention import NystromAttention

    theirs = NystromAttention(shape.dim, shape.head_dim, shape.heads, num_landmarks=64, residual=False)
    ours = Layer('nystrom', shape, num_landmarks=64, num_iterations=6, qkv_bias=False)
    copy_qkv(ours.mixer, theirs.to_qkv, out=theirs.to_out[0])
    return ours, theirs


def linformer(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """Rank 256."""
    from linformer import LinformerSelfAttention

    theirs = LinformerSelfAttention(shape.dim, shape.tokens, k=256, heads=shape.heads)
    ours = Layer('linformer', shape, rank=256, qkv_bias=False)
    copy_qkv(ours.mixer, theirs.to_q, theirs.to_k, theirs.to_v, theirs.to_out)
    ours.mixer.proj_k.data.copy_(theirs.proj_k)
    ours.mixer.proj_v.data.copy_(theirs.proj_v)
    return ours, theirs


def linear(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """The peer's features are two softmaxes, ours elu + 1 and a normaliser."""
    from linear_attention_transformer.linear_attention_transformer import SelfAttention

    return Layer('linear', shape, qkv_bias=False), SelfAttention(shape.dim, shape.heads)


def reformer(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """Two rounds of hashing, 64 keys for each query in each; the peer set to the paper's form, as ours.

    That is: attention within buckets, and a key found twice counts once. Rotations are drawn anew by each.
    """
    from reformer_pytorch import Autopadder, LSHSelfAttention

    paper = dict(attend_across_buckets=False, allow_duplicate_attention=False)
    theirs = LSHSelfAttention(shape.dim, heads=shape.heads, bucket_size=32, n_hashes=2, **paper)
    return Layer('reformer', shape, num_hashes=2, bucket_size=16, qkv_bias=False), Autopadder(theirs)


def reformer_defaults(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """As `reformer`, but the peer's own defaults: it attends across buckets and counts a key found twice twice."""
    from reformer_pytorch import Autopadder, LSHSelfAttention

    theirs = LSHSelfAttention(shape.dim, heads=shape.heads, bucket_size=32, n_hashes=2)
    return Layer('reformer', shape, num_hashes=2, bucket_size=16, qkv_bias=False), Autopadder(theirs)


def check_reformer(shape: Shape) -> float:
    """The relative difference of the two ops with the same rotations, in chunks of 32 tokens."""
    from reformer_pytorch import LSHAttention

    shape = Shape(256, shape.dim, shape.heads)
    q, v = torch.randn(2, 2, shape.heads, shape.tokens, shape.head_dim)
    attention = LSHAttention(bucket_size=32, n_hashes=2, attend_across_buckets=False, allow_duplicate_attention=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = attention.eval()(q.flatten(0, 1), v.flatten(0, 1))[0].view_as(q)
        torch.manual_seed(0)
        rotations = torch.randn(1, shape.head_dim, 2, shape.tokens // 64)[0].transpose(0, 1)
    ours = reformer_attention(q, v, rotations, (shape.side, shape.side), 32, shape.head_dim**-0.5)
    return relative_difference(ours, theirs)


def sinkhorn(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """Blocks of 64 tokens (49 at 14 x 14), 8 steps; the peer sorts runs of the raster, and its values are its keys."""
    from sinkhorn_transformer import SinkhornSelfAttention

    block = shape.block()
    theirs = SinkhornSelfAttention(
        shape.dim, block**2, shape.tokens, heads=shape.heads, non_permutative=False, sinkhorn_iter=8
    )
    return Layer('sinkhorn', shape, block_size=block, num_iterations=8, qkv_bias=False), theirs


def routing(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """Clusters of 1/8 of the tokens (1/7 at 14 x 14); the peer averages over clusters what ours puts in one softmax."""
    from routing_transformer.routing_transformer import SelfAttention

    clusters = next(number for number in (8, 7, 4) if shape.tokens % number == 0)
    size = shape.tokens // clusters
    theirs = First(SelfAttention(shape.dim, 1, shape.tokens, shape.heads, 0, size))
    return Layer('routing', shape, num_clusters=clusters, cluster_size=size, qkv_bias=False), theirs


def aft_simple(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """All channels."""
    from aft_pytorch.aft_pytorch import AFTSimple

    theirs, ours = AFTSimple(shape.tokens, shape.dim, hidden_dim=shape.dim), Layer('aft_simple', shape)
    copy_qkv(ours.mixer, theirs.to_q, theirs.to_k, theirs.to_v, theirs.project)
    return ours, theirs


def aft_full(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """All channels; the peer's table of positions is the product of our factors."""
    from aft_pytorch.aft_pytorch import AFTFull

    theirs, ours = AFTFull(shape.tokens, shape.dim, hidden_dim=shape.dim), Layer('aft_full', shape)
    copy_qkv(ours.mixer, theirs.to_q, theirs.to_k, theirs.to_v, theirs.project)
    theirs.wbias.data.copy_(ours.mixer.u_query @ ours.mixer.u_key.T)
    return ours, theirs


def local(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """Runs of 64 tokens (49 of 196), each with the run before and after it: ours on a grid of one row."""
    from local_attention.transformer import LocalMHA

    theirs = LocalMHA(
        dim=shape.dim,
        window_size=shape.run(),
        dim_head=shape.head_dim,
        heads=shape.heads,
        exact_windowsize=False,
        use_rotary_pos_emb=False,
    )
    ours = Layer('local', shape, (1, shape.tokens), block_size=shape.run(), memory_halo=shape.run(), qkv_bias=False)
    copy_qkv(ours.mixer, theirs.to_qkv, out=theirs.to_out)
    return ours, theirs


def ls(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """8 landmarks and 169 keys for each query, of the peer 192 in runs (147 of 196 tokens).

    The peer's keys are its values, so that it projects once where ours projects twice, and they are rotated.
    """
    from long_short_transformer.long_short_transformer import LongShortAttention

    theirs = LongShortAttention(
        dim=shape.dim, heads=shape.heads, dim_head=shape.head_dim, causal=False, window_size=shape.run(), r=8
    )
    return Layer('ls', shape, window_size=7, rank=8, qkv_bias=False), theirs


def cvt_13(shape: Shape) -> tuple[nn.Module, nn.Module]:
    """The whole model for images of 224 x 224; the peer has another activation, GELU for the paper's QuickGELU."""
    from transformers import CvtConfig, CvtForImageClassification

    theirs = Logits(CvtForImageClassification(CvtConfig(num_labels=1000, drop_path_rate=(0.0, 0.0, 0.0))))
    ours = timm.create_model('cvt_13')
    ours.load_state_dict(checkpoint_filter_fn(theirs.net.state_dict(), ours))
    return ours, theirs


def check_cvt_13(shape: Shape) -> float:
    """The relative difference of the logits, with the peer's activation replaced by the paper's."""
    ours, theirs = cvt_13(shape)
    for module in theirs.modules():
        if isinstance(getattr(module, 'activation', None), nn.GELU):
            module.activation = QuickGELU()
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        return relative_difference(ours.eval()(images), theirs.eval()(images))


class First(nn.Module):
    """The first of a module's outputs."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)[0]


class Logits(First):
    """The logits of a model of transformers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).logits


@torch.no_grad()
def copy_qkv(
    mixer: TokenMixer,
    q: nn.Linear,
    k: nn.Linear | None = None,
    v: nn.Linear | None = None,
    out: nn.Linear | None = None,
) -> None:
    """Give a mixer a peer's projections; `q` alone is a layer for all three."""
    layers = [layer for layer in (q, k, v) if layer is not None]
    mixer.qkv.weight.copy_(torch.cat([layer.weight for layer in layers]))
    if mixer.qkv.bias is not None:
        mixer.qkv.bias.copy_(torch.cat([layer.bias for layer in layers]))
    mixer.proj.weight.copy_(out.weight)
    if out.bias is None:
        mixer.proj.bias.zero_()
    else:
        mixer.proj.bias.copy_(out.bias)


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The norm of the difference over the norm, of what varies between tokens or classes."""
    scale = (theirs - theirs.mean(dim=-2 if theirs.ndim > 2 else -1, keepdim=True)).norm()
    return ((ours - theirs).norm() / scale).item()


PAIRS = (
    Pair('performer', 'performer-pytorch', performer, check=check_performer),
    Pair('nystrom', 'nystrom-attention', nystrom, tolerance=0.02, check_tokens=256),
    Pair('linformer', 'linformer', linformer),
    Pair('linear', 'linear-attention-transformer', linear, tolerance=None),
    Pair('reformer', 'reformer-pytorch', reformer, check=check_reformer),
    Pair('reformer', 'reformer-pytorch', reformer_defaults, tolerance=None, note='its defaults'),
    Pair('sinkhorn', 'sinkhorn-transformer', sinkhorn, tolerance=None),
    Pair('routing', 'routing-transformer', routing, tolerance=None),
    Pair('aft_simple', 'aft-pytorch', aft_simple),
    Pair('aft_full', 'aft-pytorch', aft_full),
    Pair('local', 'local-attention', local),
    Pair('ls', 'long-short-transformer', ls, tolerance=None),
    Pair('cvt_13', 'transformers', cvt_13, check=check_cvt_13, is_layer=False),
)
