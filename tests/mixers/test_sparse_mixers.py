"""Mixers with sparse attention patterns: bigbird, local, reformer, routing, sinkhorn and sparse."""

import copy
import math

import pytest
import torch
from helpers import (
    DIM,
    GRID,
    HEADS,
    SETTINGS,
    assert_near,
    assert_output_and_gradient_of_official_code,
    build,
    recorded_call,
    recorded_on_grid,
    tokens,
)
from processes import start_processes
from timm.layers.halo_attn import HaloAttn
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from vitzoo import create_mixer
from vitzoo.mixers import _clustered
from vitzoo.mixers.bigbird import draw_blocks
from vitzoo.mixers.local import local_attention
from vitzoo.mixers.reformer import lsh_buckets, reformer_attention
from vitzoo.mixers.routing import cluster_members, routing_attention, routing_naive
from vitzoo.mixers.sinkhorn import block_sort, log_sinkhorn
from vitzoo.mixers.softmax import softmax_naive

NAMES = ('bigbird', 'local', 'reformer', 'routing', 'sinkhorn', 'sparse')
CASES = [pytest.param(name, kwargs, id=f'{name}-{i}') for name in NAMES for i, kwargs in enumerate(SETTINGS[name])]


@pytest.mark.parametrize('num_prefix_tokens', [0, 2])
@pytest.mark.parametrize(
    'name, kwargs',
    [
        ('local', {'block_size': 5, 'memory_halo': 0}),
        ('local', {'block_size': 2, 'memory_halo': 4}),
        ('sparse', {'stride': 20}),
        ('sparse', {'pattern': 'fixed', 'stride': 99}),
        ('sparse', {'pattern': 'fixed', 'num_summaries': 5}),
        ('bigbird', {'block_size': 5}),
        ('bigbird', {'block_size': 1, 'num_global_blocks': 0, 'num_random_blocks': 20}),
        ('bigbird', {'block_size': 2, 'num_global_blocks': 6, 'num_random_blocks': 0}),
        ('routing', {'num_clusters': 1}),
    ],
    ids=str,
)
def test_with_every_token_attended_it_is_softmax(name, kwargs, num_prefix_tokens):
    mixer = build(name, GRID, num_prefix_tokens, **kwargs)
    x = tokens(mixer)
    q, k, v = mixer.to_qkv(x, GRID)
    expected = mixer.project(softmax_naive(q, k, v, mixer.scale))
    torch.testing.assert_close(mixer(x, GRID), expected, rtol=1e-9, atol=1e-9)


