"""Block matching and distillation: what they train, that they cannot make a student worse, and that they resume."""

import math
from copy import deepcopy
from itertools import islice
from multiprocessing import active_children
from pathlib import Path

import pytest
import timm
import torch
from accelerate import Accelerator
from processes import limited_files, start_processes
from teachers import batches, make_student, make_teacher
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from vitzoo.data.loader import TrainBatches, train_loader
from vitzoo.errors import UserError
from vitzoo.transfer import distil, match_blocks, matching, outputs
from vitzoo.transfer.attention import attention_output, mixer_paths, visit_attention
from vitzoo.transfer.data import IntervalBatches
from vitzoo.transfer.descent import StepBatches, WarmupCosine
from vitzoo.transfer.outputs import output_error
from vitzoo.transfer.rates import choose_rates, trial_steps

TRAIN, HELD_OUT = batches(3), batches(2, seed=1)
STAGES = {'matching': match_blocks, 'distillation': distil}
# the automatic rate of a student without an error is 0
RATES = {'matching': {}, 'distillation': dict(lr=3e-5, new_lr=3e-4)}


def test_the_attention_output_of_a_student_is_that_of_its_own_forward_pass():
    teacher = make_teacher()
    student = make_student(teacher, 'linear')
    seen, expected = {}, {}
    path = mixer_paths(student)[0]
    student.get_submodule(path).register_forward_hook(lambda mixer, args, output: expected.update({path: output}))
    with torch.no_grad():
        student(TRAIN[0])
        with visit_attention(teacher, [path], lambda path, call, output: seen.update({path: call})):
            teacher(TRAIN[0])
        # the input of the first block is the same in both
        assert torch.equal(attention_output(student, path, seen[path]), expected[path])


@pytest.mark.parametrize('stage', STAGES)
def test_softmax_by_softmax_starts_and_stays_at_zero(stage):
    teacher = make_teacher()
    student = make_student(teacher, 'softmax')
    before = deepcopy(student.state_dict())
    history = STAGES[stage](teacher, student, TRAIN, HELD_OUT, steps=4, eval_every=2, **RATES[stage])
    assert history[0]['output_error'] == 0
    assert max(history[0].get('errors', {'': 0}).values()) == 0
    assert [row['best'] for row in history] == [True, False, False]
    assert all(torch.equal(before[name], value) for name, value in student.state_dict().items())


MIXERS = {'linear': {}, 'aft_simple': {}, 'nystrom': dict(num_landmarks=4), 'ls': dict(window_size=2, dual_norm=False)}


@pytest.mark.parametrize('mixer', MIXERS)
def test_the_error_on_a_fixed_set_falls_from_stage_to_stage(mixer):
    teacher = make_teacher()
    student = make_student(teacher, mixer, **MIXERS[mixer])
    errors = [output_error(teacher, student, HELD_OUT)]
    for stage in STAGES.values():
        history = stage(teacher, student, HELD_OUT, HELD_OUT, steps=12, eval_every=4, lr=5e-4)
        assert history[0]['output_error'] == pytest.approx(errors[-1], rel=1e-5)
        errors.append(output_error(teacher, student, HELD_OUT))
        assert errors[-1] == pytest.approx(min(row['output_error'] for row in history), rel=1e-5)
    assert errors[0] > errors[1] > errors[2]


def test_matching_lowers_the_error_of_every_block():
    teacher = make_teacher()
    student = make_student(teacher, 'linear')
    history = match_blocks(teacher, student, TRAIN, HELD_OUT, steps=20, eval_every=20, lr=1e-3)
    assert all(history[-1]['errors'][path] < error for path, error in history[0]['errors'].items())


