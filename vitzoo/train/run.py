"""The state of a training run: all that a step, an evaluation or a checkpoint touches."""

from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator
from rich.console import Console
from timm.data import Mixup
from timm.scheduler.scheduler import Scheduler
from timm.task import TrainingTask
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from vitzoo.data import Images, Normalize
from vitzoo.train.build import Plan
from vitzoo.train.full_model import PlainModel
from vitzoo.train.recipe import Recipe


@dataclass
class Run:
    """What training is made of, and how far it is."""

    recipe: Recipe
    plan: Plan
    accelerator: Accelerator
    folder: Path
    data_config: dict
    train_set: Images
    val_set: Images
    # `model` is `bare` as Accelerate prepared it, with gradients averaged over the processes; `plain` is for the rest
    bare: nn.Module
    model: nn.Module
    plain: PlainModel
    ema: ModelEmaV3 | None
    optimizer: Optimizer
    scheduler: Scheduler
    # maps a batch and its targets to the loss, with a teacher or without
    task: TrainingTask
    mixup: Mixup | None
    # modules without a trainable parameter, which stay in evaluation mode
    frozen: list[nn.Module]
    # makes the model's input of the bytes that the loader gives
    normalize: Normalize
    train_loader: DataLoader
    val_loader: DataLoader
    console: Console
    # optimizer steps done, the losses of those in this epoch, and a row for each epoch before it
    step: int = 0
    losses: list[float] = field(default_factory=list)
    history: list[dict] = field(default_factory=list)

    @property
    def steps_in_epoch(self) -> int:
        """How many steps of the epoch under way are done; 0 also at its end."""
        return self.step % self.plan.steps_per_epoch
