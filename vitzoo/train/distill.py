"""Knowledge distillation: a student that learns from the labels and from a teacher, by timm's tasks."""

import torch
from timm.task import ClassificationTask, LogitDistillationTask, TokenDistillationTask, TrainingTask
from torch import Tensor, nn
from torch.nn import functional as F

from vitzoo.errors import UserError
from vitzoo.load import find_model, label_names, load_model
from vitzoo.train.recipe import Recipe


class HardDistillationTask(LogitDistillationTask):
    """Learns the teacher's choice as a second label.

    DeiT, section 3, "Hard-label distillation", https://arxiv.org/abs/2012.12877
    """

    def forward(self, input: Tensor, target: Tensor) -> dict[str, Tensor]:
        logits = self.trainable_module(input)
        with torch.no_grad():
            choice = self.teacher(self.teacher.normalize_input(input, self.student_mean, self.student_std)).argmax(1)
        task_loss, kd_loss = self.criterion(logits, target), F.cross_entropy(logits, choice)
        loss = self.task_loss_weight * task_loss + self.distill_loss_weight * kd_loss
        return dict(loss=loss, output=logits, task_loss=task_loss, kd_loss=kd_loss)


def build_task(recipe: Recipe, model: nn.Module, loss: nn.Module, class_names: list[str], device) -> TrainingTask:
    """What maps images and targets to the loss: the loss itself, or together with the recipe's teacher.

    Raises:
        UserError: The teacher has no weights or other classes, or the student has no distillation token.
    """
    if recipe.kd_model_name is None:
        return ClassificationTask(model, loss, device=device, verbose=False).to(device)
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
    if recipe.kd_distill_type != 'token':
        task = {'logit': LogitDistillationTask, 'hard': HardDistillationTask}[recipe.kd_distill_type](**options)
        return task.to(device)
    try:
        return TokenDistillationTask(distill_type=recipe.kd_token_distill_type, **options).to(device)
    except ValueError as error:
        raise UserError(
            f'{recipe.model} has no distillation token; take one that has, such as deit_tiny_distilled_patch16_224, or'
            f' --kd-distill-type logit'
        ) from error


def _load_teacher(recipe: Recipe, class_names: list[str]) -> nn.Module:
    name = find_model(recipe.kd_model_name)
    teacher, source = load_model(name)
    if source == 'random weights':
        raise UserError(f'the teacher {name} has no published weights; name a folder that training wrote')
    its_names = label_names(teacher)
    if teacher.num_classes != len(class_names) or (its_names and its_names != class_names):
        raise UserError(
            f'the teacher {name} knows {teacher.num_classes} classes, and not the {len(class_names)} of'
            f' {recipe.data_dir}; train it on them first'
        )
    return teacher.requires_grad_(False)
