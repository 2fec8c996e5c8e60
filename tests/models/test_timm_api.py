"""timm's API beyond logits: tracing, compiling, exporting, features, saved folders and distributed training."""

import pytest
import timm
import torch
from helpers import COMBINATIONS, GRID, SETTINGS, SMALL, SMALLEST, images, one_in, tokens
from helpers import build as build_mixer
from helpers import build_model as build
from processes import start_processes
from timm.layers import set_fused_attn
from timm.models import save_for_hf
from timm.models._features_fx import create_feature_extractor, get_graph_node_names
from timm.utils import AttentionExtract
from torch._dynamo.testing import CompileCounter

import vitzoo
from vitzoo.export.formats import trace
from vitzoo.mixers.base import named_mixers

slow = pytest.mark.slow
# each mixer in one block, alternating between backbones, because compiling and exporting take seconds per block
TWO_STAGES = dict(embed_dims=(16, 24), num_heads=(1, 2), depths=(1, 1), num_prefix_tokens=(1, 0))
ONE_BLOCK = [
    (f'deit_{mixer}_tiny', dict(depth=1))
    if i % 2 == 0
    else (f'vil_{mixer}_tiny', dict(mixer=(mixer, 'softmax'), **TWO_STAGES))
    for i, mixer in enumerate(vitzoo.list_mixers())
]
# options that take another path through a mixer
OPTIONS = [
    ('deit_nystrom_tiny', dict(depth=1, mixer_kwargs={'num_landmarks': 5, 'landmarks': 'grid'})),
    ('cvt_longformer_13', dict(mixer_kwargs={'window_size': 3, 'exact': True, 'global_proj': True})),
]


@pytest.fixture
def unfused():
    """Form the weights of softmax attention."""
    set_fused_attn(False)
    yield
    set_fused_attn(True)


@pytest.mark.parametrize(
    'backbone, options',
    [
        *(('cvt', {}), ('cvt', {'talking_heads': True})),
        *(
            ('deit', {}),
            ('deit', {'talking_heads': True}),
            ('deit', {'rel_bias': 'table'}),
            ('deit', {'qk_norm': True}),
        ),
    ],
)
def test_timm_extracts_the_weights_of_softmax_attention(backbone, options, unfused):
    model = build(f'{backbone}_softmax_{SMALLEST[backbone]}', mixer_kwargs=options)
    found = AttentionExtract(model, method='hook')(images())
    mixers = dict(named_mixers(model))
    assert [name.removesuffix('.attn_drop') for name in found] == list(mixers)
    for weights, mixer in zip(found.values(), mixers.values(), strict=True):
        assert weights.shape[:2] == (2, mixer.num_heads)
        if mixer.token_weights:
            torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1]))


def test_timm_extracts_the_same_weights_before_and_after_a_swap(unfused):
    model, x = timm.create_model('vit_tiny_patch16_224', img_size=64, depth=2, embed_dim=24, num_heads=2), images()
    before = AttentionExtract(model, method='hook')(x)
    after = AttentionExtract(vitzoo.swap_mixer(model, 'softmax'), method='hook')(x)
    assert list(before) == list(after) and len(before) == 2
    for name in before:
        torch.testing.assert_close(after[name], before[name])


@pytest.mark.parametrize('name', one_in(3, COMBINATIONS))
def test_a_traced_model_gives_the_same_logits(name):
    model, x = build(name), images()
    last = get_graph_node_names(model)[1][-1]
    traced = create_feature_extractor(model, [last])
    with torch.no_grad():
        assert torch.equal(traced(x)[last], model(x))


