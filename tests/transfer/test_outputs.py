"""The error that chooses the best state of a student."""

from copy import deepcopy

import pytest
import torch
from teachers import batches, make_teacher

from vitzoo.transfer.outputs import Outputs, compare, output_error

IMAGES = batches(2)


def test_the_error_of_a_classifier_is_that_of_its_tokens_and_logits():
    tokens, logits = torch.randn(2, 4, 7, 24), torch.randn(2, 4, 5)
    (found, expected) = (Outputs(*pair) for pair in zip(tokens, logits))
    normalized = [
        (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt() for x in tokens
    ]
    p, q = (x.softmax(dim=1) for x in (logits[1], logits[0]))
    divergence = (p * (p / q).log()).sum(dim=1).mean()
    error = (normalized[0] - normalized[1]).square().mean()
    assert compare(found, expected).item() == pytest.approx((error + divergence).item(), rel=1e-5)
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


def test_equal_models_have_no_error():
    teacher = make_teacher()
    assert output_error(teacher, deepcopy(teacher), IMAGES) == 0
