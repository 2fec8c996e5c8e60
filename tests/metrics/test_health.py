"""Error of mixers that approximate softmax attention, and their signs of failure."""

import json

import pytest
import timm
import torch
from classifiers import make_ten_images
from helpers import mixers_of_ours
from torch.utils.data import DataLoader, TensorDataset

import vitzoo
from vitzoo.errors import UserError, run_command
from vitzoo.metrics import HealthProbe, evaluate, health
from vitzoo.mixers import QKVMixer, mixer_class
from vitzoo.mixers.softmax import softmax_naive
from vitzoo.validate.command import validate
from vitzoo.validate.results import print_health

DIM, HEADS, GRID = 16, 2, (4, 6)
N = GRID[0] * GRID[1]
# in these limits a mixer is the attention that it approximates
EXACT = {
    'bigbird': {'block_size': 3},
    'local': {'block_size': 6},
    'longformer': {'window_size': 3},
    'nystrom': {'num_landmarks': N, 'num_iterations': 40},
    'reformer': {'bucket_size': N},
    'routing': {'num_clusters': 1},
    'sparse': {'stride': N},
}
APPROXIMATE = {**EXACT, 'monarch': {}, 'performer': {}, 'rfa': {}}


def build(name, num_prefix_tokens=0, **kwargs):
    torch.manual_seed(0)
    kwargs = {'dtype': torch.float64, **kwargs}
    return vitzoo.create_mixer(name, DIM, HEADS, grid_size=GRID, num_prefix_tokens=num_prefix_tokens, **kwargs).eval()


