"""Creating models by name, and the messages for wrong arguments."""

import json

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models import save_for_hf

from vitzoo.about import read_img_size
from vitzoo.classes import class_names
from vitzoo.errors import UserError
from vitzoo.load import create_model, find_model, fit_data_config, load_model, load_weights


@pytest.mark.parametrize('img_size', [48, [48, 32]])
def test_an_image_size_goes_to_the_models_that_take_one(img_size):
    size = (48, 48) if img_size == 48 else (48, 32)
    assert create_model('test_vit', img_size=img_size).patch_embed.img_size == size
    assert create_model('aft_conv_tiny', img_size=img_size, depth=1).patch_embed.img_size == size
    assert create_model('test_resnet', img_size=img_size, num_classes=3).num_classes == 3


def test_arguments_of_the_user_override_the_others():
    model = create_model('test_vit', model_kwargs={'num_classes': 5}, num_classes=3)
    assert model.num_classes == 5


def test_a_folder_is_created_with_its_own_arguments_and_weights(tmp_path):
    model = timm.create_model('deit_ls_tiny', depth=1, img_size=32, num_classes=3)
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    loaded = create_model(str(tmp_path), pretrained=True)
    assert torch.equal(loaded.head.weight, model.head.weight) and len(loaded.blocks) == 1


def test_a_folder_with_another_number_of_classes_has_no_names_of_them(tmp_path):
    model = timm.create_model('deit_ls_tiny', depth=1, img_size=32, num_classes=3)
    save_for_hf(model, str(tmp_path), model_config=dict(label_names=['a', 'b', 'c']), safe_serialization=True)
    file = str(tmp_path / 'model.safetensors')
    for options in [{}, dict(num_classes=3), dict(checkpoint=file), dict(num_classes=3, checkpoint=file)]:
        assert class_names(load_model(str(tmp_path), **options).model) == ['a', 'b', 'c']
    assert class_names(load_model(str(tmp_path), num_classes=4).model) == ['0', '1', '2', '3']


@pytest.mark.parametrize(
    ('name', 'kwargs', 'message'),
    [
        ('test_vit', dict(model_kwargs={'dept': 3}), "test_vit has no argument 'dept', did you mean depth"),
        ('test_resnet', dict(model_kwargs={'img_size': 32}), "test_resnet has no argument 'img_size'"),
        ('test_resnet', dict(img_size=32, model_kwargs={'dept': 3}), "test_resnet has no argument 'dept'"),
        ('deit_ls_tiny', dict(img_size=8), 'deit_ls_tiny cannot be made with img_size=8: .*smaller than a patch'),
        ('deit_ls_tiny', dict(model_kwargs={'mixer': 'lss'}), 'deit_ls_tiny cannot be made with mixer=lss: .*mean ls'),
        ('test_vit', dict(model_kwargs={'depth': 'two'}), 'test_vit cannot be made with depth=two'),
    ],
)
def test_a_wrong_argument_is_named(name, kwargs, message):
    with pytest.raises(UserError, match=message):
        create_model(name, **kwargs)


def to_official(swin):
    """The weights of a Swin with two stages by their official names."""
    pairs = ('head.fc.', 'head.'), ('layers.1.downsample', 'layers.0.downsample')
    return {key.replace(*pairs[0]).replace(*pairs[1]): value for key, value in swin.items()}


