"""vitzoo's own models whose mixer is replaced: as if built with the new one, from the weights of the old."""

import pytest
import timm
import torch
from timm.models import save_for_hf

import vitzoo
from vitzoo.about import describe_architecture
from vitzoo.load import create_model, swap_in
from vitzoo.metrics import token_statistics
from vitzoo.mixers import mixer_class
from vitzoo.models.inherit import differing_settings

SMALL = dict(embed_dim=48, depth=2, num_heads=3, img_size=(32, 48), num_classes=5)
STAGES = dict(embed_dims=(16, 32), depths=(1, 2), num_heads=(1, 2), img_size=(64, 96), num_classes=5)
BODIES = {
    'deit': ('deit_softmax_nano', dict(SMALL, reg_tokens=1)),
    'deit rope': ('deit_softmax_nano', dict(SMALL, pos_embed='rope')),
    'aft': ('aft_softmax_nano', SMALL),
    'cvt': ('cvt_nano', STAGES),
    'vil': ('vil_nano', dict(STAGES, num_prefix_tokens=(1, 0), mixer='softmax')),
    'vil abs': ('vil_nano', dict(STAGES, num_prefix_tokens=(1, 0), mixer='softmax', pos_embed='abs')),
}
MIXERS = vitzoo.list_mixers()
# each mixer in one body; the slow test has all pairs
IN_TURN = [(list(BODIES)[i % len(BODIES)], mixer) for i, mixer in enumerate(MIXERS)]


def build(body, **kwargs):
    """A small model with no parameter or statistic left at a special value, in which a mistake could hide."""
    torch.manual_seed(0)
    name, own = BODIES[body]
    return perturb(timm.create_model(name, **{**own, **kwargs}))


def perturb(model):
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith(('running_mean', 'running_var')) or name in dict(model.named_parameters()):
                tensor.add_(0.1 * torch.rand_like(tensor))
    return model.eval()


def images(model, batch_size=2):
    size = model.patch_embed.img_size if hasattr(model, 'patch_embed') else model.img_size
    return torch.randn(batch_size, 3, *size, generator=torch.Generator().manual_seed(1))


def outputs(model, x=None):
    x = images(model) if x is None else x
    with torch.no_grad():
        return [model(x), *model.forward_intermediates(x, intermediates_only=True)]


def assert_equal(ours, theirs):
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def mixers(model):
    return [type(mixer).__name__ for mixer in model.mixers().values()]


@pytest.mark.parametrize('body', BODIES)
def test_softmax_leaves_logits_and_features_as_they_are(body):
    model = build(body)
    before, names = outputs(model), list(model.state_dict())
    assert vitzoo.swap_mixer(model, 'softmax') is model
    assert_equal(outputs(model), before)
    assert list(model.state_dict()) == names
    assert all(report.share == 1 and not report.lost for report in model.inheritance.values())


@pytest.mark.parametrize('body', [body for body in BODIES if body != 'vil'])
def test_softmax_swapped_back_in_gives_the_old_logits(body):
    model = build(body)
    before = outputs(model)
    vitzoo.swap_mixer(model, 'linear')
    assert not torch.equal(outputs(model)[0], before[0])
    assert_equal(outputs(vitzoo.swap_mixer(model, 'softmax')), before)


def test_relative_positions_of_vil_are_kept_or_reported(caplog):
    model = build('vil')
    table = model.stages[1].blocks[0].attn.rel_bias.table.detach().clone()
    attn = vitzoo.swap_mixer(model, 'swin', window_size=2).stages[1].blocks[0].attn
    # offset (1, -1) of the 4 x 6 grid, and of a window
    assert torch.equal(attn.rel_bias.table[2 * 3 + 0], table[(1 + 3) * 11 - 1 + 5])
    assert 'swin does not inherit all weights of the attention, in stages.*.blocks.*.attn.rel_bias' in caplog.text
    vitzoo.swap_mixer(model, 'linear')
    assert 'linear does not inherit all weights of the attention, in stages.*.blocks.*.attn.rel_bias' in caplog.text
    # as in every ViL with relative positions
    assert vitzoo.swap_mixer(model, 'softmax').stages[1].blocks[0].attn.rel_bias is not None


