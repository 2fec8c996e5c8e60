"""MACs of every mixer and every model, against published counts and closed forms written independently of the code."""

import copy
import re
from math import ceil, log2, prod

import pytest
import timm
import torch
from helpers import SHALLOW, one_in
from timm.layers import set_fused_attn
from torch import nn
from torch.utils.flop_counter import register_flop_formula

import vitzoo
from vitzoo.errors import UserError
from vitzoo.metrics import count_macs
from vitzoo.metrics.macs import run_and_count
from vitzoo.mixers import _window
from vitzoo.mixers._qkv import ConvQKV
from vitzoo.mixers._window_cpu import window_attention_cpu

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')

DIM, HEADS = 96, 3
# the last is narrower than most blocks and windows
SHAPES = [((14, 14), 0), ((9, 13), 1), ((7, 7), 2), ((4, 6), 1)]
CASES = {
    **{name: (name, {}) for name in vitzoo.list_mixers()},
    'linformer_shared': ('linformer', dict(share_kv=True, share_heads=False)),
    'longformer_exact': ('longformer', dict(exact=True)),
    'longformer_global': ('longformer', dict(global_proj=True)),
    'nystrom_grid': ('nystrom', dict(landmarks='grid', num_landmarks=16)),
    'nystrom_conv': ('nystrom', dict(conv_kernel_size=7)),
    'performer_eps': ('performer', dict(eps=1e-4)),
    'relu_linear_scales': ('relu_linear', dict(scales=(3, 5))),
    'rfa_gated': ('rfa', dict(gate=True)),
    'sparse_fixed': ('sparse', dict(pattern='fixed')),
    'srformer_4': ('srformer', dict(sr_ratio=4)),
    'synthesizer_random': ('synthesizer', dict(variant='random')),
    'synthesizer_factorized_dense': ('synthesizer', dict(variant='factorized_dense')),
    'synthesizer_factorized_random': ('synthesizer', dict(variant='factorized_random')),
}


def window(grid, size, halo, shared, C):
    """Queries in tiles of `size`, keys in the tile and its halo where it is not the whole grid, and `shared` keys."""
    queries, reach = tile(grid, size, halo)
    return attend(queries, reach + shared, C)


def tile(grid, size, halo):
    """Tokens of all tiles, which are not larger than the grid, and those of a tile with its halo."""
    sides = [min(size, side) for side in grid]
    tiles = prod(ceil(side / own) for side, own in zip(grid, sides))
    reach = prod(own + 2 * halo * (side > size) for side, own in zip(grid, sides))
    return tiles * prod(sides), reach


def attend(queries, keys, C):
    return 2 * queries * keys * C


def softmax(grid, P, N, C, h):
    return attend(N, N, C)


def linformer(grid, P, N, C, h, rank=64, share_kv=False, share_heads=True, sum_first=True):
    """Keys and values of the sums, and their biases as often as the sums have them, instead of those of all tokens."""
    if not (sum_first and share_heads and rank < N):
        return 2 * N * rank * C + attend(N, rank, C)
    sums = (1 if share_kv else 2) * N * rank * C
    return sums - 2 * (N - rank) * C * C + 2 * rank * C + attend(N, rank, C)


def longformer(grid, P, N, C, h, window_size=7, exact=False, global_proj=False):
    """Exact windows are masked, not cut; projections of global tokens take two more keys and values of all tokens."""
    own = (P > 0) * global_proj * (2 * N + P) * C * C
    return own + window(grid, window_size, window_size, P, C) + attend(P, N, C)


def local(grid, P, N, C, h, block_size=7, halo=3):
    return window(grid, block_size, halo, P, C) + attend(P, N, C)


