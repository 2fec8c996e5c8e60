"""Runs a model over a dataset in all processes there are, with a progress bar in the first of them."""

import argparse
from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.data import Dataset

from vitzoo.data import eval_loader
from vitzoo.metrics import score_images


def score_dataset(
    title: str,
    model: nn.Module,
    dataset: Dataset,
    score: Callable,
    args: argparse.Namespace,
    accelerator=None,
    probe=None,
) -> dict[str, Tensor]:
    """Score the images of a dataset; `args` has batch_size and workers, the rest is as in `score_images`."""
    from rich.console import Console
    from rich.progress import Progress

    share = dict(rank=accelerator.process_index, world=accelerator.num_processes) if accelerator is not None else {}
    loader = eval_loader(dataset, args.batch_size, args.workers, **share)
    console = Console(stderr=True)
    hidden = bool(share.get('rank')) or not console.is_terminal
    with Progress(console=console, disable=hidden) as bar:
        task = bar.add_task(title, total=len(loader))
        return score_images(model, loader, score, accelerator, progress=lambda n: bar.advance(task), probe=probe)
