"""Official checkpoints and the weights of other models, as folders that timm loads."""

import argparse
import copy
import errno
import json
import os
import pickle
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import timm
import torch
from helpers import golden, one_in
from safetensors.torch import save_file
from timm.models import save_for_hf

import vitzoo
from vitzoo.about import read_about
from vitzoo.convert import convert, main
from vitzoo.convert.official import load_official, trace_names
from vitzoo.errors import UserError
from vitzoo.load import find_filter
from vitzoo.models import cvt, vil
from vitzoo.models._official import read_checkpoint, unwrap
from vitzoo.models.inherit import summarize_names

VIL = ['num_classes=10', 'embed_dims=[16,32,64,96]']
CVT = ['num_classes=10', 'img_size=64', 'embed_dims=[16,32,64]', 'num_heads=[1,2,4]', 'depths=[1,2,3]']
HEADS, DEPTHS = 'num_heads=[1,2,4,4]', 'depths=[1,1,1,1]'
# the name whose arguments, but for those given, are those of the golden file
GOLDEN = {
    'vil_ls_w7_r4_112': (
        'vil_ls_medium.nvidia_in1k',
        [*VIL, 'img_size=112', HEADS, 'depths=[1,2,2,1]', 'mixer_kwargs={window_size: 7, rank: 4}'],
    ),
    'vil_ls_w8_r2_128': (
        'vil_ls_medium_384.nvidia_in1k',
        [*VIL, 'img_size=128', 'num_heads=[2,2,4,4]', DEPTHS, 'mixer_kwargs={rank: 2}'],
    ),
    'vil_rpe_112': ('vil_small', [*VIL, 'img_size=112', HEADS, 'depths=[1,2,2,1]']),
    'vil_rpe_padded_160': ('vil_small', [*VIL, 'img_size=160', HEADS, DEPTHS]),
    'vil_ape_112': ('vil_small_abs', [*VIL, 'img_size=112', HEADS, DEPTHS]),
    'vil_linformer_112': (
        'vil_small_abs',
        [*VIL, 'img_size=112', HEADS, DEPTHS, 'mixer=linformer', 'mixer_kwargs={rank: 16, share_kv: true}'],
    ),
    'vil_srformer_partial_112': (
        'vil_small_abs',
        [
            *VIL,
            'img_size=112',
            HEADS,
            DEPTHS,
            'mixer=[srformer,srformer,softmax,softmax]',
            'mixer_kwargs=[{sr_ratio: 4, norm: instance}, {sr_ratio: 2, norm: instance}, {}, {}]',
        ],
    ),
    'cvt_64': ('cvt_13.msft_in1k', CVT),
    'cvt_64_transformers': ('cvt_13.msft_in1k', CVT),
}
SMALL = {
    'cvt': dict(img_size=64, embed_dims=(16, 24, 32), num_heads=(1, 2, 2), depths=(1, 1, 1)),
    'deit': dict(img_size=64, embed_dim=24, num_heads=2, depth=2),
    'vil': dict(img_size=64, embed_dims=(16, 24, 24, 32), num_heads=(1, 2, 2, 2), depths=(1, 1, 1, 1)),
}
PARENTS = {'cvt': 'cvt_13', 'deit': 'deit_tiny_patch16_224', 'vil': 'vil_tiny'}
CHILDREN = {'cvt': 'cvt_{}_13', 'deit': 'deit_{}_tiny', 'vil': 'vil_{}_tiny'}


def official_layout(weights):
    """A checkpoint as the training scripts of ViL and DeiT save it."""
    return {
        'net': {f'module.{name}': tensor for name, tensor in weights.items()},
        'args': argparse.Namespace(lr=1e-3, output='run', sizes=[1, 2]),
        'best': np.float64(81.5),
        'history': np.arange(3),
        'optim': {'state': {}, 'param_groups': [{'lr': 0.1}]},
        'epoch': 299,
    }


def small(name, seed=0, **kwargs):
    torch.manual_seed(seed)
    return timm.create_model(
        name, **{**SMALL.get(name.split('_')[0], SMALL['deit']), 'num_classes': 5, **kwargs}
    ).eval()


def folder_of(model, folder):
    """A folder as training writes it."""
    save_for_hf(model, str(folder), safe_serialization=True, data_config=dict(img_size=64))
    return str(folder)


def words(kwargs):
    """Keyword arguments as they stand behind --model-kwargs."""
    return [f'{key}={list(value) if isinstance(value, tuple) else value}' for key, value in kwargs.items()]


def loaded(folder):
    return timm.create_model(f'local-dir:{folder}', pretrained=True).eval()