def ls(grid, P, N, C, h, window_size=7, rank=8):
    landmarks = (N - P) * rank * h * C + 2 * (N - P) * rank * C
    return landmarks + window(grid, window_size, window_size // 2, rank + P, C) + attend(P, N, C)


def swin(grid, P, N, C, h, window_size=7):
    return window(grid, window_size, 0, P, C) + attend(P, N, C)


def ttt(grid, P, N, C, h):
    """Inner forward and backward pass, then the outer one; the gates are products too."""
    n, d = prod(grid), C // h
    own_layers = N * 4 * C * d
    network = 6 * N * C * d + (1 + 2 + 1) * N * C
    return own_layers + network + 2 * 9 * n * d


def circulant(grid, P, N, C, h):
    """Three transforms of q, k and v, and one of the weights; two inverse ones. Complex products are one product."""
    n, half = prod(grid), grid[0] * (grid[1] // 2 + 1)
    return N * C * C + 6 * 2.5 * n * C * log2(n) + 2 * half * C + N * C + attend(P, N, C)


def vssd(grid, P, N, C, h, d_state=64, expand=2):
    n, inner = prod(grid), expand * C
    projections = N * C * (2 * inner + 2 * d_state + h) + N * inner * C
    convolution = 9 * n * (inner + 2 * d_state)
    return projections + convolution + 2 * N * inner * d_state + N * (h + 3 * inner)


def biformer(grid, P, N, C, h, num_windows=7, topk=4, lepe=25):
    sides = [ceil(side / num_windows) for side in grid]
    T, s = prod(ceil(side / own) for side, own in zip(grid, sides)), prod(sides)
    routing = 2 * T * s * C + T * T * C
    return routing + attend(T * s, min(topk, T) * s + P, C) + attend(P, N, C) + lepe * prod(grid) * C


def soft(grid, P, N, C, h, ratio=4, conv=9):
    m = prod(ceil(side / ratio) for side in grid)
    landmarks = m * ratio**2 * C * C // h
    kernels = (N + m) * m * C
    newton = (20 * 2 * m**3 + m * m) * h
    return landmarks + kernels + newton + 2 * N * m * C + m * m * C + conv * prod(grid) * C


def gated_linear(grid, P, N, C, h, rank=16):
    """Forth and back: sums of decays, scores within chunks, then keys into a state and queries out of it."""
    n, d = N - P, C // h
    layers = n * (rank * C + 2 * rank * C) + N * C * C + N * C
    prefix = (P > 0) * (n + P + P + N) * C * d
    chunk = 32 if n > 16 else 16
    chunks = ceil(n / chunk)
    tokens = chunks * chunk
    # queries by decays, scores and their mask, states of all chunks, and the sums that pass from each to the next
    direction = tokens * (2 * chunk * C + C + chunk * h + 2 * C * d) + chunks * C * d + (chunks - 1) * C * d
    return layers + prefix + 2 * direction + tokens * chunk * C


def monarch(grid, P, N, C, h, num_steps=2):
    n, (H, W) = prod(grid), grid
    step = 2 * n * (H + W) * C + n * W * h
    return num_steps * step + n * (H + W) * C + attend(n, P, C) + attend(P, N, C)


def neighborhood(grid, P, N, C, h, kernel_size=7):
    """Tiles of k // 2 + 1 queries per side, with the keys of all of them."""
    side = kernel_size // 2 + 1
    tiles, keys = (
        prod(f(size) for size in grid) for f in (lambda s: ceil(s / side), lambda s: min(side + kernel_size - 1, s))
    )
    return attend(tiles * side**2, keys + P, C) + attend(P, N, C)


def rmt(grid, P, N, C, h, decomposed=True, lepe=25):
    """Rotations of pairs of channels are four products for each pair of queries and of keys, and one for the angle."""
    n = prod(grid)
    rotations = 4 * n * C + n * C // h
    decays = h * (grid[0] ** 2 + grid[1] ** 2)
    if decomposed:
        mixing = attend(n, grid[1], C) + attend(n, P + grid[0], C)
    else:
        mixing = attend(n, P + n, C)
    return rotations + decays + mixing + attend(P, N, C) + lepe * n * C


def sparse(grid, P, N, C, h, pattern='strided', summaries=2):
    H, W = grid
    far = H * W * H if pattern == 'strided' else H * W * H * min(summaries, W)
    return attend(P, N, C) + 2 * C * (H * W * P + H * W * W + far)


def bigbird(grid, P, N, C, h, block=4, num_global=1, num_random=3):
    counts = [ceil(side / block) for side in grid]
    near, size = prod(3 if count > 1 else 1 for count in counts), prod(min(block, side) for side in grid)
    keys = (near + num_global + min(num_random, prod(counts))) * size + P
    return attend(prod(counts) * size, keys, C) + attend(P + num_global * size, N, C)


def performer(grid, P, N, C, h, m=256, eps=0.0):
    return 4 * N * m * C + N * m * h


def linear(grid, P, N, C, h):
    return 2 * N * C * C // h + N * C


def rfa(grid, P, N, C, h, m=64, gate=False, chunk=64):
    d, features = C // h, 2 * N * m * C
    state = h * 2 * m * (d + 1)
    if not gate:
        return features + 2 * N * state
    # forth and back: scores within chunks and what they gather; then keys into a state and queries out of it, with
    # the decay multiplied in, and the pair of a token with itself
    n, size = N - P, min(chunk, N - P)
    chunks = ceil(n / size)
    scan = chunks * size * size * h * (2 * m + d + 2) + chunks * size * (2 * state + 2 * h * 2 * m) + chunks * state
    itself = n * h * (2 * 2 * m + d + 1)
    prefix = (n + P + N + P) * state
    return features + 2 * scan + itself + prefix


def nystrom(grid, P, N, C, h, num_landmarks=64, iterations=6, landmarks='segment', conv_kernel_size=0):
    m = min(num_landmarks, N)
    if landmarks == 'grid':
        # 4 x 4 cells of a square, 3 x 5 of what is wider, and the prefix tokens
        m = P + (16 if grid[0] == grid[1] else 15)
    return 4 * N * m * C + 2 * m * m * C + 4 * iterations * h * m**3 + N * conv_kernel_size * C


def depthwise(grid, size, C):
    return prod(grid) * size**2 * C


def agent(grid, P, N, C, h, agents=49):
    return 2 * attend(N, agents, C) + depthwise(grid, 3, C)


def cosformer(grid, P, N, C, h):
    n, sums = prod(grid), C * (C // h + 1)
    return 4 * n * C + 4 * n * sums + (P > 0) * 2 * (n + P) * sums


def flowformer(grid, P, N, C, h):
    return 2 * N * C * C // h + 8 * N * C


def focused(grid, P, N, C, h):
    return 2 * N * C * C // h + 2 * N * C + depthwise(grid, 5, C)


def hedgehog(grid, P, N, C, h):
    # the maps, then sums of keys and products with queries with one more channel, which divides the others
    return 2 * N * C * C // h + 4 * N * C * (C // h + 1) + N * C


def inline(grid, P, N, C, h):
    return (2 * N + 10) * C * C // h + depthwise(grid, 3, C)


def mala(grid, P, N, C, h):
    return 2 * N * C * C // h + 4 * N * C + 4 * prod(grid) * C + depthwise(grid, 5, C) + N * C * C


def mhla(grid, P, N, C, h, side=4):
    sizes = [ceil(length / side) for length in grid]
    tokens = side**2 * prod(sizes) + P
    return (2 * tokens + (side**2 + (P > 0)) ** 2) * C * (C // h + 1) + depthwise(grid, 5, C)


def polaformer(grid, P, N, C, h):
    return 4 * N * C * C // h + 9 * N * C + depthwise(grid, 5, C) + N * C * C


def relu_linear(grid, P, N, C, h, scales=()):
    further = sum(3 * depthwise(grid, size, C) + 3 * N * C * C // h + N * C * C for size in scales)
    return (1 + len(scales)) * linear(grid, P, N, C, h) + further


def xca(grid, P, N, C, h):
    # scores and their temperature, then values
    return (2 * N + 1) * C * C // h


def hydra(grid, P, N, C, h):
    return 2 * N * C


def aft_simple(grid, P, N, C, h):
    return 2 * N * C


def aft_full(grid, P, N, C, h, rank=128):
    return N * N * rank + N * N * 2 * C + 2 * N * C


def aft_local(grid, P, N, C, h, s=4, rank=128):
    queries, reach = tile(grid, s, s - 1)
    near = queries * reach * (rank + 2 * C + 1)
    return near + (N - P) * P * (rank + 2 * C) + P * N * (rank + 2 * C) + 2 * N * C


def aft_conv(grid, P, N, C, h, kernel=11):
    return prod(grid) * kernel**2 * (C + h) + 2 * N * C


def reformer(grid, P, N, C, h, rounds=2, bucket=16):
    n, m = N - P, min(2 * bucket, N - P)
    buckets = 0 if n <= bucket else min(2 * ceil(n / (2 * bucket)), 64)
    hashing = rounds * n * C * buckets // 2
    combine = (rounds + (P > 0)) * n * C
    return hashing + rounds * attend(ceil(n / m) * m, 2 * m, C) + combine + attend(n, P, C) + attend(P, N, C)


def routing(grid, P, N, C, h, clusters=8):
    n = N - P
    size = ceil(n / clusters)
    # the outputs of all clusters of a token and their sums are weighted
    merge = clusters * size * (C + h)
    attention = clusters * attend(size, size, C) + attend(n, P, C) + attend(P, N, C)
    return 2 * n * clusters * C + attention + merge + 2 * n * C


def sinkhorn(grid, P, N, C, h, block=7):
    tiles, size = prod(ceil(side / block) for side in grid), prod(min(block, side) for side in grid)
    # the weights of sorted tokens are 1 without partial tiles
    mass = h if any(side > block and side % block for side in grid) else 0
    sort = 2 * tiles * size * C + tiles**2 * C + tiles**2 * size * (2 * C + mass)
    return sort + attend(tiles * size, P + 2 * size, C) + attend(P, N, C)


def group(grid, P, N, C, h, own=64):
    """Global memory, whose own tokens are projected too."""
    return own * 3 * C * C + attend(own + P, own + N, C) + attend(N - P, own + P, C)


def induced_set(grid, P, N, C, h, m=64):
    return 2 * attend(m, N, C) + 3 * m * C * C


def srformer(grid, P, N, C, h, sr_ratio=2):
    reduced = prod(max(side // sr_ratio, 1) for side in grid)
    projections = (2 * N + 2 * (P + reduced)) * C * C
    return projections + reduced * sr_ratio**2 * C * C + attend(N, P + reduced, C)


def synthesizer(grid, P, N, C, h, variant='dense', rank=8):
    scores = {
        'dense': N * C * C + N * N * C,
        'random': 0,
        'factorized_dense': N * C * C + N * (P + sum(grid)) * C + N * prod(grid) * h,
        'factorized_random': N * N * rank * h,
    }
    return 2 * N * C * C + scores[variant] + N * N * C


def fourier(grid, P, N, C, h):
    n = prod(grid)
    return 2.5 * (n * C * log2(n * C) + P * C * log2(C))


def pool(grid, P, N, C, h, size=3):
    return prod(grid) * size**2 * C


FORMS = dict(
    softmax=softmax, linformer=linformer, longformer=longformer, local=local, ls=ls, sparse=sparse, bigbird=bigbird,
    performer=performer, linear=linear, rfa=rfa, nystrom=nystrom, xca=xca, hydra=hydra, aft_simple=aft_simple,
    aft_full=aft_full, aft_local=aft_local, aft_conv=aft_conv, reformer=reformer, routing=routing, sinkhorn=sinkhorn,
    rmt=rmt, swin=swin, ttt=ttt, circulant=circulant, vssd=vssd,
    agent=agent, cosformer=cosformer, flowformer=flowformer, focused=focused, hedgehog=hedgehog, inline=inline,
    mala=mala, mhla=mhla, polaformer=polaformer, relu_linear=relu_linear,
    biformer=biformer, soft=soft, gated_linear=gated_linear, monarch=monarch, neighborhood=neighborhood,
    srformer=srformer, synthesizer=synthesizer, fourier=fourier, pool=pool, **{'global': group, 'set': induced_set},
)  # fmt: skip
# their form has the projections, or there are none
WITHOUT_QKV = ('srformer', 'synthesizer', 'fourier', 'pool', 'vssd')


def closed_form(mixer, grid, P, C, h, conv=False, stride_kv=1, **options):
    """MACs of a mixer, projections included: linear ones, or CvT's with a depthwise convolution before each."""
    n, N = prod(grid), P + prod(grid)
    if mixer in WITHOUT_QKV:
        return FORMS[mixer](grid, P, N, C, h, **options)
    # AFT-conv has one key per head, and Reformer none
    k_dim = {'aft_conv': h, 'reformer': 0, 'soft': 0}.get(mixer, C)
    keys = prod(ceil(side / stride_kv) for side in grid)
    convolutions = 9 * C * (n + keys + (k_dim > 0) * keys) if conv else 0
    projections = 2 * N * C * C + (P + keys) * C * (C + k_dim)
    mixing = attend(N, P + keys, C) if mixer == 'softmax' else FORMS[mixer](grid, P, N, C, h, **options)
    return convolutions + projections + mixing


class Alone(nn.Module):
    """A mixer on the pixels of an image, with prefix tokens that are zeros."""

    def __init__(self, mixer, grid, P, **kwargs):
        super().__init__()
        self.pretrained_cfg = {'input_size': (DIM, *grid)}
        self.P = P
        self.mixer = vitzoo.create_mixer(mixer, DIM, HEADS, grid_size=grid, num_prefix_tokens=P, **kwargs)

    def forward(self, image):
        tokens = image.flatten(2).mT
        prefix = tokens.new_zeros(len(tokens), self.P, DIM)
        return self.mixer(torch.cat([prefix, tokens], dim=1), image.shape[-2:])


def projections(model, N):
    """MACs of `qkv` and `proj`, which most mixers have."""
    linears = [getattr(model.mixer, name, None) for name in ('qkv', 'proj')]
    return sum(N * linear.weight.numel() for linear in linears if linear is not None)


def test_every_mixer_has_a_closed_form():
    assert set(FORMS) == set(vitzoo.list_mixers())


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize(('grid', 'P'), SHAPES)
def test_a_mixer_counts_its_closed_form(case, grid, P):
    mixer, options = CASES[case]
    model = Alone(mixer, grid, P, **options)
    # without the projections, next to which the mixing of Hydra or AFT is negligible
    rest = projections(model, P + prod(grid))
    expected = closed_form(mixer, grid, P, DIM, HEADS, **options) - rest
    assert count_macs(model) - rest == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize('mixer', vitzoo.list_mixers())
@pytest.mark.parametrize('fused', (True, False))
@pytest.mark.parametrize('device', ('cpu', pytest.param('cuda', marks=[pytest.mark.gpu, needs_cuda])))
def test_a_mixer_counts_the_same_fused_or_not_and_on_any_device(mixer, fused, device, monkeypatch):
    model = Alone(mixer, (9, 13), 1).eval().to(device)
    expected, left_out = count_macs(model), []

    def attend(q, k, v, k_shared, v_shared, *window):
        left_out.append(padding_macs(q, k_shared.shape[2], *window[:3]))
        return window_attention_cpu(q, k, v, k_shared, v_shared, *window)

    monkeypatch.setattr(_window, 'window_attention_cpu', attend)
    if mixer == 'aft_conv' and device == 'cpu':
        # the sums of far tokens, times a number for each channel of the numerators and the denominator of a head
        left_out.append(9 * 13 * (DIM + HEADS))
    set_fused_attn(fused)
    try:
        assert count_macs(model) == expected
        found, uncounted = run_and_count(model, torch.randn(1, DIM, 9, 13, device=device))
        assert (found + sum(left_out), uncounted) == (expected, set())
    finally:
        set_fused_attn(True)
    assert bool(left_out) == (device == 'cpu' and mixer in ('aft_conv', 'local', 'longformer', 'ls'))


def padding_macs(q, num_shared, grid_size, window_size, halo):
    """MACs of the rows beyond the grid in whole windows, which are left out on a CPU."""
    (H, W), (h, w), (halo_h, halo_w) = grid_size, window_size, halo
    tops, columns = range(0, H, h), -(-W // w)
    whole = len(tops) * h * ((h + 2 * halo_h) * (w + 2 * halo_w) + num_shared)
    on_grid = 0
    for top in tops:
        num_queries, num_keys = min(h, H - top), min(top + h + halo_h, H) - max(top - halo_h, 0)
        on_grid += num_queries * (num_keys * (w + 2 * halo_w) + num_shared)
    return 2 * q.shape[0] * q.shape[1] * q.shape[3] * columns * w * (whole - on_grid)


# a mixer's class, and the option that a published model has of its own
NAMES = {vitzoo.mixers.mixer_class(name): name for name in vitzoo.list_mixers()}
OWN = {'ls': 'window_size', 'longformer': 'window_size'}


def block_form(block, grid):
    attn, P, C = block.attn, block.num_prefix_tokens, block.attn.dim
    name = NAMES[type(attn)]
    options = {OWN[name]: getattr(attn, OWN[name])} if name in OWN else {}
    if name == 'aft_conv':
        options['kernel'] = attn.kernel.shape[-1]
    conv = isinstance(getattr(attn, 'qkv', None), ConvQKV)
    if name == 'linformer':
        options['sum_first'] = not conv
    stride = 2 if conv and name == 'softmax' else 1
    mlp = 8 * (P + prod(grid)) * C * C
    return mlp + closed_form(name, grid, P, C, attn.num_heads, conv, stride, **options)


def model_form(model, backbone):
    """Patch embeddings, blocks and head of one of the zoo's models."""
    if backbone in ('deit', 'aft'):
        C, grid = model.embed_dim, model.patch_embed.grid_size
        return (
            prod(grid) * 3 * prod(model.patch_embed.patch_size) * C
            + sum(block_form(b, grid) for b in model.blocks)
            + 1000 * C
        )
    total, chans = 1000 * model.embed_dim, 3
    for i, (stage, C) in enumerate(zip(model.stages, [info['num_chs'] for info in model.feature_info])):
        first, later = (model.patch_size + 3, 3) if backbone == 'cvt' else (model.patch_size, 2)
        grid, kernel = stage.blocks[0].attn.grid_size, later if i else first
        total += prod(grid) * kernel**2 * chans * C + sum(block_form(b, grid) for b in stage.blocks)
        chans = C
    return total


ALL = [name for name in timm.list_models() if timm.model_entrypoint(name).__module__.startswith('vitzoo.')]
# the smallest of each backbone and mixer, with one block per stage
SMALL = [name for name in ALL if name.endswith(('_tiny', '_13'))]


@pytest.mark.parametrize('name', one_in(4, SMALL))
def test_every_backbone_with_every_mixer_counts_its_closed_form(name):
    backbone = name.partition('_')[0]
    model = timm.create_model(name, device='meta', **SHALLOW[backbone])
    assert count_macs(model) == pytest.approx(model_form(model, backbone), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize('name', ALL)
def test_every_model_counts_its_closed_form(name):
    model = timm.create_model(name, device='meta')
    backbone = name.partition('_')[0]
    # CvT-W24 is made for 224 and its weights are for 384
    img_size = model.img_size if backbone in ('cvt', 'vil') else model.patch_embed.img_size
    assert count_macs(model, img_size) == pytest.approx(model_form(model, backbone), rel=0.01)


def test_gates_and_pooling_outside_a_mixer_are_free():
    class Gate(nn.Module):
        def forward(self, x):
            return nn.functional.avg_pool2d(x * x.sigmoid(), 2)

    assert count_macs(nn.Sequential(Gate(), nn.Conv2d(3, 1, 1)), 8) == 3 * 16


@pytest.mark.parametrize(
    ('name', 'gmacs'),
    [
        ('deit_tiny_patch16_224', 1.254),
        ('deit_small_patch16_224', 4.599),
        ('deit_base_patch16_224', 17.564),
        ('deit_tiny_distilled_patch16_224', 1.261),
        ('resnet50', 4.089),
        ('swin_tiny_patch4_window7_224', 4.491),
        ('xcit_nano_12_p16_224', 0.551),
        ('pvt_v2_b2_li', 3.889),
    ],
)
def test_macs_equal_the_reference_counts(name, gmacs):
    with torch.device('meta'):
        model = timm.create_model(name)
    assert count_macs(model) / 1e9 == pytest.approx(gmacs, abs=0.0006)


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16, torch.float16])
def test_macs_do_not_depend_on_the_dtype(dtype):
    model = timm.create_model('deit_ls_nano', depth=1)
    assert count_macs(model.to(dtype)) == count_macs(timm.create_model('deit_ls_nano', depth=1))


def test_macs_equal_closed_forms():
    assert count_macs(nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)), 32) == 16 * 16 * 8 * 3 * 9
    assert count_macs(nn.Sequential(nn.Conv2d(3, 6, 5, groups=3)), (7, 9)) == 3 * 5 * 6 * 1 * 25
    assert count_macs(nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 10), nn.GELU()), 4) == 48 * 10
    with torch.device('meta'):
        model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=2, num_classes=10)
    N, C = 5, 192
    block = 4 * N * C * C + 2 * N * N * C + 8 * N * C * C
    assert count_macs(model) == 4 * C * 3 * 256 + 2 * block + C * 10


def test_macs_follow_the_size_and_channels_of_the_model():
    small, large = (timm.create_model('test_vit', img_size=size) for size in (32, 64))
    assert count_macs(small) < count_macs(large)
    resnet = timm.create_model('test_resnet', in_chans=1)
    assert count_macs(resnet, 64) == 2 * count_macs(resnet, (64, 32)) - resnet.fc.weight.numel()


def test_counting_leaves_the_model_as_it_is():
    model = timm.create_model('test_vit', img_size=32).train()
    weights = copy.deepcopy(model.state_dict())
    fused = [module.fused_attn for module in model.modules() if hasattr(module, 'fused_attn')]
    count_macs(model)
    assert model.training
    assert fused == [module.fused_attn for module in model.modules() if hasattr(module, 'fused_attn')]
    assert all(tensor.device.type == 'cpu' and tensor.equal(weights[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize('fused', (True, False))
def test_attention_counts_the_same_fused_or_not(fused):
    class Attention(nn.Module):
        def forward(self, x):
            x = x.flatten(2).mT  # (1, 64, 3)
            if fused:
                return nn.functional.scaled_dot_product_attention(x, x, x)
            return (x @ x.mT).softmax(-1) @ x

    assert count_macs(Attention(), 8) == 2 * 64 * 64 * 3


@torch.library.custom_op('vitzoo_test::twice', mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    ('function', 'name'),
    [
        (torch.linalg.inv, 'linalg_inv'),
        (torch.linalg.qr, 'linalg_qr'),
        (lambda x: torch.mv(x[0, 0], x[0, 0, 0]), 'mv'),
        (lambda x: torch.cdist(x, x), 'cdist'),
        (torch.ops.vitzoo_test.twice, 'vitzoo_test.twice'),
    ],
)
def test_an_operation_that_nobody_counts_stops_the_count(function, name):
    with pytest.raises(UserError, match=name):
        count_macs(Apply(function), 8)


def test_an_operation_with_a_formula_counts():
    @torch.library.custom_op('vitzoo_test::thrice', mutates_args=())
    def thrice(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    thrice.register_fake(torch.empty_like)
    register_flop_formula(torch.ops.vitzoo_test.thrice)(lambda shape, out_shape=None: 2 * shape.numel())
    assert count_macs(Apply(torch.ops.vitzoo_test.thrice), 8) == 3 * 8 * 8


def test_a_fast_path_is_counted_by_its_plain_form():
    class Switched(nn.Module):
        fused_attn = True

        def forward(self, x):
            return torch.ops.vitzoo_test.twice(x) if self.fused_attn else x @ x.mT

    model = Switched()
    assert count_macs(model, 8) == 3 * 8 * 8 * 8
    assert model.fused_attn


@pytest.mark.parametrize('mixer', vitzoo.list_mixers())
def test_every_mixer_can_be_counted(mixer):
    # those of plugins too, which have no closed form here
    model = timm.create_model(f'deit_{mixer}_tiny', img_size=64, depth=1)
    assert count_macs(model) > 16 * 192 * 192 * 8


@pytest.mark.parametrize(
    ('name', 'img_size'),
    [
        ('vit_tiny_patch16_224', 256),
        ('deit_softmax_tiny', (256, 224)),
        ('aft_full_tiny', 256),
        ('mixer_s16_224', 256),
        ('swin_tiny_patch4_window7_224', 230),
        ('levit_128', 230),
        ('resnet18', 0),
        ('resnet18', (-4, 5)),
    ],
    ids=str,
)
def test_a_size_that_the_model_cannot_run_at_is_refused(name, img_size):
    with pytest.raises(UserError, match=re.escape(f'img_size={img_size}')):
        count_macs(timm.create_model(name), img_size)
    assert count_macs(timm.create_model(name, num_classes=7)) > 0


def test_a_model_that_fails_at_its_own_size_keeps_its_traceback():
    model = timm.create_model('resnet18')
    model.fc = nn.Linear(5, 5)
    with pytest.raises(RuntimeError) as error:
        count_macs(model)
    assert not isinstance(error.value, UserError)
