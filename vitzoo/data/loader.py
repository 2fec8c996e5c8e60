"""Which images a process reads at which step, and the random stream each of them is augmented with.

Nothing here has a state to save. The order of an epoch follows from (seed, epoch), and an image's augmentation from
(seed, epoch, its position in the epoch), so neither the number of worker processes, nor that of training processes, nor
an interruption changes what is trained on.
"""

import random
from collections.abc import Iterator

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

ORDER_STREAM, DATA_STREAM, STEP_STREAM = range(3)


def hash_seed(*numbers: int) -> int:
    """One seed from several numbers, far from that of any other numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def seed_everything(*numbers: int, cpu_only: bool = False) -> None:
    """Seed Python's, numpy's and torch's generators with the hash of `numbers`."""
    mixed = hash_seed(*numbers)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    # torch.manual_seed visits every kind of device, which takes as long as decoding a small image
    (torch.default_generator.manual_seed if cpu_only else torch.manual_seed)(mixed)


class TrainBatches(Sampler):
    """The micro-batches of one process: every step's global batch, dealt out to processes and accumulation steps.

    Yields lists of (index, seed numbers). A global batch is always full: the remainder of an epoch is left out, a
    different one in every epoch. Micro-batch m of process r gets every `accum * world`-th image of the batch, beginning
    with number m * world + r, so two processes and two accumulation steps make the same micro-batches.

    With `labels`, the class of every image, each class is drawn equally often instead: an epoch is as long, but has the
    images of a large class once or not at all, and those of a small one several times.
    """

    def __init__(
        self,
        num_images: int,
        batch_size: int,
        accum: int = 1,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        aug_repeats: int = 1,
        labels: list[int] | None = None,
    ):
        self.num_images, self.batch_size, self.aug_repeats, self.seed = num_images, batch_size, aug_repeats, seed
        self.accum, self.rank, self.world = accum, rank, world
        self.classes = None if labels is None else _group_by_label(labels)
        self.epoch = self.first_step = 0

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        return self.num_images // self.batch_size

    def start_at(self, epoch: int, step: int = 0) -> None:
        """Choose the epoch, and the step in it, with which the next iteration begins."""
        self.epoch, self.first_step = epoch, step

    def order(self) -> list[int]:
        """The images of the epoch in the order of training; with `aug_repeats` each of a part of them so many times."""
        generator = torch.Generator().manual_seed(hash_seed(self.seed, ORDER_STREAM, self.epoch))
        order = self._draw_equally(generator) if self.classes else torch.randperm(self.num_images, generator=generator)
        return order.repeat_interleave(self.aug_repeats)[: self.num_images].tolist()

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.first_step) * self.accum

    def __iter__(self) -> Iterator[list]:
        order, chunks = self.order(), self.accum * self.world
        for step in range(self.first_step, self.steps_per_epoch):
            start = step * self.batch_size
            for micro in range(self.accum):
                positions = range(start + micro * self.world + self.rank, start + self.batch_size, chunks)
                yield [(order[i], (self.seed, DATA_STREAM, self.epoch, i)) for i in positions]

    def _draw_equally(self, generator: torch.Generator) -> torch.Tensor:
        """As many images of each class, give or take one, and of a class each image as often, give or take one."""
        share, rest = divmod(self.num_images, len(self.classes))
        luck = torch.randperm(len(self.classes), generator=generator).tolist()
        draws = []
        for images, number in zip(self.classes, luck):
            count = share + (number < rest)
            rounds = range(-(-count // len(images)))
            draws.append(torch.cat([images[:0]] + [_shuffle(images, generator) for _ in rounds])[:count])
        return _shuffle(torch.cat(draws), generator)


class EvalBatches(Sampler):
    """Whole batches in order, every `world`-th for this process: a batch is the same for any number of processes."""

    def __init__(self, num_images: int, batch_size: int, *, rank: int = 0, world: int = 1):
        self.num_images, self.batch_size = num_images, batch_size
        self.starts = range(rank * batch_size, num_images, world * batch_size)

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[list[int]]:
        for start in self.starts:
            yield list(range(start, min(start + self.batch_size, self.num_images)))


def train_loader(dataset: Dataset, batches: TrainBatches, workers: int = 0) -> DataLoader:
    """Load the micro-batches of one process, each image augmented with its own random stream."""
    return _loader(SeededImages(dataset), batches, workers)


def eval_loader(dataset: Dataset, batch_size: int, workers: int = 0, *, rank: int = 0, world: int = 1) -> DataLoader:
    """Load this process's share of a dataset, no image twice and none left out."""
    return _loader(dataset, EvalBatches(len(dataset), batch_size, rank=rank, world=world), workers)


class SeededImages(Dataset):
    """A dataset whose items are asked for as (index, seed numbers)."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, tuple[int, ...]]) -> tuple:
        index, numbers = key
        seed_everything(*numbers, cpu_only=True)
        return self.dataset[index]


def _group_by_label(labels: list[int]) -> list[torch.Tensor]:
    """The images of each class that has any."""
    labels = torch.as_tensor(labels)
    return [(labels == label).nonzero()[:, 0] for label in labels.unique()]


def _shuffle(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return images[torch.randperm(len(images), generator=generator)]


def _loader(dataset: Dataset, batches: Sampler, workers: int) -> DataLoader:
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_keep_to_one_core,
    )


def _keep_to_one_core(worker: int) -> None:
    """Let OpenCV, as torch does by itself, leave the other cores to the other workers."""
    cv2.setNumThreads(0)
