"""Probing of single blocks, blocks that keep softmax attention, and controls."""

import inspect
import math
from copy import deepcopy

import pytest
import torch
from helpers import mixers_of_ours, relative_error
from teachers import batches, divergence_of, make_student, make_teacher
from timm.models.vision_transformer import Block

from vitzoo.mixers import create_mixer, mixer_class
from vitzoo.mixers._kernel_mixer import KernelMixer
from vitzoo.transfer import keep_softmax, probe, zero_attention
from vitzoo.transfer.attention import only_part, parts_of
from vitzoo.transfer.outputs import output_error
from vitzoo.transfer.students import make_student as make_student_to_train
from vitzoo.transfer.students import randomize

IMAGES = batches(2)


def test_probing_softmax_by_softmax_finds_no_difference():
    teacher = make_teacher()
    costs = probe(teacher, make_student(teacher, 'softmax'), IMAGES)
    assert [cost.path for cost in costs] == ['blocks.0.attn', 'blocks.1.attn', 'blocks.2.attn']
    for cost in costs:
        assert cost.error == 0
        assert cost.cosine == pytest.approx(1)
        assert cost.divergence == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize('multi_label', [False, True])
def test_the_cost_of_a_block_is_that_of_a_model_in_which_it_alone_is_swapped(multi_label):
    teacher = make_teacher()
    cost = probe(teacher, make_student(teacher, 'linear'), IMAGES, multi_label=multi_label)[1]
    alone = make_student(teacher, 'linear', [1])
    with torch.no_grad():
        expected, found = (torch.cat([model(x) for x in IMAGES]) for model in (teacher, alone))
        tokens = [torch.cat([model.forward_features(x) for x in IMAGES]) for model in (teacher, alone)]
    assert cost.divergence == pytest.approx(divergence_of(found, expected, multi_label).item(), rel=1e-4)
    assert cost.cosine == pytest.approx(torch.cosine_similarity(*tokens, dim=-1).mean().item(), rel=1e-5)
    outputs, keys = {teacher: [], alone: []}, []
    for model, found in outputs.items():
        model.blocks[1].attn.register_forward_hook(lambda attn, args, output, found=found: found.append(output))
    teacher.blocks[1].attn.qkv.register_forward_hook(lambda layer, args, output: keys.append(output[..., 24:48]))
    with torch.no_grad():
        for model in outputs:
            model(torch.cat(IMAGES))
    (expected,), (found,) = outputs.values()
    errors = torch.linalg.matrix_norm(found - expected) / torch.linalg.matrix_norm(expected)
    assert cost.error == pytest.approx(errors.mean().item(), rel=1e-5)
    heads = keys[0].unflatten(2, (2, 12))
    shifts = heads.mean(dim=1).norm(dim=-1) / heads.norm(dim=-1).mean(dim=1)
    assert cost.shift_ratio == pytest.approx(shifts.mean().item(), rel=1e-5)


def test_a_constant_in_the_keys_is_found_and_centering_ignores_it():
    teacher = make_teacher()
    plain, centered = make_student(teacher, 'linear'), make_student(teacher, 'linear', center_keys=True)
    before = [probe(teacher, student, IMAGES)[0] for student in (plain, centered)]
    with torch.no_grad():
        for model in (teacher, plain, centered):
            model.blocks[0].attn.qkv.bias[24:48] += 3
    after = [probe(teacher, student, IMAGES)[0] for student in (plain, centered)]
    assert after[0].shift_ratio > 0.9 > before[0].shift_ratio
    assert abs(after[0].error - before[0].error) > 0.01
    assert after[1].error == pytest.approx(before[1].error, rel=1e-3)


def test_a_model_without_a_head_is_probed_by_its_features():
    teacher = make_teacher(num_classes=0)
    student = make_student(teacher, 'linear')
    assert all(cost.divergence is None and cost.cosine < 1 for cost in probe(teacher, student, IMAGES))