def fitting(body, mixer):
    """The body, or the same without rotary positions if the mixer does not take them."""
    return 'deit' if body == 'deit rope' and not mixer_class(mixer).has_rope else body


def swapped_and_built(body, mixer):
    """A swapped model, and the model built with this mixer with the same weights."""
    body = fitting(body, mixer)
    model = perturb(vitzoo.swap_mixer(build(body), mixer))
    # biformer has another scale of its own than the attention that it takes the place of, with heads of 16 channels
    kwargs = dict(mixer_kwargs=dict(scale=0.25)) if mixer == 'biformer' and body != 'cvt' else {}
    built = build(body, mixer=mixer, **kwargs)
    built.load_state_dict(model.state_dict(), strict=True)
    return model, built


@pytest.mark.parametrize('body, mixer', [*IN_TURN, ('deit rope', 'mala'), ('deit rope', 'rmt')])
@pytest.mark.filterwarnings('ignore:nystrom with num_landmarks')
def test_a_swapped_model_is_the_one_built_with_the_mixer(body, mixer):
    model, built = swapped_and_built(body, mixer)
    assert_equal(outputs(model), outputs(built))


@pytest.mark.slow
@pytest.mark.parametrize('body', BODIES)
@pytest.mark.filterwarnings('ignore:nystrom with num_landmarks')
def test_every_mixer_in_every_body_is_the_one_built_with_it(body):
    for mixer in MIXERS:
        model, built = swapped_and_built(body, mixer)
        for _ in range(2):
            assert_equal(outputs(model), outputs(built))
            # in double precision the order of sums does not matter
            model.double()
            logits, first = (model(x.double()) for x in (images(model), images(model)[:1]))
            torch.testing.assert_close(first, logits[:1])
            for either in (model.float(), built):
                either.set_input_size((64, 32))
        model.train()(images(model)).square().sum().backward()
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(('body', 'mixer', 'scale'), [('deit', 'biformer', 48**-0.5), ('cvt', 'biformer', 16**-0.5),
    ('cvt', 'srformer', 16**-0.5), ('cvt', 'pool', 16**-0.5), ('vil', 'srformer', 16**-0.5)])  # fmt: skip
def test_softmax_has_the_scale_of_the_queries_that_it_inherits_else_that_of_the_model(body, mixer, scale):
    model = vitzoo.swap_mixer(build(body, mixer=mixer), 'softmax')
    assert next(iter(model.mixers().values())).scale == pytest.approx(scale)


def test_a_difference_of_scale_is_reported():
    parent, model = build('deit', mixer='biformer'), build('deit')
    assert differing_settings(model, parent) == ['blocks.*.attn.scale (2): 0.25, not 0.1443']
    assert differing_settings(model, build('deit', mixer='linear')) == []


@pytest.mark.parametrize('mixer', ['softmax', 'ls', 'mhla'])
def test_a_norm_over_all_heads_is_not_taken_for_one_of_each_head(mixer, caplog):
    model = build('deit', mixer='mhla', mixer_kwargs=dict(rms_norm=True))
    vitzoo.swap_mixer(model, mixer, **(dict(rms_norm=True) if mixer == 'mhla' else {}))
    assert all(output.isfinite().all() for output in outputs(model))
    is_lost = {name.rpartition('.')[0] for name in model.inheritance[0].lost} >= {'q_norm', 'k_norm'}
    assert is_lost == (mixer != 'mhla') == ('q_norm' in caplog.text)


def swap_back(body, mixer):
    body = fitting(body, mixer)
    model = vitzoo.swap_mixer(build(body, mixer=mixer), 'softmax')
    assert set(mixers(model)) == {'Softmax'}
    ours, theirs = model.state_dict(), build(body).state_dict()
    assert all(ours[name].shape == tensor.shape for name, tensor in theirs.items())
    # that of a mixer with windows is kept
    assert all('_bias.' in name for name in ours.keys() - theirs.keys())
    assert all(output.isfinite().all() for output in outputs(model))


