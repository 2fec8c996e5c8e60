"""Knowledge distillation from a teacher, with timm's tasks."""

import torch
from timm.task import LogitDistillationTask, TokenDistillationTask, TrainingTask
from torch import Tensor, nn
from torch.nn import functional as F

from vitzoo.errors import UserError
from vitzoo.load import find_model, label_names, load_model
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
    recipe: Recipe, model: nn.Module, loss: nn.Module, class_names: list[str], device: torch.device
) -> TrainingTask:
    """The recipe's distillation task, with its teacher.

    Raises:
        UserError: The teacher has no weights or other classes, or the student has no distillation token.
    """
    options = dict(
        student_model=model,
        teacher_model=_load_teacher(recipe, class_names),
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


def _load_teacher(recipe: Recipe, class_names: list[str]) -> nn.Module:
    name = find_model(recipe.kd_model_name)
    teacher, source = load_model(name)
    if source == 'random weights':
        raise UserError(f'the teacher {name} has no published weights; use the folder of a training run instead')
    teacher_classes = label_names(teacher)
    if teacher.num_classes != len(class_names) or (teacher_classes and teacher_classes != class_names):
        raise UserError(
            f'the {teacher.num_classes} classes of the teacher {name} are not the {len(class_names)} of'
            f' {recipe.data_dir}; train the teacher on {recipe.data_dir} first'
        )
    return teacher.requires_grad_(False)
