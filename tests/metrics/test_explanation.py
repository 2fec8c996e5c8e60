"""Saliency maps, for every backbone and mixer, and of models with a known explanation."""

import pytest
import timm
import torch
from helpers import COMBINATIONS, images
from helpers import build_model as build
from torch import nn

import vitzoo
from vitzoo.errors import UserError
from vitzoo.metrics._attention import attention_weights
from vitzoo.metrics.explanation import explain, gradcam, gradient, rollout
from vitzoo.models.deit import DeiT

DISTILLED = 'deit_tiny_distilled_patch16_224'
TIMM = ('test_resnet', 'test_efficientnet', 'test_vit', 'test_convnext')


@pytest.mark.parametrize('name', COMBINATIONS)
def test_every_model_has_a_map_of_each_image(name):
    # in double precision, because stretching the range of a nearly even map stretches what rounding did
    model, x = build(name).double(), images().double()
    for method in ('gradient', 'gradcam'):
        maps, used = explain(model, x, method)
        assert maps.shape == (2, 64, 64)
        assert maps.isfinite().all() and maps.min() == 0 and maps.max() == 1
        assert maps.std(dim=(1, 2)).min() > 0.01
        assert used == method
        torch.testing.assert_close(explain(model, x[1:], method)[0], maps[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', TIMM)
@pytest.mark.parametrize('size', [(64, 64), (96, 64)])
def test_models_of_timm_have_maps(name, size):
    model = timm.create_model(name, **(dict(img_size=size) if 'vit' in name else {})).eval()
    maps, used = explain(model, torch.randn(2, 3, *size))
    assert maps.shape == (2, *size) and maps.isfinite().all() and maps.max() == 1
    assert used == ('gradient' if 'vit' in name else 'gradcam')


@pytest.mark.parametrize('method', ('auto', 'gradient', 'gradcam'))
def test_a_class_token_that_is_appended_has_no_place_in_the_map(method):
    torch.manual_seed(1)
    model = timm.create_model('volo_d1_224', img_size=64, num_classes=5).eval()
    maps, _ = explain(model, torch.randn(2, 3, 64, 64), method)
    assert maps.shape == (2, 64, 64) and maps.isfinite().all() and maps.max() == 1


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('coat_lite_tiny', 'cannot read the tokens of CoaT: it does not call its blocks serial_blocks1'),
        ('crossvit_tiny_240', 'the tokens of CrossVit: blocks.0 does not return a single feature map'),
        ('selecsls42', 'the tokens of SelecSls: .* does not return a single feature map'),
    ],
)
@pytest.mark.parametrize('method', ('auto', 'gradient'))
def test_a_model_without_a_single_row_of_blocks_is_named(name, message, method):
    model = timm.create_model(name).eval()
    with pytest.raises(UserError, match=message):
        explain(model, torch.randn(1, *model.pretrained_cfg['input_size']), method)


def test_a_map_of_a_pyramid_lies_on_its_last_grid_or_its_finest():
    assert gradcam(build('cvt_ls_13'), images(64, 96)).shape == (2, 4, 6)
    model = build('vil_tiny', img_size=(64, 96))
    assert gradcam(model, images(64, 96)).shape == rollout(model, images(64, 96)).shape == (2, 2, 3)
    assert gradient(model, images(64, 96)).shape == (2, 16, 24)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_the_map_of_a_single_token_is_zero(dtype):
    torch.manual_seed(0)
    model = timm.create_model('test_resnet', num_classes=5).eval().to(dtype)
    # so that no value is below 0, which would be 0 in the map
    model.get_classifier().weight.data.abs_()
    x = torch.randn(4, 3, 32, 32).to(dtype)
    assert gradcam(model, x).shape == (4, 1, 1) and gradcam(model, x).min() > 0
    # resizing it would leave rounding errors, which are not to be rescaled
    assert not explain(model, x)[0].any()