@pytest.mark.parametrize(
    ('name', 'kwargs'),
    [
        ('test_vit', {}),
        ('test_convnext', {}),
        ('deit_softmax_nano', {}),
        ('deit_tiny_distilled_patch16_224', dict(depth=1)),
        ('vit_small_patch14_dinov2', dict(depth=1, img_size=56)),
        ('swin_tiny_patch4_window7_224', dict(depths=(1, 1), num_heads=(1, 2), embed_dim=24)),
    ],
)
def test_a_checkpoint_of_other_classes_names_the_option_that_loads_it(name, kwargs, tmp_path):
    model = timm.create_model(name, num_classes=4, **kwargs)
    file = str(tmp_path / 'own.safetensors')
    save_file(to_official(model.state_dict()) if name.startswith('swin') else model.state_dict(), file)
    classes = timm.create_model(name, **kwargs).num_classes
    with pytest.raises(UserError, match=f'has 4 classes, and the model {classes}; add --num-classes 4$'):
        load_model(name, checkpoint=file, model_kwargs=kwargs)
    found = load_model(name, checkpoint=file, num_classes=4, model_kwargs=kwargs).model.state_dict()
    assert all(torch.equal(found[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize('name', ['test_vit', 'test_convnext'])
def test_a_file_of_a_run_has_the_image_size_of_the_run(name, tmp_path):
    kwargs = {} if name == 'test_convnext' else dict(img_size=96)
    model = timm.create_model(name, num_classes=4, **kwargs)
    model.pretrained_cfg['input_size'] = (3, 96, 96)
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    file = str(tmp_path / 'model.safetensors')
    loaded = load_model(name, checkpoint=file, num_classes=4).model
    assert fit_data_config(name, loaded)['input_size'] == (3, 96, 96)
    x = torch.randn(1, 3, 96, 96)
    assert torch.equal(loaded(x), model.eval()(x))
    other = load_model(name, checkpoint=file, num_classes=4, img_size=(64, 64)).model
    assert fit_data_config(name, other, (64, 64))['input_size'] == (3, 64, 64)


@pytest.mark.parametrize('averaged', ['state_dict_ema', 'model_ema'])
def test_averaged_weights_are_taken_with_a_note(averaged, tmp_path, capsys):
    plain, mean = (timm.create_model('test_vit', num_classes=4).state_dict() for _ in range(2))
    file = str(tmp_path / 'own.pth')
    for sets in (dict(state_dict=plain), {averaged: mean}, {'state_dict': plain, averaged: mean}):
        torch.save(dict(sets, epoch=3), file)
        head = load_model('test_vit', checkpoint=file, num_classes=4).model.head
        assert torch.equal(head.weight, sets.get(averaged, plain)['head.weight'])
        noted = capsys.readouterr().err
        assert (f'{file} has EMA weights and raw weights; using the EMA weights' in noted) == (len(sets) == 2)


def test_a_checkpoint_of_another_model_with_other_classes_is_not_told_about_these(tmp_path):
    file = str(tmp_path / 'own.safetensors')
    save_file(timm.create_model('test_vit', num_classes=4, depth=1).state_dict(), file)
    with pytest.raises(UserError, match=r'does not fit .* missing .*head.weight \(\(4, 64\), not \(1000, 64\)\)'):
        load_model('test_vit', checkpoint=file, model_kwargs=dict(depth=2))


@pytest.mark.parametrize('config', [{'model_type': 'vit'}, {'pretrained_cfg': {}, 'num_classes': 3}])
@pytest.mark.parametrize('source', ['', 'local-dir:'])
def test_a_folder_of_another_library_is_refused(config, source, tmp_path):
    (tmp_path / 'config.json').write_text(json.dumps(config))
    with pytest.raises(UserError, match="does not name an 'architecture' of timm"):
        create_model(f'{source}{tmp_path}')


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (b'{', 'is not JSON'),
        (b'', 'is not JSON'),
        (b'\xef\xbb\xbf{}', 'is not JSON'),
        (b'{"a": "\xff"}', 'is not JSON'),
        (b'[1]', 'does not describe a model'),
    ],
)
def test_a_damaged_config_is_one_sentence(content, message, tmp_path):
    (tmp_path / 'config.json').write_bytes(content)
    for find in (find_model, lambda name: read_img_size(f'{name}/model.safetensors')):
        with pytest.raises(UserError, match=f"^'{tmp_path}/config.json' {message}"):
            find(str(tmp_path))


def test_weights_of_a_folder_that_cannot_be_read_are_not_fetched(tmp_path):
    save_for_hf(timm.create_model('deit_ls_tiny', depth=1, img_size=32), str(tmp_path), safe_serialization=True)
    (tmp_path / 'model.safetensors').unlink()
    (tmp_path / 'model.safetensors').mkdir()
    with pytest.raises(UserError, match=f'cannot read the weights in {tmp_path} .* their permissions'):
        create_model(str(tmp_path), pretrained=True)


@pytest.mark.parametrize('size', [0, 100, -100])
def test_truncated_weights_of_a_folder_are_reported(size, tmp_path):
    model = timm.create_model('deit_ls_tiny', depth=1, img_size=32, num_classes=3)
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    file = tmp_path / 'model.safetensors'
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(UserError, match=f'the weights of {tmp_path} are damaged'):
        create_model(str(tmp_path), pretrained=True)


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('local-dir:', 'give local-dir:FOLDER'),
        ('hf-hub:', 'give hf-hub:ORG/NAME'),
        ('hf-hub:me/a/b', 'give hf-hub:ORG/NAME'),
        ('hf-hub:me/photos--v2', "without '--'"),
        ('hf-hub:me/a..b@v2', "without '--'"),
        ('hf-hub:me/photos@', 'does not name one revision'),
        ('hf-hub:me/photos@a@b', 'does not name one revision'),
    ],
)
def test_a_malformed_source_is_one_sentence(name, message):
    with pytest.raises(UserError, match=f"^'{name}' .*{message}"):
        find_model(name)


@pytest.mark.parametrize('name', ['hf-hub:me/photos', 'hf-hub:me/photos@v2', 'hf-hub:gpt2', 'local-dir:my photos'])
def test_a_source_is_its_own_name(name):
    assert find_model(name) == name


def test_weights_that_cannot_be_fetched_are_reported(monkeypatch):
    def no_answer(*args, **kwargs):
        raise OSError('no answer')

    monkeypatch.setattr('vitzoo.models._register.download_url_to_file', no_answer)
    with pytest.raises(
        UserError,
        match=r'cannot fetch the weights of vil_tiny .*no answer.*`vitzoo convert FILE --model vil_tiny --out DIR`',
    ):
        create_model('vil_tiny', pretrained=True, cache_dir='/nonexistent')


def test_a_checkpoint_that_cannot_be_converted_names_the_reason(tmp_path, monkeypatch):
    file = tmp_path / 'model.safetensors'
    save_file({'other': torch.zeros(1)}, file)
    monkeypatch.setattr('vitzoo.load.find_filter', lambda model: lambda state_dict, model: state_dict['absent'])
    with pytest.raises(UserError, match=r"1 unexpected \(other\); converting .* fails with KeyError\('absent'\)"):
        load_weights(timm.create_model('test_vit'), str(file))
