"""The state of a training run: everything that a step, an evaluation or a checkpoint uses."""

from collections.abc import Callable
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
from vitzoo.train.full_model import FullModel
from vitzoo.train.lock import FolderLock
from vitzoo.train.recipe import Recipe


@dataclass(frozen=True)
class Plan:
    """Batch sizes, number of steps and learning rate of a run."""

    batch_size: int
    world_size: int
    accum_steps: int
    steps_per_epoch: int
    epochs: int
    lr: float
    # of a run that is counted in steps: its last epoch may be shorter
    max_steps: int | None = None

    @property
    def micro_batch_size(self) -> int:
        """Images per process and accumulation step."""
        return self.batch_size // (self.world_size * self.accum_steps)

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        steps = self.epochs * self.steps_per_epoch
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def end_of(self, epoch: int) -> int:
        """The step at which an epoch ends, the first being epoch 0."""
        return min((epoch + 1) * self.steps_per_epoch, self.steps)

    def describe_position(self, step: int) -> str:
        """The epoch of a step, or the step itself in a run that is counted in steps."""
        if self.max_steps is not None:
            return f'step {step:5}/{self.steps}'
        return f'epoch {-(-step // self.steps_per_epoch):3}/{self.epochs}'

    def __str__(self) -> str:
        factors = f' = {self.world_size} processes x {self.accum_steps} accumulated x {self.micro_batch_size} images'
        split = factors if self.world_size * self.accum_steps > 1 else ''
        return f'batch {self.batch_size}{split}, lr {self.lr:.3g}, {self.epochs} epochs x {self.steps_per_epoch} steps'


@dataclass
class Run:
    """Everything that training uses, and its progress."""

    recipe: Recipe
    plan: Plan
    accelerator: Accelerator
    lock: FolderLock
    data_config: dict
    train_set: Images
    val_set: Images
    # `model` is `raw_model` as prepared by Accelerate (DDP or FSDP); `full_model` is for everything but the step
    raw_model: nn.Module
    model: nn.Module
    full_model: FullModel
    ema: ModelEmaV3 | None
    optimizer: Optimizer
    scheduler: Scheduler
    # computes the loss of a batch, with or without a teacher
    task: TrainingTask
    mixup: Mixup | None
    # modules without trainable parameters, which stay in eval mode
    frozen: list[nn.Module]
    # the loaders return uint8 images
    normalize: Normalize
    train_loader: DataLoader
    val_loader: DataLoader
    console: Console
    # optimizer steps done, the losses of the current epoch, and one row of metrics per finished epoch
    step: int = 0
    losses: list[float] = field(default_factory=list)
    history: list[dict] = field(default_factory=list)
    # training images per second in the current epoch
    speed: float = 0.0
    # val_interval and epochs of the process that saved the checkpoint, which may have evaluated the epoch that it ends
    saved_schedule: tuple[int, int] | None = None
    # best/ has the model of an epoch after this many; not 0 in a run that went back to an earlier checkpoint
    best_from: int = 0
    # checkpoints of this folder after the one that the run went back to
    later_checkpoints: list[Path] = field(default_factory=list)
    # measures a model, by default its accuracy on the validation images
    measure_model: Callable[[nn.Module], dict[str, float]] | None = None
    # the measurements of the model before training, if it may be the best
    start_row: dict[str, float] | None = None
    # of a loss that is not finite; {} is half the learning rate
    remedies: str = 'half the lr ({}), --clip-grad 1, a longer warm-up'

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.lock.folder