def test_the_error_of_a_block_is_relative_to_the_variance_of_its_channels(monkeypatch):
    teacher = make_teacher()
    student = make_student(teacher, 'linear')
    outputs = {teacher: [], student: []}
    for model, found in outputs.items():
        model.blocks[0].attn.register_forward_hook(lambda attn, args, output, found=found: found.append(output))
        model(torch.cat(HELD_OUT))
    (expected,), (found,) = outputs.values()
    variance = expected.detach().flatten(0, 1).var(dim=0, correction=0).mean()
    error = (found - expected.detach()).square().mean() / variance
    (gradient,) = torch.autograd.grad(error, student.blocks[0].attn.qkv.weight)
    descend = {}
    monkeypatch.setattr(matching, 'descend', lambda *args, **options: descend.update(backward=args[3], measure=args[4]))
    match_blocks(teacher, student, TRAIN, HELD_OUT)
    assert descend['measure']()['errors']['blocks.0.attn'] == pytest.approx(error.item(), rel=1e-5)
    descend['backward'](torch.cat(HELD_OUT))
    torch.testing.assert_close(student.blocks[0].attn.qkv.weight.grad, gradient)


def test_a_rate_that_destroys_the_student_leaves_it_as_it_was():
    teacher = make_teacher()
    student = make_student(teacher, 'linear')
    before = deepcopy(student.state_dict())
    history = match_blocks(teacher, student, TRAIN, HELD_OUT, steps=4, eval_every=2, lr=10.0)
    assert min(row['output_error'] for row in history[1:]) > history[0]['output_error']
    assert all(torch.equal(before[name], value) for name, value in student.state_dict().items())


def test_matching_trains_mixers_except_their_projection():
    teacher = make_teacher()
    student = make_student(teacher, 'ls', rank=2, window_size=2)
    before = deepcopy(student.state_dict())
    match_blocks(teacher, student, TRAIN, HELD_OUT, steps=3, eval_every=3, lr=1e-3)
    changed = {
        name.split('.', 2)[2] for name, value in student.state_dict().items() if not torch.equal(before[name], value)
    }
    assert all(name.startswith('attn.') and not name.startswith('attn.proj.') for name in changed)
    assert {'attn.qkv.weight', 'attn.dynamic_proj.weight'} <= changed
    assert all(parameter.requires_grad for parameter in student.parameters())


@pytest.mark.parametrize('stage', STAGES)
def test_a_stage_that_is_interrupted_continues_to_the_same_weights(stage, tmp_path):
    teacher = make_teacher()
    whole, interrupted = (make_student(teacher, 'linear') for _ in range(2))
    options = dict(steps=6, eval_every=2, lr=1e-3)
    expected = STAGES[stage](teacher, whole, TRAIN, HELD_OUT, **options)
    file = tmp_path / 'state.pt'
    with pytest.raises(KeyboardInterrupt):
        STAGES[stage](teacher, interrupted, TRAIN, HELD_OUT, **options, state_file=file, progress=interrupt_at(4))
    again = make_student(teacher, 'linear')
    assert STAGES[stage](teacher, again, TRAIN, HELD_OUT, **options, state_file=file) == expected
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items())


def match_in_process(folder: str) -> None:
    """Match a student with BatchNorm in its mixers on images of this process, and write its weights."""
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    torch.manual_seed(0)
    teacher = timm.create_model('cvt_softmax_nano', img_size=32, num_classes=3).eval()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    student, train = make_student(teacher, 'linear'), batches(2, size=32, seed=rank)
    options = dict(steps=2, eval_every=1, lr=1e-3, state_file=Path(folder, 'state.pt'))
    history = match_blocks(teacher, student, train, batches(1, size=32), **options, accelerator=accelerator)
    assert history[-1]['best']
    torch.save(student.state_dict(), Path(folder, f'{rank}.pt'))
    accelerator.wait_for_everyone()
    distributed.destroy_process_group()


@pytest.mark.slow
def test_processes_have_the_same_student_after_matching_also_the_statistics_of_its_images(tmp_path):
    outcome = start_processes(2, match_in_process, str(tmp_path))
    assert outcome.codes == [0, 0], outcome.err
    first, second = (torch.load(tmp_path / f'{rank}.pt', weights_only=True) for rank in range(2))
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_matching_stops_its_workers_and_starts_others_for_the_next_student():
    teacher, images = make_teacher(), [(image, 0) for image in torch.cat(TRAIN)]
    loader, others = train_loader(images, TrainBatches(len(images), 4), workers=1), set(active_children())
    for _ in range(2):
        match_blocks(teacher, make_student(teacher, 'linear'), StepBatches(loader), HELD_OUT, steps=1)
        assert set(active_children()) <= others


