"""Transfer of other families of timm than the plain vision transformer."""

from copy import deepcopy
from shlex import split

import pytest
import timm
import torch
from helpers import one_in
from teachers import batches, make_student, make_teacher, save_teacher
from timm.models import save_for_hf

import vitzoo
from vitzoo.report.markup import to_html
from vitzoo.report.transfers import read_transfer, transfer_section
from vitzoo.train.network_loss import NetworkLoss
from vitzoo.transfer import keep_softmax, match_blocks, probe
from vitzoo.transfer.command import transfer
from vitzoo.transfer.matching import new_parameters
from vitzoo.transfer.outputs import Outputs, output_error
from vitzoo.validate.command import validate

IMAGES = batches(1, batch_size=2)
PATHS = ['stages.0.blocks.0.attn', 'stages.1.blocks.0.attn', 'stages.1.blocks.1.attn']
SMALL = dict(depth=2, embed_dim=32, num_heads=2, patch_size=8)
STAGES = dict(depth=None, embed_dim=None, embed_dims=(16, 32), depths=(1, 2), num_heads=(2, 2))
PYRAMID = dict(depth=None, embed_dim=None, embed_dims=(16, 32), depths=(2, 1), num_heads=(2, 2))
FAMILIES = {
    'dinov3': ('vit_small_patch16_dinov3', {}),
    'eva02': ('eva02_tiny_patch14_224', {}),
    'rope mixed': ('vit_small_patch16_rope_mixed_224', {}),
    'parallel': ('vit_small_patch16_18x2_224', {}),
    'beit': ('beit_base_patch16_224', {}),
    'beit with a bias of all blocks': ('beit_base_patch16_224', dict(use_shared_rel_pos_bias=True)),
    'relative positions of all blocks': ('vit_srelpos_small_patch16_224', {}),
    'sam': ('samvit_base_patch16', dict(global_attn_indexes=(0, 1), window_size=3)),
    'cait': ('cait_xxs24_224', {}),
    'deit': ('deit_softmax_nano', {}),
    'vil': ('vil_nano', dict(STAGES, num_prefix_tokens=(1, 0), mixer='softmax')),
    'cvt': ('cvt_softmax_nano', STAGES),
    'swin': (
        'swin_tiny_patch4_window7_224',
        dict(embed_dim=16, depth=None, depths=(1, 1), num_heads=(2, 2), window_size=6),
    ),
    'naflex': ('naflexvit_base_patch16_gap', {'pos_embed_grid_size': (6, 6)}),
}


@pytest.mark.parametrize('family', FAMILIES)
def test_softmax_by_softmax_stays_at_zero_and_linear_learns(family):
    name, own = FAMILIES[family]
    teacher = make_teacher(name, **{**SMALL, **own})
    same = make_student(teacher, 'softmax')
    assert max(cost.error for cost in probe(teacher, same, IMAGES)) < 1e-5
    assert output_error(teacher, same, IMAGES) < 1e-9
    student = make_student(teacher, 'linear')
    history = match_blocks(teacher, student, IMAGES, IMAGES, steps=6, eval_every=3, lr=1e-3)
    assert history[0]['output_error'] > 1e-6
    assert sum(history[-1]['errors'].values()) < sum(history[0]['errors'].values())
    before = output_error(teacher, student, IMAGES)
    keep_softmax(teacher, student, IMAGES, 1)
    assert output_error(teacher, student, IMAGES) < before


def test_a_bias_of_all_blocks_is_kept_with_a_block_that_needs_it(tmp_path):
    teacher = make_teacher('vit_srelpos_small_patch16_224', **SMALL)
    student = make_student(teacher, 'linear')
    keep_softmax(teacher, student, IMAGES, 1)
    save_for_hf(student, str(tmp_path), safe_serialization=True)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    with torch.no_grad():
        assert torch.allclose(loaded(IMAGES[0]), student(IMAGES[0]), atol=1e-6)
    assert student.shared_rel_pos is not None and student.shared_rel_pos is not teacher.shared_rel_pos


def test_a_block_of_parallel_layers_is_kept_as_one():
    teacher = make_teacher('vit_small_patch16_18x2_224', **SMALL)
    student = make_student(teacher, 'linear')
    with pytest.raises(ValueError, match="'auto' or 0 to 1 of 2 blocks, not 2"):
        keep_softmax(teacher, student, IMAGES, 2)
    keep_softmax(teacher, student, IMAGES, 1)
    assert len(student.mixers()) == 2


@pytest.mark.parametrize('family', ['pvt', 'sam'])
def test_final_tokens_are_normalized_over_their_channels(family):
    name, own = {**FAMILIES, 'pvt': ('pvt_v2_b0', dict(PYRAMID, img_size=None, patch_size=None))}[family]
    teacher = make_teacher(name, **{**SMALL, **own})
    images = batches(1, batch_size=2)[0] if family == 'sam' else batches(1, batch_size=2, size=64)[0][..., :32]
    with torch.no_grad():
        tokens = Outputs.of(teacher, images).tokens
        assert tokens.shape[-1] == teacher.num_features
        expected = torch.nn.functional.layer_norm(tokens, tokens.shape[-1:])
        student = make_teacher(name, **{**SMALL, **own}, mlp_ratio=3.0) if family == 'sam' else deepcopy(teacher)
        next(iter(student.parameters())).add_(0.3)
        found = Outputs.of(student, images).tokens
        found = torch.nn.functional.layer_norm(found, found.shape[-1:])
        with NetworkLoss(student, teacher, block_weight=0) as loss:
            logits = [model(images).log_softmax(dim=1) for model in (student, teacher)]
            divergence = torch.nn.functional.kl_div(*logits, reduction='batchmean', log_target=True)
            assert float(loss()) == pytest.approx(float((found - expected).square().mean() + divergence), rel=1e-4)