@pytest.mark.parametrize(
    'body, mixer',
    [
        ('aft', 'aft_conv'), ('cvt', 'srformer'), ('cvt', 'swin'), ('deit', 'pool'), ('vil', 'synthesizer'),
        ('vil', 'vssd'),
    ],
)  # fmt: skip
def test_a_model_built_with_a_mixer_of_other_weights_is_swapped(body, mixer):
    swap_back(body, mixer)


@pytest.mark.slow
@pytest.mark.parametrize('body', BODIES)
@pytest.mark.filterwarnings('ignore:nystrom with num_landmarks')
def test_a_model_built_with_any_mixer_is_swapped(body):
    for mixer in MIXERS:
        swap_back(body, mixer)


def test_a_mixer_without_rotary_positions_is_told_so(caplog):
    model = vitzoo.swap_mixer(build('deit rope'), 'pool', blocks=[1])
    assert 'the rotary positions of the model are lost in 1 blocks, and it does not have a position' in caplog.text
    assert all(output.isfinite().all() for output in outputs(model))


@pytest.mark.parametrize(
    'body',
    ['cvt', 'vil abs', *(pytest.param(body, marks=pytest.mark.slow) for body in ('deit', 'deit rope', 'aft', 'vil'))],
)
def test_a_swapped_model_is_saved_and_loaded_at_every_size(body, tmp_path):
    model = vitzoo.swap_mixer(build(body), 'performer', blocks=[1], num_features=8)
    vitzoo.swap_mixer(model, ['linformer'], blocks=[0], rank=3)
    save_for_hf(perturb(model), str(tmp_path), safe_serialization=True)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    assert type(loaded) is type(model) and mixers(loaded) == mixers(model)
    assert_equal(outputs(loaded), outputs(model))
    model.set_input_size((64, 32))
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, img_size=(64, 32)).eval()
    assert_equal(outputs(loaded), outputs(model))
    save_for_hf(model, str(tmp_path / 'resized'), safe_serialization=True)
    assert_equal(
        outputs(timm.create_model(f'local-dir:{tmp_path / "resized"}', pretrained=True).eval()), outputs(model)
    )
    kwargs = dict(features_only=True, out_indices=[0, 1], img_size=(64, 32))
    features = timm.create_model(f'local-dir:{tmp_path}', pretrained=True, **kwargs).eval()
    with torch.no_grad():
        assert_equal(features(images(model)), outputs(model)[1:])
    grey = create_model(str(tmp_path), pretrained=True, in_chans=1, model_kwargs=dict(num_classes=0)).eval()
    assert grey(torch.zeros(1, 1, *images(grey).shape[2:])).shape == (1, grey.num_features)


def test_the_name_of_the_model_remains_in_its_description(tmp_path):
    model = build('vil')
    assert swap_in('vil_nano', model, 'ls:0,softmax:2', {}) == 'ls in block 0, softmax in block 2'
    config = dict(architecture=model.pretrained_cfg['architecture'], model_args=model._model_args)
    assert describe_architecture(config) == 'vil_nano with ls in block 0, softmax in block 2'
    config = dict(architecture='cvt_nano', model_args=dict(mixer='performer'))
    assert describe_architecture(config) == 'cvt_nano with performer'
    config['model_args'] = dict(mixer=['ls', 'ls', 'softmax'])
    assert describe_architecture(config) == 'cvt_nano with ls, ls, softmax in its stages'
    assert len(token_statistics(model, [images(model)])['blocks']) == 3


@pytest.mark.parametrize('body', ['deit rope', 'cvt'])
def test_gradients_are_the_same_with_checkpointing(body):
    model = vitzoo.swap_mixer(build(body), 'ls', blocks=[1])
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(images(model)).square().mean().backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*gradients)
    assert {f'{path}.norm_full.weight' for path in model.mixers()} <= set(dict(model.named_parameters()))