@pytest.mark.parametrize('name', COMBINATIONS)
def test_features_only_gives_maps_of_the_promised_sizes(name):
    backbone = name.split('_')[0]
    depth = {'depth': 3} if backbone in ('aft', 'deit') else {}
    model = timm.create_model(name, features_only=True, img_size=64, **{**SMALL[backbone], **depth}).eval()
    with torch.no_grad():
        maps = model(images())
    sizes = [(2, info['num_chs'], 64 // info['reduction'], 64 // info['reduction']) for info in model.feature_info]
    assert [tuple(image.shape) for image in maps] == sizes
    assert len(maps) == 3 + (backbone == 'vil')


@pytest.mark.parametrize('name', COMBINATIONS)
def test_a_saved_model_loads_as_it_was_also_after_a_change_of_size(name, tmp_path):
    model, x = build(name), images(64, 96)
    model.set_input_size((64, 96))
    save_for_hf(model, tmp_path, safe_serialization=True)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize('name, pool', [('deit_ls_tiny', 'max'), ('deit_ls_tiny', 'avg'), ('aft_conv_tiny', 'max')])
def test_a_model_with_another_pooling_is_saved(name, pool, tmp_path):
    model, x = build(name), images()
    model.reset_classifier(3, pool)
    save_for_hf(model, tmp_path, safe_serialization=True)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    assert loaded.global_pool == pool
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize('name', ['cvt_ls_13', 'vil_ls_tiny', 'deit_performer_tiny', 'aft_conv_tiny'])
@pytest.mark.parametrize('in_chans', [1, 4])
def test_pretrained_weights_adapt_to_other_channels_and_classes(name, in_chans, tmp_path):
    parent = build(name)
    save_for_hf(parent, tmp_path, safe_serialization=True)
    model = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, in_chans=in_chans, num_classes=7).eval()
    assert model(images(in_chans=in_chans)).shape == (2, 7)
    body = {key: t for key, t in parent.state_dict().items() if not key.startswith('head') and 'proj.weight' not in key}
    own = model.state_dict()
    assert all(torch.equal(own[key], tensor) for key, tensor in body.items())


def compilable(name, *kwargs, **options):
    # torch 2.6 itself can neither compile nor export a real FFT of a dynamic batch
    fails = any(mixer in name for mixer in ('circulant', 'fourier')) and torch.__version__.startswith('2.6')
    xfail = pytest.mark.xfail(fails, reason='torch 2.6 compiles and exports no real FFT')
    return pytest.param(name, *kwargs, marks=[xfail, *options.get('marks', [])])


def assert_compiles_once(module, batch):
    """Check that there is no graph break, and that the size of the last batch does not compile again."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    with torch.no_grad():
        # torch compiles again for convolutions of fewer than 16 images, and heads may be images of their own
        torch.testing.assert_close(compiled(*batch(8)), module(*batch(8)))
        compiled(*batch(7))
        # the second batch size made the batch dimension dynamic
        frames = counter.frame_count
        compiled(*batch(6))
    assert counter.frame_count == frames <= 2


@pytest.mark.parametrize('mixer', one_in(10, map(compilable, vitzoo.list_mixers())))
def test_a_compiled_mixer_has_no_graph_break_and_stays_compiled_on_the_last_batch(mixer):
    kwargs = SETTINGS.get(mixer, [{}])[0]
    module = build_mixer(mixer, num_prefix_tokens=1, dtype=torch.float32, **kwargs).eval()
    assert_compiles_once(module, lambda B: (tokens(module, B, dtype=torch.float32), GRID))


@pytest.mark.parametrize('name, kwargs', [compilable(*case, marks=[slow]) for case in ONE_BLOCK + OPTIONS])
def test_a_compiled_model_has_no_graph_break_and_stays_compiled_on_the_last_batch(name, kwargs):
    assert_compiles_once(build(name, **kwargs), lambda B: (images(batch_size=B),))


@pytest.mark.parametrize(
    'name',
    ['aft_linear_tiny', 'deit_softmax_tiny', *(pytest.param(n, marks=slow) for n in ('cvt_ls_13', 'vil_ls_tiny'))],
)
def test_every_backbone_compiles_without_a_graph_break(name):
    assert_compiles_once(build(name), lambda B: (images(batch_size=B),))


def test_a_random_shift_compiles_to_one_graph_for_all_neighbours():
    torch._dynamo.reset()
    counter = CompileCounter()
    model = build('deit_longformer_tiny', mixer_kwargs={'window_size': 2, 'random_shift': True}).train()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    logits = torch.stack([compiled(images()) for _ in range(6)])
    assert counter.frame_count == 1
    assert not torch.equal(logits[0].expand_as(logits), logits)


@pytest.mark.parametrize('mixer', one_in(12, map(compilable, vitzoo.list_mixers())))
def test_an_exported_mixer_takes_any_batch_size(mixer):
    module = build_mixer(mixer, num_prefix_tokens=1, dtype=torch.float32, **SETTINGS.get(mixer, [{}])[0]).eval()
    x = [tokens(module, B, dtype=torch.float32) for B in (2, 3)]
    sizes = ({0: torch.export.Dim('batch', max=2**31 - 1)}, (None, None))
    with torch.no_grad():
        program = torch.export.export(module, (x[0], GRID), dynamic_shapes=sizes, strict=False)
        torch.testing.assert_close(program.module()(x[1], GRID), module(x[1], GRID))


@slow
@pytest.mark.parametrize('name, kwargs', [compilable(*case) for case in ONE_BLOCK + OPTIONS])
def test_an_exported_program_gives_the_same_logits_for_any_batch_size(name, kwargs):
    model, x = build(name, **kwargs), images(batch_size=3)
    program = trace(model, images())
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.parametrize('name', ['cvt_ls_13', 'vil_ls_tiny', 'deit_ls_tiny', 'aft_ls_tiny'])
def test_pruned_models_keep_the_features_they_are_pruned_to(name):
    model, x = build(name), images()
    with torch.no_grad():
        expected = model.forward_intermediates(x, indices=[1], intermediates_only=True)[0]
        assert model.prune_intermediate_layers(1 if len(model.feature_info) == 2 else [1]) == [1]
        torch.testing.assert_close(model.forward_intermediates(x, indices=[1], intermediates_only=True)[0], expected)


@pytest.mark.parametrize('name', ['cvt_ls_13', 'vil_ls_tiny', 'deit_ls_tiny'])
def test_stopping_after_the_last_features_leaves_the_final_ones_as_they_are(name):
    model, x = build(name), images()
    with torch.no_grad():
        final, maps = model.forward_intermediates(x, stop_early=True)
        torch.testing.assert_close(final, model.forward_features(x))
        # after an earlier stage there are no final ones
        _, earlier = model.forward_intermediates(x, indices=[0], stop_early=True)
    assert torch.equal(earlier[0], maps[0])


PRETRAINED = timm.list_pretrained('cvt_*') + timm.list_pretrained('vil_*')
# weights that are shipped are files, and have tests of their own
DOWNLOADED = [name for name in PRETRAINED if not timm.get_pretrained_cfg(name).file]


@pytest.mark.parametrize('name', DOWNLOADED)
def test_published_weights_say_where_they_come_from_and_how_they_are_tested(name):
    config = timm.get_pretrained_cfg(name)
    assert (config.hf_hub_id or config.url) and config.origin_url and config.paper_ids and config.license == 'mit'
    assert config.input_size[-1] == (384 if '384' in name else 224)
    assert config.first_conv and config.classifier == 'head' and config.interpolation == 'bicubic'


def test_pretrained_never_means_random(monkeypatch):
    with pytest.raises(RuntimeError, match='No pretrained weights'):
        timm.create_model('deit_ls_tiny', pretrained=True)

    def no_answer(url, *args, **kwargs):
        raise OSError('no answer')

    monkeypatch.setattr('vitzoo.models._register.download_url_to_file', no_answer)
    with pytest.raises(OSError, match=r'vil_tiny\.msft_in1k\.pth, and run: vitzoo convert') as error:
        timm.create_model('vil_tiny', pretrained=True, cache_dir='/nonexistent')
    assert 'penzhanwu2.blob' in str(error.value)


def _checkpointed_step(folder):
    """One step of a checkpointed model under DDP on one's share of a batch; rank 0 keeps the gradients."""
    torch.distributed.init_process_group('gloo')
    rank = torch.distributed.get_rank()
    model = build('cvt_ls_13').train()
    model.set_grad_checkpointing()
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    x = images(batch_size=4)[2 * rank : 2 * rank + 2]
    for _ in range(2):
        # a second step fails where the first left parameters unused or marked them ready twice
        model.zero_grad()
        parallel(x).square().mean().backward()
    if rank == 0:
        torch.save({name: p.grad for name, p in model.named_parameters()}, f'{folder}/grads.pt')
    torch.distributed.destroy_process_group()


def test_gradient_checkpointing_works_under_ddp_without_unused_parameters(tmp_path):
    outcome = start_processes(2, _checkpointed_step, str(tmp_path))
    assert outcome.codes == [0, 0], outcome.err
    grads = torch.load(tmp_path / 'grads.pt')
    model = build('cvt_ls_13').train()
    x = images(batch_size=4)
    # each process has batch statistics of its own, so the mean over processes is that over their shares
    for _ in range(2):
        model.zero_grad()
        (sum(model(part).square().mean() for part in x.split(2)) / 2).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-4, atol=1e-6)
