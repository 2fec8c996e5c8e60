"""Stateless batch samplers and data loaders for training and evaluation.

There is no state to save. The order of an epoch is a function of (seed, epoch), and the augmentation of an image of
(seed, epoch, position in the epoch), so training batches do not depend on the number of workers or processes, or on
whether a run was resumed.
"""

import math
import os
import random
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from multiprocessing.sharedctypes import RawValue
from multiprocessing.util import Finalize
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

ORDER_STREAM, DATA_STREAM, STEP_STREAM = range(3)


def hash_seed(*numbers: int) -> int:
    """Hash numbers to one seed; similar numbers give unrelated seeds."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def seed_everything(*numbers: int, cpu_only: bool = False) -> None:
    """Seed the generators of Python, NumPy and torch with the hash of `numbers`."""
    mixed = hash_seed(*numbers)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    if cpu_only:
        # torch.manual_seed also seeds all other devices, which takes as long as decoding a small image
        torch.default_generator.manual_seed(mixed)
    else:
        torch.manual_seed(mixed)


class TrainBatches(Sampler):
    """Batch sampler that yields the micro-batches of one process as lists of (index, seed numbers).

    Global batches are always full: the remainder of an epoch is dropped, a different one in each epoch. Micro-batch m
    of process r takes every (accum * world)-th image of the global batch, starting at m * world + r, so two processes
    have the same micro-batches as two accumulation steps.

    With `labels`, the class of each image, all classes are drawn equally often: an epoch has the same length, with the
    images of a large class at most once and those of a small class several times.
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
    ) -> None:
        self.num_images, self.batch_size, self.aug_repeats, self.seed = num_images, batch_size, aug_repeats, seed
        self.accum, self.rank, self.world = accum, rank, world
        self.classes = None if labels is None else _group_by_label(labels)
        self.epoch = self.first_step = 0

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch."""
        return self.num_images // self.batch_size

    def start_at(self, epoch: int, step: int = 0) -> None:
        """Set the epoch, and the step in it, at which the next iteration starts."""
        self.epoch, self.first_step = epoch, step

    def order(self) -> list[int]:
        """Image indices of the epoch in training order; with `aug_repeats`, a subset, each repeated that often."""
        generator = torch.Generator().manual_seed(hash_seed(self.seed, ORDER_STREAM, self.epoch))
        order = (
            self._draw_equally(self.classes, generator)
            if self.classes
            else torch.randperm(self.num_images, generator=generator)
        )
        return order.repeat_interleave(self.aug_repeats)[: self.num_images].tolist()

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.first_step) * self.accum

    def __iter__(self) -> Iterator[list]:
        order, stride = self.order(), self.accum * self.world
        for step in range(self.first_step, self.steps_per_epoch):
            start = step * self.batch_size
            for micro in range(self.accum):
                positions = range(start + micro * self.world + self.rank, start + self.batch_size, stride)
                yield [(order[i], (self.seed, DATA_STREAM, self.epoch, i)) for i in positions]

    def _draw_equally(self, classes: list[torch.Tensor], generator: torch.Generator) -> torch.Tensor:
        """Draw an epoch in which image counts differ by at most one between classes, and between images of a class."""
        share, remainder = divmod(self.num_images, len(classes))
        # random classes get one image more if the epoch does not divide evenly
        ranks = torch.randperm(len(classes), generator=generator).tolist()
        draws = []
        for images, rank in zip(classes, ranks):
            count = share + 1 if rank < remainder else share
            rounds = math.ceil(count / len(images))
            repeated = [_shuffle(images, generator) for _ in range(rounds)]
            draws.append(torch.cat([images[:0], *repeated])[:count])
        return _shuffle(torch.cat(draws), generator)


class EvalBatches(Sampler):
    """Batch sampler that assigns batches to processes in turn; batches are the same for any number of processes."""

    def __init__(self, num_images: int, batch_size: int, *, rank: int = 0, world: int = 1) -> None:
        self.num_images, self.batch_size = num_images, batch_size
        self.starts = range(rank * batch_size, num_images, world * batch_size)

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[list[int]]:
        for start in self.starts:
            yield list(range(start, min(start + self.batch_size, self.num_images)))


def train_loader(dataset: Dataset, batches: Sampler, workers: int = 0) -> DataLoader:
    """Loader of the micro-batches of one process; each image is augmented with its own seed."""
    return _loader(SeededImages(dataset), batches, workers)


def eval_loader(dataset: Dataset, batch_size: int, workers: int = 0, *, rank: int = 0, world: int = 1) -> DataLoader:
    """Loader of one process's share of a dataset; the shares are disjoint and complete."""
    # torch's Dataset does not declare __len__
    num_images = len(dataset)  # type: ignore[arg-type]
    return _loader(dataset, EvalBatches(num_images, batch_size, rank=rank, world=world), workers)


