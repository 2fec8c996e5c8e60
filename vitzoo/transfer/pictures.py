"""The images of a transfer: with classes if the data has those of the teacher or others, else without."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data import Subset as TorchSubset

from vitzoo.data import DataOptions, Images, Normalize, eval_transform, open_dataset, train_loader, train_transform
from vitzoo.data.held_out import Subset
from vitzoo.data.loader import TrainBatches
from vitzoo.data.reader import LabelledReader
from vitzoo.data.unlabelled import UnlabelledImages, find_files
from vitzoo.errors import UserError
from vitzoo.train.recipe import Recipe, make_recipe
from vitzoo.transfer.descent import StepBatches
from vitzoo.transfer.probing import has_head
from vitzoo.validate.evaluation import open_validation_data

if TYPE_CHECKING:
    from accelerate import Accelerator

_VAL_FRACTION = 0.2
# crops and flips only: the student must see what the teacher sees
_AUGMENTATION = dict(scale=[0.35, 1.0], color_jitter=0.0, hflip=0.5, train_interpolation='bicubic')


@dataclass
class Pictures:
    """Training and validation images, and how a model is measured on them.

    Attributes:
        train: Training images as the student sees them.
        plain: The same images without augmentation.
        kind: 'top1' if the classes are the teacher's, 'knn' for other classes, 'cosine' without classes.
        note: Why the kind is not 'top1', for the user; empty if it is.
    """

    train: Dataset
    plain: Dataset
    val: Dataset
    kind: str
    class_names: list[str]
    note: str = ''


def open_pictures(
    teacher_name: str, teacher: torch.nn.Module, data_dir: str, data_config: dict, options: DataOptions, seed: int
) -> Pictures:
    """Open the images of a transfer.

    The validation images are the data's, or those that the teacher's run held out, or a fifth.

    Raises:
        UserError: There are no images, or too few to hold some out.
    """
    recipe, evaluation = make_recipe(_AUGMENTATION), eval_transform(data_config)
    try:
        labelled = open_dataset(data_dir, 'train', options=options)
    except UserError as error:
        return _open_unlabelled(data_dir, recipe, data_config, str(error))
    settings = dict(options=options, val_fraction=_VAL_FRACTION, seed=seed)
    val = open_dataset(data_dir, 'val', evaluation, class_to_idx=labelled.class_to_idx, **settings)
    kind, note = 'top1', ''
    if has_head(teacher):
        try:
            found = open_validation_data(data_dir, teacher, evaluation, teacher_name, options)
        except UserError as error:
            kind, note = 'knn', f'its accuracy is measured by nearest neighbours, because {error}'
        else:
            # data without a validation split is whole in `found`, unless the teacher's run held images of it out
            is_whole = found.root == labelled.root and len(found) == len(labelled)
            val = Images(val.reader, evaluation, found.class_to_idx) if is_whole else found
    else:
        kind, note = 'knn', 'its accuracy is measured by nearest neighbours, because it has no head'
    names = set(val.reader.filenames()) if labelled.root == val.root else set()
    rest = [index for index, name in enumerate(labelled.reader.filenames()) if name not in names]
    if not rest:
        raise UserError(f"all images of '{data_dir}' are validation images; add a train split")
    reader: LabelledReader = Subset(labelled.reader, rest) if names else labelled.reader
    train = Images(reader, train_transform(recipe, data_config))
    return Pictures(train, Images(reader, evaluation, val.class_to_idx), val, kind, val.class_names, note)


def _open_unlabelled(data_dir: str, recipe: Recipe, data_config: dict, reason: str) -> Pictures:
    if not Path(data_dir).expanduser().exists():
        raise UserError(reason)
    files = find_files([data_dir])
    if len(files) < 2:
        raise UserError(f"'{data_dir}' has only one image; a transfer needs some to learn from and others to measure")
    names = sorted(files, key=lambda name: hashlib.sha256(Path(name).name.encode(errors='surrogateescape')).digest())
    held_out = set(names[: max(1, round(_VAL_FRACTION * len(names)))])
    train = {name: read for name, read in files.items() if name not in held_out}
    val = {name: read for name, read in files.items() if name in held_out}
    note = f'it is measured by the similarity of its features, because {reason}'
    evaluation = eval_transform(data_config)
    return Pictures(
        UnlabelledImages(train, train_transform(recipe, data_config)),
        UnlabelledImages(train, evaluation),
        UnlabelledImages(val, evaluation),
        'cosine',
        [],
        note,
    )


def divide(num_images: int, limit: int) -> tuple[list[int], list[int]]:
    """Indices of training images, and of those that choose the best state: at most `limit` and a fifth of all.

    Raises:
        UserError: There is only one image.
    """
    if num_images < 2:
        raise UserError('a transfer needs at least 2 training images; add some')
    order = torch.randperm(num_images, generator=torch.Generator().manual_seed(0)).tolist()
    number = min(limit, max(1, num_images // 5))
    return sorted(order[number:]), sorted(order[:number])


def training_batches(
    train: Dataset,
    indices: list[int],
    batch_size: int,
    workers: int,
    seed: int,
    data_config: dict,
    accelerator: 'Accelerator',
) -> StepBatches:
    """Batches of one process, as a function of the step.

    Raises:
        UserError: There are fewer images than processes, or the batch size is not a multiple of them.
    """
    world = accelerator.num_processes
    if batch_size % world:
        raise UserError(f'batch_size {batch_size} is not a multiple of {world} processes; change one of them')
    batch_size = min(batch_size, len(indices) // world * world)
    if not batch_size:
        raise UserError(f'{len(indices)} training images are too few for {world} processes')
    batches = TrainBatches(len(indices), batch_size, rank=accelerator.process_index, world=world, seed=seed)
    return StepBatches(train_loader(TorchSubset(train, indices), batches, workers), Normalize(data_config))


def held_out_batches(plain: Dataset, indices: list[int], batch_size: int, accelerator: 'Accelerator') -> list[Tensor]:
    """The share of one process of some images, kept in memory.

    Raises:
        UserError: There are fewer images than processes.
    """
    own = indices[accelerator.process_index :: accelerator.num_processes]
    if len(indices) < accelerator.num_processes:
        raise UserError(f'{len(indices)} held-out images are too few for {accelerator.num_processes} processes')
    return list(torch.stack([plain[index][0] for index in own]).split(batch_size))
