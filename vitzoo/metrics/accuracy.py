"""Top-1, top-5 and loss over a dataset, counted per image: the same integers for any batch size and process count.

Where an image has several labels, it is right if the best-scored class is one of them
(https://arxiv.org/abs/2006.07159), the loss is binary cross-entropy, and there is the mean average precision too.
"""

from collections.abc import Callable, Iterable
from itertools import chain, islice
from math import nan

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import IterableDataset

from vitzoo.errors import UserError


def evaluate(
    model: nn.Module,
    loader: Iterable,
    accelerator=None,
    num_samples: int | None = None,
    progress: Callable[[int], None] | None = None,
    probe=None,
) -> dict:
    """Evaluate a classifier on every image of a loader's dataset exactly once.

    Arguments and errors are those of `score_images`.

    Returns:
        The integers n, correct1 and correct5, the percentages top1 and top5, the mean loss, with a probe its means
        under its `key`, and with several labels the percentage map, over the classes that occur. top1 and top5 leave
        out images without any label.
    """
    return summarise(score_images(model, loader, rank_classes, accelerator, num_samples, progress, probe))


def score_images(
    model: nn.Module,
    loader: Iterable,
    score: Callable[[Tensor, Tensor], dict[str, Tensor]],
    accelerator=None,
    num_samples: int | None = None,
    progress: Callable[[int], None] | None = None,
    probe=None,
) -> dict[str, Tensor]:
    """Score every image of a loader's dataset exactly once, whichever process and batch it comes in.

    Each process scores the images its loader yields. What all processes have is then joined by dataset index, so an
    image that a sampler repeated to make the processes even counts once, and no mean of means is ever taken.

    Args:
        model: Maps images (B, C, H, W) to logits (B, num_classes). It runs on its own device and in the caller's
            autocast context. Pass the bare model: a DDP wrapper synchronises inside forward.
        loader: Yields (images, target). A plain `DataLoader`, timm's loaders and one that Accelerate prepared all
            work; the sampler must give the same order each time it is iterated. The target is what `score` takes: for
            `rank_classes` (B,) of classes or, with several labels, (B, num_classes) of 0 and 1.
        score: Maps logits in float32 and target to columns with one row per image, such as `rank_classes` does.
        accelerator: The `Accelerator` whose processes share the dataset; None for one process.
        num_samples: How many images there must be; by default `len(loader.dataset)`. A streaming dataset is checked
            only where this is given.
        progress: Called after every batch with the number of images in it.
        probe: An entered `OversmoothingProbe` or `HealthProbe` on this model, read after every batch into the column
            of its `key`.

    Returns:
        The columns, on the CPU, with a row for each image in the order of the dataset.

    Raises:
        UserError: The dataset is empty, or an image cannot be read.
        RuntimeError: The processes together did not see each image of the dataset.
    """
    was_training = model.training
    model.eval()
    try:
        columns, mistake = _score_share(model, loader, score, progress, probe)
    finally:
        model.train(was_training)
    num_rows = len(next(iter(columns.values()), ()))
    indices, columns = _join_processes(accelerator, columns, mistake, _dataset_indices(loader, num_rows, accelerator))

    # sorted by dataset index, the copies of an image stand next to each other
    order = indices.argsort(stable=True)
    order = order[indices[order].diff(prepend=indices.new_tensor([-1])) != 0]
    if not isinstance(loader.dataset, IterableDataset) and num_samples is None:
        num_samples = len(loader.dataset)
    if num_samples is not None and len(order) != num_samples:
        raise RuntimeError(f'evaluated {len(order)} different images of {num_samples}: check the sampler of the loader')
    return {name: column[order] for name, column in columns.items()}


def rank_classes(logits: Tensor, target: Tensor, keep_logits: bool = False) -> dict[str, Tensor]:
    """What is kept of each image: label, loss, and the five likeliest classes (top) with their probabilities (prob).

    With several labels the label is a row of booleans, and the logits are kept in any case.
    """
    top = logits.topk(min(5, logits.shape[1]), dim=1).indices  # (B, 5)
    if target.ndim == 2:
        loss = binary_cross_entropy_with_logits(logits, target.float(), reduction='none').mean(dim=1)
        prob, target, keep_logits = logits.sigmoid(), target > 0, True
    else:
        loss, prob = cross_entropy(logits, target, reduction='none'), logits.softmax(dim=1)
    columns = dict(label=target, top=top, prob=prob.gather(1, top), loss=loss)
    return {**columns, 'logits': logits} if keep_logits else columns


