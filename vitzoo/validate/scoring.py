"""Scores a model on a dataset in all processes, with a progress bar in the main process."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.data import Dataset

from vitzoo.data import eval_loader
from vitzoo.metrics import score_images
from vitzoo.metrics.accuracy import Probe
from vitzoo.validate.options import EvalOptions

if TYPE_CHECKING:
    from accelerate import Accelerator


def score_dataset(
    title: str,
    model: nn.Module,
    dataset: Dataset,
    score: Callable,
    options: EvalOptions,
    accelerator: 'Accelerator | None' = None,
    probe: Probe | None = None,
) -> dict[str, Tensor]:
    """Score the images of a dataset; `title` names the progress bar, and the rest is as in `score_images`."""
    from rich.console import Console
    from rich.progress import Progress

    share = dict(rank=accelerator.process_index, world=accelerator.num_processes) if accelerator is not None else {}
    loader = eval_loader(dataset, options.batch_size, options.workers, **share)
    console = Console(stderr=True)
    is_hidden = bool(share.get('rank')) or not console.is_terminal
    with Progress(console=console, disable=is_hidden) as bar:
        task = bar.add_task(title, total=len(loader))
        return score_images(
            model, loader, score, accelerator, progress=lambda n: bar.advance(task), probe=probe, name=title
        )
