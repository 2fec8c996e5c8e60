"""Knowledge distillation from a teacher, with timm's tasks."""

from typing import Any

import torch
from accelerate import Accelerator
from timm.task import LogitDistillationTask, TokenDistillationTask, TrainingTask
from timm.task.distillation import DistillationTeacher
from timm.utils import unwrap_model
from torch import Tensor, nn
from torch.nn import functional as F

from vitzoo.classes import label_names
from vitzoo.data import resolve_data_config
from vitzoo.errors import UserError
from vitzoo.load import find_model, fit_data_config, load_model
from vitzoo.models._mixer_paths import swapped_paths
from vitzoo.train.network_loss import NetworkLoss
from vitzoo.train.recipe import Recipe


class Teacher(DistillationTeacher):
    """A teacher that computes in the precision of the training and returns float32, as Accelerate lets its student."""

    def __init__(self, model: nn.Module, accelerator: Accelerator) -> None:
        super().__init__(model, device=accelerator.device)
        self.autocast = accelerator.autocast

    def forward(self, input: Tensor, return_features: bool = False) -> Tensor:
        with self.autocast():
            output = super().forward(input, return_features)
        return output.float()


class HardDistillationTask(LogitDistillationTask):
    """Distillation with the teacher's predicted class as a second label.

    DeiT, section 3, "Hard-label distillation", https://arxiv.org/abs/2012.12877
    """

    student_mean: Tensor
    student_std: Tensor

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.trainable_module(input)
        with torch.no_grad():
            teacher_input = self.teacher.normalize_input(input, self.student_mean, self.student_std)
            teacher_label = self.teacher(teacher_input).argmax(1)
        task_loss, kd_loss = self.criterion(logits, target), F.cross_entropy(logits, teacher_label)
        loss = self.task_loss_weight * task_loss + self.distill_loss_weight * kd_loss
        return dict(loss=loss, output=logits, task_loss=task_loss, kd_loss=kd_loss)


