"""Keys that have no effect are named."""

import pytest
from toys import SHIPPED_RECIPES

from vitzoo.train.progress import unused_keys
from vitzoo.train.recipe import make_recipe, read_recipe_file


@pytest.mark.parametrize(
    ('values', 'expected'),
    [
        (dict(bce_target_thresh=0.2), {'bce_target_thresh': 'without bce_loss'}),
        (dict(bce_target_thresh=0.2, multi_label=True), {}),
        (dict(amp_dtype='float16'), {'amp_dtype': 'without amp'}),
        (dict(amp_dtype='float16', amp=True), {}),
        (dict(aa='v0', aug='albumentations'), {'aa': 'with aug: albumentations'}),
        (dict(no_aug=True, aa='v0', hflip=0, reprob=0.5), dict.fromkeys(('aa', 'hflip', 'reprob'), 'with no_aug')),
        (dict(no_aug=True, mixup=0.5, mixup_prob=0.5), {}),
        (dict(mixup_off_epoch=3), {'mixup_off_epoch': 'without mixup or cutmix'}),
        (dict(mixup_off_epoch=3, cutmix_minmax=[0.2, 0.8]), {}),
        (dict(cutmix=1, cutmix_minmax=[0.2, 0.8]), {'cutmix': 'with cutmix_minmax'}),
        (dict(mixup_switch_prob=0.2), {'mixup_switch_prob': 'without mixup or cutmix'}),
        (dict(mixup_switch_prob=0.2, mixup=0.5), {'mixup_switch_prob': 'without both mixup and cutmix'}),
        (dict(mixup_switch_prob=0.2, cutmix=0.5), {'mixup_switch_prob': 'without both mixup and cutmix'}),
        (dict(mixup_switch_prob=0.2, mixup=0.5, cutmix_minmax=[0.2, 0.8]), {}),
        (dict(color_jitter=0.1, aa='v0'), {'color_jitter': 'with aa'}),
        (dict(color_jitter=0.1, aa='3a'), {}),
        (dict(kd_temperature=1), {'kd_temperature': 'without kd_model_name'}),
        (dict(model_ema_warmup=True), {'model_ema_warmup': 'without model_ema'}),
    ],
    ids=str,
)
def test_a_key_without_effect_is_named_with_the_reason(values, expected):
    assert unused_keys(make_recipe(values)) == expected


@pytest.mark.parametrize('path', SHIPPED_RECIPES, ids=lambda path: path.stem)
def test_every_key_of_a_shipped_recipe_has_an_effect(path):
    assert unused_keys(make_recipe(read_recipe_file(path))) == {}
