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

    Each process scores the images its loader yields. The rows of all processes are then joined by dataset index, so an
    image that a sampler repeated to make the processes even counts once, and no mean of means is ever taken.

    Args:
        model: Maps images (B, C, H, W) to logits (B, num_classes). It runs on its own device and in the caller's
            autocast context. Pass the bare model: a DDP wrapper synchronises inside forward.
        loader: Yields (images, target), the target (B,) of classes or, with several labels, (B, num_classes) of 0 and
            1. A plain `DataLoader`, timm's loaders and one that Accelerate prepared all
            work; the sampler must give the same order each time it is iterated.
        accelerator: The `Accelerator` whose processes share the dataset; None for one process.
        num_samples: How many images there must be; by default `len(loader.dataset)`. A streaming dataset is checked
            only where this is given.
        progress: Called after every batch with the number of images in it.
        probe: An entered `OversmoothingProbe` or `HealthProbe` on this model, read after every batch.

    Returns:
        The integers n, correct1 and correct5, the percentages top1 and top5, the mean loss, with a probe its means
        under its `key`, and with several labels the percentage map, over the classes that occur. top1 and top5 leave
        out images without any label.

    Raises:
        UserError: The dataset is empty, or an image cannot be read.
        RuntimeError: The processes together did not see each image of the dataset.
    """
    was_training = model.training
    model.eval()
    try:
        rows, mistake = _score_images(model, loader, progress, probe)
    finally:
        model.train(was_training)
    rows = _join_processes(accelerator, rows, mistake, _dataset_indices(loader, len(rows), accelerator))

    # sorted by dataset index, the copies of an image stand next to each other
    rows = rows[rows[:, 0].argsort(stable=True)]
    rows = rows[rows[:, 0].diff(prepend=rows.new_tensor([-1])) != 0]
    if not isinstance(loader.dataset, IterableDataset) and num_samples is None:
        num_samples = len(loader.dataset)
    if num_samples is not None and len(rows) != num_samples:
        raise RuntimeError(f'evaluated {len(rows)} different images of {num_samples}: check the sampler of the loader')
    return _summarise(rows[:, 1:], probe)


@torch.no_grad()
def _score_images(model: nn.Module, loader: Iterable, progress, probe) -> tuple[Tensor, UserError | None]:
    """Score this process's images, a row for each, up to a mistake of the user.

    A row is (correct1, correct5, loss, *probe) and, where an image has several labels, (*logits, *target).
    """
    device = next(model.parameters(), torch.empty(0)).device
    rows, mistake = [], None
    try:
        for images, target in loader:
            target = target.to(device, non_blocking=True)
            logits = model(images.to(device, non_blocking=True)).float()
            row = [_score(logits, target)]
            row += [] if probe is None else [probe.per_image()]
            row += [logits, target.float()] if target.ndim == 2 else []
            rows.append(torch.cat(row, dim=1))
            if progress is not None:
                progress(len(target))
    except UserError as error:
        mistake = error
    width = 3 if probe is None else 3 + len(probe.names)
    return torch.cat(rows) if rows else torch.empty(0, width, device=device), mistake


def _score(logits: Tensor, target: Tensor) -> Tensor:
    """(B, 3): whether the best class, and one of the best five, is right, and the loss."""
    best = logits.topk(min(5, logits.shape[1]), dim=1).indices
    if target.ndim == 2:
        hits = target.gather(1, best) > 0
        loss = binary_cross_entropy_with_logits(logits, target.float(), reduction='none').mean(dim=1)
    else:
        hits = best == target[:, None]
        loss = cross_entropy(logits, target, reduction='none')
    return torch.stack([hits[:, 0].float(), hits.any(dim=1).float(), loss], dim=1)


def _dataset_indices(loader: Iterable, num_rows: int, accelerator) -> Tensor:
    """Find which image of the dataset each of this process's rows belongs to."""
    if isinstance(loader.dataset, IterableDataset):
        # a stream has no indices: number its images so that no two processes share one
        rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator is not None else (0, 1)
        return torch.arange(num_rows) * world + rank
    # islice because a batch sampler may repeat for ever (timm's MultiEpochsDataLoader)
    batches = islice(iter(loader.batch_sampler), len(loader))
    return torch.tensor(list(chain.from_iterable(batches)), dtype=torch.int64)


def _join_processes(accelerator, rows: Tensor, mistake: UserError | None, indices: Tensor) -> Tensor:
    """Put the index in front of each row and join the rows of all processes, in float64 on the CPU."""
    if accelerator is not None and accelerator.num_processes > 1:
        from accelerate.utils import gather_object

        # every process arrives here even where one of them failed, so that none waits for ever
        shards = gather_object([(indices, rows.cpu(), mistake and str(mistake))])
        # a process without images does not know how wide a row is
        indices, rows = (torch.cat([shard[i] for shard in shards if len(shard[1])] or [shards[0][i]]) for i in range(2))
        mistakes = [shard[2] for shard in shards if shard[2]]
        mistake = UserError(mistakes[0]) if mistakes else None
    if mistake is not None:
        raise mistake
    if not len(rows):
        raise UserError('there is nothing to evaluate: the dataset holds no images')
    if len(indices) != len(rows):
        raise RuntimeError(f'the sampler named {len(indices)} images but the loader gave {len(rows)}')
    return torch.cat([indices[:, None].double(), rows.cpu().double()], dim=1)


def _summarise(rows: Tensor, probe) -> dict:
    """Turn one row per image into counts, percentages and means."""
    n, correct1, correct5 = len(rows), int(rows[:, 0].sum()), int(rows[:, 1].sum())
    num_probes = 0 if probe is None else len(probe.names)
    logits, target = rows[:, 3 + num_probes :].chunk(2, dim=1) if rows.shape[1] > 3 + num_probes else (None, None)
    labelled = n if target is None else int(target.any(dim=1).sum())
    top1, top5 = (100 * correct / labelled if labelled else nan for correct in (correct1, correct5))
    summary = dict(n=n, correct1=correct1, correct5=correct5, top1=top1, top5=top5)
    summary['loss'] = rows[:, 2].mean().item()
    if probe is not None:
        summary[probe.key] = rows[:, 3 : 3 + num_probes].mean(dim=0).tolist()
    if target is not None:
        summary['map'] = _mean_average_precision(logits, target)
    return summary


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