def test_swin_by_its_own_windows_stays_at_zero_and_others_learn():
    # 12 x 12 and 6 x 6 tokens, in the second block of the first stage in shifted windows
    own = dict(embed_dim=16, depth=None, depths=(2, 1), num_heads=(2, 2), window_size=3, patch_size=4)
    teacher = make_teacher('swin_tiny_patch4_window7_224', **own)
    same = make_student(teacher, 'swin', window_size=3)
    assert max(cost.error for cost in probe(teacher, same, IMAGES)) < 1e-5
    assert output_error(teacher, same, IMAGES) < 1e-9
    with torch.no_grad(), NetworkLoss(same, teacher, block_weight=1.0) as loss:
        for model in (same, teacher):
            model(IMAGES[0])
        assert float(loss()) < 1e-6
    assert not any('_attn' in vars(module) for module in teacher.modules())
    student = make_student(teacher, 'linear')
    history = match_blocks(teacher, student, IMAGES, IMAGES, steps=6, eval_every=3, lr=1e-3)
    assert 0 < sum(history[-1]['errors'].values()) < sum(history[0]['errors'].values())


# with the size of the images
ONE_SIZE = {
    'cait': ('cait_xxs24_224', dict(patch_size=8), '32'),
    'pvt': ('pvt_v2_b0', dict(PYRAMID, img_size=None, patch_size=None, sr_ratios=(2, 1), mlp_ratios=(2, 2)), '64'),
    'twins': ('twins_svt_small', dict(PYRAMID, patch_size=4, sr_ratios=(2, 1), wss=(4, 4)), '32'),
    'swin': (
        'swin_tiny_patch4_window7_224',
        dict(PYRAMID, embed_dim=16, embed_dims=None, patch_size=4, window_size=4),
        '32',
    ),
}


@pytest.mark.usefixtures('fresh_accelerate', 'quick_timing')
@pytest.mark.parametrize('family', one_in(2, ONE_SIZE))
def test_families_that_timm_builds_for_one_size_are_transferred_with_all_measures(family, images, tmp_path):
    name, kwargs, size = ONE_SIZE[family]
    teacher = save_teacher(tmp_path / 'teacher', name=name, **kwargs)
    command = [teacher, '--data-dir', images, '--output', str(tmp_path / 'ls'), '--img-size', size]
    options = '--mixer ls --steps 1 --network-steps 1 --network-lr scaled --evals 1 --eval-images 8 --batch-size 8'
    (results,) = transfer([*command, *split(options), *split(f'--workers 0 --no-random-control --sizes {size}')])
    assert results['images_per_second'][size].keys() >= {'teacher', 'student'}
    record = read_transfer(str(tmp_path / 'ls')) | dict(index=0, name='ls', model=str(tmp_path / 'ls'))
    assert ('Tokens of ls' in ''.join(map(to_html, transfer_section([record])))) == (family != 'twins')
    (validated,) = validate([str(tmp_path / 'ls'), '--data-dir', images, '--workers', '0'])
    assert validated['top1'] == pytest.approx(results['student']['top1']) and str(validated['img_size']) == size


@pytest.mark.usefixtures('fresh_accelerate')
def test_the_run_of_a_model_of_vitzoo_is_transferred(images, tmp_path):
    vil = dict(FAMILIES['vil'][1], patch_size=8, name='vil_nano')
    command = [save_teacher(tmp_path / 'teacher', **vil), '--data-dir', images, '--output', str(tmp_path / 'ls')]
    options = '--mixer ls --mixer-kwargs window_size=1 --keep-softmax 1 --steps 2 --network-steps 2 --evals 1'
    options += ' --network-lr scaled --no-random-control --workers 0 --sizes'
    (results,) = transfer([*command, *split(options)])
    assert [cost['path'] for cost in results['probe']] == PATHS
    (kept,) = results['keep_softmax'][-1]['kept']
    student = timm.create_model(f'local-dir:{tmp_path / "ls"}', pretrained=True)
    assert {path: type(student.get_submodule(path)).__name__ for path in PATHS} == {
        path: 'Softmax' if path == kept else 'LongShort' for path in PATHS
    }


def test_a_student_of_a_swapped_teacher_is_built_again(tmp_path):
    teacher = vitzoo.swap_mixer(make_teacher(), 'ls', [0, 1])
    student = make_student(teacher, ['linear', 'softmax', 'linear'])
    keep_softmax(teacher, student, IMAGES, 2)
    save_for_hf(student, str(tmp_path), safe_serialization=True)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(loaded(IMAGES[0]), student(IMAGES[0]))


def test_new_parameters_of_parallel_mixers_are_found():
    student = make_student(make_teacher('vit_small_patch16_18x2_224', **SMALL), 'ls', rank=2)
    path = 'blocks.0.attns.1.attn'
    found = {id(parameter) for parameter in new_parameters(student, [path])}
    names = {name for name, parameter in student.get_submodule(path).named_parameters() if id(parameter) in found}
    assert names == {
        f'{name}.{kind}' for name in ('dynamic_proj', 'norm_full', 'norm_landmarks') for kind in ('weight', 'bias')
    }


def test_keys_are_centered_after_their_rotation():
    teacher = make_teacher('vit_small_patch16_dinov3', **SMALL)
    mixer = make_student(teacher, 'linear', center_keys=True).blocks[0].attn
    keys = []
    mixer.op = lambda q, k, v: keys.append(k) or v
    student = make_student(teacher, 'linear', center_keys=True)
    student.blocks[0].attn = mixer
    with torch.no_grad():
        student(IMAGES[0])
    assert keys[0].mean(dim=2).abs().max() < 1e-5
