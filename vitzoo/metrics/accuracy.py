"""Top-1, top-5 and loss over a dataset, counted per image: the same integers for any batch size and process count."""

from collections.abc import Callable, Iterable
from itertools import chain, islice

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
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
        loader: Yields (images, target). A plain `DataLoader`, timm's loaders and one that Accelerate prepared all
            work; the sampler must give the same order each time it is iterated.
        accelerator: The `Accelerator` whose processes share the dataset; None for one process.
        num_samples: How many images there must be; by default `len(loader.dataset)`. A streaming dataset is checked
            only where this is given.
        progress: Called after every batch with the number of images in it.
        probe: An entered `OversmoothingProbe` or `HealthProbe` on this model, read after every batch.

    Returns:
        The integers n, correct1 and correct5, the percentages top1 and top5, the mean loss, and with a probe its means
        under its `key`.

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
    """Score this process's images, a row (correct1, correct5, loss, *probe) for each, up to a mistake of the user."""
    device = next(model.parameters(), torch.empty(0)).device
    rows, mistake = [], None
    try:
        for images, target in loader:
            target = target.to(device, non_blocking=True)
            logits = model(images.to(device, non_blocking=True)).float()
            hits = logits.topk(min(5, logits.shape[1]), dim=1).indices == target[:, None]
            loss = cross_entropy(logits, target, reduction='none')
            row = torch.stack([hits[:, 0].float(), hits.any(dim=1).float(), loss], dim=1)
            rows.append(row if probe is None else torch.cat([row, probe.per_image()], dim=1))
            if progress is not None:
                progress(len(target))
    except UserError as error:
        mistake = error
    width = 3 if probe is None else 3 + len(probe.names)
    return torch.cat(rows) if rows else torch.empty(0, width, device=device), mistake


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
        indices, rows = (torch.cat([shard[i] for shard in shards]) for i in range(2))
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
    summary = dict(n=n, correct1=correct1, correct5=correct5, top1=100 * correct1 / n, top5=100 * correct5 / n)
    summary['loss'] = rows[:, 2].mean().item()
    if probe is not None:
        summary[probe.key] = rows[:, 3:].mean(dim=0).tolist()
    return summary
