"""Mixup and CutMix that end at an epoch, or have a range for the box."""

from shlex import split

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from toys import make_images

from vitzoo.errors import UserError
from vitzoo.train import step as step_module
from vitzoo.train.batches import build_mixup
from vitzoo.train.loop import train
from vitzoo.train.recipe import make_recipe
from vitzoo.train.step import mix

pytestmark = pytest.mark.usefixtures('fresh_accelerate')
TINY = split('--model test_vit --img-size 32 --workers 0 --batch-size 8 --lr 1e-3 --warmup-epochs 0 --crop-pct 1')


@pytest.fixture
def mixed(monkeypatch) -> list[bool]:
    """An entry for each step, True if its images were mixed."""
    found = []

    def mix_and_compare(mixup, images, target):
        before = images.clone()
        target = mix(mixup, images, target)
        assert target.ndim == 2
        found.append(not torch.equal(before, images))
        return target

    monkeypatch.setattr(step_module, 'mix', mix_and_compare)
    return found


def test_mixing_ends_at_an_epoch_also_in_a_run_that_resumes(images, tmp_path, mixed):
    options = [*TINY, '--data-dir', images, '--mixup', '0.8', '--mixup-off-epoch', '2']
    train([*options, '--output', str(tmp_path / 'whole'), '--epochs', '3', '--model-ema'])
    assert mixed == [True] * 10 + [False] * 5
    del mixed[:]
    # from the end of an epoch, and from within one
    halves = ['--output', str(tmp_path / 'halves'), '--model-ema', '--sched', 'cosine', '--checkpoint-every', '3']
    train([*options, *halves, '--epochs', '3', '--checkpoint-hist', '9'])
    for step in (10, 12):
        del mixed[:]
        train(['--resume', str(tmp_path / 'halves' / 'checkpoints' / f'step-{step:08d}')])
        assert mixed == [False] * (15 - step)
        left, right = (load_file(tmp_path / run / 'model.safetensors') for run in ('whole', 'halves'))
        assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_several_labels_are_not_mixed_after_the_epoch(tmp_path, mixed):
    images = make_images(tmp_path / 'images', train_red=4, train_blue=4, val_red=2, val_blue=2)
    for part in ('train', 'val'):
        files = [f'{path.relative_to(images / part)},{path.parent.name}' for path in (images / part).rglob('*.jpg')]
        (images / part / 'labels.csv').write_text('\n'.join(['file,labels', *files]))
    options = ['--multi-label', '--cutmix-minmax', '0.2', '0.8', '--mixup-off-epoch', '1', '--epochs', '2']
    train([*TINY, *options, '--data-dir', str(images), '--output', str(tmp_path / 'run')])
    assert mixed == [True, False]


@pytest.mark.parametrize('mode', ['batch', 'pair', 'elem'])
def test_the_box_of_cutmix_has_sides_in_the_range(mode):
    recipe = make_recipe(dict(cutmix_minmax=[0.25, 0.5], mixup_mode=mode, smoothing=0))
    mixup = build_mixup(recipe, 4, (32, 64))
    shares = []
    for seed in range(20):
        step_module.seed_everything(seed)
        images = torch.arange(4.0)[:, None, None, None].expand(4, 3, 32, 64).clone()
        target = mix(mixup, images, torch.arange(4))
        for number, image in enumerate(images):
            box = (image[0] != number).nonzero()
            height, width = (box.max(dim=0).values - box.min(dim=0).values + 1).tolist()
            assert 8 <= height < 16 and 16 <= width < 32
            shares.append(target[number, number].item())
            assert shares[-1] == pytest.approx(1 - height * width / (32 * 64))
    assert len(set(shares)) > 5


@pytest.mark.parametrize('minmax', [[0.5, 0.2], [0.2, 0.21], [0, 0]])
def test_a_range_without_whole_pixels_is_refused(minmax):
    with pytest.raises(UserError, match='cutmix_minmax .* has no whole number of pixels'):
        build_mixup(make_recipe(dict(cutmix_minmax=minmax)), 4, (32, 32))


@pytest.mark.parametrize(('accum', 'is_mixed'), [(4, True), (8, False)])
def test_parts_of_one_image_are_noted_as_not_mixed(images, tmp_path, mixed, capsys, accum, is_mixed):
    options = ['--mixup', '0.8', '--epochs', '1', '--grad-accum-steps', str(accum)]
    train([*TINY, *options, '--data-dir', images, '--output', str(tmp_path)])
    assert mixed == [is_mixed] * 5 * accum
    assert ('mixup and cutmix have no effect' in capsys.readouterr().out) != is_mixed


@pytest.mark.parametrize('prob', [0.2, 0.8])
@pytest.mark.parametrize('switch_prob', [0.2, 0.8])
def test_images_are_mixed_with_the_probabilities_of_the_recipe(prob, switch_prob):
    values = dict(mixup=1.0, cutmix=1.0, mixup_prob=prob, mixup_switch_prob=switch_prob, mixup_mode='elem')
    mixup = build_mixup(make_recipe(values), 2, (8, 8))
    np.random.seed(0)
    # a box copies the pixels of another image, and mixup makes new values
    images = torch.tensor([0.0, 1.0]).repeat(500).view(-1, 1, 1, 1).repeat(1, 1, 8, 8)
    before, target = images.clone(), torch.tensor([0, 1]).repeat(500)
    mix(mixup, images, target)
    is_mixed = (images != before).flatten(1).any(dim=1)
    has_box = is_mixed & (images.flatten(1).frac() == 0).all(dim=1)
    assert is_mixed.float().mean() == pytest.approx(prob, abs=0.06)
    assert has_box.sum() / is_mixed.sum() == pytest.approx(switch_prob, abs=0.06)


def test_the_targets_of_mixed_images_are_smoothed():
    mixup = build_mixup(make_recipe(dict(mixup=1.0, smoothing=0.1)), 4, (8, 8))
    target = mix(mixup, torch.zeros(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]))
    torch.testing.assert_close(target[:, 2:], torch.full((4, 2), 0.025))
    torch.testing.assert_close(target.sum(dim=1), torch.ones(4))