def fails(capsys, *argv):
    """The sentence with which the command fails."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in argv])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith('vitzoo: error: ') and error.count('\n') == 1
    return error


@pytest.mark.parametrize('name', GOLDEN)
def test_an_official_checkpoint_becomes_a_folder_with_the_official_logits(name, tmp_path, capsys):
    recorded = golden(name)
    weights = {key.removeprefix('state.'): t for key, t in recorded.items() if key.startswith('state.')}
    model, kwargs = GOLDEN[name]
    # transformers' files are bare state dicts
    file = tmp_path / ('pytorch_model.bin' if 'transformers' in name else 'model_best.pth')
    torch.save(weights if 'transformers' in name else official_layout(weights), file)
    convert([str(file), '--model', model, '--model-kwargs', *kwargs, '--out', str(tmp_path / 'out')])
    with torch.no_grad():
        logits = loaded(tmp_path / 'out')(recorded['input'] / 127.5 - 1)
    expected = recorded['logits_official' if 'logits_official' in recorded else 'logits']
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    said = capsys.readouterr().out
    assert f'of {len(weights)} tensors to' in said and 'missing none' in said


def test_the_config_has_the_data_config_of_the_tag_and_the_bias_index(tmp_path):
    recorded = golden('vil_ls_w7_r4_112')
    file = tmp_path / 'model_best.pth'
    torch.save({key.removeprefix('state.'): t for key, t in recorded.items() if key.startswith('state.')}, file)
    model, kwargs = GOLDEN['vil_ls_w7_r4_112']
    convert([str(file), '--model', model, '--model-kwargs', *kwargs, '--out', str(tmp_path / 'out')])
    config = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert config['architecture'] == 'vil_ls_medium'
    assert config['model_args']['mixer_kwargs'] == {'window_size': 7, 'rank': 4, 'rel_bias': 'nvidia'}
    own = timm.models.get_pretrained_cfg('vil_ls_medium.nvidia_in1k')
    assert (config['pretrained_cfg']['license'], config['pretrained_cfg']['tag']) == ('mit', 'nvidia_in1k')
    assert tuple(config['pretrained_cfg']['mean']) == own.mean
    assert config['pretrained_cfg']['input_size'] == [3, 112, 112]


@pytest.mark.parametrize('kwargs, index', [({}, 'table'), ({'mixer_kwargs': {'rel_bias': 'none'}}, 'none')])
def test_the_config_of_a_name_with_the_clean_index_says_so_too(kwargs, index, tmp_path):
    model = small('vil_ls_small', **kwargs)
    save_file(model.state_dict(), tmp_path / 'model.safetensors')
    argv = ['--model', 'vil_ls_small', '--model-kwargs', *words({**SMALL['vil'], 'num_classes': 5, **kwargs})]
    convert([str(tmp_path / 'model.safetensors'), *argv, '--out', str(tmp_path / 'out')])
    config = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert config['model_args']['mixer_kwargs'] == {'rel_bias': index}
    x = torch.ones(1, 3, 64, 64)
    assert torch.equal(loaded(tmp_path / 'out')(x), model(x))


def test_a_timm_checkpoint_is_converted_too(tmp_path):
    model = small('deit_tiny_patch16_224')
    torch.save({'model': model.state_dict(), 'args': argparse.Namespace()}, tmp_path / 'deit.pth')
    kwargs = words({**SMALL['deit'], 'num_classes': 5})
    argv = ['--model', 'deit_softmax_tiny', '--model-kwargs', *kwargs, '--out', str(tmp_path / 'out')]
    convert([str(tmp_path / 'deit.pth'), *argv])
    x = torch.ones(1, 3, 64, 64)
    assert torch.equal(loaded(tmp_path / 'out')(x), model(x))


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f'touch {self.marker}',)


@pytest.mark.parametrize('zipped', [True, False], ids=['zip', 'legacy'])
@pytest.mark.parametrize('option', ['file', '--checkpoint'])
def test_a_hostile_pickle_is_refused_and_runs_nothing(option, zipped, tmp_path, capsys):
    marker, file = tmp_path / 'ran', tmp_path / 'model_best.pth'
    torch.save({'net': Hostile(marker)}, file, _use_new_zipfile_serialization=zipped)
    argv = [file, '--model', 'cvt_13'] if option == 'file' else ['--from', 'cvt_13', '--to', 'cvt_ls_13', option, file]
    error = fails(capsys, *argv, '--out', tmp_path / 'out')
    assert 'asks for posix.system, which could run code' in error
    assert not marker.exists() and not (tmp_path / 'out').exists()
    # the file is a working exploit
    if zipped:
        torch.load(file, weights_only=False)
        assert marker.exists()


def test_pickles_of_numpy_1_and_2_are_read(tmp_path):
    content = official_layout({'weight': torch.ones(2)})
    new, old = tmp_path / 'new.pth', tmp_path / 'old.pth'
    torch.save(content, new, _use_new_zipfile_serialization=False)
    cores = [b'numpy._core.multiarray', b'numpy.core.multiarray']
    text = new.read_bytes()
    written = cores[0] if cores[0] in text else cores[1]
    assert written in text
    old.write_bytes(text.replace(written, cores[1 - cores.index(written)]))
    for path in (new, old):
        checkpoint = read_checkpoint(path)
        assert checkpoint['best'] == 81.5 and checkpoint['args'].lr == 1e-3
        assert checkpoint['history'].tolist() == [0, 1, 2]


def test_pickles_of_paths_are_read(tmp_path):
    args = argparse.Namespace(output_dir=Path('out'))
    torch.save({'model': {'weight': torch.ones(2)}, 'args': args}, tmp_path / 'a.pth')
    assert read_checkpoint(tmp_path / 'a.pth')['args'] == args
    # Python 3.13 writes another module, and reads both
    torch.save({'args': args}, tmp_path / 'b.pth', _use_new_zipfile_serialization=False)
    text = (tmp_path / 'b.pth').read_bytes()
    for module in (b'cpathlib\n', b'cpathlib._local\n'):
        written = re.sub(rb'cpathlib(\._local)?\n', module, text)
        assert module in written
        (tmp_path / 'b.pth').write_bytes(written)
        assert read_checkpoint(tmp_path / 'b.pth')['args'].output_dir == Path('out')


WEIGHTS = {'norm.weight': torch.ones(2)}


@pytest.mark.parametrize(
    'checkpoint',
    [
        {'model_state_dict': WEIGHTS, 'epoch': 3},
        {'module': WEIGHTS},
        {'state_dict': {'model.norm.weight': torch.ones(2), 'criterion.weight': torch.ones(3)}},
        {
            'student': {'backbone.norm.weight': torch.zeros(2)},
            'teacher': {'module.backbone.norm.weight': torch.ones(2)},
        },
        {'backbone.norm.weight': torch.ones(2), 'head.mlp.0.weight': torch.ones(2)},
        {'state_dict': {'model._orig_mod.backbone.norm.weight': torch.ones(2)}},
        {'state_dict': WEIGHTS, 'teacher': {'other.weight': torch.ones(2)}},
        {'model': WEIGHTS, 'teacher': {'name': 'vit'}},
        {**WEIGHTS, 'params': {'lr': 1.0}, 'module': {}},
        {'model': {'name': 'vit'}, 'weights': WEIGHTS},
    ],
    ids=[
        *('tutorial', 'DeepSpeed', 'Lightning', 'DINO', 'head', 'compiled', 'distilled', 'name', 'settings', 'config'),
    ],
)
def test_weights_are_found_in_the_checkpoints_of_other_trainers(checkpoint):
    found = unwrap(checkpoint)
    assert found.keys() == WEIGHTS.keys() and torch.equal(found['norm.weight'], WEIGHTS['norm.weight'])


def test_a_linear_head_next_to_a_backbone_is_its_head():
    head = {f'head.{name}': torch.ones(2) for name in ('weight', 'bias')}
    assert unwrap({'backbone.norm.weight': torch.ones(2), **head}).keys() == {'norm.weight', *head}


def test_the_names_of_a_model_that_has_other_parts_keep_their_prefix():
    weights = {'backbone.norm.weight': torch.ones(2), 'neck.weight': torch.ones(2)}
    assert unwrap(weights).keys() == weights.keys()


def test_files_in_other_formats_are_named(tmp_path):
    np.savez(tmp_path / 'a.npz', x=np.zeros(2))
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / 'a.pt')
    (tmp_path / 'model.safetensors.index.json').write_text('{}')
    for name, message in (('a.npz', 'of NumPy'), ('a.pt', 'TorchScript'), ('model.safetensors.index.json', 'a list')):
        with pytest.raises(UserError, match=message):
            read_checkpoint(tmp_path / name)


def test_reading_leaves_no_global_allowed(tmp_path):
    before = set(torch.serialization.get_safe_globals())
    torch.save(official_layout({}), tmp_path / 'a.pth')
    read_checkpoint(tmp_path / 'a.pth')
    assert set(torch.serialization.get_safe_globals()) == before
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / 'a.pth', weights_only=True)


@pytest.mark.parametrize(
    'content, message',
    [
        (None, 'is not a file'),
        (b'', 'damaged'),
        (b'not a checkpoint', 'damaged'),
        ([1, 2], 'holds a list'),
    ],
)
@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
def test_a_file_that_is_no_checkpoint_is_refused(content, message, suffix, tmp_path):
    file = tmp_path / f'file{suffix}'
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
        message = 'damaged' if suffix == '.safetensors' else message
    with pytest.raises(UserError, match=message):
        read_checkpoint(file)


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
def test_a_checkpoint_that_may_not_be_read_is_not_called_damaged(suffix, tmp_path, monkeypatch):
    file = tmp_path / f'file{suffix}'
    file.write_bytes(b'')
    # root may read any file
    monkeypatch.setattr(Path, 'open', Mock(side_effect=PermissionError(errno.EACCES, 'Permission denied', str(file))))
    with pytest.raises(PermissionError):
        read_checkpoint(file)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, capsys):
    file, kwargs = tmp_path / 'a.pth', ['--model-kwargs', *words(SMALL['deit'])]
    out = tmp_path / 'out'
    weights = small('deit_tiny_patch16_224').state_dict()
    torch.save(weights, file)
    error = fails(capsys, file, '--model', 'deit_performer_tiny', *kwargs, 'num_classes=5', '--out', out)
    assert '2 of 34 tensors without a value: blocks.*.attn.features (2)' in error and '--from' in error
    error = fails(capsys, file, '--model', 'deit_softmax_tiny', *kwargs, 'num_classes=7', '--out', out)
    assert 'has 5 classes, and deit_softmax_tiny 7; add --model-kwargs num_classes=5' in error
    error = fails(capsys, file, '--model', 'deit_softmax_tiny', *kwargs, 'num_classes=5', 'mlp_ratio=2', '--out', out)
    assert 'blocks.0.mlp.fc1.weight is (96, 24), not (48, 24)' in error
    torch.save({'vit.encoder.norm': torch.ones(2)}, tmp_path / 'other.pth')
    error = fails(capsys, tmp_path / 'other.pth', '--model', 'deit_softmax_tiny', '--out', out)
    assert 'has none of the' in error and 'such as cls_token; it has vit.encoder.norm' in error
    error = fails(capsys, file, '--model', 'cvt_13', '--out', out)
    assert 'without a value' in error
    weights['norm.bias'][0] = float('nan')
    torch.save(weights, file)
    error = fails(capsys, file, '--model', 'deit_softmax_tiny', *kwargs, 'num_classes=5', '--out', out)
    assert 'not finite' in error
    assert not out.exists()


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        (dict(init_values=0.1), r'blocks.0.ls1.gamma.*add --model-kwargs init_values=1e-5'),
        (dict(qk_norm=True), r'blocks.0.attn.q_norm.weight.*add --model-kwargs qk_norm=True'),
        (
            dict(depth=2),
            r'has 12 tensors that .* lacks: blocks.1.*add --model-kwargs depth=2, or name the model that it is of',
        ),
    ],
)
@pytest.mark.parametrize('command', ['convert', 'swap'])
def test_weights_that_the_model_would_compute_without_are_refused(kwargs, message, command, tmp_path, capsys):
    file, name, small_vit = tmp_path / 'a.pth', 'vit_tiny_patch16_224', {**SMALL['deit'], 'depth': 1, 'num_classes': 5}
    torch.save(timm.create_model(name, **{**small_vit, **kwargs}).state_dict(), file)
    words_of_model = ['--model-kwargs', *words(small_vit), '--out', tmp_path / 'out']
    argv = [file, '--model', name] if command == 'convert' else ['--from', name, '--checkpoint', file, '--swap', 'ls']
    assert re.search(message, fails(capsys, *argv, *words_of_model))
    assert not (tmp_path / 'out').exists()


def test_weights_that_the_model_does_not_need_are_dropped(tmp_path):
    model = timm.create_model('test_vit_relpos')
    weights = {**dict(model.named_buffers()), **model.state_dict(), 'decoder_embed.weight': torch.ones(2, 2)}
    assert weights.keys() > model.state_dict().keys() | {'decoder_embed.weight'}
    torch.save({**weights, 'mask_token': torch.ones(1, 1, 2)}, tmp_path / 'a.pth')
    convert([str(tmp_path / 'a.pth'), '--model', 'test_vit_relpos', '--out', str(tmp_path / 'out')])
    assert loaded(tmp_path / 'out').state_dict().keys() == model.state_dict().keys()


def test_wrong_arguments_are_one_sentence(tmp_path, capsys):
    file, out = tmp_path / 'a.pth', tmp_path / 'out'
    torch.save({}, file)
    assert 'did you mean cvt_13' in fails(capsys, file, '--model', 'cvt_133', '--out', out)
    assert 'stands for' in fails(capsys, file, '--model', 'cvt_*', '--out', out)
    assert 'no_such' in fails(capsys, file, '--model', 'cvt_13', '--model-kwargs', 'no_such=1', '--out', out)
    assert 'no published weights' in fails(capsys, '--from', 'cvt_ls_13', '--to', 'cvt_13', '--out', out)
    (out / 'config.json').parent.mkdir()
    (out / 'config.json').write_text('{}')
    assert 'already' in fails(capsys, file, '--model', 'cvt_13', '--out', out)
    usages = [[], ['a.pth'], ['a.pth', '--model', 'cvt_13', '--from', 'y'], ['--from', 'cvt_13']]
    usages += [['a.pth', '--model', 'cvt_13', *option.split()] for option in ('--random-weights', '--checkpoint a.pth')]
    usages += [['a.pth', '--model', 'cvt_13', '--model-kwargs', wrong] for wrong in ('depth', 'depth={')]
    for argv in usages:
        with pytest.raises(SystemExit) as end:
            main([*argv, '--out', 'x'])
        assert end.value.code == 2


@pytest.mark.parametrize(
    ('out', 'message'),
    [
        ('file.jpg', 'is a file; choose a folder'),
        ('file.jpg/out', 'cannot create the folder of .*: Not a directory'),
        # where not even root may create one
        ('/proc/out', 'cannot create the folder of '),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_first(out, message, tmp_path, capsys):
    (tmp_path / 'file.jpg').write_text('')
    assert re.search(message, fails(capsys, 'missing.pth', '--model', 'cvt_13', '--out', tmp_path / out))


def test_the_mapping_names_what_each_tensor_is_made_of():
    model = small('vil_tiny')
    official = {
        'layer1.0.proj.weight': torch.ones(16, 3, 4, 4),
        'layer1.1.attn.query.weight': torch.ones(16, 16),
        'layer1.1.attn.kv.weight': torch.ones(32, 16),
        'layer1.1.attn.relative_position_index': torch.ones(3, 3),
        'head.bias': torch.ones(5),
    }
    assert trace_names(vil.checkpoint_filter_fn, official, model) == {
        'stages.0.embed.proj.weight': ['layer1.0.proj.weight'],
        'stages.0.blocks.0.attn.qkv.weight': ['layer1.1.attn.query.weight', 'layer1.1.attn.kv.weight'],
        'head.bias': ['head.bias'],
    }
    bare = {'stage0.patch_embed.proj.weight': torch.ones(16, 3, 7, 7)}
    assert trace_names(cvt.checkpoint_filter_fn, bare, small('cvt_13')) == {
        'stages.0.embed.proj.weight': ['stage0.patch_embed.proj.weight']
    }


def test_a_tensor_that_the_filter_adds_up_has_all_its_sources(tmp_path):
    name, size = 'vit_small_patch14_reg4_dinov2', dict(depth=1, embed_dim=24, num_heads=2, img_size=28)
    model = timm.create_model(name, **size)
    official = dict(model.state_dict())
    official['register_tokens'] = official.pop('reg_token')
    official['mask_token'] = torch.zeros(1, 24)
    official['pos_embed'] = torch.cat([torch.ones(1, 1, 24), official['pos_embed']], dim=1)
    sources = trace_names(find_filter(model), official, model)
    assert sorted(sources['cls_token']) == ['cls_token', 'pos_embed']
    assert sources['reg_token'] == ['register_tokens']
    assert 'mask_token' not in {source for found in sources.values() for source in found}


def test_a_tensor_that_the_filter_sets_has_no_source(tmp_path, capsys):
    name, small_clip = 'vit_base_patch16_clip_quickgelu_224', dict(depth=1, embed_dim=32, num_heads=2, num_classes=8)
    model = timm.create_model(name, **small_clip)
    own = model.state_dict()
    visual = {
        'class_embedding': own['cls_token'][0, 0],
        'positional_embedding': own['pos_embed'][0],
        'proj': own['head.weight'].T,
        'conv1.weight': own['patch_embed.proj.weight'],
    }
    for official, ours in {'ln_pre': 'norm_pre', 'ln_post': 'norm'}.items():
        visual |= {f'{official}.{kind}': own[f'{ours}.{kind}'] for kind in ('weight', 'bias')}
    block = {'ln_1.': 'norm1.', 'ln_2.': 'norm2.', 'attn.in_proj_': 'attn.qkv.', 'attn.out_proj.': 'attn.proj.'}
    block |= {'mlp.c_fc.': 'mlp.fc1.', 'mlp.c_proj.': 'mlp.fc2.'}
    for official, ours in block.items():
        for kind in ('weight', 'bias'):
            visual[f'transformer.resblocks.0.{official}{kind}'] = own[f'blocks.0.{ours}{kind}']
    torch.save({f'visual.{key}': tensor.clone() for key, tensor in visual.items()}, tmp_path / 'clip.pth')
    kwargs = [f'{key}={value}' for key, value in small_clip.items()]
    convert([str(tmp_path / 'clip.pth'), '--model', name, '--model-kwargs', *kwargs, '--out', str(tmp_path / 'out')])
    assert 'mapped 20 of 20 tensors to 21' in capsys.readouterr().out
    state = loaded(tmp_path / 'out').state_dict()
    assert torch.equal(state['blocks.0.attn.qkv.weight'], own['blocks.0.attn.qkv.weight'])
    assert not state['head.bias'].any()


def test_the_layer_scales_of_deit_iii_are_renamed(tmp_path):
    small_deit = dict(depth=1, embed_dim=32, num_heads=2, num_classes=5)
    own = timm.create_model('deit3_small_patch16_224', **small_deit).state_dict()
    official = {re.sub(r'ls([12]).gamma', r'gamma_\1', name): tensor for name, tensor in own.items()}
    torch.save({'model': official}, tmp_path / 'deit3.pth')
    kwargs = [f'{key}={value}' for key, value in small_deit.items()]
    out = str(tmp_path / 'out')
    convert(
        [str(tmp_path / 'deit3.pth'), '--model', 'deit3_small_patch16_224', '--model-kwargs', *kwargs, '--out', out]
    )
    assert all(torch.equal(tensor, own[name]) for name, tensor in loaded(out).state_dict().items())


def test_long_lists_of_names_are_shortened():
    names = [f'blocks.{i}.attn.u_key' for i in range(3)] + ['head.weight']
    assert summarize_names(names) == 'blocks.*.attn.u_key (3), head.weight'
    assert summarize_names([f'{letter}.weight' for letter in 'abc'], limit=2) == 'a.weight, b.weight, …'


@pytest.mark.parametrize('mixer', one_in(2, vitzoo.list_mixers()))
@pytest.mark.parametrize('backbone', PARENTS)
def test_every_mixer_inherits_70_percent_and_lists_the_rest(backbone, mixer):
    parent, model = small(PARENTS[backbone]), small(CHILDREN[backbone].format(mixer), seed=1)
    weights, before = parent.state_dict(), {name: t.clone() for name, t in model.state_dict().items()}
    inheritance = vitzoo.inherit_weights(model, weights)
    assert inheritance.share >= 0.7
    own = model.state_dict()
    assert sorted(inheritance.copied + inheritance.fitted + inheritance.initialized) == sorted(own)
    assert all(torch.equal(own[name], weights[name]) for name in inheritance.copied)
    assert all(torch.equal(own[name], before[name]) for name in inheritance.initialized)
    # these two have layers of their own in place of the fused one
    is_split = mixer in ('srformer', 'synthesizer')
    used = {name for name in weights if '.attn.qkv.' in name and name not in own and is_split and backbone != 'cvt'}
    assert set(inheritance.dropped) == set(weights) - set(inheritance.copied) - set(inheritance.fitted) - used
    same = {name for name in own if name in weights and own[name].shape == weights[name].shape}
    assert set(inheritance.copied) == same
    assert model(torch.ones(1, 3, 64, 64)).isfinite().all()


@pytest.mark.parametrize('parent', ['deit_small_patch16_224', 'cvt_21', 'vil_small'])
def test_the_real_sizes_inherit_70_percent_too(parent):
    backbone, size = parent.split('_')[:2]
    with torch.device('meta'):
        weights = timm.create_model(parent).state_dict()
        for mixer in ('aft_conv', 'ls', 'performer'):
            model = timm.create_model(f'{backbone}_{mixer}_{size}')
            assert vitzoo.inherit_weights(model, weights).share >= 0.7


def test_a_layer_scale_of_the_parent_is_multiplied_into_the_layers_before_it():
    kwargs = {**SMALL['deit'], 'num_classes': 5}
    parent = timm.create_model('vit_tiny_patch16_224', init_values=0.5, **kwargs).eval()
    with torch.no_grad():
        for parameter in parent.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model = timm.create_model('deit_softmax_tiny', **kwargs).eval()
    inheritance = vitzoo.inherit_weights(model, parent.state_dict())
    assert inheritance.share == 1 and not inheritance.dropped and not inheritance.initialized
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(x), parent(x), rtol=1e-5, atol=1e-5)
    # a mixer with two output layers keeps it to itself
    parent, model = (vitzoo.swap_mixer(copy.deepcopy(x), 'ttt') for x in (parent, model))
    assert 'blocks.0.ls1.gamma' in vitzoo.inherit_weights(model, parent.state_dict()).dropped
    # without a projection, that of attention has no place
    model = timm.create_model('deit_pool_tiny', **kwargs)
    assert 'blocks.0.ls1.gamma' in vitzoo.inherit_weights(model, parent.state_dict()).dropped


def test_the_share_counts_parameters_of_the_parent():
    parent, model = small('deit_tiny_patch16_224', num_classes=3), small('deit_aft_conv_tiny')
    inheritance = vitzoo.inherit_weights(model, parent.state_dict())
    total = sum(parameter.numel() for parameter in parent.parameters())
    keys, head = 2 * (24 * 24 + 24), 3 * 24 + 3
    assert inheritance.share == pytest.approx((total - keys - head) / total)
    assert {'head.weight', 'head.bias'} <= set(inheritance.dropped) & set(inheritance.initialized)
    assert 'initialized 8: blocks.*.attn.kernel (2)' in str(inheritance)


def test_narrower_keys_leave_queries_and_values_inherited():
    parent, model = small('deit_tiny_patch16_224'), small('deit_aft_conv_tiny', seed=1)
    before = model.blocks[0].attn.qkv.weight.clone()
    inheritance = vitzoo.inherit_weights(model, parent.state_dict())
    old, new = parent.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight
    assert torch.equal(new[:24], old[:24]) and torch.equal(new[-24:], old[-24:])
    assert torch.equal(new[24:26], before[24:26]) and len(new) == 50
    assert 'blocks.0.attn.qkv.weight' in inheritance.fitted


@pytest.mark.parametrize('dim', [12, 48])
def test_nothing_of_a_model_of_another_width_is_inherited_but_what_fits(dim):
    parent, model = small('deit_tiny_patch16_224', embed_dim=dim), small('deit_ls_tiny')
    inheritance = vitzoo.inherit_weights(model, parent.state_dict())
    assert (inheritance.copied, inheritance.fitted) == (['head.bias'], [])
    assert inheritance.share == 5 / sum(parameter.numel() for parameter in parent.parameters())


def test_positions_of_another_grid_are_resampled():
    parent, model = small('deit_tiny_patch16_224'), small('deit_ls_tiny', img_size=(96, 64))
    y = torch.arange(4.0).reshape(1, 4, 1, 1).expand(1, 4, 4, 24)
    weights = {**parent.state_dict(), 'pos_embed': torch.cat([torch.full((1, 1, 24), 7.0), y.flatten(1, 2)], dim=1)}
    inheritance = vitzoo.inherit_weights(model, weights)
    assert inheritance.fitted == ['pos_embed']
    grid = model.pos_embed[:, 1:].unflatten(1, (6, 4))
    assert (model.pos_embed[:, 0] == 7).all()
    assert (grid[:, 1:] > grid[:, :-1]).all()
    torch.testing.assert_close(grid[:, :, 0], grid[:, :, 3])


def test_axial_positions_of_another_grid_are_resampled():
    parent, model = small('vil_tiny_abs'), small('vil_tiny_abs', img_size=(64, 128))
    inheritance = vitzoo.inherit_weights(model, parent.state_dict())
    assert inheritance.fitted == [f'stages.{i}.pos_embed.column' for i in range(4)]
    assert inheritance.share == 1


@pytest.mark.parametrize('child, size', [('vil_ls_tiny', 19), ('vil_softmax_tiny', 31)])
def test_biases_of_relative_position_keep_their_offsets(child, size):
    parent, model = small('vil_tiny'), small(child)
    weights, name = parent.state_dict(), 'stages.0.blocks.0.attn.rel_bias.table'
    offsets = torch.arange(-13.0, 14)
    weights[name] = (offsets[:, None] + 100 * offsets[None]).reshape(-1, 1)
    assert name in vitzoo.inherit_weights(model, weights).fitted
    reach = torch.arange(-(size // 2), size // 2 + 1.0).clamp(-13, 13)
    assert torch.equal(model.state_dict()[name].reshape(size, size), reach[:, None] + 100 * reach[None])


def test_a_table_with_shared_rows_is_not_resampled():
    parent, model = small('vil_tiny'), small('vil_ls_medium')
    inheritance = vitzoo.inherit_weights(model, parent.state_dict())
    assert 'stages.0.blocks.0.attn.rel_bias.table' in inheritance.initialized


@pytest.mark.parametrize('backbone', PARENTS)
def test_convert_starts_a_model_from_a_trained_folder(backbone, tmp_path, capsys):
    parent = small(PARENTS[backbone])
    source = folder_of(parent, tmp_path / 'parent')
    name = CHILDREN[backbone].format('aft_full')
    kwargs = {key: value for key, value in SMALL[backbone].items() if key != 'img_size'}
    out = tmp_path / 'out'
    convert(['--from', source, '--to', name, '--model-kwargs', *words(kwargs), '--out', str(out)])
    said = capsys.readouterr().out
    assert 'inherited ' in said and 'attn.u_query' in said
    model = loaded(out)
    config = json.loads((out / 'config.json').read_text())
    assert config['vitzoo']['inherited'] >= 0.7 and config['architecture'] == name
    assert (config['num_classes'], config['pretrained_cfg']['input_size']) == (5, [3, 64, 64])
    assert model(torch.ones(1, 3, 64, 64)).isfinite().all()
    weights = parent.state_dict()
    assert all(torch.equal(t, weights[n]) for n, t in model.state_dict().items() if n in weights)


def test_a_parent_is_brought_to_the_image_size_of_the_model(tmp_path):
    parent = small('vil_tiny')
    source = folder_of(parent, tmp_path / 'parent')
    kwargs = words({**SMALL['vil'], 'img_size': 96})
    convert(['--from', source, '--to', 'vil_ls_tiny', '--model-kwargs', *kwargs, '--out', str(tmp_path / 'out')])
    parent.set_input_size(96)
    name = 'stages.3.blocks.0.attn.rel_bias.table'
    assert torch.equal(loaded(tmp_path / 'out').state_dict()[name], parent.state_dict()[name])


def test_a_parents_preprocessing_and_labels_are_inherited(tmp_path):
    parent = small('deit_tiny_patch16_224', num_classes=2)
    data_config = dict(mean=(0.5, 0.5, 0.5), crop_pct=1.0)
    model_config = dict(label_names=['cat', 'dog'])
    save_for_hf(
        parent, str(tmp_path / 'p'), safe_serialization=True, model_config=model_config, data_config=data_config
    )
    kwargs = words({key: value for key, value in SMALL['deit'].items() if key != 'img_size'})
    argv = ['--to', 'deit_nystrom_tiny', '--model-kwargs', *kwargs, '--out', str(tmp_path / 'out')]
    convert(['--from', str(tmp_path / 'p'), *argv])
    config = loaded(tmp_path / 'out').pretrained_cfg
    assert (config['mean'], config['crop_pct'], config['label_names']) == ([0.5, 0.5, 0.5], 1.0, ['cat', 'dog'])
    # not the names of other classes
    argv[argv.index('--out') :] = ['num_classes=3', '--out', str(tmp_path / 'other')]
    convert(['--from', str(tmp_path / 'p'), *argv])
    assert not loaded(tmp_path / 'other').pretrained_cfg.get('label_names')


def test_a_file_of_a_run_folder_keeps_its_preprocessing_and_labels(tmp_path):
    kwargs = {key: value for key, value in SMALL['deit'].items() if key != 'img_size'}
    model = small('deit_softmax_tiny', num_classes=2)
    data_config, about = dict(mean=(0.5, 0.5, 0.5), crop_pct=1.0), dict(label_names=['cat', 'dog'])
    save_for_hf(model, str(tmp_path / 'run'), safe_serialization=True, model_config=about, data_config=data_config)
    argv = [str(tmp_path / 'run' / 'model.safetensors'), '--model', 'deit_softmax_tiny', '--out', str(tmp_path / 'out')]
    convert([*argv, '--model-kwargs', *words({**kwargs, 'num_classes': 2, 'img_size': SMALL['deit']['img_size']})])
    config = loaded(tmp_path / 'out').pretrained_cfg
    assert (config['mean'], config['crop_pct'], config['label_names']) == ([0.5, 0.5, 0.5], 1.0, ['cat', 'dog'])


@pytest.mark.parametrize('is_elsewhere', [False, True])
def test_a_file_of_a_run_keeps_the_facts_about_its_data(is_elsewhere, tmp_path):
    vit(tmp_path / 'run', about=dict(multi_label=True, data_dir='photos', val_split='night', epochs=3))
    file = tmp_path / 'run' / 'model.safetensors'
    if is_elsewhere:
        file = shutil.copy(file, tmp_path / 'model.safetensors')
    convert([str(file), '--model', str(tmp_path / 'run'), '--out', str(tmp_path / 'out')])
    config = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert config['vitzoo'] == dict(multi_label=True, data_dir='photos', val_split='night')


def test_a_model_for_images_of_any_size_takes_that_of_its_file(tmp_path):
    model = timm.create_model('test_resnet', num_classes=2)
    torch.save(model.state_dict(), tmp_path / 'best.pth')
    argv = [str(tmp_path / 'best.pth'), '--model', 'test_resnet', '--model-kwargs', 'num_classes=2', 'img_size=96']
    convert([*argv, '--out', str(tmp_path / 'out')])
    assert tuple(loaded(tmp_path / 'out').pretrained_cfg['input_size']) == (3, 96, 96)


def test_a_model_of_other_channels_averages_the_preprocessing_of_its_parent(tmp_path):
    parent = small('deit_softmax_tiny', depth=9)
    data_config = dict(mean=(0.2, 0.4, 0.6), std=(0.1, 0.2, 0.3))
    save_for_hf(parent, str(tmp_path / 'p'), safe_serialization=True, data_config=data_config)
    kwargs = words({**SMALL['deit'], 'depth': 9, 'in_chans': 1})
    argv = ['--from', str(tmp_path / 'p'), '--to', 'deit_softmax_tiny', '--model-kwargs', *kwargs]
    convert([*argv, '--out', str(tmp_path / 'out')])
    model = loaded(tmp_path / 'out')
    config = model.pretrained_cfg
    assert config['mean'] == pytest.approx([0.4]) and config['std'] == pytest.approx([0.2])
    assert config['input_size'][0] == 1
    # as timm adapts the first convolution
    torch.testing.assert_close(model.patch_embed.proj.weight, parent.patch_embed.proj.weight.sum(dim=1, keepdim=True))


@pytest.mark.parametrize('file', ['', 'config.json'])
@pytest.mark.parametrize('options', ['--to deit_softmax_tiny', '--swap softmax'])
def test_facts_about_the_data_of_a_run_are_kept(options, file, tmp_path):
    vit(tmp_path / 'parent', about=dict(multi_label=True, data_dir='photos', val_split='night', epochs=3))
    (tmp_path / 'parent' / 'held_out.csv').write_text('file,sha256\n')
    out, kwargs = tmp_path / 'out', words(SMALL['deit'])
    convert(['--from', str(tmp_path / 'parent' / file), *options.split(), '--model-kwargs', *kwargs, '--out', str(out)])
    about = read_about(str(out))
    assert (about['multi_label'], about['data_dir'], about['val_split']) == (True, 'photos', 'night')
    assert 'epochs' not in about
    assert about['held_out'] == out / 'held_out.csv'


def test_the_list_of_held_out_images_is_written_before_the_model(tmp_path, monkeypatch):
    vit(tmp_path / 'parent')
    (tmp_path / 'parent' / 'held_out.csv').write_text('file,sha256\n')

    def stop(folder, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr('vitzoo.convert.command.save_model', stop)
    with pytest.raises(KeyboardInterrupt):
        convert(['--from', str(tmp_path / 'parent'), '--swap', 'softmax', '--out', str(tmp_path / 'out')])
    assert [path.name for path in (tmp_path / 'out').iterdir()] == ['held_out.csv']


def test_a_model_has_the_settings_of_its_parent(tmp_path, capsys):
    settings = dict(num_heads=2, global_pool='avg', pos_embed='none', reg_tokens=2)
    parent = small('deit_softmax_tiny', **settings, drop_path_rate=0.1)
    source, out = folder_of(parent, tmp_path / 'parent'), tmp_path / 'out'
    convert(['--from', source, '--to', 'deit_softmax_small', '--out', str(out)])
    assert 'computed otherwise' not in capsys.readouterr().out
    model, x = loaded(out), torch.ones(1, 3, 64, 64)
    torch.testing.assert_close(model(x), parent.eval()(x), rtol=0, atol=0)
    assert model._model_args.items() >= settings.items() and 'drop_path_rate' not in model._model_args
    # those that are given come first
    argv = ['--to', 'deit_ls_small', '--model-kwargs', 'num_heads=4', '--out', str(tmp_path / 'other')]
    convert(['--from', source, *argv])
    assert loaded(tmp_path / 'other').blocks[1].attn.num_heads == 4


@pytest.mark.parametrize(
    ('name', 'kwargs', 'swap', 'child'),
    [
        ('deit_softmax_tiny', dict(pos_embed='rope', global_pool='avg'), dict(mixer='softmax'), 'deit_softmax_small'),
        ('deit_softmax_tiny', {}, dict(mixer='ls', window_size=2, rank=1, dual_norm=False), 'deit_ls_small'),
        ('vit_tiny_patch16_224', {}, dict(mixer='linear', center_keys=True, dwc='v'), 'deit_linear_tiny'),
        ('cvt_13', {}, dict(mixer='performer', num_features=8, proj_drop=0.1), 'cvt_performer_13'),
        ('deit_ls_tiny', dict(mixer_kwargs={'window_size': 2, 'rank': 1}), None, 'deit_ls_small'),
        (
            'deit_ls_tiny',
            dict(mixer_kwargs={'window_size': 2}),
            dict(mixer='ls', blocks=[0], window_size=2),
            'deit_ls_small',
        ),
        ('vil_tiny', dict(mixer_kwargs={'window_size': 3}), dict(mixer='softmax', blocks=[3]), 'vil_small'),
        ('vil_tiny', dict(num_prefix_tokens=(0, 0, 0, 0), global_pool='avg'), None, 'vil_small'),
    ],
)
def test_settings_of_swapped_parents_and_of_the_same_mixer_are_kept_too(name, kwargs, swap, child, tmp_path):
    parent = small(name, **kwargs)
    if swap is not None:
        vitzoo.swap_mixer(parent, **swap)
    convert(['--from', folder_of(parent, tmp_path / 'parent'), '--to', child, '--out', str(tmp_path / 'out')])
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loaded(tmp_path / 'out')(x), parent.eval()(x), rtol=0, atol=0)


def test_a_pooling_that_is_usual_for_the_parents_name_is_not_one_of_its_settings(tmp_path, capsys):
    # the config of a folder names its pooling in any case
    kwargs = {**SMALL['deit'], 'num_classes': 5, 'mixer_kwargs': {'bias_dim': 4}}
    parent = timm.create_model('aft_full_nano', **kwargs)
    assert parent.global_pool == 'token'
    convert(['--from', folder_of(parent, tmp_path / 'p'), '--to', 'aft_ls_nano', '--out', str(tmp_path / 'out')])
    assert 'global_pool: avg, not token' in capsys.readouterr().out
    assert loaded(tmp_path / 'out').global_pool == 'avg'


def test_a_checkpoint_of_another_run_has_the_classes_of_that_run(tmp_path):
    folders = {}
    for name, labels in dict(a=['cat', 'dog'], b=['dog', 'cat']).items():
        model = small('deit_softmax_tiny', num_classes=2)
        about = dict(mean=(0.1, 0.2, 0.3)) if name == 'b' else {}
        folders[name] = str(tmp_path / name)
        save_for_hf(
            model, folders[name], safe_serialization=True, model_config=dict(label_names=labels), data_config=about
        )
    argv = ['--from', folders['a'], '--checkpoint', f'{folders["b"]}/model.safetensors', '--swap', 'performer']
    convert([*argv, '--out', str(tmp_path / 'out')])
    config = loaded(tmp_path / 'out').pretrained_cfg
    assert (config['label_names'], config['mean']) == (['dog', 'cat'], [0.1, 0.2, 0.3])


def test_settings_without_weights_that_differ_are_named(tmp_path, capsys):
    kwargs = {**SMALL['deit'], 'num_classes': 5, 'global_pool': 'avg', 'num_heads': 4}
    parent = timm.create_model('vit_base_patch16_clip_quickgelu_224', **kwargs)
    argv = [
        '--to',
        'deit_ls_tiny',
        '--model-kwargs',
        'num_heads=2',
        'global_pool=token',
        '--out',
        str(tmp_path / 'out'),
    ]
    convert(['--from', folder_of(parent, tmp_path / 'parent'), *argv])
    (line,) = re.findall(r'computed otherwise than in the parent: (.*)', capsys.readouterr().out)
    assert 'blocks.*.mlp.act (2): GELU, not QuickGELU' in line and 'blocks.*.norm1.eps (2)' in line
    assert 'blocks.*.attn.num_heads (2): 2, not 4' in line and 'global_pool: token, not avg' in line


@pytest.mark.parametrize(
    ('name', 'kwargs', 'expected'),
    [
        ('aft_softmax_tiny', dict(pos_embed='rope', num_heads=2), 'rope: none, not RotaryEmbeddingCat'),
        ('vit_small_patch16_rope_224', {}, 'rope: none, not RotaryEmbeddingCat'),
        ('vit_base_patch16_rpn_224', {}, 'blocks.*.norm1 (2): pre-norm, not post-norm'),
        ('vit_relpos_small_patch16_rpn_224', {}, 'blocks.*.norm1 (2): pre-norm, not post-norm'),
        (
            'vit_tiny_patch16_224',
            {'norm_layer': 'rmsnorm'},
            'blocks.*.norm1 (2), blocks.*.norm2 (2), norm: LayerNorm, not RmsNorm',
        ),
        ('vit_tiny_patch16_224', {'dynamic_img_pad': True}, 'patch_embed.dynamic_img_pad: False, not True'),
        ('vit_tiny_patch16_224', {'norm_layer': 'layernormfp32'}, None),
        ('vit_tiny_patch16_224', {}, None),
    ],
)
def test_settings_of_the_parent_that_are_lost_are_named(name, kwargs, expected, tmp_path, capsys):
    source = folder_of(small(name, **kwargs), tmp_path / 'parent')
    sizes = words(SMALL['deit'])
    convert(['--from', source, '--to', 'deit_softmax_tiny', '--model-kwargs', *sizes, '--out', str(tmp_path / 'out')])
    printed = capsys.readouterr().out
    assert expected is None or expected in printed
    assert ('computed otherwise' in printed) == (expected is not None)


def test_arguments_of_the_parent_are_kept_if_the_given_mixers_are_those_of_the_parent(tmp_path):
    parent = small('vil_tiny', mixer=['ls'] * 4, mixer_kwargs={'window_size': 3})
    argv = ['--from', folder_of(parent, tmp_path / 'parent'), '--to', 'vil_small', '--out', str(tmp_path / 'out')]
    convert([*argv, '--model-kwargs', 'mixer=[ls,ls,ls,ls]'])
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(loaded(tmp_path / 'out')(x), parent(x), rtol=0, atol=0)


WINDOW = dict(mixer_kwargs={'window_size': 2})


@pytest.mark.parametrize(
    ('name', 'kwargs', 'swap', 'child', 'expected'),
    [
        (
            'deit_softmax_tiny',
            {},
            dict(mixer='linear', blocks=[0], center_keys=True),
            'deit_linear_tiny',
            ["{'center_keys': True} in block 0"],
        ),
        ('deit_softmax_tiny', {}, dict(mixer='linear', center_keys=True), 'deit_linear_tiny', []),
        ('deit_softmax_tiny', {}, dict(mixer='linear', center_keys=True), 'deit_ls_tiny', []),
        ('deit_ls_tiny', WINDOW, dict(mixer='ls', blocks=[0]), 'deit_ls_tiny', ["{'window_size': 2} in block 1"]),
        ('deit_ls_tiny', WINDOW, dict(mixer='softmax', blocks=[0]), 'deit_ls_tiny', ["{'window_size': 2} in block 1"]),
        ('vil_tiny', WINDOW, dict(mixer='softmax', blocks=[0]), 'vil_tiny', ["{'window_size': 2} in block 1"]),
    ],
)
def test_arguments_of_mixers_that_are_lost_are_named(name, kwargs, swap, child, expected, tmp_path, capsys):
    parent = vitzoo.swap_mixer(small(name, **kwargs), **swap)
    convert(['--from', folder_of(parent, tmp_path / 'parent'), '--to', child, '--out', str(tmp_path / 'out')])
    printed = capsys.readouterr().out
    assert re.findall(r'mixer_kwargs: {}, not ({.*} in block \d)', printed) == expected
    assert ('mixer_kwargs' in printed) == bool(expected)


def test_a_bias_that_mixers_had_from_the_attention_is_named_as_an_argument_that_is_lost(tmp_path, capsys):
    parent = vitzoo.swap_mixer(small('vit_relpos_small_patch16_224'), 'ls', window_size=2)
    kwargs = words({**SMALL['deit'], 'mixer_kwargs': '{window_size: 2}'})
    argv = ['--from', folder_of(parent, tmp_path / 'parent'), '--to', 'deit_ls_tiny', '--model-kwargs', *kwargs]
    convert([*argv, '--out', str(tmp_path / 'out')])
    own, parents = ({'window_size': 2, 'rel_bias': bias} for bias in ('none', 'table'))
    assert f'mixer_kwargs: {own}, not {parents} in blocks 0-1' in capsys.readouterr().out


def test_an_official_checkpoint_can_be_the_parent(tmp_path):
    parent = timm.create_model('deit_tiny_patch16_224')
    file, out = tmp_path / 'deit.pth', tmp_path / 'out'
    torch.save({'model': parent.state_dict(), 'args': argparse.Namespace()}, file)
    argv = ['--to', 'deit_performer_tiny', '--out', str(out)]
    convert(['--from', 'deit_tiny_patch16_224', '--checkpoint', str(file), *argv])
    assert torch.equal(loaded(out).state_dict()['blocks.11.attn.qkv.weight'], parent.blocks[11].attn.qkv.weight)


@pytest.mark.parametrize('num_classes', [None, 3, 7])
def test_the_command_that_a_misfit_recommends_works(num_classes, tmp_path, capsys):
    parent = timm.create_model('cvt_softmax_nano', num_classes=3)
    file, out = tmp_path / 'model.safetensors', tmp_path / 'out'
    save_file(parent.state_dict(), file)
    error = fails(capsys, file, '--model', 'cvt_ls_nano', '--model-kwargs', 'num_classes=3', '--out', out)
    (command,) = re.findall(r'--from NAME .* --to NAME', error)
    argv = command.replace('NAME', 'cvt_softmax_nano', 1).replace('NAME', 'cvt_ls_nano').split()
    kwargs = [] if num_classes is None else ['--model-kwargs', f'num_classes={num_classes}']
    convert([*argv, *kwargs, '--out', str(out)])
    model = loaded(out)
    assert model.num_classes == (num_classes or 3)
    assert torch.equal(model.head.weight, parent.head.weight) == (num_classes != 7)


@pytest.mark.parametrize(
    'argv', ['FILE --model vit_tiny_patch16_224', '--from vit_tiny_patch16_224 --checkpoint FILE --swap ls']
)
def test_a_file_of_other_classes_names_the_argument_that_converts_it(argv, tmp_path, capsys):
    file, out = tmp_path / 'own.pth', tmp_path / 'out'
    model = small('vit_tiny_patch16_224', num_classes=4)
    torch.save({'state_dict': model.state_dict()}, file)
    argv = [str(file) if word == 'FILE' else word for word in argv.split()]
    argv += ['--out', str(out), '--model-kwargs', *words(SMALL['deit'])]
    error = fails(capsys, *argv)
    assert error.endswith('has 4 classes, and vit_tiny_patch16_224 1000; add --model-kwargs num_classes=4\n')
    convert([*argv, 'num_classes=4'])
    assert torch.equal(loaded(out).head.weight, model.head.weight)


def test_a_head_that_the_model_does_not_have_is_named(tmp_path, capsys):
    file, name = tmp_path / 'own.pth', 'vit_small_patch14_dinov2'
    kwargs = dict(depth=1, embed_dim=24, num_heads=2, img_size=56)
    torch.save(timm.create_model(name, num_classes=4, **kwargs).state_dict(), file)
    argv = [str(file), '--model', name, '--model-kwargs', *words(kwargs)]
    convert([*argv, '--out', str(tmp_path / 'headless')])
    assert 'the head for 4 classes is dropped; --model-kwargs num_classes=4 keeps it' in capsys.readouterr().out
    convert([*argv, 'num_classes=4', '--out', str(tmp_path / 'own')])
    assert loaded(tmp_path / 'own').num_classes == 4 and 'is dropped' not in capsys.readouterr().out


def test_a_file_without_a_head_is_a_parent_and_the_advice_for_it_works(tmp_path, capsys):
    name, file, kwargs = 'deit_softmax_nano', tmp_path / 'backbone.pth', dict(num_classes=0)
    parent = timm.create_model(name, **kwargs)
    torch.save(parent.state_dict(), file)
    swap, advice = ['--from', name, '--checkpoint', file, '--swap', 'ls'], '--model-kwargs num_classes=0'
    for number, argv in enumerate([[file, '--model', name], swap]):
        error = fails(capsys, *argv, '--out', tmp_path / f'{number}')
        assert error.endswith(f'has no head for the 1000 classes of this DeiT; add {advice}\n')
        convert([*map(str, argv), *advice.split(), '--out', str(tmp_path / f'{number}')])
    for number, classes in {2: [], 3: ['--model-kwargs', 'num_classes=7']}.items():
        argv = ['--from', name, '--checkpoint', str(file), '--to', 'deit_ls_nano', *classes]
        convert([*argv, '--out', str(tmp_path / f'{number}')])
        model = loaded(tmp_path / f'{number}')
        assert model.num_classes == (7 if classes else 0) and torch.equal(model.norm.weight, parent.norm.weight)


def test_a_parent_that_does_not_name_its_head_keeps_it(tmp_path, monkeypatch):
    parent = vit(tmp_path / 'parent')
    del parent.pretrained_cfg['classifier']
    monkeypatch.setattr('vitzoo.convert.official.create_model', lambda *args, **kwargs: parent)
    file = str(tmp_path / 'parent' / 'model.safetensors')
    assert load_official(file, 'test_vit', {}, any_classes=True).num_classes == 2


def test_a_parent_of_another_size_is_refused(tmp_path, capsys):
    source = folder_of(small('deit_tiny_patch16_224'), tmp_path / 'parent')
    argv = ['--to', 'deit_ls_tiny', '--model-kwargs', 'embed_dim=60', 'num_heads=3']
    error = fails(capsys, '--from', source, *argv, '--out', tmp_path / 'out')
    assert 'same backbone and size' in error
    assert not (tmp_path / 'out').exists()


def test_separate_layers_of_queries_keys_and_values_are_inherited_as_a_fused_one():
    parent, model = small('deit_srformer_tiny', mixer_kwargs={'sr_ratio': 1}), small('deit_softmax_tiny', seed=1)
    assert vitzoo.inherit_weights(model, parent.state_dict()).lost == []
    x = torch.ones(1, 3, 64, 64)
    torch.testing.assert_close(model(x), parent(x))


def test_an_official_last_stage_of_srformer_keeps_its_reduction_of_1():
    own = [{'sr_ratio': ratio, 'norm': 'instance', 'reduce_at_1': True} for ratio in (4, 2, 2, 1)]
    model = small('vil_tiny_abs', mixer='srformer', mixer_kwargs=tuple(own))
    sr = model.stages[3].blocks[0].attn.sr
    assert sr.kernel_size == (1, 1) and sr.bias is None
    assert model(torch.rand(1, 3, 64, 64)).isfinite().all()


def test_a_model_of_a_distilled_parent_takes_its_arguments(tmp_path):
    save_for_hf(small('deit_tiny_distilled_patch16_224'), str(tmp_path / 'p'), safe_serialization=True)
    convert(['--from', str(tmp_path / 'p'), '--to', 'deit_softmax_tiny', '--out', str(tmp_path / 'out')])
    model = loaded(tmp_path / 'out')
    assert (model.embed_dim, len(model.blocks), model.blocks[0].attn.num_heads) == (24, 2, 2)


@pytest.mark.parametrize('size', [64, 96])
def test_positions_of_a_distilled_parent_are_inherited(size):
    parent = small('deit_tiny_distilled_patch16_224')
    model = small('deit_performer_tiny', seed=1, img_size=size)
    assert 'pos_embed' in vitzoo.inherit_weights(model, parent.state_dict()).fitted
    assert torch.equal(model.pos_embed[:, 0], parent.pos_embed[:, 0])
    expected = small('deit_tiny_patch16_224')
    expected.pos_embed = torch.nn.Parameter(torch.cat([parent.pos_embed[:, :1], parent.pos_embed[:, 2:]], dim=1))
    expected.set_input_size(size)
    assert torch.equal(model.pos_embed, expected.pos_embed)


def test_prefix_tokens_inherit_the_positions_of_their_kind():
    parent = small('deit_softmax_tiny', reg_tokens=2)
    model = small('deit_softmax_tiny', seed=1, reg_tokens=2, class_token=False, global_pool='avg')
    assert 'pos_embed' in vitzoo.inherit_weights(model, parent.state_dict()).fitted
    # registers follow the class token
    assert torch.equal(model.pos_embed, parent.pos_embed[:, 1:])


@pytest.mark.parametrize('size', [64, (64, 96)])
@pytest.mark.parametrize('reg_tokens', [0, 4])
def test_prefix_tokens_of_a_parent_without_positions_for_them_get_zeros(reg_tokens, size):
    parent = small('vit_tiny_patch16_224', no_embed_class=True, img_size=size, reg_tokens=reg_tokens)
    num_prefix = 1 + reg_tokens
    model = small('deit_softmax_tiny', seed=1, img_size=size, reg_tokens=reg_tokens)
    inheritance = vitzoo.inherit_weights(model, parent.state_dict())
    assert inheritance.fitted == ['pos_embed'] and not inheritance.lost
    assert not model.pos_embed[:, :num_prefix].any()
    assert torch.equal(model.pos_embed[:, num_prefix:], parent.pos_embed)
    x = torch.ones(1, 3, *parent.patch_embed.img_size)
    torch.testing.assert_close(model(x), parent(x))
    # and the other way round
    assert vitzoo.inherit_weights(parent, model.state_dict()).lost == ['pos_embed']
    assert torch.equal(model.pos_embed[:, num_prefix:], parent.pos_embed)


@pytest.mark.parametrize('name, size', [('cvt_w24', 384), ('cvt_13.msft_in1k_384', 384), ('cvt_13', 224)])
def test_a_model_is_built_for_the_image_size_of_its_config(name, size):
    with torch.device('meta'):
        model = timm.create_model(name)
    assert model.img_size == (size, size) == tuple(model.pretrained_cfg['input_size'][1:])


def vit(folder, about=None, **kwargs):
    """The folder of a plain vision transformer with two labels, and its kind of data."""
    torch.manual_seed(0)
    model = timm.create_model('vit_tiny_patch16_224', **{**SMALL['deit'], 'num_classes': 2, **kwargs})
    about = about or dict(multi_label=True, val_split='night', epochs=3)
    model_config = dict(label_names=['cat', 'dog'], vitzoo=about)
    data_config = dict(mean=(0.3, 0.4, 0.5), crop_pct=1.0)
    save_for_hf(model, str(folder), safe_serialization=True, model_config=model_config, data_config=data_config)
    return model


def test_convert_swaps_the_mixers_of_a_folder(tmp_path, capsys):
    model = vit(tmp_path / 'parent')
    (tmp_path / 'parent' / 'held_out.csv').write_text('file,sha256\n')
    argv = ['--from', str(tmp_path / 'parent'), '--swap', 'ls:0,softmax:1', '--out', str(tmp_path / 'out')]
    convert([*argv, '--mixer-kwargs', 'ls={rank: 2, window_size: 3}'])
    assert 'with ls in block 0, softmax in block 1\ninherited 100.00%' in capsys.readouterr().out
    swapped = loaded(tmp_path / 'out')
    config = json.loads((tmp_path / 'out' / 'config.json').read_text())
    vitzoo.swap_mixer(model, 'ls', blocks=[0], rank=2, window_size=3)
    model.load_state_dict(swapped.state_dict())
    x = torch.rand(1, 3, 64, 64)
    assert torch.equal(swapped(x), model.eval()(x))
    assert (swapped.pretrained_cfg['mean'], swapped.pretrained_cfg['label_names']) == ([0.3, 0.4, 0.5], ['cat', 'dog'])
    about = {'multi_label': True, 'val_split': 'night', 'parent': argv[1], 'weights': 'trained', 'inherited': 1.0}
    assert config['vitzoo'] == about
    assert (tmp_path / 'out' / 'held_out.csv').is_file()
    # a swapped folder is swapped again, at another size
    again = ['--from', str(tmp_path / 'out'), '--swap', 'aft_full', '--blocks', '0-1', '--model-kwargs', 'img_size=96']
    convert([*again, '--out', str(tmp_path / 'again')])
    assert loaded(tmp_path / 'again')(torch.rand(1, 3, 96, 96)).isfinite().all()


@pytest.mark.parametrize('options', ['{0}/model.safetensors --model {0}', '--from {0} --to {0}'])
def test_a_swapped_folder_is_converted_again(options, tmp_path):
    vit(tmp_path / 'parent')
    swapped = tmp_path / 'swapped'
    argv = ['--from', str(tmp_path / 'parent'), '--swap', 'ls', '--mixer-kwargs', 'window_size=3']
    convert([*argv, '--out', str(swapped)])
    convert([*options.format(swapped).split(), '--out', str(tmp_path / 'out')])
    x = torch.rand(1, 3, 64, 64)
    assert torch.equal(loaded(tmp_path / 'out')(x), loaded(swapped)(x))


def test_weights_are_inherited_by_a_converted_model_that_comes_with_vitzoo(tmp_path):
    convert(['--from', 'vil_softmax_nano', '--to', 'vil_softmax_nano_to_ls', '--out', str(tmp_path / 'out')])
    config = json.loads((tmp_path / 'out' / 'config.json').read_text())
    assert 'mixer_kwargs' not in config['model_args']
    assert loaded(tmp_path / 'out')(torch.rand(1, 3, 128, 128)).isfinite().all()


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'deit_softmax_tiny'])
def test_a_file_of_a_swapped_model_is_converted_at_another_image_size(name, tmp_path):
    model = vitzoo.swap_mixer(small(name), 'linformer')
    folder = folder_of(model, tmp_path / 'parent')
    file = shutil.copy(f'{folder}/model.safetensors', str(tmp_path / 'weights.safetensors'))
    size = ['--model-kwargs', 'img_size=96']
    convert([file, '--model', folder, *size, '--out', str(tmp_path / 'out')])
    swap = ['--from', folder, '--checkpoint', file, '--swap', 'softmax:0']
    convert([*swap, *size, '--out', str(tmp_path / 'swapped')])
    model.set_input_size((96, 96))
    x = torch.rand(1, 3, 96, 96)
    assert torch.equal(loaded(tmp_path / 'out')(x), model(x))
    assert torch.equal(loaded(tmp_path / 'swapped')(x), vitzoo.swap_mixer(model, 'softmax', blocks=[0])(x))


def test_the_mixers_of_a_model_for_images_of_any_size_have_the_size_that_is_given(tmp_path):
    sizes = words(dict(embed_dims=(16, 32), depths=(1, 1), num_heads=(2, 2), sr_ratios=(4, 2)))
    argv = ['--from', 'pvt_v2_b0', '--random-weights', '--swap', 'aft_full', '--model-kwargs', *sizes]
    convert([*argv, 'img_size=[64,96]', '--out', str(tmp_path / 'out')])
    model = loaded(tmp_path / 'out')
    assert [mixer.grid_size for mixer in model.mixers().values()] == [(16, 24), (8, 12)]
    assert model(torch.rand(1, 3, 64, 96)).isfinite().all()
    # a folder of such mixers is built for a size
    again = ['--from', str(tmp_path / 'out'), '--swap', 'softmax:0', '--model-kwargs', 'img_size=64']
    convert([*again, '--out', str(tmp_path / 'again')])
    assert loaded(tmp_path / 'again').mixers()['stages.1.blocks.0.attn'].grid_size == (8, 8)


@pytest.mark.parametrize('options', ['--swap softmax', '--to deit_softmax_tiny'])
def test_random_weights_are_not_those_of_the_folder(options, tmp_path, capsys):
    parent, kwargs = vit(tmp_path / 'parent', about=dict(data_dir='photos')), words(SMALL['deit'])
    argv = ['--from', str(tmp_path / 'parent'), '--random-weights', *options.split(), '--model-kwargs', *kwargs]
    convert([*argv, '--out', str(tmp_path / 'out')])
    key = 'blocks.0.attn.qkv.weight'
    assert not torch.equal(loaded(tmp_path / 'out').state_dict()[key], parent.state_dict()[key])
    about = read_about(str(tmp_path / 'out'))
    assert about['weights'] == 'random weights' and 'data_dir' not in about
    file = tmp_path / 'parent' / 'model.safetensors'
    error = fails(capsys, *argv, '--checkpoint', file, '--out', tmp_path / 'other')
    assert '--random-weights and --checkpoint cannot be combined' in error


def test_random_weights_for_other_classes_have_no_names_of_those_of_the_folder(tmp_path):
    vit(tmp_path / 'parent')
    argv = ['--from', str(tmp_path / 'parent'), '--random-weights', '--swap', 'softmax', '--model-kwargs']
    for number, names in {2: ['cat', 'dog'], 3: []}.items():
        convert([*argv, f'num_classes={number}', '--out', str(tmp_path / f'{number}')])
        assert (loaded(tmp_path / f'{number}').pretrained_cfg.get('label_names') or []) == names


def test_a_checkpoint_is_swapped_too(tmp_path):
    model = vit(tmp_path / 'parent')
    argv = ['--checkpoint', str(tmp_path / 'parent' / 'model.safetensors'), '--swap', 'softmax', '--out']
    kwargs = words({**SMALL['deit'], 'num_classes': 2})
    convert(['--from', 'vit_tiny_patch16_224', *argv, str(tmp_path / 'out'), '--model-kwargs', *kwargs])
    x = torch.rand(1, 3, 64, 64)
    assert torch.equal(loaded(tmp_path / 'out')(x), model.eval()(x))


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ('--swap lss', 'Unknown mixer .lss., did you mean ls'),
        ('--swap ls:0-2', 'no block 2: the model has 2, from 0 to 1'),
        ('--swap ls:0,softmax:0', "block 0 has two mixers in 'ls:0,softmax:0', ls and softmax"),
        ('--swap ls --blocks 1-0', "'1-0' in the blocks '1-0' is not a number or a range"),
        ('--swap ls --mixer-kwargs ranc=2', 'ranc'),
        ('--swap ls:0,pool:1 --mixer-kwargs rank=2', 'must be those of one of them'),
        ('--swap ls --mixer-kwargs dim=48', 'The dim of a mixer is that of the model; leave dim=48 out'),
        ('--swap ls --mixer-kwargs device=meta', 'The device of a mixer is that of the model'),
        (
            '--swap ls --model-kwargs num_classes=7',
            'num_classes=7 does not fit .* for 2 classes',
        ),
        ('--swap ls --model-kwargs num_classes=0', 'num_classes=0 does not fit'),
        ('--swap ls --model-kwargs num_classes=-1', 'num_classes=-1; give a number of 0 or more'),
        ('--to deit_ls_tiny --model-kwargs num_classes=-1', 'num_classes=-1; give a number of 0 or more'),
    ],
)
def test_wrong_options_of_an_inheritance_are_one_sentence(options, message, tmp_path, capsys):
    vit(tmp_path / 'parent')
    error = fails(capsys, '--from', tmp_path / 'parent', *options.split(), '--out', tmp_path / 'out')
    assert re.search(message, error)
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    'options', ['{0}/model.safetensors --model {0}', '--from {0} --swap ls', '--from {0} --to {0}']
)
def test_an_image_size_that_patches_do_not_divide_is_one_sentence(options, tmp_path, capsys):
    # such a model is built for any size
    vit(tmp_path / 'any', dynamic_img_size=True)
    argv = [*options.format(tmp_path / 'any').split(), '--model-kwargs', 'img_size=[64,60]', '--out', tmp_path / 'out']
    assert f'{tmp_path / "any"} cannot take images of 64 x 60: ' in fails(capsys, *argv)
    assert not (tmp_path / 'out').exists()


def test_what_cannot_be_swapped_is_one_sentence(tmp_path, capsys):
    argv = ['--random-weights', '--swap', 'ls', '--out', tmp_path / 'out']
    assert 'does not support ResNet' in fails(capsys, '--from', 'test_resnet', *argv)
    for usage in (['--from', 'test_vit', '--to', 'deit_ls_tiny', '--swap', 'ls'], ['--from', 'x', '--blocks', '1']):
        with pytest.raises(SystemExit) as end:
            main([*usage, '--out', 'x'])
        assert end.value.code == 2


def official_names(weights):
    """The names of ViL's code."""
    renames = [
        (r'stages\.(\d)\.embed\.norm', lambda m: f'layer{int(m[1]) + 1}.0.norm_embed'),
        (r'stages\.(\d)\.(?:embed\.)?(?=proj|cls_token|pos_embed)', lambda m: f'layer{int(m[1]) + 1}.0.'),
        (r'pos_embed\.prefix', 'cls_pos_embed'),
        (r'pos_embed\.row', 'x_pos_embed'),
        (r'pos_embed\.column', 'y_pos_embed'),
        (r'stages\.(\d)\.blocks\.(\d+)\.(?=norm1|attn)', lambda m: f'layer{int(m[1]) + 1}.{2 * int(m[2]) + 1}.'),
        (r'stages\.(\d)\.blocks\.(\d+)\.', lambda m: f'layer{int(m[1]) + 1}.{2 * int(m[2]) + 2}.'),
        (r'norm[12]\.', 'norm.'),
        (r'attn\.features', 'attn.fast_attention.projection_matrix'),
    ]
    named = {}
    for name, tensor in weights.items():
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        named[name] = tensor
    return named


