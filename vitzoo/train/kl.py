"""The difference of a student's logits from a teacher's, for one class per image and for several labels."""

from torch import Tensor
from torch.nn import functional as F


def kl_divergence(logits: Tensor, teacher_logits: Tensor, multi_label: bool = False) -> Tensor:
    """KL divergence of (B, num_classes) logits from the teacher's in nats, averaged over images.

    With `multi_label`, each logit is that of a label of its own, and the divergences of all labels are added. Raises
    ValueError for other numbers of classes.
    """
    own, others = logits.shape[1], teacher_logits.shape[1]
    if own != others:
        raise ValueError(f'The student has {own} classes and the teacher {others}: give models of the same classes.')
    if not multi_label:
        return _kl(logits.log_softmax(dim=1), teacher_logits.log_softmax(dim=1))
    # of the probability that an image has a label, and of the probability that it does not
    has = _kl(F.logsigmoid(logits), F.logsigmoid(teacher_logits))
    has_not = _kl(F.logsigmoid(-logits), F.logsigmoid(-teacher_logits))
    return has + has_not


def same_classes(logits: Tensor, teacher_logits: Tensor, multi_label: bool = False) -> Tensor:
    """True for images with the teacher's top class or, with `multi_label`, exactly the teacher's labels: (B,)."""
    if multi_label:
        return ((logits > 0) == (teacher_logits > 0)).all(dim=1)
    return logits.argmax(dim=1) == teacher_logits.argmax(dim=1)


def _kl(log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    return F.kl_div(log_probs, teacher_log_probs, reduction='batchmean', log_target=True)