def mark_hits(top: Tensor, label: Tensor) -> Tensor:
    """Say which of the likeliest classes (B, k) are right: the label (B,), or one of the labels (B, num_classes)."""
    return label.gather(1, top) > 0 if label.ndim == 2 else top == label[:, None]


def summarise(columns: dict[str, Tensor]) -> dict:
    """Turn the columns of `rank_classes`, and those of probes, into counts, percentages and means."""
    label, hits = columns['label'], mark_hits(columns['top'], columns['label'])  # (N,), (N, 5)
    n, correct1, correct5 = len(hits), int(hits[:, 0].sum()), int(hits.any(dim=1).sum())
    labelled = n if label.ndim == 1 else int(label.any(dim=1).sum())
    top1, top5 = (100 * correct / labelled if labelled else nan for correct in (correct1, correct5))
    summary = dict(n=n, correct1=correct1, correct5=correct5, top1=top1, top5=top5)
    summary['loss'] = columns['loss'].double().mean().item()
    if label.ndim == 2:
        summary['map'] = _mean_average_precision(columns['logits'].double(), label.double())
    of_probe = columns.keys() - {'label', 'top', 'prob', 'loss', 'logits'}
    return summary | {key: columns[key].double().mean(dim=0).tolist() for key in of_probe}


def _mean_average_precision(logits: Tensor, target: Tensor) -> float:
    """The mean over the classes that occur of the area under precision over recall, in percent."""
    from timm.task import MultiLabelClassificationEvaluator

    occurs = target.any(dim=0)
    if not occurs.any():
        return nan
    # timm counts a class that never occurs as 0
    evaluator = MultiLabelClassificationEvaluator()
    evaluator.update(logits[:, occurs], target[:, occurs])
    return evaluator.compute()['map']


@torch.no_grad()
def _score_share(
    model: nn.Module, loader: Iterable, score: Callable, progress, probe
) -> tuple[dict[str, Tensor], UserError | None]:
    """Score this process's images up to a mistake of the user; no columns at all where it has no image."""
    device = next(model.parameters(), torch.empty(0)).device
    batches, mistake = [], None
    try:
        for images, target in loader:
            target = target.to(device, non_blocking=True)
            columns = score(model(images.to(device, non_blocking=True)).float(), target)
            batches.append(columns if probe is None else {**columns, probe.key: probe.per_image()})
            if progress is not None:
                progress(len(target))
    except UserError as error:
        mistake = error
    return _join(batches), mistake


def _dataset_indices(loader: Iterable, num_rows: int, accelerator) -> Tensor:
    """Find which image of the dataset each of this process's rows belongs to."""
    if isinstance(loader.dataset, IterableDataset):
        # a stream has no indices: number its images so that no two processes share one
        rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator is not None else (0, 1)
        return torch.arange(num_rows) * world + rank
    # islice because a batch sampler may repeat for ever (timm's MultiEpochsDataLoader)
    batches = islice(iter(loader.batch_sampler), len(loader))
    return torch.tensor(list(chain.from_iterable(batches)), dtype=torch.int64)


def _join_processes(
    accelerator, columns: dict[str, Tensor], mistake: UserError | None, indices: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Join the rows of all processes and the dataset indices that belong to them, on the CPU."""
    columns = {name: column.cpu() for name, column in columns.items()}
    if accelerator is not None and accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        # every process arrives here even where one of them failed, so that none waits for ever
        shards = gather_object([(indices, columns, mistake and str(mistake))])
        indices, columns = torch.cat([shard[0] for shard in shards]), _join([shard[1] for shard in shards])
        mistakes = [shard[2] for shard in shards if shard[2]]
        mistake = UserError(mistakes[0]) if mistakes else None
    if mistake is not None:
        raise mistake
    if not columns:
        raise UserError('there is nothing to evaluate: the dataset holds no images')
    num_rows = len(next(iter(columns.values())))
    if len(indices) != num_rows:
        raise RuntimeError(f'the sampler named {len(indices)} images but the loader gave {num_rows}')
    return indices, columns


def _join(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Put the rows of several sets of columns below each other."""
    parts = [part for part in parts if part]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}
