"""The loss for imbalanced classes."""

import pytest
import torch
from timm.data.mixup import mixup_target
from timm.loss import create_classification_loss
from torch.nn import functional as F

from vitzoo.errors import UserError
from vitzoo.train.batches import build_mixup
from vitzoo.train.loss import BalancedLoss, build_loss, count_labels
from vitzoo.train.recipe import make_recipe

KINDS = [('ce', 0.0, None), ('ce', 0.1, None), ('bce', 0.0, None), ('bce', 0.1, None), ('bce', 0.1, 0.2)]
LABELS = torch.tensor([0] * 12 + [1] * 3 + [3] * 5)
LOGITS = torch.randn(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def balanced(kind, smoothing, threshold, labels=LABELS):
    return BalancedLoss(count_labels(labels.tolist(), 4), kind, smoothing, threshold).double()


def plain(kind, smoothing, threshold, soft=False):
    options = dict(bce_target_thresh=threshold) if kind == 'bce' else {}
    return create_classification_loss(kind, smoothing=smoothing, soft_targets=soft, **options)


@pytest.mark.parametrize('kind', KINDS, ids=str)
def test_all_classes_have_the_same_total_weight(kind):
    by_class = [plain(*kind)(LOGITS[label == LABELS], LABELS[label == LABELS]) for label in (0, 1, 3)]
    torch.testing.assert_close(balanced(*kind)(LOGITS, LABELS), sum(by_class) / 3)


@pytest.mark.parametrize('kind', KINDS, ids=str)
def test_classes_of_equal_size_have_the_plain_loss(kind):
    labels = torch.arange(20) % 4
    torch.testing.assert_close(balanced(*kind, labels)(LOGITS, labels), plain(*kind)(LOGITS, labels))
    mixed = mixup_target(labels, 4, 0.7, kind[1]).double()
    torch.testing.assert_close(balanced(*kind, labels)(LOGITS, mixed), plain(*kind, soft=True)(LOGITS, mixed))


@pytest.mark.parametrize('kind', KINDS, ids=str)
def test_a_mixed_image_weighs_as_its_parts_by_their_share(kind):
    loss = balanced(*kind)
    unmixed = mixup_target(LABELS, 4, 1.0, kind[1]).double()
    if kind[2] is None:
        torch.testing.assert_close(loss(LOGITS, unmixed), loss(LOGITS, LABELS))
    # three quarters of class 0 and a quarter of class 3
    mixed = mixup_target(LABELS[[0, 19]], 4, 0.75, kind[1]).double()
    weight = 0.75 * 20 / (3 * 12) + 0.25 * 20 / (3 * 5)
    torch.testing.assert_close(
        loss(LOGITS[:1], mixed[:1]), weight * plain(*kind, soft=True)(LOGITS[:1], mixed[:1]), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize('kind', KINDS, ids=str)
def test_the_loss_of_a_batch_is_the_mean_over_its_parts(kind):
    loss, order = balanced(*kind), torch.randperm(20, generator=torch.Generator().manual_seed(1))
    parts = [loss(LOGITS[part], LABELS[part]) for part in order.view(4, 5)]
    torch.testing.assert_close(sum(parts) / 4, loss(LOGITS, LABELS))


class Labels(list):
    """A dataset without images."""

    @property
    def targets(self) -> list:
        return list(self)


@pytest.mark.parametrize('bce_loss', [False, True])
def test_a_recipe_balances_the_loss_by_one_key(bce_loss):
    labels = torch.tensor([0, 0, 0, 1])
    logits = torch.randn(4, 2, generator=torch.Generator().manual_seed(2))
    values = dict(smoothing=0, bce_loss=bce_loss)
    per_image = (
        F.binary_cross_entropy_with_logits(logits, F.one_hot(labels).float(), reduction='none').mean(1)
        if bce_loss
        else F.cross_entropy(logits, labels, reduction='none')
    )
    expected = dict(none=per_image.mean(), loss=per_image[:3].mean() / 2 + per_image[3] / 2, sampler=per_image.mean())
    for balance, value in expected.items():
        loss = build_loss(make_recipe(values | dict(balance=balance)), None, Labels(labels.tolist()), 2)
        torch.testing.assert_close(loss(logits, labels), value)


def test_multi_label_losses_balance_positives_and_negatives_of_each_class():
    # of four images, three have the first label, one the second and all the third
    images = Labels([[0, 2], [0, 2], [0, 1, 2], [2]])
    target = torch.tensor([[1.0, 0, 1], [1, 0, 1], [1, 1, 1], [0, 0, 1]])
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(3))
    recipe = make_recipe(dict(multi_label=True, balance='loss', smoothing=0))
    positive, negative = F.softplus(-logits) * target, F.softplus(logits) * (1 - target)
    expected = (positive * torch.tensor([1 / 3, 3, 1 / 3]) + negative).mean()
    torch.testing.assert_close(build_loss(recipe, None, images, 3)(logits, target), expected)


# of 1,000 images, every second has the first label, and ten the second
RARE = Labels([[0] * (i % 2) + [1] * (i < 10) for i in range(1000)])


@pytest.mark.parametrize('mixing', [{}, dict(mixup=0.5)], ids=['unmixed', 'mixed'])
@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_smoothed_negatives_of_rare_labels_stay_negative(smoothing, mixing):
    recipe = make_recipe(dict(multi_label=True, balance='loss', smoothing=smoothing, **mixing))
    mixup = build_mixup(recipe, 2, (8, 8))
    loss = build_loss(recipe, mixup, RARE, 2).double()
    for label in (0, 1):
        target = torch.full((1, 2), float(label), dtype=torch.float64)
        best = target * (1 - smoothing) + smoothing / 2
        # the best prediction is the smoothed target itself
        logits = best.clamp(1e-6, 1 - 1e-6).logit().requires_grad_()
        given = mixup_target(target, 2, smoothing=smoothing, multi_label=True).double() if mixing else target
        (gradient,) = torch.autograd.grad(loss(logits, given), logits)
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-4)


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
def test_a_mixed_image_with_several_labels_has_the_losses_of_its_parts(smoothing):
    recipe = make_recipe(dict(multi_label=True, balance='loss', smoothing=smoothing, mixup=0.5))
    loss = build_loss(recipe, build_mixup(recipe, 2, (8, 8)), RARE, 2).double()
    targets = torch.tensor([[1.0, 0], [0, 1]])
    logits = torch.randn(1, 2, generator=torch.Generator().manual_seed(5)).double()
    first, second, mixed = (
        mixup_target(targets, 2, share, smoothing, multi_label=True)[:1].double() for share in (1.0, 0.0, 0.7)
    )
    torch.testing.assert_close(loss(logits, mixed), 0.7 * loss(logits, first) + 0.3 * loss(logits, second))