def eval_loaders(
    datasets: Sequence[Any], batch_size: int, workers: int = 0, *, rank: int = 0, world: int = 1
) -> list['LoaderTurn']:
    """The `eval_loader` of each dataset, with worker processes in common: iterate each once, in order."""
    samplers = [EvalBatches(len(dataset), batch_size, rank=rank, world=world) for dataset in datasets]
    keys = ([(number, index) for index in batch] for number, batches in enumerate(samplers) for batch in batches)
    loaded = iter(_loader(_SeveralDatasets(datasets), keys, workers)) if datasets else iter(())
    return [LoaderTurn(dataset, sampler, loaded) for dataset, sampler in zip(datasets, samplers, strict=True)]


class LoaderTurn:
    """The batches of one dataset, taken from a loader of several."""

    def __init__(self, dataset: Dataset, batch_sampler: EvalBatches, loaded: Iterator) -> None:
        self.dataset, self.batch_sampler, self.loaded = dataset, batch_sampler, loaded

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator:
        return islice(self.loaded, len(self))


class SeededImages(Dataset):
    """A dataset indexed by (index, seed numbers), which seeds the generators before reading an image."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        # torch's Dataset does not declare __len__
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, key: tuple[int, tuple[int, ...]]) -> tuple:
        index, numbers = key
        seed_everything(*numbers, cpu_only=True)
        return self.dataset[index]


class _SeveralDatasets(Dataset):
    """Datasets indexed by (number of the dataset, index)."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        self.datasets = datasets

    def __getitem__(self, key: tuple[int, int]) -> tuple:
        number, index = key
        return self.datasets[number][index]


def _group_by_label(labels: list[int]) -> list[torch.Tensor]:
    """Image indices of each class that has images, in ascending order."""
    values = torch.as_tensor(labels)
    _, counts = values.unique(return_counts=True)
    return list(values.argsort(stable=True).split(counts.tolist()))


def _shuffle(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return images[torch.randperm(len(images), generator=generator)]


def _loader(dataset: Dataset, batches: Iterable[list], workers: int) -> DataLoader:
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_worker_start() if workers else None,
    )


def stop_workers(loader: DataLoader) -> None:
    """End the worker processes of a loader now; another iteration starts new ones.

    A garbage collection may destroy the queues that tell workers to end before PyTorch uses them. It then waits 10
    seconds, and the workers stay until this process ends.
    """
    batches, loader._iterator = loader._iterator, None
    if batches is not None:
        batches._shutdown_workers()  # type: ignore[attr-defined]


def _worker_start() -> Callable[[int], None]:
    """`_start_worker`, told by this process when it ends."""
    is_ending = RawValue('b', False)
    # before multiprocessing ends its child processes
    Finalize(None, _announce_end, (is_ending,), exitpriority=100)
    return partial(_start_worker, is_ending)


def _announce_end(is_ending: Any) -> None:
    is_ending.value = True


def _start_worker(is_ending: Any, worker: int) -> None:
    """Limit OpenCV to one thread in a worker process, as torch does for itself, and let only the parent end it.

    Clusters send SIGTERM to all processes, and the trainer needs batches until it has stopped.
    """
    cv2.setNumThreads(0)

    def end(*signal_and_frame: object) -> None:
        if is_ending.value:
            os._exit(0)

    signal.signal(signal.SIGTERM, end)
