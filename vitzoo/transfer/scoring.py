"""Scores of students: how much of their teacher's accuracy or features they have, on the same images."""

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from vitzoo._modes import restored_modes
from vitzoo.data.loader import stop_workers
from vitzoo.metrics.features import linear_probe, nearest_neighbors
from vitzoo.train.kl import kl_divergence, same_classes
from vitzoo.train.processes import raise_together
from vitzoo.transfer.outputs import has_head

if TYPE_CHECKING:
    from accelerate import Accelerator

# scores in percent: by the kind of `TransferData`, and of the linear probe
SCORE_TITLES = {
    'top1': 'top-1',
    'knn': 'nearest neighbours',
    'linear_probe': 'linear probe',
    'cosine': 'cosine similarity',
}


class StudentScorer:
    """Scores models on the same images as their teacher.

    Args:
        teacher: In evaluation mode.
        val: Batches of (images, labels), in the same order each time; of several processes, the share of this one.
        kind: As in `vitzoo.transfer.data.TransferData`.
        bank: Labelled batches that nearest neighbours and the linear probe learn from, for kind 'knn'.
        accelerator: Its processes share the batches; None if this one has all.
        multi_label: The models predict several labels per image.
    """

    def __init__(
        self,
        teacher: nn.Module,
        val: Iterable,
        kind: str,
        bank: Iterable | None = None,
        accelerator: 'Accelerator | None' = None,
        multi_label: bool = False,
    ) -> None:
        self.val, self.kind, self.bank, self.accelerator = val, kind, bank, accelerator
        self.multi_label = multi_label
        self.expected: tuple[Tensor, Tensor, Tensor] | None = None
        self.has_head = has_head(teacher)
        self.teacher_scores = self.score(teacher)

    @torch.no_grad()
    def score(self, model: nn.Module) -> dict[str, float]:
        """Scores of a model in percent, the main one under 'score'.

        Returns:
            `cosine`: mean cosine similarity of the pooled features with the teacher's. With a head, `agreement`:
            images with the teacher's top class or labels, and `divergence` of the logits in nats. By kind, `top1`, or
            `knn` and `linear_probe`.
        """
        with restored_modes(model):
            model.eval()
            return self._score(model)

    def stop_workers(self) -> None:
        """End the worker processes of the loaders; another score starts new ones."""
        for loader in (self.val, self.bank):
            if isinstance(loader, DataLoader):
                stop_workers(loader)

    def _score(self, model: nn.Module) -> dict[str, float]:
        found = _collect(model, self.val, self.has_head, self.accelerator)
        if self.expected is None:
            self.expected = found
        features, logits, labels = found
        scores = dict(cosine=100 * F.cosine_similarity(features, self.expected[0]).mean().item())
        if self.has_head:
            scores['agreement'] = _percent(same_classes(logits, self.expected[1], self.multi_label))
            scores['divergence'] = kl_divergence(logits, self.expected[1], self.multi_label).item()
        if self.kind == 'top1':
            scores['top1'] = _percent(logits.argmax(dim=1) == labels)
        elif self.kind == 'knn':
            assert self.bank is not None
            bank, _, bank_labels = _collect(model, self.bank, False, self.accelerator)
            scores['knn'] = _percent(nearest_neighbors(bank, bank_labels, features) == labels)
            scores['linear_probe'] = _percent(linear_probe(bank, bank_labels, features) == labels)
        return dict(score=scores[self.kind], **scores)


def _collect(
    model: nn.Module, loader: Iterable, needs_logits: bool, accelerator: 'Accelerator | None'
) -> tuple[Tensor, Tensor, Tensor]:
    """Pooled features, logits and labels of all images in the order of the dataset, on the CPU in float32."""
    device = next(model.parameters()).device
    batches = []
    with nullcontext() if accelerator is None else raise_together(accelerator):
        for images, target in loader:
            tokens = model.forward_features(images.to(device, non_blocking=True))
            features = model.forward_head(tokens, pre_logits=True).float().cpu()
            # an empty slice would be sent to the other processes with all features
            logits = model.forward_head(tokens).float().cpu() if needs_logits else features.new_empty(len(features), 0)
            batches.append((features, logits, target))
    shares = [batches] if accelerator is None else gather_object([batches])
    # `eval_loader` deals batches to the processes in turn
    batches = [share[turn] for turn in range(len(shares[0])) for share in shares if turn < len(share)]
    features, logits, labels = (torch.cat(parts) for parts in zip(*batches))
    return features, logits, labels


def _percent(hits: Tensor) -> float:
    return 100 * hits.double().mean().item()