def test_the_most_useful_block_is_kept_first_and_the_gap_closes():
    teacher = make_teacher()
    student = make_student(teacher, 'linear')
    alternatives = [
        output_error(teacher, make_student(teacher, 'linear', blocks), IMAGES) for blocks in ([1, 2], [0, 2], [0, 1])
    ]
    rows = keep_softmax(teacher, student, IMAGES, 2)
    errors = [row['output_error'] for row in rows]
    assert errors[0] > errors[1] > errors[2]
    assert errors[1] == pytest.approx(min(alternatives), rel=1e-5)
    assert rows[1]['kept'] == [f'blocks.{alternatives.index(min(alternatives))}.attn']
    assert output_error(teacher, student, IMAGES) == pytest.approx(errors[2], rel=1e-6)
    kept = [int(path.split('.')[1]) for path in rows[-1]['kept']]
    assert all(type(student.blocks[index]) is Block for index in kept)
    assert student._model_args['swap_mixer'] == [{'mixer': 'linear', 'blocks': [i for i in range(3) if i not in kept]}]
    assert list(student.inheritance) == [i for i in range(3) if i not in kept]
    # copies, which can be trained without changing the teacher
    shared = {id(parameter) for parameter in teacher.parameters()} & {
        id(parameter) for parameter in student.parameters()
    }
    assert not shared


def test_automatic_keeping_stops_at_the_tolerance():
    teacher = make_teacher()
    gaps = iter([5.0, 2.0, 0.4, 0.0])
    rows = keep_softmax(teacher, make_student(teacher, 'linear'), IMAGES, tolerance=0.5, gap=lambda model: next(gaps))
    assert [row['gap'] for row in rows] == [5.0, 2.0, 0.4]
    same = keep_softmax(teacher, make_student(teacher, 'softmax'), IMAGES)
    assert [(row['kept'], row['gap']) for row in same] == [([], 0)]


@pytest.mark.parametrize('count', [0, 1])
def test_as_many_blocks_are_kept_as_are_asked_for(count):
    teacher = make_teacher()
    rows = keep_softmax(teacher, make_student(teacher, 'linear'), IMAGES, count)
    assert [len(row['kept']) for row in rows] == [*range(count + 1)]


@pytest.mark.parametrize('count', [-1, 3, 'all', 1.5])
def test_a_number_of_blocks_that_does_not_exist_is_refused(count):
    teacher = make_teacher()
    with pytest.raises(ValueError, match="'auto' or 0 to 2 of 3 blocks"):
        keep_softmax(teacher, make_student(teacher, 'linear'), IMAGES, count)


def test_the_zero_control_is_the_model_without_attention_and_ends_with_its_context():
    teacher = make_teacher()
    student = make_student(teacher, 'linear')
    without = make_teacher()
    for block in without.blocks:
        torch.nn.init.zeros_(block.attn.proj.weight)
        torch.nn.init.zeros_(block.attn.proj.bias)
    with torch.no_grad():
        before = student.forward_features(IMAGES[0])
        with zero_attention(student):
            assert torch.equal(student.forward_features(IMAGES[0]), without.forward_features(IMAGES[0]))
        assert torch.equal(student.forward_features(IMAGES[0]), before)


def test_ls_without_its_norms_is_window_attention_of_the_inherited_weights():
    teacher = make_teacher()
    student = make_student(teacher, 'ls', window_size=6, rank=0, dual_norm=False)
    # the window covers the grid, and prefix tokens attend the outputs of the others: compare the grid of block 0
    x = teacher.blocks[0].norm1(teacher._pos_embed(teacher.patch_embed(IMAGES[0])))
    with torch.no_grad():
        expected, found = teacher.blocks[0].attn(x), student.blocks[0].attn(x, (6, 6))
    assert relative_error(found[:, 1:], expected[:, 1:]) < 1e-5


@torch.no_grad()
def test_the_parts_of_ls_are_its_window_and_its_landmarks():
    torch.manual_seed(0)
    mixer = create_mixer('ls', 12, 3, grid_size=(6, 6), window_size=2, rank=2, dual_norm=False)
    window = create_mixer('ls', 12, 3, grid_size=(6, 6), window_size=2, rank=0, dual_norm=False)
    window.load_state_dict(mixer.state_dict(), strict=False)
    x = torch.randn(2, 36, 12)
    model = torch.nn.Sequential(mixer)
    assert parts_of(model) == ['local', 'global']
    with only_part(model, 'local'):
        torch.testing.assert_close(mixer(x, (6, 6)), window(x, (6, 6)))
    with only_part(model, 'global'):
        alone = mixer(x, (6, 6))
    q, k, v = mixer.to_qkv(x, (6, 6))
    weights = mixer.dynamic_proj(x).unflatten(2, (3, 2)).permute(0, 2, 3, 1).softmax(-1)
    scores = (q @ (weights @ k).mT / math.sqrt(4)).softmax(-1)
    torch.testing.assert_close(alone, mixer.project(scores @ (weights @ v)))
    assert relative_error(mixer(x, (6, 6)), alone) > 0.1


