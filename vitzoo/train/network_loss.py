"""The loss of a student with other mixers than its teacher: their final tokens, logits and attention outputs."""

from functools import partial
from typing import Any

import torch
from timm.utils import unwrap_model
from torch import Tensor, nn
from torch.nn import functional as F

from vitzoo.models._attention_hook import hook_attention
from vitzoo.models._final_tokens import channels_last, normalize_tokens
from vitzoo.models._mixer_paths import swapped_paths
from vitzoo.train.kl import kl_divergence


class NetworkLoss:
    """Difference of a student's forward pass from a teacher's, whose attention layers have the same paths.

        L = L_tokens + KL(teacher's logits, student's logits) + block_weight * mean over mixers of L_attention

    L_tokens is the mean squared error of the outputs, normalized to unit variance, and L_attention that of the
    attention outputs, each divided by the variance of the teacher's output for the image. All terms are means over
    images, so they do not depend on how a batch is divided. A student without a head has no divergence, and with
    `multi_label` it is the sum of those of the labels (`vitzoo.train.kl`). ViT-AdaLA, stage 2,
    https://arxiv.org/abs/2603.16063, with the term of https://arxiv.org/abs/2410.10254.

    While the context is open, call the student and then the teacher on a batch, and the object for the loss.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        block_weight: float = 0.1,
        temperature: float = 1.0,
        multi_label: bool = False,
    ) -> None:
        self.student, self.teacher = unwrap_model(student), teacher
        self.block_weight, self.temperature, self.multi_label = block_weight, temperature, multi_label

    def __enter__(self) -> 'NetworkLoss':
        paths = swapped_paths(self.student)
        self.records = [_Record(model, paths if self.block_weight else []) for model in (self.student, self.teacher)]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for record in self.records:
            record.close()

    def __call__(self) -> Tensor:
        student, teacher = self.records
        tokens = [normalize_tokens(record.tokens) for record in self.records]
        loss = F.mse_loss(tokens[0], tokens[1])
        if self.student.num_classes:
            logits, expected = (record.output.float() / self.temperature for record in self.records)
            loss = loss + self.temperature**2 * kl_divergence(logits, expected, self.multi_label)
        if student.attention:
            errors = [_relative_error(student.attention[name], teacher.attention[name]) for name in student.attention]
            loss = loss + self.block_weight * torch.stack(errors).mean()
        for record in self.records:
            record.clear()
        return loss


class _Record:
    """Final tokens, output and attention outputs of the last forward pass of a model."""

    tokens: Tensor
    output: Tensor

    def __init__(self, model: Any, paths: list[str]) -> None:
        self.model = model
        self.attention: dict[str, Tensor] = {}
        self.hooks = [hook_attention(model, path, partial(self._keep, path)) for path in paths]
        self.forward_head = model.forward_head
        model.forward_head = self._keep_tokens

    def clear(self) -> None:
        self.attention.clear()
        del self.tokens, self.output

    def close(self) -> None:
        del self.model.forward_head
        for hook in self.hooks:
            hook.remove()

    def _keep(self, path: str, output: Tensor) -> None:
        self.attention[path] = output

    def _keep_tokens(self, features: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.tokens = channels_last(self.model, features)
        self.output = self.forward_head(features, *args, **kwargs)
        return self.output


def _relative_error(output: Tensor, target: Tensor) -> Tensor:
    """Squared error of (B, …) as a fraction of the variance of each image's target, averaged over images."""
    output, target = output.float().flatten(1), target.float().flatten(1)
    return ((output - target).square().mean(dim=1) / target.var(dim=1).clamp(min=1e-12)).mean()