def test_published_layout_of_performer_is_loaded():
    parent, model = (small('vil_small_abs', seed=seed, mixer='performer') for seed in (0, 1))
    for block in parent.stages[0].blocks:
        block.attn.features += 1
    official = {**official_names(parent.state_dict()), 'calls_since_last_redraw': torch.tensor(1)}
    assert 'layer1.1.attn.fast_attention.projection_matrix' in official
    model.load_state_dict(vil.checkpoint_filter_fn(official, model), strict=True)
    x = torch.rand(1, 3, 64, 64)
    assert torch.equal(model(x), parent(x))


def test_published_model_with_global_tokens_averages_them_too():
    kwargs = dict(mixer='global', mixer_kwargs={'num_global': 0}, num_prefix_tokens=(4, 4, 2, 3))
    model = small('vil_small_abs', pool_include_prefix=True, **kwargs)
    x = torch.rand(2, 3, 64, 64)
    tokens = model.forward_features(x)
    assert tokens.shape[1] == 3 + 2 * 2
    torch.testing.assert_close(model(x), tokens.mean(dim=1) @ model.head.weight.T + model.head.bias)
    assert not torch.allclose(model(x), small('vil_small_abs', **kwargs)(x))
    with pytest.raises(ValueError, match='pool_include_prefix'):
        small('vil_small_abs', pool_include_prefix=True)