class TransferTask(LogitDistillationTask):
    """Distillation of a whole network into one with other mixers, by `NetworkLoss`.

    Labels of images are used only if `task_loss_weight` is not 0. `multi_label` says that the teacher predicts several.
    """

    student_mean: Tensor
    student_std: Tensor

    def __init__(self, *args: Any, block_weight: float = 0.1, multi_label: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.block_weight, self.multi_label = block_weight, multi_label

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        teacher_input = self.teacher.normalize_input(input, self.student_mean, self.student_std)
        with NetworkLoss(
            self.trainable_module, self.teacher.model, self.block_weight, self.temperature, self.multi_label
        ) as network_loss:
            logits = self.trainable_module(input)
            with torch.no_grad():
                self.teacher(teacher_input)
            kd_loss = network_loss()
        loss = self.distill_loss_weight * kd_loss
        if self.task_loss_weight:
            loss = loss + self.task_loss_weight * self.criterion(logits, target)
        return dict(loss=loss, output=logits, kd_loss=kd_loss)


def distillation_task(
    recipe: Recipe,
    model: nn.Module,
    loss: nn.Module,
    class_names: list[str],
    data_config: dict,
    accelerator: Accelerator,
) -> TrainingTask:
    """The recipe's distillation task, with its teacher at the student's image size.

    Args:
        data_config: The student's, with the input size, mean and std of its images.

    Raises:
        UserError: The teacher has no weights, other classes or another number of channels, cannot take the student's
            images, the student has no distillation token, or the weight of the distillation loss is below 0.
    """
    teacher, device = _load_teacher(recipe, class_names, data_config), accelerator.device
    task: Any = _create_task(recipe, model, Teacher(teacher, accelerator), loss, device)
    # timm's buffers have three channels, also for grey images
    task.student_mean, task.student_std = _mean_and_std(data_config, device)
    task.teacher.mean_kd, task.teacher.std_kd = _mean_and_std(resolve_data_config(teacher), device)
    return task


def _create_task(
    recipe: Recipe, model: nn.Module, teacher: Teacher, loss: nn.Module, device: torch.device
) -> TrainingTask:
    options: dict[str, Any] = dict(
        student_model=model,
        teacher_model=teacher,
        criterion=loss,
        distill_loss_weight=recipe.distill_loss_weight,
        task_loss_weight=recipe.task_loss_weight,
        temperature=recipe.kd_temperature,
        device=device,
        verbose=False,
    )
    task_weight, is_complement = recipe.task_loss_weight, recipe.distill_loss_weight is None
    if is_complement and task_weight is not None and task_weight > 1 and recipe.kd_distill_type != 'transfer':
        raise UserError(
            f'task_loss_weight {task_weight:g} makes the weight of the distillation loss 1 - {task_weight:g}, which is'
            f' below 0; add --distill-loss-weight'
        )
    if recipe.kd_distill_type == 'logit':
        return LogitDistillationTask(**options)
    if recipe.kd_distill_type == 'hard':
        return HardDistillationTask(**options)
    if recipe.kd_distill_type == 'transfer':
        return _transfer_task(recipe, options)
    try:
        return TokenDistillationTask(distill_type=recipe.kd_token_distill_type, **options)
    except ValueError as error:
        raise UserError(
            f'{recipe.model} has no distillation token; use a model that has one, such as'
            f' deit_tiny_distilled_patch16_224, or --kd-distill-type logit'
        ) from error


def _transfer_task(recipe: Recipe, options: dict) -> TransferTask:
    """The task of `vitzoo transfer`; without weights in the recipe, labels are not used."""
    student, teacher = unwrap_model(options['student_model']), options['teacher_model'].model
    modules = dict(teacher.named_modules())
    paths = swapped_paths(student)
    missing = next((path for path in paths if path not in modules), None)
    of_student, of_teacher = (_shapes_outside(paths, model) for model in (student, teacher))
    other = next((name for name, shape in of_teacher.items() if of_student.get(name) != shape), None)
    if not paths or missing or other:
        reason = f'{recipe.model} has no mixers'
        if paths:
            reason = f'the teacher {recipe.kd_model_name} has {f"no {missing}" if missing else f"another {other}"}'
        raise UserError(
            f'{reason}; --kd-distill-type transfer needs a student that is the teacher with another --mixer'
        )
    if recipe.torchcompile:
        raise UserError('--kd-distill-type transfer reads the attention of each block; leave out --torchcompile')
    weights = dict(distill_loss_weight=recipe.distill_loss_weight, task_loss_weight=recipe.task_loss_weight)
    defaults = dict(distill_loss_weight=1.0, task_loss_weight=0.0)
    given = {name: weight for name, weight in weights.items() if weight is not None}
    return TransferTask(**options | defaults | given, block_weight=recipe.kd_block_weight)


def _shapes_outside(paths: list[str], model: nn.Module) -> dict[str, torch.Size]:
    """Shapes of the parameters outside of some layers."""
    inside = tuple(f'{path}.' for path in paths)
    return {name: parameter.shape for name, parameter in model.named_parameters() if not name.startswith(inside)}


def _mean_and_std(data_config: dict, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and std of the images, (1, C, 1, 1)."""
    mean, std = (torch.tensor(data_config[key], device=device).view(1, -1, 1, 1) for key in ('mean', 'std'))
    return mean, std


def _load_teacher(recipe: Recipe, class_names: list[str], data_config: dict) -> nn.Module:
    assert recipe.kd_model_name is not None
    name = find_model(recipe.kd_model_name)
    in_chans, *img_size = data_config['input_size']
    loaded = load_model(name, img_size=tuple(img_size))
    teacher = loaded.model
    if loaded.weights == 'random weights':
        raise UserError(f'the teacher {name} has no published weights; use the folder of a training run instead')
    teacher_classes = label_names(teacher)
    # a head may have more outputs than the data has classes, but without names they may be of other data
    is_of_data = teacher_classes == class_names if teacher_classes else teacher.num_classes == len(class_names)
    if not is_of_data:
        raise UserError(
            f'the {teacher.num_classes} classes of the teacher {name} are not the {len(class_names)} of'
            f' {recipe.data_dir}; train the teacher on {recipe.data_dir} first'
        )
    num_classes = recipe.num_classes or len(class_names)
    if teacher.num_classes != num_classes:
        is_of_default = teacher.num_classes == len(class_names)
        advice = 'leave out num_classes' if is_of_default else f'give num_classes {teacher.num_classes}'
        raise UserError(f'the teacher {name} has {teacher.num_classes} outputs and the student {num_classes}; {advice}')
    teacher_chans = resolve_data_config(teacher)['input_size'][0]
    if teacher_chans != in_chans:
        raise UserError(f'the teacher {name} takes images of {teacher_chans} channels and the student of {in_chans}')
    fit_data_config(name, teacher, tuple(img_size))
    return teacher.requires_grad_(False)
