"""Every registered mixer against its specification, its limits, and what a backbone relies on."""

import warnings

import pytest
import torch

from vitzoo import create_mixer, list_mixers, register_mixer
from vitzoo.mixers import QKVMixer, _window
from vitzoo.mixers._random_shift import draw_neighbour
from vitzoo.mixers.aft import aft_conv, aft_full_naive
from vitzoo.mixers.longformer import longformer_attention
from vitzoo.mixers.nystrom import grid_means, iterative_pinv, landmark_grid, nystrom_attention, segment_means
from vitzoo.mixers.performer import orthogonal_features, performer_attention
from vitzoo.mixers.softmax import softmax_naive

DIM, HEADS, GRID = 12, 3, (4, 5)
# small enough that a small grid has several windows, landmarks and features; a mixer not named here runs as it comes
SETTINGS = {
    'aft_conv': [{'kernel_size': 3}, {'kernel_size': 7}],
    'aft_local': [{'window_size': 2, 'bias_dim': 4}, {'window_size': 3, 'bias_dim': 4}],
    'bigbird': [
        {'block_size': 2, 'num_global_blocks': 0, 'num_random_blocks': 1},
        {'block_size': 1, 'num_global_blocks': 2, 'num_random_blocks': 2, 'seed': 5},
        {'block_size': 3, 'num_random_blocks': 0},
    ],
    'global': [{'num_global': 3}, {'num_global': 1}],
    'linformer': [{'rank': 5}, {'rank': 4, 'share_kv': True}, {'rank': 3, 'share_heads': False}],
    'local': [{'block_size': 2, 'memory_halo': 1}, {'block_size': 3, 'memory_halo': 0}],
    'longformer': [
        {'window_size': 2},
        {'window_size': 3, 'rel_bias': 'table'},
        {'window_size': 1, 'exact': True},
        {'window_size': 2, 'exact': True, 'rel_bias': 'table'},
        {'window_size': 1, 'random_shift': True},
        {'window_size': 2, 'random_shift': True, 'rel_bias': 'table'},
        {'window_size': 2, 'global_proj': True},
        {'window_size': 1, 'global_proj': True, 'rel_bias': 'table', 'qk_norm': True},
    ],
    'ls': [
        {'window_size': 3, 'rank': 2},
        {'window_size': 2, 'rank': 0},
        {'window_size': 1, 'rank': 1, 'rel_bias': 'table'},
        {'window_size': 4, 'rank': 2, 'rel_bias': 'nvidia'},
    ],
    'nystrom': [{'num_landmarks': 5}, {'num_landmarks': 6, 'landmarks': 'grid'}],
    'performer': [{'num_features': 16}, {'num_features': 6, 'kernel': 'relu'}],
    'pool': [{}, {'pool_size': 5}],
    'reformer': [
        {'num_hashes': 1, 'bucket_size': 2},
        {'num_hashes': 3, 'bucket_size': 3},
        {'num_hashes': 2, 'bucket_size': 64},
    ],
    'rfa': [{'num_features': 16}, {'num_features': 16, 'gate': True}],
    'routing': [{'num_clusters': 3}, {'num_clusters': 4, 'cluster_size': 7}, {'num_clusters': 2, 'cluster_size': 1}],
    'set': [{'num_inducing': 5}, {'num_inducing': 1}],
    'sinkhorn': [{'block_size': 2}, {'block_size': 3, 'num_iterations': 2, 'temperature': 0.5}],
    'softmax': [{}, {'rel_bias': 'table'}],
    'sparse': [
        {},
        {'stride': 3},
        {'pattern': 'fixed', 'num_summaries': 1},
        {'pattern': 'fixed', 'stride': 4, 'num_summaries': 2},
    ],
    'srformer': [{'sr_ratio': 3}, {'sr_ratio': 2, 'norm': 'instance'}],
    'synthesizer': [
        {},
        {'variant': 'random'},
        {'variant': 'factorized_dense'},
        {'variant': 'factorized_random', 'rank': 3},
    ],
}
CASES = [
    pytest.param(name, kwargs, id=f'{name}-{i}')
    for name in list_mixers()
    for i, kwargs in enumerate(SETTINGS.get(name, [{}]))
]