# mixers without the queries, keys or values of attention, or with new random parameters that their output needs
OTHERS = {
    *('aft_conv', 'fourier', 'gated_linear', 'global', 'linformer', 'ls', 'pool', 'reformer', 'set', 'soft'),
    *('srformer', 'synthesizer', 'ttt', 'vssd'),
}


@pytest.mark.parametrize('mixer', mixers_of_ours())
@torch.no_grad()
def test_a_student_starts_as_the_kernel_of_its_mixer_on_inherited_weights(mixer, monkeypatch):
    teacher = make_teacher(depth=1)
    attn, op = teacher.blocks[0].attn, mixer_class(mixer).op
    x = torch.randn(2, 37, 24, generator=torch.Generator().manual_seed(0))
    q, k, v = attn.qkv(x).unflatten(2, (3, 2, 12)).permute(2, 0, 3, 1, 4)
    seen = []

    def call_and_record(*args):
        seen.append(([arg for arg in args if isinstance(arg, torch.Tensor)], op(*args)))
        return seen[-1][1]

    monkeypatch.setattr(mixer_class(mixer), 'op', staticmethod(call_and_record))
    students = [make_student_to_train('teacher', teacher, mixer, {}, seed) for seed in (0, 1)]
    outputs = [student.blocks[0].attn(x, (6, 6)) for student in students]
    args, mixed = seen[0]

    def has(tensor: torch.Tensor) -> bool:
        return any(arg.shape == tensor.shape and torch.allclose(arg, tensor, atol=1e-5) for arg in args)

    is_exact = (
        has(q)
        and (has(k) or has(k - k.mean(dim=2, keepdim=True)))
        and has(v)
        and mixed.shape == v.shape
        and torch.allclose(attn.proj(mixed.transpose(1, 2).flatten(2)), outputs[0], atol=1e-5)
        and torch.equal(*outputs)
        and not any('norm' in name for name in students[0].inheritance[0].initialized)
    )
    assert is_exact == (mixer not in OTHERS)


KERNELS = [name for name in mixers_of_ours() if issubclass(mixer_class(name), KernelMixer)]


NO_CONVOLUTION = dict(conv_size=0, conv_kernel_size=None, dwc='none')


@pytest.mark.parametrize('mixer', [*KERNELS, 'nystrom'])
@torch.no_grad()
def test_a_mixer_starts_without_its_convolution_and_gate(mixer):
    teacher = make_teacher()
    student = make_student_to_train('teacher', teacher, mixer, {}, 0)
    accepted = inspect.signature(mixer_class(mixer)).parameters
    without = next({name: value} for name, value in NO_CONVOLUTION.items() if name in {**accepted, 'dwc': None})
    arguments = mixer_class(mixer).start_arguments | without
    bare = make_student(teacher, mixer, **arguments)
    bare.load_state_dict(student.state_dict(), strict=False)
    torch.testing.assert_close(student(IMAGES[0]), bare(IMAGES[0]))
    assert not any('gate' in name or 'norm_' in name for name, _ in student.blocks[0].attn.named_modules())


@pytest.mark.parametrize('mixer', ['mala', 'polaformer'])
@torch.no_grad()
def test_a_gate_that_is_asked_for_starts_open(mixer):
    teacher = make_teacher(depth=1)
    bare, gated = (make_student_to_train('teacher', teacher, mixer, dict(gate=gate), 0) for gate in (False, True))
    assert torch.equal(gated(IMAGES[0]), bare(IMAGES[0]))


def test_a_randomized_student_keeps_the_spread_of_parameters_without_an_initialization_of_their_own():
    student = make_student(make_teacher(), 'aft_full')
    with torch.no_grad():
        student.pos_embed.add_(3)
    before = deepcopy(student.state_dict())
    randomize(student, seed=0)
    after = student.state_dict()
    assert not any(torch.equal(after[name], tensor) for name, tensor in before.items())
    for name in ('pos_embed', 'blocks.1.attn.u_key'):
        assert after[name].mean().item() == pytest.approx(before[name].mean().item(), abs=0.05)
        assert after[name].std().item() == pytest.approx(before[name].std().item(), rel=0.1)
    # of linear layers and norms that of PyTorch
    assert (after['norm.weight'] == 1).all() and after['blocks.0.mlp.fc1.weight'].abs().max() <= 24**-0.5