@pytest.mark.parametrize('stage', STAGES)
def test_a_loader_without_images_is_refused(stage):
    teacher = make_teacher()
    with pytest.raises(ValueError, match='no .*images'):
        STAGES[stage](teacher, make_student(teacher, 'linear'), TRAIN, [], steps=1)
    with pytest.raises(ValueError, match='no images'):
        STAGES[stage](teacher, make_student(teacher, 'linear'), [], HELD_OUT, steps=1)


def test_a_model_without_mixers_is_refused():
    teacher = make_teacher()
    with pytest.raises(ValueError, match='VisionTransformer has no token mixers'):
        match_blocks(teacher, deepcopy(teacher), TRAIN, HELD_OUT)


def test_a_stage_that_diverges_ends_with_a_sentence_and_the_best_state():
    teacher = make_teacher()
    student = make_student(teacher, 'linear')
    before = deepcopy(student.state_dict())
    with pytest.raises(UserError, match=r'after step 1 at learning rates of 1e\+30; halve them'):
        distil(teacher, student, TRAIN, HELD_OUT, steps=2, eval_every=1, lr=1e30)
    assert all(torch.equal(before[name], value) for name, value in student.state_dict().items())


def refuse(*rates: float) -> float:
    raise AssertionError


@pytest.mark.parametrize(
    ('error', 'lr'), [(0.0, 0.0), (0.1, 1e-5), (0.5, 3e-5), (float('inf'), 3e-5), (float('nan'), 3e-5)]
)
def test_the_scaled_learning_rate_follows_the_error_up_to_a_limit(error, lr):
    rates = choose_rates('scaled', 'auto', 100, lambda: error, refuse)
    assert rates == pytest.approx(dict(lr=lr, new_lr=10 * lr))
    assert choose_rates('scaled', 0.5, 100, lambda: error, refuse) == pytest.approx(dict(lr=lr, new_lr=0.5))


@pytest.mark.parametrize(
    ('steps', 'errors', 'chosen'),
    [
        # from an error of 0.1: in a short stage each trial must be better than those before
        (99, [0.08, 0.05, 0.03, 0.04], 2),
        (99, [0.03, 0.04], 0),
        (99, [0.03, math.inf], 0),
        (99, [0.3, 0.02, math.nan], 1),
        (99, [0.03, 0.03], 0),
        (99, [0.3, 0.2], 0),
        (99, [math.inf, math.inf], 0),
        # in a long one, half as good as the best
        (100, [0.08, 0.03, 0.06, 0.064, 0.066], 3),
        (100, [0.03, 0.066], 0),
        (100, [0.03, math.nan], 0),
        (100, [0.2, 0.09, 0.1], 1),
        (100, [0.2, 0.3], 0),
        (100, [math.inf, math.inf], 0),
    ],
)
def test_the_learning_rate_is_tripled_as_long_as_trials_are_good(steps, errors, chosen):
    seen, left = [], iter(errors)

    def trial(lr: float, new_lr: float) -> float:
        seen.append((lr, new_lr))
        return next(left)

    found, tried = choose_rates('auto', 'auto', steps, lambda: 0.1, trial), len(errors)
    assert seen == [pytest.approx((1e-5 * 3**power, 1e-4 * 3**power)) for power in range(tried)]
    assert tuple(found.values()) == seen[chosen]


def test_given_learning_rates_need_no_error():
    assert choose_rates(2e-4, 'auto', 100, refuse, refuse) == pytest.approx(dict(lr=2e-4, new_lr=2e-3))
    assert choose_rates(2e-4, 1e-4, 100, refuse, refuse) == dict(lr=2e-4, new_lr=1e-4)


def test_trials_have_a_twentieth_of_the_steps_and_at_least_ten():
    assert [trial_steps(steps) for steps in (2, 10, 100, 200, 1000)] == [2, 10, 10, 10, 50]


@pytest.mark.parametrize(
    ('rates', 'message'),
    [(dict(new_lr='high'), "new_lr is a number or 'auto'"), (dict(lr='high'), "lr is a number or 'auto' or 'scaled'")],
)
def test_a_rate_in_words_is_refused(rates, message):
    teacher = make_teacher()
    with pytest.raises(ValueError, match=f"{message}, not 'high'"):
        distil(teacher, make_student(teacher, 'linear'), TRAIN, HELD_OUT, steps=1, **rates)