@pytest.mark.parametrize(
    ('values', 'num_classes', 'is_refused'),
    [
        (dict(bce_loss=True, bce_target_thresh=0.01), 10, True),
        (dict(bce_loss=True, bce_target_thresh=0.011), 10, False),
        (dict(bce_loss=True, bce_target_thresh=0.91), 10, True),
        (dict(bce_loss=True, bce_target_thresh=0.9), 10, False),
        (dict(multi_label=True, bce_target_thresh=0.05), 10, True),
        (dict(multi_label=True, bce_target_thresh=0.06), 10, False),
        (dict(multi_label=True, bce_target_thresh=0.95), 10, True),
        (dict(bce_loss=True, bce_target_thresh=0, smoothing=0), 10, False),
        (dict(bce_loss=True, bce_target_thresh=1, smoothing=0), 10, True),
        # without effect here
        (dict(bce_target_thresh=0), 10, False),
    ],
    ids=str,
)
def test_a_threshold_outside_the_smoothed_targets_is_refused(values, num_classes, is_refused):
    recipe, images = make_recipe(values), Labels([[0], [1]] if 'multi_label' in values else [0, 1])
    if not is_refused:
        build_loss(recipe, None, images, num_classes)
        return
    result = 1 if recipe.bce_target_thresh < 0.5 else 0
    with pytest.raises(UserError, match=f'bce_target_thresh .* makes all targets {result}'):
        build_loss(recipe, None, images, num_classes)


def test_multi_label_targets_are_smoothed_towards_a_half():
    target = torch.tensor([[1.0, 0, 1]])
    logits = torch.randn(1, 3, generator=torch.Generator().manual_seed(4))
    loss = build_loss(make_recipe(dict(multi_label=True, smoothing=0.2)), None, Labels([[0, 2]]), 3)
    expected = F.binary_cross_entropy_with_logits(logits, torch.tensor([[0.9, 0.1, 0.9]]))
    torch.testing.assert_close(loss(logits, target), expected)