def build(name, grid_size=GRID, num_prefix_tokens=0, dtype=torch.float64, **kwargs):
    """A mixer with no parameter left at a special value, in which a mistake could hide."""
    torch.manual_seed(0)
    mixer = create_mixer(
        name, DIM, HEADS, grid_size=grid_size, num_prefix_tokens=num_prefix_tokens, dtype=dtype, **kwargs
    )
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return mixer


def tokens(mixer, batch_size=2, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    H, W = mixer.grid_size
    shape = (batch_size, mixer.num_prefix_tokens + H * W, DIM)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def recorded_call(mixer, x):
    """The arguments with which the mixer calls its op on `x`."""
    calls = []

    def recorder(*args):
        calls.append(args)
        return type(mixer).op(*args)

    mixer.op = recorder
    mixer(x, mixer.grid_size)
    del mixer.op
    return calls[0]


def run_with_gradients(op, args):
    args = [a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args]
    inputs = [a.requires_grad_() for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
    out = op(*args)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return out, torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize('num_prefix_tokens', [0, 1, 2])
@pytest.mark.parametrize('grid_size', [(4, 4), (3, 6), (5, 7)], ids=lambda g: f'{g[0]}x{g[1]}')
@pytest.mark.parametrize('name, kwargs', CASES)
def test_fast_op_equals_naive_form_with_gradients(name, kwargs, grid_size, num_prefix_tokens):
    mixer = build(name, grid_size, num_prefix_tokens, **kwargs)
    args = recorded_call(mixer, tokens(mixer))
    fast, fast_grads = run_with_gradients(mixer.op, args)
    naive, naive_grads = run_with_gradients(mixer.op_naive, args)
    torch.testing.assert_close(fast, naive, rtol=1e-9, atol=1e-9)
    for fast_grad, naive_grad in zip(fast_grads, naive_grads, strict=True):
        torch.testing.assert_close(fast_grad, naive_grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('name, kwargs', CASES)
def test_every_parameter_gets_a_gradient(name, kwargs):
    mixer = build(name, num_prefix_tokens=1, **kwargs)
    mixer(tokens(mixer).requires_grad_(), GRID).square().sum().backward()
    without = [name for name, p in mixer.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without == []


@pytest.mark.parametrize('std', [1, 3, 6])
@pytest.mark.parametrize('name, kwargs', CASES)
def test_a_sample_does_not_depend_on_its_batch(name, kwargs, std):
    mixer = build(name, num_prefix_tokens=1, **kwargs)
    # no other tensor has a first dimension of 11; the samples differ in scale, so that a statistic over the batch shows
    B, scales = 11, std * torch.logspace(-1, 0.3, 11, dtype=torch.float64)
    args = scaled(recorded_call(mixer, tokens(mixer, B)), B, scales)
    batched = mixer.op(*args)
    for i in range(B):
        alone = mixer.op(*(a[i : i + 1] if is_per_sample(a, B) else a for a in args))
        torch.testing.assert_close(batched[i : i + 1], alone, rtol=1e-9, atol=1e-12)


def is_per_sample(arg, batch_size):
    return isinstance(arg, torch.Tensor) and arg.ndim > 2 and arg.shape[0] == batch_size


def scaled(args, batch_size, scales):
    """Queries, keys, values and whatever else belongs to a sample, brought to the given standard deviations."""
    scales = torch.as_tensor(scales, dtype=torch.float64).expand(batch_size)

    def scale(a):
        return scales.reshape(-1, *[1] * (a.ndim - 1)) * a / a.std() if a.numel() > 1 else a

    return [scale(a) if is_per_sample(a, batch_size) and a.is_floating_point() else a for a in args]


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize('std', [0.1, 1, 4, 8])
@pytest.mark.parametrize('name, kwargs', CASES)
def test_values_and_gradients_stay_finite(name, kwargs, std, dtype):
    mixer = build(name, num_prefix_tokens=1, **kwargs)
    args = scaled(recorded_call(mixer, tokens(mixer)), 2, std)
    args = [a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    out, grads = run_with_gradients(mixer.op, args)
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize('name, kwargs', CASES)
def test_what_lies_in_the_padding_does_not_matter(name, kwargs, monkeypatch):
    mixer = build(name, (5, 7), num_prefix_tokens=1, **kwargs)
    x = tokens(mixer)
    torch.manual_seed(2)
    expected = mixer(x, (5, 7))
    pad = _window._pad

    def pad_with_junk(x, *args):
        return pad(x, *args) + 1e3 * (1 - pad(torch.ones_like(x), *args))

    monkeypatch.setattr(_window, '_pad', pad_with_junk)
    # a mixer with random draws in training makes the same ones again
    torch.manual_seed(2)
    torch.testing.assert_close(mixer(x, (5, 7)), expected, rtol=0, atol=0)


@pytest.mark.parametrize('name, kwargs', CASES)
def test_a_new_input_size_and_back_keeps_the_parameters_close(name, kwargs):
    mixer = build(name, (3, 3), num_prefix_tokens=1, **kwargs)
    # grown from a coarse grid, positions are as smooth as trained ones; white noise could not survive any resampling
    mixer.set_input_size((6, 6))
    before = {key: value.clone() for key, value in mixer.state_dict().items()}
    mixer.set_input_size((8, 12))
    assert mixer(tokens(mixer), (8, 12)).isfinite().all()
    mixer.set_input_size((6, 6))
    for key, value in mixer.state_dict().items():
        assert value.shape == before[key].shape
        value, old = value.flatten().double(), before[key].flatten().double()
        assert torch.nn.functional.cosine_similarity(value, old, dim=0) > 0.95, key


@pytest.mark.parametrize('name', list_mixers())
def test_an_unknown_keyword_raises(name):
    with pytest.raises(TypeError, match='windowsize'):
        create_mixer(name, DIM, HEADS, grid_size=GRID, windowsize=7)


@pytest.mark.parametrize('name', list_mixers())
def test_no_weight_decay_names_exist(name):
    kwargs = SETTINGS.get(name, [{}])[-1]
    mixer = build(name, num_prefix_tokens=1, **kwargs)
    assert mixer.no_weight_decay() <= {name for name, _ in mixer.named_parameters()}


@pytest.mark.parametrize('name', list_mixers())
def test_attention_dropout_acts_or_is_refused(name):
    if not create_mixer(name, DIM, HEADS, grid_size=GRID).attn_weights:
        with pytest.raises(ValueError, match='attn_drop'):
            create_mixer(name, DIM, HEADS, grid_size=GRID, attn_drop=0.5)
        return
    mixer = build(name, attn_drop=0.5)
    x = tokens(mixer)
    assert not torch.equal(mixer(x, GRID), mixer(x, GRID))
    mixer.eval()
    assert torch.equal(mixer(x, GRID), mixer(x, GRID))


def test_an_unknown_mixer_names_the_closest():
    with pytest.raises(ValueError, match='did you mean performer'):
        create_mixer('perfomer', DIM, HEADS, grid_size=GRID)


def test_a_taken_name_and_a_missing_specification_are_refused():
    with pytest.raises(ValueError, match='taken'):
        register_mixer('ls')(QKVMixer)
    with pytest.raises(TypeError, match='op_naive|`op`'):
        register_mixer('brand_new')(QKVMixer)


@pytest.mark.parametrize('name', ['aft_full', 'aft_local', 'softmax'])
def test_positions_refuse_another_grid(name):
    mixer = build(name, **({'rel_bias': 'table'} if name == 'softmax' else {}))
    x = torch.randn(1, 9, DIM, dtype=torch.float64)
    with pytest.raises(ValueError, match='made for a 4 x 5 grid and got 3 x 3'):
        mixer(x, (3, 3))


def qkv(N, d=8, std=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (std * torch.randn(2, 2, N, d, generator=generator, dtype=torch.float64) for _ in range(3))


def relative_error(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize('num_landmarks, grid_size', [(24, None), (99, None), (24, (4, 6)), (20, (4, 5)), (99, (1, 9))])
def test_nystrom_with_a_landmark_per_token_is_softmax(num_landmarks, grid_size):
    q, k, v = qkv(24)
    got = nystrom_attention(q, k, v, num_landmarks, num_iterations=30, scale=8**-0.5, grid_size=grid_size)
    torch.testing.assert_close(got, softmax_naive(q, k, v, 8**-0.5), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize('N', [49, 50, 196, 197, 257])
def test_nystrom_segments_are_even_and_lose_nothing(N):
    x = torch.randn(1, 1, N, 3, dtype=torch.float64)
    sizes = torch.tensor([N // 16 + (i < N % 16) for i in range(16)], dtype=torch.float64)
    total = (segment_means(x, 16) * sizes[:, None]).sum(dim=2)
    torch.testing.assert_close(total, x.sum(dim=2))


def test_nystrom_landmarks_on_the_grid_are_means_of_cells():
    grid, prefix = torch.arange(7.0 * 5).reshape(7, 5), torch.tensor([-1.0, -2.0])
    # 7 rows in 3 and 5 columns in 2, the longer ones first; the prefix tokens stay what they are
    cells = [cell.mean() for rows in grid.split([3, 2, 2]) for cell in rows.split([3, 2], dim=1)]
    got = grid_means(torch.cat([prefix, grid.flatten()])[None, None, :, None], (7, 5), 6)
    torch.testing.assert_close(got.flatten(), torch.tensor([*prefix, *cells]))


@pytest.mark.parametrize(
    'grid_size, num_landmarks, expected',
    [
        ((14, 14), 64, (8, 8)),
        ((14, 14), 65, (8, 8)),
        ((14, 14), 50, (7, 7)),
        ((56, 28), 32, (8, 4)),
        ((28, 56), 32, (4, 8)),
        ((7, 7), 64, (7, 7)),
        ((3, 100), 10, (1, 10)),
        ((13, 17), 1, (1, 1)),
    ],
)
def test_nystrom_cuts_the_grid_into_cells_that_are_nearly_square(grid_size, num_landmarks, expected):
    assert landmark_grid(grid_size, num_landmarks) == expected


def test_nystrom_landmarks_on_the_grid_hold_together_what_lies_together():
    # two halves of an image, each the same throughout: cells tell left from right, strips as wide as the image do not
    left = torch.arange(8).expand(8, 8).flatten() < 4
    q = torch.where(left[:, None], 3.0, -3.0)[None, None].double()
    v = left[None, None, :, None].double()
    expected = softmax_naive(q, q, v, 1.0)
    on_grid, segments = (nystrom_attention(q, q, v, 4, 6, 1.0, grid_size) for grid_size in ((8, 8), None))
    assert relative_error(on_grid, expected) < 1e-3
    assert relative_error(segments, expected) > 0.2


@pytest.mark.parametrize('kwargs, most', [({}, 21), ({'landmarks': 'grid'}, 20)], ids=str)
def test_nystrom_warns_where_every_token_is_a_landmark(kwargs, most):
    with pytest.warns(UserWarning, match=f'num_landmarks={most} makes each of {most} tokens a landmark'):
        build('nystrom', GRID, 1, num_landmarks=most, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        build('nystrom', GRID, 1, num_landmarks=most - 1, **kwargs)


def test_nystrom_knows_two_kinds_of_landmarks():
    with pytest.raises(ValueError, match="'segment' or 'grid', not 'pool'"):
        build('nystrom', landmarks='pool')


def test_iterative_pseudo_inverse_inverts():
    q, k, _ = qkv(16)
    a = (q @ k.mT).softmax(dim=-1)
    z = iterative_pinv(a, 30)
    torch.testing.assert_close(a @ z @ a, a, rtol=0, atol=1e-9)


def test_performer_error_falls_towards_softmax_as_features_grow():
    q, k, v = qkv(32, std=0.5)
    expected = softmax_naive(q, k, v, 8**-0.5)
    errors = []
    for num_features in (32, 512, 8192):
        runs = []
        for seed in range(4):
            features = orthogonal_features(num_features, 8, torch.Generator().manual_seed(seed)).double()
            runs.append(relative_error(performer_attention(q, k, v, features, 8**-0.5), expected))
        errors.append(sum(runs) / len(runs))
    # a Monte Carlo error falls with the square root of the number of samples: 16 times more, 4 times less
    assert errors[1] < errors[0] / 2 and errors[2] < errors[1] / 2
    assert errors[2] < 0.05


def test_performer_features_are_orthogonal():
    features = orthogonal_features(20, 8, torch.Generator().manual_seed(0))
    block = torch.nn.functional.normalize(features[:8], dim=1)
    torch.testing.assert_close(block @ block.T, torch.eye(8), rtol=0, atol=1e-5)
    assert features.shape == (20, 8)


@pytest.mark.parametrize('std', [4, 8])
def test_performer_does_not_collapse_to_the_mean(std):
    q, k, v = qkv(64, std=std)
    features = orthogonal_features(64, 8, torch.Generator().manual_seed(0)).double()
    out = performer_attention(q, k, v, features, 8**-0.5)
    assert out.std(dim=2).mean() > 0.1 * v.std()


@pytest.mark.parametrize('window_size', [5, 9])
def test_long_short_with_one_window_and_rank_0_is_softmax_on_normalised_keys_and_values(window_size):
    mixer = build('ls', (5, 5), window_size=window_size, rank=0)
    x = tokens(mixer)
    q, k, v = mixer.qkv(x, (5, 5))
    k, v = mixer.norm_heads(mixer.norm_full, k), mixer.norm_heads(mixer.norm_full, v)
    expected = mixer.project(softmax_naive(q, k, v, mixer.scale))
    torch.testing.assert_close(mixer(x, (5, 5)), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    'kwargs',
    [
        {'window_size': 5},
        {'window_size': 3},
        {'window_size': 5, 'random_shift': True},
        {'window_size': 5, 'exact': True},
        {'window_size': 4, 'exact': True},
    ],
    ids=str,
)
def test_longformer_with_every_token_in_reach_is_softmax(kwargs):
    mixer = build('longformer', (4, 5), num_prefix_tokens=1, **kwargs)
    x = tokens(mixer)
    q, k, v = mixer.qkv(x, GRID)
    expected = mixer.project(softmax_naive(q, k, v, mixer.scale))
    torch.testing.assert_close(mixer(x, GRID), expected, rtol=1e-9, atol=1e-9)


def longformer_reach(grid_size, window_size, **kwargs):
    """Which grid tokens each grid token attends, (H*W, H*W)."""
    N = grid_size[0] * grid_size[1]
    q, k = torch.randn(2, 1, 1, N, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.eye(N, dtype=torch.float64)[None, None]
    return longformer_attention(q, k, weights, grid_size, window_size, 0.5, **kwargs)[0, 0] > 0


@pytest.mark.parametrize('grid_size, window_size', [((9, 8), 2), ((7, 11), 3), ((2, 13), 4), ((5, 5), 1)], ids=str)
def test_exact_windows_hold_the_tokens_within_their_size_of_the_query(grid_size, window_size):
    y, x = (place.flatten() for place in torch.meshgrid(*map(torch.arange, grid_size), indexing='ij'))
    distance = torch.maximum((y[:, None] - y).abs(), (x[:, None] - x).abs())
    assert torch.equal(longformer_reach(grid_size, window_size, exact=True), distance <= window_size)
    # the chunks reach at least as far
    assert longformer_reach(grid_size, window_size)[distance <= window_size].all()


def test_random_shift_attends_the_window_and_the_drawn_neighbour():
    full, seen = longformer_reach((7, 8), 3), torch.zeros(56, 56, dtype=torch.bool)
    row, column = torch.arange(56) // 8 // 3, torch.arange(56) % 8 // 3
    down, right = row - row[:, None], column - column[:, None]
    for neighbour in (0, 1, 2, 3, 5, 6, 7, 8):
        reach = longformer_reach((7, 8), 3, neighbour=torch.tensor(neighbour))
        there = (down == neighbour // 3 - 1) & (right == neighbour % 3 - 1)
        assert torch.equal(reach, there | (down == 0) & (right == 0))
        seen |= reach
    assert torch.equal(seen, full)


def test_every_neighbour_is_drawn_alike():
    torch.manual_seed(0)
    counts = torch.stack([draw_neighbour(torch.device('cpu')) for _ in range(1600)]).bincount(minlength=9)
    neighbours = counts[[0, 1, 2, 3, 5, 6, 7, 8]]
    assert neighbours.sum() == 1600
    # binomial with a mean of 200 and a standard deviation of 13
    assert neighbours.min() > 150 and neighbours.max() < 250


def test_random_shift_ends_with_its_steps_and_never_reaches_evaluation():
    mixer = build('longformer', (5, 7), 1, window_size=2, random_shift=True, shift_steps=3)
    full = build('longformer', (5, 7), 1, window_size=2)
    x = tokens(mixer)
    for step in range(5):
        mixer.set_step(step)
        assert torch.equal(mixer.train()(x, (5, 7)), full(x, (5, 7))) == (step >= 3)
        assert torch.equal(mixer.eval()(x, (5, 7)), full(x, (5, 7)))


def test_random_shift_without_an_end_goes_on():
    mixer = build('longformer', (5, 7), window_size=2, random_shift=True)
    mixer.set_step(10**6)
    assert mixer.random_shift


def test_global_projections_that_equal_the_others_change_nothing():
    mixer, shared = (build('longformer', GRID, 2, window_size=2, global_proj=own) for own in (True, False))
    state = {name: value.clone() for name, value in shared.state_dict().items()}
    for kind in ('weight', 'bias'):
        state[f'q_global.{kind}'], state[f'kv_global.{kind}'] = state[f'qkv.{kind}'].split([DIM, 2 * DIM])
        state[f'proj_global.{kind}'] = state[f'proj.{kind}']
    mixer.load_state_dict(state)
    x = tokens(mixer)
    torch.testing.assert_close(mixer(x, GRID), shared(x, GRID), rtol=1e-12, atol=1e-12)
    # and they reach no token of the grid
    with torch.no_grad():
        for name in ('q_global', 'kv_global', 'proj_global'):
            getattr(mixer, name).weight.add_(1)
    torch.testing.assert_close(mixer(x, GRID)[:, 2:], shared(x, GRID)[:, 2:], rtol=1e-12, atol=1e-12)
    assert (mixer(x, GRID)[:, :2] - shared(x, GRID)[:, :2]).abs().min() > 1e-6


def test_without_prefix_tokens_there_are_no_global_projections():
    assert not [name for name, _ in build('longformer', global_proj=True).named_parameters() if 'global' in name]


@pytest.mark.parametrize(
    'kwargs, message',
    [
        ({'random_shift': True, 'exact': True}, 'choose one'),
        ({'shift_steps': 5}, 'random_shift=True'),
        ({'window_size': 0}, 'at least 1, not 0'),
    ],
)
def test_longformer_refuses_what_has_no_meaning(kwargs, message):
    with pytest.raises(ValueError, match=message):
        build('longformer', **kwargs)


@pytest.mark.parametrize('num_prefix_tokens', [0, 1])
def test_aft_conv_is_aft_full_with_the_dense_bias_of_its_kernel(num_prefix_tokens):
    mixer = build('aft_conv', (4, 5), num_prefix_tokens, kernel_size=5)
    q, k, v, kernel, _ = recorded_call(mixer, tokens(mixer))
    P, (H, W) = num_prefix_tokens, GRID
    bias = torch.zeros(HEADS, P + H * W, P + H * W, dtype=torch.float64)
    for i in range(H * W):
        for j in range(H * W):
            dy, dx = j // W - i // W + 2, j % W - i % W + 2
            if 0 <= dy < 5 and 0 <= dx < 5:
                bias[:, P + i, P + j] = kernel[:, dy, dx]
    expected = aft_full_naive(q, k, v, bias)
    torch.testing.assert_close(aft_conv(q, k, v, kernel, GRID), expected, rtol=1e-9, atol=1e-9)


def test_a_new_aft_conv_starts_without_positions():
    mixer = create_mixer('aft_conv', DIM, HEADS, grid_size=GRID)
    assert torch.equal(mixer.normalised_kernel(), torch.zeros(HEADS, 11, 11))


def test_aft_local_in_reach_of_the_whole_grid_is_aft_full():
    local = build('aft_local', (4, 5), num_prefix_tokens=1, window_size=5, bias_dim=6)
    full = build('aft_full', (4, 5), num_prefix_tokens=1, bias_dim=6)
    full.load_state_dict(local.state_dict())
    x = tokens(local)
    torch.testing.assert_close(local(x, GRID), full(x, GRID), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('name', ['aft_conv', 'aft_full', 'aft_local', 'aft_simple'])
def test_aft_is_finite_where_exp_of_the_keys_is_not(name):
    mixer = build(name, dtype=torch.float32)
    q, k, v, *rest = recorded_call(mixer, tokens(mixer, dtype=torch.float32))
    out = mixer.op(q, 100 * k / k.std(), v, *rest)
    assert out.isfinite().all() and out.std() > 0


def test_published_long_short_bias_shares_rows_and_the_clean_one_does_not():
    for window_size, rows in ((7, 253), (8, 375)):
        published = build('ls', window_size=window_size, rel_bias='nvidia').rel_bias
        clean = build('ls', window_size=window_size, rel_bias='table').rel_bias
        assert published.table.shape[0] == rows
        side = window_size + 2 * (window_size // 2)
        offsets = (window_size + side - 1) ** 2
        assert clean.table.shape[0] == offsets == clean.index.unique().numel()
        assert published.index.unique().numel() < offsets
