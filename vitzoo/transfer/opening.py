"""The shared parts of a transfer of one teacher to several students: the teacher, the images and the processes."""

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor, nn

from vitzoo.data import Normalize, eval_loader, train_loader
from vitzoo.data.loader import TrainBatches
from vitzoo.errors import UserError
from vitzoo.load import LoadedModel, find_model, fit_data_config, load_model
from vitzoo.metrics.finite import find_non_finite
from vitzoo.mixers import mixer_class
from vitzoo.models.swap import without_warnings
from vitzoo.train.batches import plan_batches
from vitzoo.train.opening import create_accelerator
from vitzoo.train.run import Plan
from vitzoo.transfer.data import ImageSubset, TransferData, divide, held_out_batches, open_transfer_data, read_batches
from vitzoo.transfer.descent import StepBatches
from vitzoo.transfer.options import TransferOptions
from vitzoo.transfer.outputs import output_error
from vitzoo.transfer.record import hash_weights
from vitzoo.transfer.scoring import StudentScorer
from vitzoo.transfer.students import make_student


@dataclass
class Transfer:
    """A teacher and the images that its students learn from.

    Attributes:
        loaded: The teacher and the origin of its weights.
        images: Training images as the student sees them, without those held out.
        held_out_images: Those that choose the best state of a stage.
        held_out: The share of this process of them, in batches.
        plan: Batches of one step.
        made: Mixers of which there has been a student.
    """

    options: TransferOptions
    accelerator: Accelerator
    loaded: LoadedModel
    data_config: dict
    data: TransferData
    images: ImageSubset
    held_out_images: ImageSubset
    held_out: list[Tensor]
    plan: Plan
    console: Console
    made: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """Name of the teacher."""
        return self.loaded.name

    @cached_property
    def first_held_out(self) -> list[Tensor]:
        """The first two batches of all held-out images, the same ones in each process."""
        if self.accelerator.num_processes == 1:
            return self.held_out[:2]
        batch_size = self.options.batch_size
        return read_batches(self.held_out_images, range(len(self.held_out_images))[: 2 * batch_size], batch_size)

    @property
    def teacher(self) -> nn.Module:
        """The model of the teacher."""
        return self.loaded.model

    @cached_property
    def teacher_weights(self) -> str | None:
        """Hash of the teacher's weights; None if they have no file here."""
        return hash_weights(self.options.teacher, self.options.checkpoint)

    @cached_property
    def train(self) -> StepBatches:
        """Batches of block matching."""
        loader = train_loader(self.images, self.batches(), self.options.workers)
        return StepBatches(loader, Normalize(self.data_config).to(self.accelerator.device))

    def batches(self, accum: int = 1) -> TrainBatches:
        """The training batches of this process, each in `accum` micro-batches."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        return TrainBatches(len(self.images), self.plan.batch_size, accum, rank, world, self.options.seed)

    @cached_property
    def scorer(self) -> StudentScorer:
        """Scores students on the validation images."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        batch_size, workers = self.options.batch_size, self.options.workers
        load = partial(eval_loader, batch_size=batch_size, workers=workers, rank=rank, world=world)
        bank = load(self.data.plain) if self.data.kind == 'knn' else None
        settings: dict[str, Any] = dict(accelerator=self.accelerator, multi_label=self.data.multi_label)
        return StudentScorer(self.teacher, load(self.data.val), self.data.kind, bank, **settings)

    def stop_workers(self) -> None:
        """End the worker processes that read the validation images."""
        if 'scorer' in vars(self):
            self.scorer.stop_workers()

    def output_error(self, student: nn.Module) -> float:
        """Error of a student's outputs on the held-out images, as in `vitzoo.transfer.outputs`."""
        with self.accelerator.autocast():
            return output_error(self.teacher, student, self.held_out, self.accelerator, self.data.multi_label)

    def score(self, model: nn.Module) -> dict[str, float]:
        """Scores of a model, as in `StudentScorer.score`."""
        with self.accelerator.autocast():
            return self.scorer.score(model)

    def score_teacher(self) -> dict[str, float]:
        """Scores of the teacher."""
        with self.accelerator.autocast():
            return self.scorer.teacher_scores

    def arguments(self, mixer: str) -> dict:
        """Arguments of a mixer, with those that it starts with unless the user gave others."""
        return {**mixer_class(mixer).start_arguments, **self.options.mixer_kwargs.get(mixer, {})}

    def student(self, mixer: str) -> nn.Module:
        """A new student; only for the first of a mixer, the weights that it loses are named."""
        with without_warnings() if mixer in self.made else nullcontext():
            student: Any = make_student(self.name, self.teacher, mixer, self.arguments(mixer), self.options.seed)
        self.made.add(mixer)
        if self.options.img_size is not None and not hasattr(self.teacher, 'set_input_size'):
            # timm builds such a model for one size
            student.set_input_size(img_size=self.data_config['input_size'][1:])
        return student


def open_transfer(options: TransferOptions) -> Transfer:
    """Join the processes, load the teacher, and open the images.

    Raises:
        UserError: The teacher has no weights, the images are missing, too few or without the classes for --labels, or
            the kind of distributed training is not supported.
    """
    accelerator = create_accelerator(options.recipe)
    if accelerator.mixed_precision not in ('no', 'bf16'):
        raise UserError(
            f'a transfer in {accelerator.mixed_precision} is not supported; use --amp-dtype bfloat16, and no'
            f' --mixed_precision of the launcher'
        )
    name = find_model(options.teacher)
    loaded = load_model(name, img_size=options.img_size, num_classes=options.num_classes, checkpoint=options.checkpoint)
    loaded.require_weights()
    teacher = loaded.model.to(accelerator.device)
    if loaded.weights == 'checkpoint':
        # it is that of other weights
        teacher.pretrained_cfg.pop('license', None)
    data_config = fit_data_config(name, teacher, options.img_size)
    problem = find_non_finite(teacher, torch.zeros(1, *data_config['input_size'], device=accelerator.device))
    if problem:
        raise UserError(f'{name} cannot be a teacher: {problem}')
    data = open_transfer_data(loaded, options.data_dir, data_config, options.data_options, options.seed)
    if options.labels and data.multi_label:
        raise UserError(f'--labels learns one class per image, but {name} predicts several labels; leave --labels out')
    if options.labels and data.kind != 'top1':
        raise UserError(f'--labels needs images of the classes of {name}, but {data.reason}; leave --labels out')
    train, held_out = divide(len(data.train), options.eval_images)
    held_out_images = ImageSubset(data.plain, held_out)
    return Transfer(
        options=options,
        accelerator=accelerator,
        loaded=loaded,
        data_config={key: value for key, value in data_config.items() if value is not None},
        data=data,
        images=ImageSubset(data.train, train),
        held_out_images=held_out_images,
        held_out=held_out_batches(held_out_images, options.batch_size, accelerator),
        plan=plan_batches(options.recipe, len(train), accelerator.num_processes),
        console=Console(quiet=not accelerator.is_main_process, highlight=False, markup=False, soft_wrap=True),
    )