def qkv(mixer, std=1.0, batch_size=3):
    """Queries, keys and values of each standard deviation 1, the queries and keys times `std`."""
    generator = torch.Generator().manual_seed(1)
    shape = (batch_size, HEADS, mixer.num_prefix_tokens + N, DIM // HEADS)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return std * q, std * k[..., : 0 if type(mixer).__name__ == 'Reformer' else None], v


def signs(mixer, std=1.0):
    with torch.no_grad():
        return {sign: value.mean().item() for sign, value in mixer.health(*qkv(mixer, std), GRID).items()}


def test_mixers_that_approximate_softmax_attention_say_so():
    assert [name for name in mixers_of_ours() if build(name).approximates_softmax] == sorted(APPROXIMATE)


@pytest.mark.parametrize('num_prefix_tokens', [0, 1])
@pytest.mark.parametrize('name', EXACT)
def test_the_error_is_zero_where_the_mixer_is_exact(name, num_prefix_tokens):
    mixer = build(name, num_prefix_tokens, **EXACT[name])
    if name == 'nystrom':
        mixer.num_landmarks += num_prefix_tokens
    assert signs(mixer)['softmax_error'] < 1e-6


@pytest.mark.parametrize(
    'name, kwargs',
    [
        ('bigbird', {'block_size': 1, 'num_global_blocks': 0, 'num_random_blocks': 0}),
        ('local', {'block_size': 1, 'memory_halo': 0}),
        ('longformer', {'window_size': 1}),
        ('longformer', {'window_size': 1, 'exact': True}),
        ('nystrom', {'num_landmarks': 2}),
        ('nystrom', {'num_landmarks': 2, 'landmarks': 'grid'}),
        ('reformer', {'bucket_size': 1, 'num_hashes': 1}),
        ('routing', {'num_clusters': 12}),
        ('sparse', {'stride': 2}),
    ],
)
def test_the_error_is_large_where_most_is_left_out(name, kwargs):
    assert signs(build(name, **kwargs))['softmax_error'] > 0.3


def test_the_error_is_that_of_the_formula_for_each_sample():
    mixer = build('nystrom', num_landmarks=5)
    q, k, v = qkv(mixer)
    with torch.no_grad():
        mixed, exact = mixer.mix(q, k, v, GRID), softmax_naive(q, k, v, mixer.scale)
        errors = mixer.health(q, k, v, GRID)['softmax_error']
    expected = [(a - b).norm() / b.norm() for a, b in zip(mixed, exact)]
    torch.testing.assert_close(errors, torch.stack(expected), rtol=1e-12, atol=0)


@pytest.mark.parametrize('name', ['performer', 'rfa'])
def test_the_error_falls_as_features_grow(name):
    errors = [signs(build(name, num_features=m), std=0.5)['softmax_error'] for m in (32, 512, 8192)]
    assert errors[1] < errors[0] / 2 and errors[2] < errors[1] / 2


@pytest.mark.parametrize('sigma', [0.3, 2.0])
def test_rfa_is_compared_with_the_kernel_it_estimates(sigma):
    mixer = build('rfa')
    torch.nn.init.uniform_(mixer.sigma, sigma, 2 * sigma)
    q, k, v = qkv(mixer)
    scaled = [mixer.sigma[:, None] * torch.nn.functional.normalize(x, dim=-1) for x in (q, k)]
    scores = -torch.cdist(*scaled).square() / 2
    expected = scores.softmax(dim=-1) @ v
    torch.testing.assert_close(mixer.softmax_target(q, k, v), expected, rtol=1e-9, atol=1e-9)


def test_performers_features_sink_to_the_floor_as_queries_and_keys_grow():
    mixer = build('performer', num_features=64)
    shares = [signs(mixer, std)['features_at_floor'] for std in (0.1, 1, 4, 100)]
    assert shares[0] == 0 and shares[3] > 0.95
    assert shares == sorted(shares)


def test_a_feature_that_carries_nothing_is_at_the_floor():
    mixer = build('performer', num_features=4)
    # for the query (s, 0, ...) a feature w weighs exp(s w_0), if all keys are zero
    mixer.features = torch.eye(8, dtype=torch.float64)[[0, 0, 1, 1]] * torch.tensor([[1.0], [0.5], [1.0], [-1.0]])
    q = torch.zeros(1, HEADS, N, 8, dtype=torch.float64)
    q[..., 0] = 15 / mixer.scale**0.5
    share = mixer.health(q, torch.zeros_like(q), q, GRID)['features_at_floor']
    # exp(-7.5) is above 1e-4 and exp(-15) is below
    torch.testing.assert_close(share, torch.tensor([0.5], dtype=torch.float64))


def test_a_probe_without_images_says_so():
    model = timm.create_model('deit_performer_nano', img_size=32)
    with HealthProbe(model) as probe, pytest.raises(UserError, match='the model has seen no images'):
        probe.report()


def test_rfas_normalizers_reach_the_floor_where_the_kernel_is_narrow():
    mixer = build('rfa', num_features=8)
    wide = signs(mixer)['normalizers_at_floor']
    torch.nn.init.constant_(mixer.sigma, 6.0)
    assert wide == 0 < signs(mixer)['normalizers_at_floor'] < 1


@pytest.mark.parametrize('landmarks', ['segment', 'grid'])
def test_the_pseudo_inverse_converges_with_its_iterations(landmarks):
    mixers = [build('nystrom', num_landmarks=8, num_iterations=i, landmarks=landmarks) for i in (1, 6, 30)]
    residuals = [signs(mixer)['pinv_residual'] for mixer in mixers]
    assert residuals[0] > residuals[1] > residuals[2] and residuals[2] < 1e-6


@pytest.mark.parametrize(
    'name, kwargs',
    [
        *[(name, {}) for name in ('hydra', 'linear', 'ls', 'softmax', 'set')],
        ('performer', {'kernel': 'relu'}),
        ('rfa', {'gate': True}),
        ('longformer', {'rel_bias': 'table'}),
        ('longformer', {'global_proj': True, 'num_prefix_tokens': 1}),
    ],
)
def test_other_mixers_do_not_pretend(name, kwargs):
    mixer = build(name, **kwargs)
    assert not mixer.approximates_softmax
    with pytest.raises(ValueError, match=f'{type(mixer).__name__} .* does not approximate'):
        mixer.health(*qkv(mixer), GRID)


def test_only_mixers_with_queries_keys_and_values_can_be_compared():
    for name in vitzoo.list_mixers():
        assert issubclass(mixer_class(name), QKVMixer) or not mixer_class(name).approximates_softmax


def model(name='deit_nystrom_tiny', **kwargs):
    torch.manual_seed(0)
    small = dict(img_size=64, embed_dim=24, num_heads=2, depth=2, num_classes=5)
    return timm.create_model(name, **{**small, **kwargs}).eval()


def images(batch_size=7, size=64):
    return torch.randn(batch_size, 3, size, size, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize('name', ['deit_nystrom_tiny', 'deit_performer_tiny', 'deit_rfa_tiny', 'deit_reformer_tiny'])
def test_health_is_that_of_the_mixers_inputs_in_every_block(name):
    net = model(name)
    inputs = []
    for block in net.blocks:
        block.attn.register_forward_pre_hook(lambda mixer, args: inputs.append(args))
    report = health(net.train(), images())
    assert net.training
    assert list(report) == ['blocks.0.attn', 'blocks.1.attn']
    net.eval()
    with torch.no_grad():
        for block, (x, grid_size), values in zip(net.blocks, inputs, report.values()):
            expected = block.attn.health(*block.attn.to_qkv(x, grid_size), grid_size)
            assert values == pytest.approx({sign: value.mean().item() for sign, value in expected.items()})
            assert all(0 <= value < 10 for value in values.values())


@pytest.mark.parametrize('batch_size', [1, 2, 3])
def test_health_streams_and_does_not_depend_on_the_batch_size(batch_size):
    net = model('vil_performer_tiny', embed_dims=(16, 24, 24, 32), num_heads=(1, 2, 2, 2), depths=(1, 1, 1, 1),
                embed_dim=None, depth=None)  # fmt: skip
    expected = health(net, images())
    # stages 3 and 4 have softmax attention
    assert [name.split('.')[1] for name in expected] == ['0', '1']
    with torch.no_grad(), HealthProbe(net) as probe:
        for batch in images().split(batch_size):
            net(batch)
    report = probe.report()
    for name, values in expected.items():
        assert report[name] == pytest.approx(values, rel=1e-5)
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_evaluation_measures_the_health_of_each_image_once():
    net = model()
    dataset = TensorDataset(images(5), torch.arange(5))
    with HealthProbe(net) as probe:
        loader = DataLoader(dataset, 2, sampler=[0, 1, 2, 3, 4, 4, 4])
        report = probe.report(evaluate(net, loader, probe=probe)['health'])
    expected = health(net, dataset.tensors[0])
    assert {name: pytest.approx(values, rel=1e-5) for name, values in expected.items()} == report


def test_a_mixer_in_half_precision_is_compared_with_exact_attention():
    mixer = build('nystrom', dtype=torch.float32, **EXACT['nystrom'])
    q, k, v = (x.bfloat16() for x in qkv(mixer))
    error = mixer.health(q, k, v, GRID)['softmax_error']
    assert error.dtype == torch.float32
    # bfloat16 has 8 bits
    assert (error > 1e-4).all() and (error < 1e-2).all()


def test_a_model_without_approximations_says_so():
    with pytest.raises(UserError, match='no mixer of this DeiT approximates'):
        HealthProbe(model('deit_softmax_tiny'))


def test_validation_reports_the_health_of_approximating_models(tmp_path, capsys, quick_timing):
    names, data = ['deit_nystrom_tiny', 'deit_softmax_tiny'], make_ten_images(tmp_path)
    save = ['--data-dir', str(data), '--results-file', str(tmp_path / 'results.json')]
    shared = ['--img-size', '32', '--num-classes', '3', '--random-weights', '--workers', '0']
    records = validate([*names, *shared, *save, '--health'])
    captured = capsys.readouterr()
    assert list(records[0]['health']) == [f'blocks.{i}.attn' for i in range(12)]
    assert records[1]['health'] is None
    assert json.loads((tmp_path / 'results.json').read_text())[0]['health'] == records[0]['health']
    assert 'health of deit_nystrom_tiny' in captured.out and 'pinv residual' in captured.out
    assert 'vitzoo: deit_softmax_tiny: no health to report' in captured.err


def test_health_needs_images(capsys):
    with pytest.raises(SystemExit):
        run_command(validate, ['deit_nystrom_tiny', '--no-data', '--health'])
    assert '--health needs images: drop --no-data' in capsys.readouterr().err


def test_the_table_has_a_column_for_every_sign(capsys):
    mixed = {'a': {'softmax_error': 0.25}, 'b': {'softmax_error': 1.5, 'pinv_residual': 0.5}}
    print_health([{'model': 'mine', 'health': mixed}, {'model': 'other', 'health': None}])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[1] == ['mixer', 'softmax', 'error', 'pinv', 'residual']
    assert lines[2:] == [['a', '0.250', '–'], ['b', '1.500', '0.500']]
