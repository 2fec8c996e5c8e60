"""The error that chooses the best state of a student."""

from copy import deepcopy

import pytest
import torch
from teachers import batches, divergence_of, make_student, make_teacher

from vitzoo.transfer import probe
from vitzoo.transfer.matching import attention_variance, measure_errors
from vitzoo.transfer.outputs import Outputs, compare, output_error, output_gap

IMAGES = batches(2)


@pytest.mark.parametrize('multi_label', [False, True])
def test_the_error_of_a_classifier_is_that_of_its_tokens_and_logits(multi_label):
    tokens, logits = torch.randn(2, 4, 7, 24), torch.randn(2, 4, 5)
    (found, expected) = (Outputs(*pair) for pair in zip(tokens, logits))
    normalized = [
        (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt() for x in tokens
    ]
    divergence = divergence_of(*logits, multi_label)
    error = (normalized[0] - normalized[1]).square().mean()
    assert compare(found, expected, multi_label).item() == pytest.approx((error + divergence).item(), rel=1e-5)
    without = [Outputs(x, None) for x in tokens]
    assert compare(*without).item() == pytest.approx(error.item(), rel=1e-5)


def test_of_two_students_the_one_with_the_logits_of_the_teacher_is_better_than_the_one_with_its_tokens():
    teacher = make_teacher()
    with torch.no_grad():
        # a channel that the head does not read
        teacher.head.weight[:, 0] = 0
        same_logits, same_tokens = deepcopy(teacher), deepcopy(teacher)
        same_logits.norm.bias[0] += 3
        same_tokens.head.weight *= -10
    torch.testing.assert_close(same_logits(IMAGES[0]), teacher(IMAGES[0]))
    assert torch.equal(same_tokens.forward_features(IMAGES[0]), teacher.forward_features(IMAGES[0]))
    assert 0 < output_error(teacher, same_logits, IMAGES) < output_error(teacher, same_tokens, IMAGES)


@pytest.mark.parametrize('multi_label', [False, True])
def test_equal_models_have_no_error(multi_label):
    teacher = make_teacher()
    same = deepcopy(teacher)
    assert output_error(teacher, same, IMAGES, multi_label=multi_label) == 0
    assert output_gap(teacher, same, IMAGES, multi_label=multi_label) == 0


def test_a_constant_added_to_all_logits_changes_labels_but_no_class():
    teacher = make_teacher()
    shifted = deepcopy(teacher)
    with torch.no_grad():
        shifted.head.bias += 20
    assert output_error(teacher, shifted, IMAGES) == pytest.approx(0, abs=1e-6)
    assert output_error(teacher, shifted, IMAGES, multi_label=True) > 1
    assert (output_gap(teacher, shifted, IMAGES), output_gap(teacher, shifted, IMAGES, multi_label=True)) == (0, 100)


@pytest.mark.parametrize('num_classes', [0, 5])
def test_errors_do_not_depend_on_the_batches(num_classes):
    teacher = make_teacher(num_classes=num_classes)
    student = make_student(teacher, 'linear')
    images = torch.cat(IMAGES)
    paths = [f'blocks.{index}.attn' for index in range(3)]
    assert output_gap(teacher, deepcopy(teacher), [images]) == pytest.approx(0, abs=1e-4)
    found = []
    for sizes in ([8], [5, 3], [7, 1]):
        loader = images.split(sizes)
        variance = attention_variance(teacher, paths, loader, images.device)
        errors = measure_errors(teacher, student, loader, variance)
        found.append([output_error(teacher, student, loader), output_gap(teacher, student, loader)])
        assert errors['output_error'] == pytest.approx(found[-1][0], rel=1e-6)
        found[-1] += errors['errors'].values()
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


def test_models_of_other_classes_are_refused():
    teacher, (images,) = make_teacher(), batches(1)
    student = make_student(make_teacher(num_classes=3), 'linear')
    for measure in (lambda: probe(teacher, student, [images]), lambda: output_error(teacher, student, [images])):
        with pytest.raises(ValueError, match='The student has 3 classes and the teacher 5: give models of the same'):
            measure()
