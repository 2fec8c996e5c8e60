"""Top-1, top-5 and loss over a dataset, counted per image: the same integers for any batch size and process count.

An image with several labels is correct if the top-scoring class is one of them (https://arxiv.org/abs/2006.07159); the
loss is then binary cross-entropy, and the mean average precision is computed as well.
"""

from collections.abc import Callable, Iterator
from itertools import chain, islice
from math import nan
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import IterableDataset

from vitzoo._modes import restored_modes
from vitzoo.errors import UserError
from vitzoo.metrics.finite import check_logits

if TYPE_CHECKING:
    from accelerate import Accelerator

# of which the average precision is computed at a time, 0.5 GB
_MAX_LOGITS = 2**22


class Loader(Protocol):
    """Batches (images, target) of a dataset: a `DataLoader`, or any with what is read of one."""

    dataset: Any
    batch_sampler: Any

    def __iter__(self) -> Iterator[Any]: ...

    def __len__(self) -> int: ...


class Probe(Protocol):
    """Measures of the images in a forward pass, such as an `OversmoothingProbe` or a `HealthProbe`."""

    key: str

    def per_image(self) -> Tensor:
        """The values since the last call, (images, columns)."""


def evaluate(
    model: nn.Module,
    loader: Loader,
    accelerator: 'Accelerator | None' = None,
    num_samples: int | None = None,
    progress: Callable[[int], None] | None = None,
    probe: Probe | None = None,
) -> dict:
    """Evaluate a classifier on every image of a loader's dataset exactly once.

    Arguments and errors are those of `score_images` and `rank_classes`.

    Returns:
        The integers n, correct1 and correct5, the percentages top1 and top5 and the mean loss; with a probe, its means
        under its `key`; for multi-label data, the mean average precision `map` in percent, over the classes that
        occur, and the number of images with a label, `labelled`. The others do not count in top1 and top5.
    """
    return summarize(score_images(model, loader, rank_classes, accelerator, num_samples, progress, probe))


def score_images(
    model: nn.Module,
    loader: Loader,
    score: Callable[[Tensor, Tensor], dict[str, Tensor]],
    accelerator: 'Accelerator | None' = None,
    num_samples: int | None = None,
    progress: Callable[[int], None] | None = None,
    probe: Probe | None = None,
    name: str | None = None,
) -> dict[str, Tensor]:
    """Score every image of a loader's dataset exactly once, over all batches and processes.

    Each process scores the images its loader yields. The rows of all processes are then joined by dataset index, so an
    image that a sampler repeated for padding counts once, and no mean of means is ever taken.

    Args:
        model: Maps images (B, C, H, W) to logits (B, num_classes). It runs on its own device and in the caller's
            autocast context. Pass the raw model: DDP communicates inside forward.
        loader: Yields (images, target). A plain `DataLoader`, timm's loaders and a loader prepared by Accelerate all
            work; the sampler must return the same order each time it is iterated. `target` is passed to `score`: for
            `rank_classes`, class indices (B,) or multi-label targets (B, num_classes) of 0 and 1.
        score: Maps float32 logits and target to columns with one row per image, as `rank_classes` does.
        accelerator: The `Accelerator` whose processes share the dataset; None for a single process.
        num_samples: Expected number of images; by default `len(loader.dataset)`. For a streaming dataset there is no
            default and no check.
        progress: Called after every batch with its number of images.
        probe: An entered `OversmoothingProbe` or `HealthProbe` on this model, read after every batch into the column
            of its `key`.
        name: Name of the model in errors; by default its architecture.

    Returns:
        The columns, on the CPU, with one row per image in the order of the dataset.

    Raises:
        UserError: The dataset is empty, an image cannot be read or scored, or its logits are not finite.
        RuntimeError: Some image of the dataset was not seen by any process.
    """
    with restored_modes(model):
        model.eval()
        columns, error = _score_share(model, loader, score, accelerator, progress, probe, name)
    num_rows = len(next(iter(columns.values()), ()))
    indices, columns = _join_processes(accelerator, columns, error, _dataset_indices(loader, num_rows, accelerator))

    # after sorting by dataset index, repeats of an image are adjacent
    order = indices.argsort(stable=True)
    order = order[indices[order].diff(prepend=indices.new_tensor([-1])) != 0]
    if not isinstance(loader.dataset, IterableDataset) and num_samples is None:
        num_samples = len(loader.dataset)
    if num_samples is not None and len(order) != num_samples:
        raise RuntimeError(f'evaluated {len(order)} different images of {num_samples}: check the sampler of the loader')
    return {name: column[order] for name, column in columns.items()}


def rank_classes(logits: Tensor, target: Tensor, keep_logits: bool = False) -> dict[str, Tensor]:
    """Reduce logits to per-image columns: label, loss, and the top 5 classes (top) with their probabilities (prob).

    For multi-label targets, label is a row of booleans and the logits are always kept.

    Raises:
        UserError: A label is none of the classes.
    """
    _check_labels(logits, target)
    top, prob = most_likely(logits, 5, is_multi_label=target.ndim == 2)
    if target.ndim == 2:
        loss = binary_cross_entropy_with_logits(logits, target.float(), reduction='none').mean(dim=1)
        target, keep_logits = target > 0, True
    else:
        loss = cross_entropy(logits, target, reduction='none')
    columns = dict(label=target, top=top, prob=prob, loss=loss)
    # a copy, because the next run of a CUDA graph overwrites its output
    return {**columns, 'logits': logits.clone()} if keep_logits else columns