def test_distillation_begins_with_the_rates_of_the_students_error():
    teacher = make_teacher()
    # close to the teacher: a window that covers nearly the whole grid
    scaled, explicit, fixed = (make_student(teacher, 'neighborhood', kernel_size=3).train() for _ in range(3))
    error = output_error(teacher, scaled, HELD_OUT)
    assert error < 0.3
    scaled.train()
    options = dict(steps=4, eval_every=2)
    history = distil(teacher, scaled, TRAIN, HELD_OUT, lr='scaled', **options)
    assert scaled.training
    rates = choose_rates('scaled', 'auto', 100, lambda: error, refuse)
    assert history == distil(teacher, explicit, TRAIN, HELD_OUT, **rates, **options)
    assert history != distil(teacher, fixed, TRAIN, HELD_OUT, lr=3e-5, new_lr=3e-4, **options)


@pytest.mark.parametrize('steps', [12, 100])
def test_distillation_trains_at_the_rate_that_trials_find(steps):
    teacher = make_teacher(depth=1)
    found, *others = (make_student(teacher, 'xca') for _ in range(9))
    options = dict(steps=steps, eval_every=steps)
    history = distil(teacher, found, TRAIN, HELD_OUT, **options)
    start = history[0]['output_error']
    first = choose_rates('scaled', 'auto', steps, lambda: start, refuse)['lr']
    rates = [first * 3**power for power in range(len(others))]
    # trials of ten steps, each with the whole schedule
    errors = [
        distil(teacher, deepcopy(other), TRAIN, HELD_OUT, steps=10, eval_every=10, lr=lr)[-1]['output_error']
        for lr, other in zip(rates, others)
    ]
    gains, enough = [start - error for error in errors], 1 if steps == 12 else 0.5
    best = next(index for index in range(len(rates) - 1) if not gains[index + 1] > enough * max(gains[: index + 1]))
    assert best > 1 and gains[0] > 0
    assert history == distil(teacher, others[best], TRAIN, HELD_OUT, lr=rates[best], **options)
    scaled = distil(teacher, others[0], TRAIN, HELD_OUT, lr='scaled', **options)
    assert history[-1]['output_error'] < scaled[-1]['output_error']


def test_a_state_that_does_not_fit_on_the_disk_is_one_sentence(tmp_path):
    teacher, file = make_teacher(), tmp_path / 'state.pt'
    options = dict(steps=2, eval_every=1, state_file=file)
    with pytest.raises(UserError, match=f"cannot write '{file}' .* MB free"), limited_files(1000):
        match_blocks(teacher, make_student(teacher, 'linear'), TRAIN, HELD_OUT, **options)
    assert list(tmp_path.iterdir()) == []


def test_stochastic_depth_does_not_keep_a_stage_from_continuing_exactly(tmp_path):
    teacher = make_teacher(drop_path_rate=0.5)
    options = dict(steps=4, eval_every=2, lr=1e-3)
    whole, parts = (make_student(teacher, 'linear') for _ in range(2))
    expected = distil(teacher, whole, TRAIN, HELD_OUT, **options)
    file = tmp_path / 'state.pt'
    with pytest.raises(KeyboardInterrupt):
        distil(teacher, parts, TRAIN, HELD_OUT, **options, state_file=file, progress=interrupt_at(4))
    torch.manual_seed(7)
    assert distil(teacher, parts, TRAIN, HELD_OUT, **options, state_file=file) == expected


@pytest.mark.parametrize('stage', [match_blocks, distil])
def test_random_numbers_of_a_stage_follow_its_seed_and_leave_those_of_the_caller(stage):
    teacher = make_teacher(drop_path_rate=0.5)
    student = make_student(teacher, 'linear', proj_drop=0.5)
    options = dict(steps=2, eval_every=2, lr=1e-3)
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    first, again, other = (
        stage(teacher, deepcopy(student), TRAIN, HELD_OUT, **options, seed=seed)[-1]['output_error']
        for seed in (1, 1, 2)
    )
    assert torch.rand(2).equal(expected)
    assert first == again != other