def test_explaining_leaves_the_model_as_it_was():
    model = build('deit_softmax_tiny').requires_grad_(False)
    for method in ('rollout', 'gradient', 'gradcam'):
        maps, _ = explain(model, images(), method)
        assert not maps.requires_grad
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_map_of_a_linear_head_on_pooled_features_is_its_weighted_sum():
    torch.manual_seed(0)
    model = timm.create_model('test_resnet', num_classes=5).eval()
    x, target = torch.randn(2, 3, 96, 64), torch.tensor([3, 1])
    with torch.no_grad():
        features = model.forward_features(x)  # (2, C, h, w)
    expected = torch.einsum('bc,bchw->bhw', model.fc.weight[target].detach(), features).relu()
    expected = expected / features.shape[2:].numel()
    torch.testing.assert_close(gradcam(model, x, target), expected)
    assert not torch.allclose(gradcam(model, x, 4 - target), expected)


@pytest.mark.parametrize('method', (gradient, gradcam))
def test_the_likeliest_class_is_explained_unless_another_is_asked_for(method):
    model, x = build('aft_conv_tiny'), images()
    top = model(x).argmax(dim=1)
    torch.testing.assert_close(method(model, x), method(model, x, top))
    assert not torch.allclose(method(model, x), method(model, x, (top + 1) % 5))


def test_without_a_gradient_of_the_features_the_last_mixer_is_explained():
    model, x, target = build('deit_softmax_tiny'), images(), torch.tensor([2, 0])
    tokens, grid = model.embed(x)
    tokens, block = model.blocks[0](tokens, grid).detach(), model.blocks[1]
    entered = block.norm1(tokens).detach().requires_grad_()
    out = tokens + block.attn(entered, grid)
    score = model.head(model.norm(out + block.mlp(block.norm2(out)))[:, 0]).gather(1, target[:, None]).sum()
    (derivative,) = torch.autograd.grad(score, entered)
    weights = derivative[:, 1:].mean(dim=1, keepdim=True)
    expected = (weights * entered.detach()[:, 1:]).sum(dim=-1).relu().unflatten(1, grid)
    torch.testing.assert_close(gradcam(model, x, target), expected)