def _check_labels(logits: Tensor, labels: Tensor) -> None:
    """Raise UserError if labels are not those of the logits."""
    num_classes = logits.shape[1]
    if labels.ndim == 2:
        if labels.shape[1] != num_classes:
            raise UserError(f'the images have {labels.shape[1]} labels each, and the model {num_classes} classes')
        return
    wrong = labels[(labels < 0) | (labels >= num_classes)]
    if len(wrong):
        raise UserError(
            f'an image has the label {int(wrong[0])}, which is none of the {num_classes} classes of the model; give a'
            ' model and images of the same classes'
        )


def most_likely(logits: Tensor, k: int, is_multi_label: bool = False) -> tuple[Tensor, Tensor]:
    """The k most likely classes (B, k), or all if there are fewer, and their probabilities.

    Probabilities are a softmax over the classes, or a sigmoid of each. The order is that of the logits, because
    probabilities of different logits may all be 1 or 0.
    """
    top = logits.topk(min(k, logits.shape[1]), dim=1).indices
    prob = logits.sigmoid() if is_multi_label else logits.softmax(dim=1)
    return top, prob.gather(1, top)


def mark_hits(top: Tensor, label: Tensor) -> Tensor:
    """Mark the top classes (B, k) that are correct, for labels (B,) or multi-label targets (B, num_classes)."""
    return label.gather(1, top) > 0 if label.ndim == 2 else top == label[:, None]


def summarize(columns: dict[str, Tensor]) -> dict:
    """Reduce the columns of `rank_classes` and of probes to counts, percentages and means."""
    label, hits = columns['label'], mark_hits(columns['top'], columns['label'])  # (N,), (N, 5)
    n, correct1, correct5 = len(hits), int(hits[:, 0].sum()), int(hits.any(dim=1).sum())
    labelled = n if label.ndim == 1 else int(label.any(dim=1).sum())
    top1, top5 = (100 * correct / labelled if labelled else nan for correct in (correct1, correct5))
    summary = dict(n=n, correct1=correct1, correct5=correct5, top1=top1, top5=top5)
    summary['loss'] = columns['loss'].double().mean().item()
    if label.ndim == 2:
        summary['labelled'] = labelled
        summary['map'] = _mean_average_precision(columns['logits'], label)
    probe_keys = columns.keys() - {'label', 'top', 'prob', 'loss', 'logits'}
    return summary | {key: columns[key].double().mean(dim=0).tolist() for key in probe_keys}


def _mean_average_precision(logits: Tensor, target: Tensor) -> float:
    """Average precision (area under the precision-recall curve) in percent, averaged over the classes that occur."""
    from timm.task import MultiLabelClassificationEvaluator

    # timm counts a class without positives as 0
    classes, total = target.any(dim=0).nonzero().flatten(), 0.0
    if not len(classes):
        return nan
    # some classes at a time, because timm needs 130 bytes for each logit
    for some in classes.split(max(1, _MAX_LOGITS // len(logits))):
        evaluator = MultiLabelClassificationEvaluator()
        evaluator.update(logits[:, some], target[:, some])
        total += len(some) * evaluator.compute()['map']
    return total / len(classes)


@torch.no_grad()
def _score_share(
    model: nn.Module,
    loader: Loader,
    score: Callable,
    accelerator: 'Accelerator | None',
    progress: Callable[[int], None] | None,
    probe: Probe | None,
    name: str | None,
) -> tuple[dict[str, Tensor], UserError | None]:
    """Score the images of this process, up to the first UserError; without images, there are no columns."""
    device = next(model.parameters(), torch.empty(0)).device
    batches, user_error, num_rows = [], None, 0

    def describe_image(row: int) -> str:
        index = int(_dataset_indices(loader, num_rows + row + 1, accelerator)[num_rows + row])
        return loader.dataset.filename(index) if hasattr(loader.dataset, 'filename') else f'image {index}'

    try:
        for images, target in loader:
            images, target = (tensor.to(device, non_blocking=True) for tensor in (images, target))
            logits = model(images).float()
            check_logits(logits, model, images, describe_image, name)
            columns = score(logits, target)
            num_rows += len(target)
            batches.append(columns if probe is None else {**columns, probe.key: probe.per_image()})
            if progress is not None:
                progress(len(target))
    except UserError as error:
        user_error = error
    return _join(batches), user_error


def _dataset_indices(loader: Loader, num_rows: int, accelerator: 'Accelerator | None') -> Tensor:
    """Dataset index of each row of this process."""
    if isinstance(loader.dataset, IterableDataset):
        # a stream has no indices: number its images so that they are unique over processes
        rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator is not None else (0, 1)
        return torch.arange(num_rows) * world + rank
    # islice because a batch sampler may be infinite (timm's MultiEpochsDataLoader)
    batches = islice(iter(loader.batch_sampler), len(loader))
    return torch.tensor(list(chain.from_iterable(batches)), dtype=torch.int64)


def _join_processes(
    accelerator: 'Accelerator | None', columns: dict[str, Tensor], error: UserError | None, indices: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Gather the rows of all processes and their dataset indices, on the CPU."""
    columns = {name: column.cpu() for name, column in columns.items()}
    if accelerator is not None and accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        # every process takes part in the gather even if it failed, or the others would deadlock
        shards = gather_object([(indices, columns, error and str(error))])
        indices, columns = torch.cat([shard[0] for shard in shards]), _join([shard[1] for shard in shards])
        messages = [shard[2] for shard in shards if shard[2]]
        error = UserError(messages[0]) if messages else None
    if error is not None:
        raise error
    if not columns:
        raise UserError('there is nothing to evaluate: the dataset has no images')
    num_rows = len(next(iter(columns.values())))
    if len(indices) != num_rows:
        raise RuntimeError(f'the sampler listed {len(indices)} images but the loader returned {num_rows}')
    return indices, columns


def _join(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate several sets of columns."""
    parts = [part for part in parts if part]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}