def test_matching_learns_in_an_autocast_context_of_the_caller():
    # the context caches the weights that it has cast
    teacher = make_teacher()
    student = make_student(teacher, 'linear')
    with torch.autocast('cpu', torch.bfloat16):
        history = match_blocks(teacher, student, TRAIN, HELD_OUT, steps=6, eval_every=6, lr=1e-3)
    assert all(history[-1]['errors'][path] < 0.99 * error for path, error in history[0]['errors'].items())


@pytest.mark.parametrize('stage', STAGES)
def test_an_autocast_context_of_the_caller_sees_the_weights_that_a_stage_has_left(stage):
    teacher = make_teacher()
    student = make_student(teacher, 'linear')
    with torch.autocast('cpu', torch.bfloat16):
        student(TRAIN[0])
        STAGES[stage](teacher, student, TRAIN, HELD_OUT, steps=1, **RATES[stage])
        found, expected = student(TRAIN[0]), deepcopy(student)(TRAIN[0])
    assert torch.equal(found, expected)


@pytest.mark.parametrize('stage', STAGES)
def test_gradients_are_computed_outside_of_autocast(stage):
    teacher = make_teacher()
    student, within = make_student(teacher, 'linear'), set()
    for parameter in student.parameters():
        parameter.register_hook(lambda grad: within.add(torch.is_autocast_enabled('cpu')))
    with torch.autocast('cpu', torch.bfloat16):
        STAGES[stage](teacher, student, TRAIN, HELD_OUT, steps=1, **RATES[stage])
    assert within == {False}


def test_the_rates_of_a_stage_rise_from_the_first_step_on_and_follow_a_cosine_to_zero():
    optimizer, rates = torch.optim.SGD([torch.zeros(1)], lr=1.0), []
    schedule = WarmupCosine(optimizer, 40)
    for step in range(40):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]['lr'])
    assert rates == pytest.approx([0.5, 1.0, *((1 + math.cos(math.pi * step / 38)) / 2 for step in range(38))])


def test_images_of_bytes_are_normalized_on_the_device():
    images = [(torch.zeros(3, 8, 8, dtype=torch.uint8), 0)] * 4
    seen = []
    loader = train_loader(images, TrainBatches(len(images), 4), workers=0)
    step_batches = StepBatches(loader, lambda images: seen.append(images) or images.float())
    (found,) = islice(step_batches.from_step(0, torch.device('meta')), 1)
    assert (seen[0].dtype, seen[0].device.type, found.device.type) == (torch.uint8, 'meta', 'meta')


class WithoutFloat64(TorchDispatchMode):
    """Operations as MPS has them."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        assert getattr(found, 'dtype', None) != torch.float64, func
        return found


def test_stages_need_no_float64_on_a_device_without_it(monkeypatch):
    assert outputs.widest_dtype(torch.device('mps')) == torch.float32
    for module in (matching, outputs):
        monkeypatch.setattr(module, 'widest_dtype', lambda device: torch.float32)
    teacher = make_teacher()
    student = make_student(teacher, 'linear')
    with WithoutFloat64():
        match_blocks(teacher, student, TRAIN, HELD_OUT, steps=1)
        output_error(teacher, student, HELD_OUT)
        outputs.output_gap(teacher, student, HELD_OUT)


@pytest.mark.parametrize('accum', [1, 2])
def test_intervals_of_steps_have_the_batches_of_the_epochs(accum):
    epochs = TrainBatches(10, 4, accum)
    expected = []
    for epoch in range(4):
        epochs.start_at(epoch)
        expected += epochs
    batches = IntervalBatches(TrainBatches(10, 4, accum), interval=3, steps=7)
    found = []
    for interval in range(3):
        batches.start_at(interval)
        assert len(batches) == len(list(batches)) == accum * (1 if interval == 2 else 3)
        found += batches
    assert found == expected[: 7 * accum]
    batches.start_at(1, 2)
    assert list(batches) == expected[5 * accum : 6 * accum]


def interrupt_at(step: int):
    def interrupt(row: dict) -> None:
        if row['step'] == step:
            raise KeyboardInterrupt

    return interrupt