def test_routing_with_clusters_of_all_tokens_is_softmax():
    mixer = build('routing', GRID, num_clusters=3, cluster_size=20)
    x = tokens(mixer)
    expected = mixer.project(softmax_naive(*mixer.to_qkv(x, GRID), mixer.scale))
    torch.testing.assert_close(mixer(x, GRID), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('num_prefix_tokens', [0, 2])
def test_sinkhorn_with_one_block_is_softmax_in_which_grid_tokens_count_twice(num_prefix_tokens):
    mixer = build('sinkhorn', GRID, num_prefix_tokens, block_size=5)
    x = tokens(mixer)
    q, k, v = mixer.to_qkv(x, GRID)
    twice = torch.zeros(q.shape[2], q.shape[2], dtype=q.dtype)
    twice[num_prefix_tokens:, num_prefix_tokens:] = math.log(2)
    expected = mixer.project(softmax_naive(q, k, v, mixer.scale, twice))
    torch.testing.assert_close(mixer(x, GRID), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('num_prefix_tokens', [0, 2])
@pytest.mark.parametrize('num_hashes', [1, 3])
def test_reformer_with_one_bucket_is_softmax_over_the_other_tokens_with_shared_keys(num_hashes, num_prefix_tokens):
    mixer = build('reformer', GRID, num_prefix_tokens, bucket_size=20, num_hashes=num_hashes)
    x = tokens(mixer)
    q, _, v = mixer.to_qkv(x, GRID)
    others = torch.zeros(q.shape[2], q.shape[2], dtype=q.dtype).fill_diagonal_(float('-inf'))
    # the authors' `length_normalized` divides by the root mean square
    k = q / q.square().mean(dim=-1, keepdim=True).sqrt()
    expected = mixer.project(softmax_naive(q, k, v, mixer.scale, others))
    torch.testing.assert_close(mixer(x, GRID), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('name, kwargs', CASES)
def test_the_weights_of_every_token_sum_to_one(name, kwargs):
    mixer = build(name, (5, 7), num_prefix_tokens=1, **kwargs)
    args = list(recorded_call(mixer, tokens(mixer)))
    v = 1 if name == 'reformer' else 2
    args[v] = torch.ones_like(args[v])
    torch.testing.assert_close(mixer.op(*args), args[v], rtol=0, atol=1e-12)


@pytest.mark.parametrize('grid_size', [(1, 1), (1, 2), (3, 1)], ids=str)
@pytest.mark.parametrize('name, kwargs', [(name, {}) for name in NAMES] + [(c.values[0], c.values[1]) for c in CASES])
def test_the_smallest_grids_run_in_their_dtype(name, kwargs, grid_size):
    for num_prefix_tokens in (0, 1):
        mixer = build(name, grid_size, num_prefix_tokens, **kwargs)
        x = tokens(mixer).requires_grad_()
        out = mixer(x, grid_size)
        out.sum().backward()
        assert out.dtype == torch.float64
        assert out.isfinite().all() and x.grad.isfinite().all()


def op_macs(name, H, W=None, train=False, **kwargs):
    """MACs of the op alone, without the projections that every mixer has, on an H x W or H x H grid."""
    grid_size = H, W or H
    mixer = create_mixer(name, 64, 2, grid_size=grid_size, num_prefix_tokens=1, device='meta', **kwargs)
    mixer.train(train)
    counter = FlopCounterMode(display=False)

    def counted(*args):
        with counter:
            return type(mixer).op(*args)

    mixer.op = counted
    mixer(torch.empty(1, 1 + math.prod(grid_size), 64, device='meta'), grid_size)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize(
    'name, kwargs',
    [('local', {}), ('bigbird', {}), ('longformer', {}), ('longformer', {'exact': True}), ('reformer', {})],
)
def test_cost_is_linear(name, kwargs):
    # whole blocks on both grids, and as many hash buckets as there can be
    ratio = op_macs(name, 112, **kwargs) / op_macs(name, 56, **kwargs)
    assert 3.7 <= ratio <= 4.3


@pytest.mark.parametrize(
    'name, small, large',
    [
        ('sparse', {}, {}),
        ('sparse', {'stride': 16}, {'stride': 64}),
        ('sparse', {'pattern': 'fixed'}, {'pattern': 'fixed'}),
        ('routing', {'num_clusters': 16}, {'num_clusters': 64}),
        ('sinkhorn', {'block_size': 4}, {'block_size': 8}),
    ],
    ids=str,
)
def test_cost_grows_with_the_power_of_one_and_a_half(name, small, large):
    exponent = math.log(op_macs(name, 64, **large) / op_macs(name, 16, **small), 16)
    assert 1.4 <= exponent <= 1.53


def test_a_random_shift_costs_two_windows_of_nine():
    cost, shifted = (op_macs('longformer', 56, train=True, random_shift=shift) for shift in (False, True))
    assert shifted / cost == pytest.approx(2 / 9, rel=0.02)


def test_local_is_the_layer_of_local_attention_on_a_strip():
    recorded, grid = recorded_on_grid('local_1x33')
    mixer = create_mixer('local', 48, 3, grid_size=grid, qkv_bias=False, block_size=7, memory_halo=7)
    # its inputs are queries, keys and values
    identity = {'qkv.weight': torch.eye(48).repeat(3, 1), 'proj.weight': torch.eye(48), 'proj.bias': torch.zeros(48)}
    mixer.load_state_dict(identity)
    assert_output_and_gradient_of_official_code(mixer, recorded, grid)


@pytest.mark.parametrize(
    'grid_size, block_size, halo', [((8, 12), 4, 1), ((9, 15), 3, 3), ((14, 7), 7, 3), ((4, 10), 2, 2)], ids=str
)
def test_local_is_timms_halo_attention_without_positions_and_padding(grid_size, block_size, halo):
    torch.manual_seed(0)
    layer = HaloAttn(48, num_heads=3, block_size=block_size, halo_size=halo, qkv_bias=True).double()
    for positions in layer.pos_embed.parameters():
        nn.init.zeros_(positions)
    x = torch.randn(2, 48, *grid_size, dtype=torch.float64)
    with torch.no_grad():
        # a channel that adds 100 to the score of every key, except for the zeros around the grid
        for conv, size, value in ((layer.q, 16, 100 / layer.scale), (layer.kv, 32, 1.0)):
            conv.weight.unflatten(0, (3, size))[:, 15] = 0
            conv.bias.unflatten(0, (3, size))[:, 15] = value
        q, kv = (conv(x).unflatten(1, (3, -1)).flatten(3).mT for conv in (layer.q, layer.kv))
        out = local_attention(q, *kv.split(16, dim=3), grid_size, block_size, halo, layer.scale)
        assert_near(out.mT.flatten(1, 2).unflatten(2, grid_size), layer(x))


def test_bigbird_is_the_layer_of_transformers_on_a_strip_with_the_same_random_blocks():
    recorded, grid = recorded_on_grid('bigbird_1x36')
    # both have two global blocks: the first, and the last or the prefix tokens
    options = dict(num_prefix_tokens=3, block_size=3, num_random_blocks=2)
    mixer = create_mixer('bigbird', 48, 3, grid_size=grid, **options)
    layers = ('query', 'key', 'value')
    weights = {f'qkv.{k}': torch.cat([recorded[f'state.{layer}.{k}'] for layer in layers]) for k in ('weight', 'bias')}
    weights |= {'proj.weight': torch.eye(48), 'proj.bias': torch.zeros(48), 'seeds': mixer.seeds}
    mixer.load_state_dict(weights)
    assert_output_and_gradient_of_official_code(mixer, recorded, grid)


def bigbird_blocks(mixer, grid_size=(6, 8)):
    return draw_blocks(mixer.seeds, grid_size, mixer.block_size, mixer.num_global_blocks, mixer.num_random_blocks)


def test_bigbird_draws_the_same_blocks_in_every_construction_and_after_a_state_dict_round_trip():
    kwargs = dict(grid_size=(6, 8), block_size=1)
    torch.manual_seed(1)
    first = create_mixer('bigbird', DIM, HEADS, seed=3, **kwargs)
    torch.manual_seed(2)
    second = create_mixer('bigbird', DIM, HEADS, seed=3, **kwargs)
    assert torch.equal(bigbird_blocks(first), bigbird_blocks(second))
    other = create_mixer('bigbird', DIM, HEADS, seed=4, **kwargs)
    assert not torch.equal(bigbird_blocks(first), bigbird_blocks(other))
    other.load_state_dict(first.state_dict())
    assert torch.equal(bigbird_blocks(first), bigbird_blocks(other))


def test_bigbird_blocks_are_these():
    # pinned: a changed draw would silently change the attention of trained weights
    mixer = create_mixer('bigbird', DIM, 1, grid_size=(6, 8), block_size=2, num_random_blocks=2)
    assert bigbird_blocks(mixer)[0, :4].tolist() == [[11, 2], [7, 9], [11, 8], [11, 5]]


def test_bigbird_random_blocks_are_distinct_far_not_global_and_spread_evenly():
    mixer = create_mixer('bigbird', DIM, HEADS, grid_size=(20, 20), block_size=1, num_global_blocks=2)
    blocks = bigbird_blocks(mixer, (20, 20))
    block = torch.arange(400)[None, :, None]
    near = ((blocks // 20 - block // 20).abs() <= 1) & ((blocks % 20 - block % 20).abs() <= 1)
    assert not near.any() and (blocks >= 2).all()
    assert (blocks.sort(dim=-1).values.diff(dim=-1) > 0).all()
    assert not torch.equal(blocks[0], blocks[1])
    # 3 heads * 400 blocks * 3 draws over 398: a mean of 9 and, if all are equally likely, a variance near it
    counts = blocks.flatten().bincount(minlength=400)[2:].double()
    assert 0.75 < counts.var() / counts.mean() < 1.25


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest result of an operation."""

    def __init__(self):
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [out] if isinstance(out, torch.Tensor) else out
        if isinstance(tensors, (tuple, list)):
            self.size = max([self.size, *(x.numel() for x in tensors if isinstance(x, torch.Tensor))])
        return out


def test_drawing_bigbird_blocks_takes_memory_linear_in_the_number_of_blocks():
    sizes = []
    for side in (64, 256):
        with LargestTensor() as largest:
            draw_blocks(torch.arange(HEADS), (side, side), 4, 1, 3)
        sizes.append(largest.size)
    assert sizes[1] == 16 * sizes[0]


@pytest.mark.parametrize('num_global_blocks', [0, 1, 7])
@pytest.mark.parametrize('grid_size', [(1, 1), (1, 9), (3, 4), (5, 5)], ids=str)
def test_bigbird_draws_every_block_that_is_neither_near_nor_global_if_there_are_no_more(grid_size, num_global_blocks):
    T, W = math.prod(grid_size), grid_size[1]
    drawn = draw_blocks(torch.arange(HEADS), grid_size, 1, num_global_blocks, T)
    for i in range(T):
        far = [j for j in range(T) if abs(i // W - j // W) > 1 or abs(i % W - j % W) > 1]
        expected = [j for j in far if j >= num_global_blocks]
        for blocks in drawn[:, i].tolist():
            assert sorted(block for block in blocks if block >= 0) == expected
            assert blocks[len(expected) :] == [-1] * (T - len(expected))


def test_bigbird_has_fewer_random_blocks_on_a_grid_with_too_few_blocks():
    mixer = create_mixer('bigbird', DIM, HEADS, grid_size=(1, 5), block_size=1, num_global_blocks=0)
    # the neighbours of the middle block are near, which leaves the two ends
    assert bigbird_blocks(mixer, (1, 5))[:, 2].sort(dim=-1).values.tolist() == [[-1, 0, 4]] * HEADS


def test_reformer_counts_a_key_of_several_rounds_once():
    mixer = build('reformer', (5, 7), num_prefix_tokens=1, num_hashes=1, bucket_size=4)
    q, v, rotations, *rest = recorded_call(mixer, tokens(mixer))
    once = reformer_attention(q, v, rotations, *rest)
    thrice = reformer_attention(q, v, rotations.repeat(3, 1, 1), *rest)
    torch.testing.assert_close(thrice, once, rtol=1e-9, atol=1e-9)


def test_a_reformer_token_attends_itself_only_if_it_has_no_other_key():
    q = torch.tensor([[1.0, 0], [-1, 0], [1, 0.1], [1, -0.1]], dtype=torch.float64)[None, None]
    v = torch.eye(4, dtype=torch.float64)[None, None]
    rotations = torch.tensor([[[1.0], [0]]], dtype=torch.float64)
    weights = reformer_attention(q, v, rotations, (2, 2), 4, 1.0)[0, 0]
    # the second token is alone in its bucket
    assert weights[1].tolist() == [0, 1, 0, 0]
    assert weights.diagonal().tolist() == [0, 1, 0, 0]
    assert (weights[[0, 0, 2, 2, 3, 3], [2, 3, 0, 3, 0, 2]] > 0).all()


def test_reformer_attends_its_bucket_in_its_chunk_and_the_one_before():
    generator = torch.Generator().manual_seed(0)
    N, m = 30, 4
    q = torch.randn(1, 1, N, 3, generator=generator, dtype=torch.float64)
    rotations = torch.randn(1, 3, 2, generator=generator, dtype=torch.float64)
    weights = reformer_attention(q, torch.eye(N, dtype=torch.float64)[None, None], rotations, (5, 6), m, 1.0)[0, 0]
    bucket = lsh_buckets(q, rotations)[0, 0, 0]
    place = bucket.argsort(stable=True).argsort()
    assert place.sort().values.tolist() == list(range(N))
    step = place[:, None] // m - place // m
    expected = (bucket[:, None] == bucket) & (step >= 0) & (step <= 1) & ~torch.eye(N, dtype=torch.bool)
    alone = ~expected.any(dim=1)
    assert torch.equal(weights > 0, expected | torch.diag(alone))


def test_lsh_buckets_depend_on_the_direction_alone():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 50, 8, generator=generator)
    rotations = torch.randn(4, 8, 5, generator=generator)
    buckets = lsh_buckets(x, rotations)
    assert buckets.shape == (2, 3, 4, 50) and buckets.unique().tolist() == list(range(10))
    assert torch.equal(lsh_buckets(7 * x, rotations), buckets)
    assert torch.equal(lsh_buckets(-x, rotations), (buckets + 5) % 10)


@pytest.mark.parametrize(
    'name, option', [('aft_local', 'window_size'), ('bigbird', 'block_size'), ('sinkhorn', 'block_size')]
)
def test_a_strip_is_not_padded_to_the_height_of_a_block(name, option):
    assert 4 * op_macs(name, 1, 64, **{option: 4}) < 1.01 * op_macs(name, 4, 64, **{option: 4})
    for grid_size in ((1, 11), (11, 1), (2, 9)):
        mixer = build(name, grid_size, num_prefix_tokens=1, **{option: 3}).eval()
        args = recorded_call(mixer, tokens(mixer))
        torch.testing.assert_close(mixer.op(*args), mixer.op_naive(*args), rtol=1e-9, atol=1e-9)


DRAWN_IN_TRAINING = [(name, SETTINGS[name][1]) for name in ('reformer', 'sinkhorn')]
DRAWN_IN_TRAINING += [('longformer', {'window_size': 2, 'random_shift': True})]


@pytest.mark.parametrize('name, kwargs', DRAWN_IN_TRAINING, ids=str)
def test_random_draws_differ_in_training_and_not_in_evaluation(name, kwargs):
    mixer = build(name, (5, 7), **kwargs)
    x = tokens(mixer)
    first, second = mixer(x, (5, 7)), mixer(x, (5, 7))
    assert not torch.equal(first, second)
    mixer.eval()
    assert torch.equal(mixer(x, (5, 7)), mixer(x, (5, 7)))


def test_sinkhorn_matrices_are_doubly_stochastic_and_permutations_when_cold():
    logits = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ones = torch.ones(2, 3, 12, dtype=torch.float64)
    few, many = log_sinkhorn(logits, 1).exp(), log_sinkhorn(logits, 30).exp()
    for sort in (few, many):
        torch.testing.assert_close(sort.sum(dim=-1), ones, rtol=0, atol=1e-12)
    torch.testing.assert_close(many.sum(dim=-2), ones, rtol=0, atol=1e-6)
    assert (few.sum(dim=-2) - ones).abs().max() > 1e-3
    permutation = torch.eye(12, dtype=torch.float64)[torch.randperm(12, generator=torch.Generator().manual_seed(1))]
    cold = log_sinkhorn((logits + 20 * permutation) / 0.05, 8).exp()
    torch.testing.assert_close(cold, permutation.expand_as(cold), rtol=0, atol=1e-6)


def test_sinkhorn_sorts_each_block_by_the_means_of_real_tokens():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 2, 4, 3, generator=generator, dtype=torch.float64)
    inside = torch.tensor([[True] * 4, [True, False, True, False]])
    sort = block_sort(q, k, inside, None, 3, 0.5, 1.0)
    q[:, :, ~inside], k[:, :, ~inside] = 1e3, 0
    assert torch.equal(block_sort(q, k, inside, None, 3, 0.5, 1.0), sort)


def test_routing_clusters_are_balanced_and_hold_the_most_similar_tokens():
    mixer = build('routing', (5, 7), num_clusters=4)
    q, _, _, centroids, _, cluster_size, _, _ = recorded_call(mixer, tokens(mixer))
    assert cluster_size == 9
    members = cluster_members(q, centroids, cluster_size)
    assert members.shape == (2, HEADS, 4, 9)
    cosine = F.cosine_similarity(q.unsqueeze(2), centroids[:, :, None], dim=-1)  # (B, heads, c, N)
    inside = torch.zeros_like(cosine, dtype=torch.bool).scatter(-1, members, True)
    assert (inside.sum(dim=-1) == 9).all()
    assert (cosine.where(inside, 2).amin(dim=-1) >= cosine.where(~inside, -2).amax(dim=-1)).all()


@pytest.mark.parametrize('stored', [0, 10**6])
@pytest.mark.parametrize('cached', [1, 200, 10**6])
@pytest.mark.parametrize('cluster_size', [1, 9, 20])
def test_routing_is_its_formula_for_any_number_of_heads_and_clusters_at_once(cluster_size, cached, stored, monkeypatch):
    monkeypatch.setattr(_clustered, '_STORED_HEAD', stored)
    for name in ('CACHED', '_NUM_SCORES'):
        monkeypatch.setattr(_clustered, name, cached)
    generator = torch.Generator().manual_seed(0)
    # two prefix tokens
    q, k, v = (torch.randn(2, 3, 37, 4, generator=generator).double().requires_grad_() for _ in range(3))
    args = q, k, v, torch.randn(3, 5, 4, generator=generator).double(), (5, 7), cluster_size, 0.7
    fast, naive = routing_attention(*args), routing_naive(*args)
    torch.testing.assert_close(fast, naive, rtol=1e-9, atol=1e-9)
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (fast, naive)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('use_reentrant', [False, True])
@pytest.mark.parametrize(
    'name, kwargs',
    [*DRAWN_IN_TRAINING, ('routing', {'num_clusters': 4, 'decay': 0.5})],
    ids=str,
)
def test_recomputation_repeats_the_draw_and_updates_centroids_once(name, kwargs, use_reentrant):
    runs = []
    for recompute in (False, True):
        mixer = build(name, (5, 7), **kwargs)
        x = tokens(mixer).requires_grad_()
        torch.manual_seed(2)
        out = checkpoint(mixer, x, (5, 7), use_reentrant=use_reentrant) if recompute else mixer(x, (5, 7))
        out.square().sum().backward()
        runs.append([x.grad, *(p.grad for p in mixer.parameters()), *mixer.buffers()])
    for plain, recomputed in zip(*runs, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)


def routing_step(mixer, x):
    mixer(x, GRID).square().sum().backward()
    return (mixer.module if isinstance(mixer, DistributedDataParallel) else mixer).centroids


def test_routing_centroids_move_to_the_mean_of_their_tokens_and_only_in_training():
    mixer = build('routing', num_clusters=3, decay=0.0)
    x, before = tokens(mixer), mixer.centroids.clone()
    q, k, _ = mixer.to_qkv(x, GRID)
    with torch.no_grad():
        mixer(x, GRID)
    mixer.eval()
    assert torch.equal(routing_step(mixer, x), before)
    after = routing_step(mixer.train(), x)
    for head in range(HEADS):
        unit = F.normalize(torch.cat([q[:, head], k[:, head]]).flatten(0, 1), dim=-1)
        nearest = (unit @ before[head].T).argmax(dim=-1)
        for c in range(3):
            expected = F.normalize(unit[nearest == c].mean(dim=0), dim=0)
            torch.testing.assert_close(after[head, c], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_routing_centroids_move_as_far_if_the_weights_are_in_half_precision(dtype):
    mixer = build('routing', num_clusters=3, dtype=torch.float32)
    built = build('routing', num_clusters=3, dtype=dtype)
    converted = copy.deepcopy(mixer).to(dtype)
    x, before = tokens(mixer, dtype=torch.float32), mixer.centroids.clone()
    moved = routing_step(mixer, x) - before
    for half in (built, converted):
        assert half.qkv.weight.dtype == dtype and torch.equal(half.centroids, before)
        half.load_state_dict({name: tensor.to(dtype) for name, tensor in mixer.state_dict().items()})
        half.centroids.copy_(before)
        found = routing_step(half, x.to(dtype)) - before
        assert (found - moved).norm() < 0.05 * moved.norm()
    assert torch.equal(converted.double().centroids, converted.centroids.double())


def test_routing_centroids_do_not_move_under_torch_func():
    mixer = build('routing', num_clusters=3).train()
    x, before = tokens(mixer), mixer.centroids.clone()
    weights = {name: p.detach() for name, p in mixer.named_parameters()}
    grads = torch.func.grad(lambda weights: torch.func.functional_call(mixer, weights, (x, GRID)).sum())(weights)
    assert grads['qkv.weight'].any() and torch.equal(mixer.centroids, before)


def test_a_routing_centroid_without_nearest_tokens_does_not_move():
    mixer = build('routing', num_clusters=3)
    mixer.centroids[:, 2] = -mixer.centroids[:, 0]
    statistics = torch.ones(HEADS, 3, DIM // HEADS + 1, dtype=torch.float64)
    statistics[:, 2] = 0
    before = mixer.centroids.clone()
    mixer.update_centroids(statistics)
    assert torch.equal(mixer.centroids[:, 2], before[:, 2])
    assert not torch.equal(mixer.centroids[:, :2], before[:, :2])


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
def test_a_routing_token_that_is_not_finite_leaves_the_centroids_of_its_head(value):
    mixer = build('routing', num_clusters=3, decay=0.5).train()
    before = mixer.centroids.clone()
    q, k, _ = mixer.to_qkv(tokens(mixer), GRID)
    bad = q.clone()
    bad[0, 1, 3] = value
    mixer.update_centroids(mixer.statistics(bad, k))
    assert torch.equal(mixer.centroids[1], before[1])
    assert not torch.equal(mixer.centroids[::2], before[::2])
    mixer.update_centroids(mixer.statistics(q, k))
    assert mixer.centroids.isfinite().all() and not torch.equal(mixer.centroids[1], before[1])


def test_routing_centroids_survive_a_step_of_tokens_that_are_not_finite():
    mixer = build('routing', num_clusters=3, decay=0.5).train()
    x, before = tokens(mixer), mixer.centroids.clone()
    bad = x.clone()
    bad[0, 3] = float('nan')
    assert torch.equal(routing_step(mixer, bad), before)
    after = routing_step(mixer, x)
    assert after.isfinite().all() and not torch.equal(after, before)


def routing_rank(folder):
    distributed.init_process_group('gloo')
    rank = distributed.get_rank()
    mixer = DistributedDataParallel(build('routing', num_clusters=3, decay=0.5))
    x = tokens(mixer.module, batch_size=4)[2 * rank : 2 * rank + 2]
    steps = [routing_step(mixer, x).clone() for _ in range(2)]
    torch.save(steps, f'{folder}/{rank}.pt')
    distributed.destroy_process_group()


def test_routing_centroids_are_those_of_the_whole_batch_on_every_rank(tmp_path):
    outcome = start_processes(2, routing_rank, str(tmp_path))
    assert outcome.codes == [0, 0], outcome.err
    ranks = [torch.load(tmp_path / f'{rank}.pt') for rank in range(2)]
    mixer = build('routing', num_clusters=3, decay=0.5)
    x = tokens(mixer, batch_size=4)
    for first, second in zip(*ranks, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, routing_step(mixer, x), rtol=1e-9, atol=1e-12)
