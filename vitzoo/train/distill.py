"""Knowledge distillation from a teacher, with timm's tasks."""

import torch
from timm.task import LogitDistillationTask, TokenDistillationTask, TrainingTask
from torch import Tensor, nn
from torch.nn import functional as F

from vitzoo.data import resolve_data_config
from vitzoo.errors import UserError
from vitzoo.load import find_model, fit_data_config, label_names, load_model
from vitzoo.train.recipe import Recipe


class HardDistillationTask(LogitDistillationTask):
    """Distillation with the teacher's predicted class as a second label.

    DeiT, section 3, "Hard-label distillation", https://arxiv.org/abs/2012.12877
    """

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.trainable_module(input)
        with torch.no_grad():
            teacher_input = self.teacher.normalize_input(input, self.student_mean, self.student_std)
            teacher_label = self.teacher(teacher_input).argmax(1)
        task_loss, kd_loss = self.criterion(logits, target), F.cross_entropy(logits, teacher_label)
        loss = self.task_loss_weight * task_loss + self.distill_loss_weight * kd_loss
        return dict(loss=loss, output=logits, task_loss=task_loss, kd_loss=kd_loss)


def distillation_task(
    recipe: Recipe, model: nn.Module, loss: nn.Module, class_names: list[str], data_config: dict, device: torch.device
) -> TrainingTask:
    """The recipe's distillation task, with its teacher at the student's image size.

    Args:
        data_config: The student's, with the input size, mean and std of its images.

    Raises:
        UserError: The teacher has no weights, other classes or another number of channels, cannot take the student's
            images, or the student has no distillation token.
    """
    teacher = _load_teacher(recipe, class_names, data_config)
    task = _create_task(recipe, model, teacher, loss, device)
    # timm's buffers have three channels, also for grey images
    task.student_mean, task.student_std = _mean_and_std(data_config, device)
    task.teacher.mean_kd, task.teacher.std_kd = _mean_and_std(resolve_data_config(teacher), device)
    return task


def _create_task(
    recipe: Recipe, model: nn.Module, teacher: nn.Module, loss: nn.Module, device: torch.device
) -> TrainingTask:
    options = dict(
        student_model=model,
        teacher_model=teacher,
        criterion=loss,
        distill_loss_weight=recipe.distill_loss_weight,
        task_loss_weight=recipe.task_loss_weight,
        temperature=recipe.kd_temperature,
        device=device,
        verbose=False,
    )
    if recipe.kd_distill_type == 'logit':
        return LogitDistillationTask(**options)
    if recipe.kd_distill_type == 'hard':
        return HardDistillationTask(**options)
    try:
        return TokenDistillationTask(distill_type=recipe.kd_token_distill_type, **options)
    except ValueError as error:
        raise UserError(
            f'{recipe.model} has no distillation token; use a model that has one, such as'
            f' deit_tiny_distilled_patch16_224, or --kd-distill-type logit'
        ) from error


def _mean_and_std(data_config: dict, device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and std of the images, (1, C, 1, 1)."""
    mean, std = (torch.tensor(data_config[key], device=device).view(1, -1, 1, 1) for key in ('mean', 'std'))
    return mean, std


def _load_teacher(recipe: Recipe, class_names: list[str], data_config: dict) -> nn.Module:
    name = find_model(recipe.kd_model_name)
    in_chans, *img_size = data_config['input_size']
    teacher, source = load_model(name, img_size=tuple(img_size))
    if source == 'random weights':
        raise UserError(f'the teacher {name} has no published weights; use the folder of a training run instead')
    teacher_classes = label_names(teacher)
    if teacher.num_classes != len(class_names) or (teacher_classes and teacher_classes != class_names):
        raise UserError(
            f'the {teacher.num_classes} classes of the teacher {name} are not the {len(class_names)} of'
            f' {recipe.data_dir}; train the teacher on {recipe.data_dir} first'
        )
    if recipe.num_classes not in (None, teacher.num_classes):
        raise UserError(
            f'the teacher {name} has {teacher.num_classes} outputs and the student {recipe.num_classes}; leave out'
            f' num_classes'
        )
    teacher_chans = resolve_data_config(teacher)['input_size'][0]
    if teacher_chans != in_chans:
        raise UserError(f'the teacher {name} takes images of {teacher_chans} channels and the student of {in_chans}')
    fit_data_config(name, teacher, tuple(img_size))
    return teacher.requires_grad_(False)