def test_gradients_are_the_effect_of_a_token_beyond_the_mean_token():
    """By finite differences: each token that enters a mixer, or the head, is moved a little towards the mean token."""
    model, x, target = build('aft_conv_tiny').double(), images(32, 32, batch_size=1).double(), torch.tensor([2])
    step, expected = 1e-6, torch.zeros(4, dtype=torch.float64)

    def move(place):
        def hook(module, args):
            tokens = args[0].clone()
            tokens[:, place] += step * (tokens.mean(dim=1) - tokens[:, place])
            return (tokens, *args[1:])

        return hook

    with torch.no_grad():
        logit = model(x)[0, target]
        for module in (*(block.attn for block in model.blocks), model.norm):
            for place in range(4):
                handle = module.register_forward_pre_hook(move(place))
                expected[place] += ((model(x)[0, target] - logit) / step).abs().item()
                handle.remove()
    torch.testing.assert_close(gradient(model, x, target).flatten(), expected, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize(
    'name', ('deit_softmax_tiny', 'deit_performer_tiny', 'aft_linear_tiny', 'vil_tiny', 'test_vit', DISTILLED)
)
def test_rollout_is_the_row_of_the_product_of_all_weights(name):
    torch.manual_seed(0)
    if name in ('test_vit', DISTILLED):
        model = timm.create_model(name, img_size=64, depth=3).eval()
        # the weights of untrained layers are almost even
        for block in model.blocks:
            nn.init.normal_(block.attn.qkv.weight)
    else:
        model = build(name) if 'vil' in name else build(name, depth=3)
    stage = model.stages[-1] if name == 'vil_tiny' else model
    x, calls = images(), []
    hooks = [block.attn.register_forward_pre_hook(lambda *call: calls.append(call)) for block in stage.blocks]
    with torch.no_grad():
        model(x)
        product = torch.eye(calls[0][1][0].shape[1])
        for attn, args in calls:
            product = (attention_weights(attn, *args).dense().mean(dim=1) + torch.eye(len(product[-1]))) / 2 @ product
    for hook in hooks:
        hook.remove()
    # the prediction of a distilled model is the mean of those of two tokens
    read = product[:, : 2 if name == DISTILLED else 1] if model.global_pool == 'token' else product
    row = read.mean(dim=1)
    found = rollout(model, x)
    torch.testing.assert_close(found.flatten(1), row[:, model.num_prefix_tokens :])
    if not model.num_prefix_tokens:
        torch.testing.assert_close(found.sum(dim=(1, 2)), torch.ones(2))


@pytest.mark.parametrize('name', ('deit_softmax_tiny', 'test_vit', DISTILLED))
def test_the_map_of_a_rollout_in_bfloat16_is_that_in_float32(name):
    torch.manual_seed(0)
    model = build(name, depth=3) if 'softmax' in name else timm.create_model(name, img_size=64).eval()
    expected, _ = explain(model, images(), 'rollout')
    with torch.autocast('cpu', torch.bfloat16):
        found, _ = explain(model, images(), 'rollout')
    torch.testing.assert_close(found, expected, rtol=0, atol=0.05)


@pytest.mark.parametrize('name', ('deit_hydra_tiny', 'cvt_softmax_13', 'test_resnet'))
def test_rollout_needs_weights_between_all_tokens(name):
    model = timm.create_model(name).eval() if name == 'test_resnet' else build(name)
    with pytest.raises(UserError, match='in its last stage has no attention weights'):
        explain(model, images(), 'rollout')


PATCH = (2, 1)


def see_red(mixer: str, global_pool: str) -> tuple[nn.Module, torch.Tensor]:
    """A model whose first channels are the colour of a patch, that answers by red alone, and an image with one red."""
    torch.manual_seed(0)
    model = DeiT(
        32, 8, num_classes=2, embed_dim=8, depth=1, num_heads=1, mixer=mixer,
        class_token=global_pool == 'token', pos_embed='none', global_pool=global_pool,
    ).eval()  # fmt: skip
    for name, parameter in model.named_parameters():
        if 'norm' not in name:
            nn.init.zeros_(parameter)
    for channel in range(3):
        model.patch_embed.proj.weight.data[channel, channel] = 1 / 64
    model.head.weight.data[1, 0] = 1
    image = torch.rand(1, 3, 32, 32)
    y, x = (8 * place for place in PATCH)
    image[:, 0] = 0
    image[:, 0, y : y + 8, x : x + 8] = 2
    return model, image


def assert_the_patch_is_hot(heat: torch.Tensor) -> None:
    (heat,) = heat
    assert divmod(int(heat.argmax()), 4) == PATCH
    assert heat[PATCH] > 5 * heat.flatten().sort().values[-2]


# pooling mixes tokens whatever its weights are, and a Fourier transform all of them
@pytest.mark.parametrize('mixer', [name for name in vitzoo.list_mixers() if name not in ('pool', 'fourier')])
@pytest.mark.parametrize('method', (gradient, gradcam))
def test_the_patch_that_decides_is_highlighted(mixer, method):
    model, image = see_red(mixer, 'avg')
    assert_the_patch_is_hot(method(model, image, torch.tensor([1])))


@pytest.mark.parametrize('mixer', ('softmax', 'longformer', 'local', 'sparse', 'bigbird', 'sinkhorn'))
@pytest.mark.parametrize('method', (rollout, gradient, gradcam))
def test_the_patch_that_the_class_token_attends_is_highlighted(mixer, method):
    model, image = see_red(mixer, 'token')
    attn = model.blocks[0].attn
    # all queries ask for red, and the values carry it to the class token
    attn.qkv.bias.data[0] = 5
    attn.qkv.weight.data[8, 0] = attn.qkv.weight.data[16, 0] = attn.proj.weight.data[0, 0] = 1
    assert_the_patch_is_hot(method(model, image, *([] if method is rollout else [torch.tensor([1])])))
