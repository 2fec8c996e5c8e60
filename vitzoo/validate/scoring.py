"""Scores a model on datasets in all processes, with a progress bar in the main process."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from vitzoo.data.loader import eval_loaders
from vitzoo.load import LoadedModel
from vitzoo.metrics import score_images
from vitzoo.metrics.accuracy import Probe
from vitzoo.validate.options import EvalOptions

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Evaluation:
    """A model, the data config of its images, and the options and processes of its evaluation.

    Attributes:
        accelerator: None if there is one process.
    """

    loaded: LoadedModel
    data_config: dict
    options: EvalOptions
    accelerator: 'Accelerator | None' = None

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.loaded.name

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.loaded.model

    @property
    def is_main(self) -> bool:
        """True in the process that prints and writes."""
        return self.accelerator is None or self.accelerator.is_main_process


def score_dataset(
    title: str, evaluation: Evaluation, dataset: Dataset, score: Callable, probe: Probe | None = None
) -> dict[str, Tensor]:
    """Score the images of a dataset; `title` names the progress bar, and the rest is as in `score_images`."""
    (columns,) = score_in_turn(title, evaluation, [dataset], score, probe)
    return columns


def score_in_turn(
    title: str,
    evaluation: Evaluation,
    datasets: Sequence[Any],
    score: Callable,
    probe: Probe | None = None,
    images_before: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Score datasets one after the other, and yield the columns of each as soon as it is finished.

    Arguments are as in `score_dataset`; `images_before` were scored earlier, and count in the progress bar.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    accelerator, options = evaluation.accelerator, evaluation.options
    rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator is not None else (0, 1)
    loaders = eval_loaders(datasets, options.batch_size, options.workers, rank=rank, world=world)
    console = Console(stderr=True)
    with Progress(console=console, disable=rank > 0 or not console.is_terminal) as bar:
        task = bar.add_task(escape(title), total=images_before + sum(map(len, datasets)), completed=images_before)

        def advance(num_images: int) -> None:
            bar.advance(task, world * num_images)

        for loader in loaders:
            yield score_images(evaluation.model, loader, score, accelerator, progress=advance, probe=probe, name=title)
