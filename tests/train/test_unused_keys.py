"""Keys that have no effect are named."""

import pytest
import torch
from toys import SHIPPED_RECIPES

from vitzoo.train.optim import build_scheduler
from vitzoo.train.progress import unused_keys
from vitzoo.train.recipe import FIELDS, make_recipe, read_recipe_file


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
        (
            dict(kd_model_name='m', kd_distill_type='hard', kd_temperature=1),
            {'kd_temperature': 'with kd_distill_type: hard'},
        ),
        (
            dict(kd_model_name='m', kd_distill_type='token', kd_token_distill_type='hard', kd_temperature=1),
            {'kd_temperature': 'with kd_token_distill_type: hard'},
        ),
        (dict(kd_model_name='m', kd_distill_type='token', kd_temperature=1), {}),
        (
            dict(kd_model_name='m', kd_token_distill_type='hard'),
            {'kd_token_distill_type': 'without kd_distill_type: token'},
        ),
        (dict(kd_model_name='m', kd_block_weight=1), {'kd_block_weight': 'without kd_distill_type: transfer'}),
        (dict(kd_model_name='m', kd_block_weight=1, kd_distill_type='transfer'), {}),
        (dict(opt='SGD', opt_betas=[0.9, 0.9], opt_eps=1e-3), dict.fromkeys(('opt_eps', 'opt_betas'), 'with opt: SGD')),
        (dict(opt='sgd', momentum=0.5), {}),
        (dict(momentum=0.5), {'momentum': 'with opt: adamw'}),
        (dict(opt_betas=[0.9, 0.9], opt_eps=1e-3), {}),
        (dict(lr=0.1, lr_base=0.2, lr_base_scale='sqrt'), dict.fromkeys(('lr_base', 'lr_base_scale'), 'with lr')),
        (dict(model_ema_warmup=True), {'model_ema_warmup': 'without model_ema'}),
    ],
    ids=str,
)
def test_a_key_without_effect_is_named_with_the_reason(values, expected):
    assert unused_keys(make_recipe(values)) == expected


def rates(recipe):
    optimizer, found = torch.optim.SGD([torch.zeros(1)], lr=0.1), []
    scheduler = build_scheduler(recipe, optimizer, 5)
    for step in range(30):
        found.append(optimizer.param_groups[0]['lr'])
        scheduler.step_update(step + 1)
    return found


@pytest.mark.parametrize('sched', FIELDS['sched'].metadata['choices'])
@pytest.mark.parametrize(
    'key',
    [{'decay_epochs': 2}, {'decay_milestones': [2, 3]}, {'decay_rate': 0.5}, {'min_lr': 0.01}, {'warmup_lr': 0.01}],
    ids=lambda key: next(iter(key)),
)
@pytest.mark.parametrize('warmup', [0, 1])
def test_the_keys_of_a_schedule_that_are_named_are_those_that_do_not_change_it(sched, key, warmup):
    if sched == 'rsqrt' and not warmup:
        return
    shared = dict(sched=sched, epochs=4, cooldown_epochs=2, warmup_epochs=warmup)
    # early, so that the factor of their decay shows
    shared |= {'multistep': dict(decay_milestones=[1]), 'step': dict(decay_epochs=1)}.get(sched, {})
    recipe = make_recipe(shared | key)
    assert (rates(recipe) == rates(make_recipe(shared))) == (unused_keys(recipe).keys() == {*key})


@pytest.mark.parametrize('path', SHIPPED_RECIPES, ids=lambda path: path.stem)
def test_every_key_of_a_shipped_recipe_has_an_effect(path):
    assert unused_keys(make_recipe(read_recipe_file(path))) == {}
