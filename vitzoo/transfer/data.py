"""The images of a transfer: with classes or labels if the data has those of the teacher or others, else without."""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Sampler
from torch.utils.data import Subset as TorchSubset

from vitzoo.data import DataOptions, Images, eval_transform, open_dataset, train_transform
from vitzoo.data.dataset import merge_options
from vitzoo.data.held_out import Subset
from vitzoo.data.layout import split_names
from vitzoo.data.loader import TrainBatches
from vitzoo.data.options import DATA_OPTIONS, NO_OPTIONS
from vitzoo.data.reader import LabelledReader
from vitzoo.data.unlabelled import UnlabelledImages, find_files
from vitzoo.errors import NoClassesError, UserError, format_flag
from vitzoo.load import LoadedModel
from vitzoo.train.recipe import Recipe, make_recipe
from vitzoo.transfer.outputs import has_head
from vitzoo.validate.data import open_validation_data

if TYPE_CHECKING:
    from accelerate import Accelerator

_VAL_FRACTION = 0.2
# crops and flips only: the student must see what the teacher sees
_AUGMENTATION = dict(scale=[0.35, 1.0], color_jitter=0.0, hflip=0.5, train_interpolation='bicubic')


@dataclass
class TransferData:
    """Training and validation images, and how a model is measured on them.

    Attributes:
        train: Training images as the student sees them.
        plain: The same images without augmentation.
        kind: 'top1' if the classes are the teacher's, 'knn' for other classes, 'cosine' without classes or with
            several labels per image.
        about: Facts for the config.json of a student, as training records them: the options of the data, and
            `multi_label` if the teacher predicts several labels.
        reason: Why the kind is not 'top1'; empty if it is.
        dropped: Options that the teacher's run recorded and that do not suit the data, and why; empty if all do.
    """

    train: Images | UnlabelledImages
    plain: Images | UnlabelledImages
    val: Images | UnlabelledImages
    kind: str
    about: dict
    reason: str = ''
    dropped: str = ''

    @property
    def multi_label(self) -> bool:
        """True if the teacher predicts several labels per image."""
        return self.about.get('multi_label', False)

    @property
    def note(self) -> str:
        """The options that are dropped, and the kind unless it is 'top1', with their reasons, for the user."""
        measure = {
            'knn': 'its accuracy is measured by nearest neighbours',
            'cosine': 'it is measured by the similarity of its features',
        }
        kind = f'{measure[self.kind]}, because {self.reason}' if self.reason else ''
        return '; '.join(filter(None, [self.dropped, kind]))


class ImageSubset(TorchSubset):
    """Some images of a dataset, with its classes and options."""

    @property
    def class_names(self) -> list[str]:
        """Those of all images; empty if they have none."""
        return getattr(self.dataset, 'class_names', [])

    @property
    def options(self) -> DataOptions:
        """Those of the dataset."""
        return getattr(self.dataset, 'options', NO_OPTIONS)


class IntervalBatches(Sampler):
    """Micro-batches of intervals of steps, which go on in the next epoch where one of the images ends.

    Args:
        batches: Of the images.
        interval: Steps of an interval; the last may be shorter.
        steps: Of all intervals.
    """

    def __init__(self, batches: TrainBatches, interval: int, steps: int) -> None:
        self.batches, self.interval, self.steps = batches, interval, steps
        self.start_at(0)

    def start_at(self, interval: int, step: int = 0) -> None:
        """Set the interval, and the step in it, at which the next iteration starts."""
        self.first = interval * self.interval + step
        self.last = min((interval + 1) * self.interval, self.steps)

    def __len__(self) -> int:
        return (self.last - self.first) * self.batches.accum

    def __iter__(self) -> Iterator[list]:
        step = self.first
        while step < self.last:
            epoch, start = divmod(step, self.batches.steps_per_epoch)
            self.batches.start_at(epoch, start)
            number = min(self.last - step, self.batches.steps_per_epoch - start)
            yield from islice(self.batches, number * self.batches.accum)
            step += number


def open_transfer_data(
    teacher: LoadedModel, data_dir: str, data_config: dict, options: DataOptions, seed: int
) -> TransferData:
    """Open the images of a transfer.

    The validation images are the data's, or those that the teacher's run held out, or a fifth. Options of the data are
    for images with classes. Those that the teacher's run recorded are used if `options` does not have others and they
    suit the data.

    Raises:
        UserError: There are no images, or too few to hold some out, or an option does not suit them.
    """
    recipe, evaluation = make_recipe(_AUGMENTATION), eval_transform(data_config)
    recorded = teacher.about
    try:
        labelled, val, dropped = _open_labelled(data_dir, evaluation, options, recorded, seed)
    except NoClassesError as error:
        if options != NO_OPTIONS:
            raise
        about = _describe_data(NO_OPTIONS, recorded)
        return _open_unlabelled(data_dir, recipe, data_config, about, _fact(error))
    open_val = partial(open_validation_data, data_dir, teacher, evaluation, labelled.options)
    val, kind, reason = _choose_measure(labelled, val, open_val if has_head(teacher.model) else None)
    names = set(val.reader.filenames()) if labelled.root == val.root else set()
    rest = [index for index, name in enumerate(labelled.reader.filenames()) if name not in names]
    if not rest:
        raise UserError(f"all images of '{data_dir}' are validation images; add a train split")
    reader: LabelledReader = Subset(labelled.reader, rest) if names else labelled.reader
    train = Images(reader, train_transform(recipe, data_config), val.class_to_idx)
    plain, about = Images(reader, evaluation, val.class_to_idx), _describe_data(labelled.options, recorded)
    return TransferData(train, plain, val, kind, about, reason, dropped)


def _open_labelled(
    data_dir: str, evaluation: Callable, options: DataOptions, recorded: dict, seed: int
) -> tuple[Images, Images, str]:
    """Open both splits with the recorded options that are not given, or without them if they do not suit the data.

    Returns:
        Both splits, and `dropped` as in `TransferData`.
    """

    def open_splits(options: DataOptions) -> tuple[Images, Images]:
        # None, because a student may learn from images in class folders, too
        settings: dict[str, Any] = dict(options=options, multi_label=None if recorded.get('multi_label') else False)
        labelled = open_dataset(data_dir, 'train', **settings)
        settings |= dict(class_to_idx=labelled.class_to_idx, val_fraction=_VAL_FRACTION, seed=seed)
        return labelled, open_dataset(data_dir, 'val', evaluation, **settings)

    try:
        return *open_splits(merge_options(options, recorded, data_dir)), ''
    except NoClassesError:
        raise
    except UserError as error:
        # a student may learn from other images than its teacher did
        given = options.given()
        dropped = ', '.join(format_flag(name) for name in DATA_OPTIONS if name in recorded and name not in given)
        return *open_splits(options), f'without {dropped} of its run, because {_fact(error)}'


def _choose_measure(labelled: Images, val: Images, open_val: Callable[[], Images] | None) -> tuple[Images, str, str]:
    """The validation images, with the teacher's classes if they have these, and the kind and reason of `TransferData`.

    Args:
        open_val: Opens the validation images as `vitzoo validate` does; None for a teacher without a head.
    """
    kind = 'cosine' if labelled.is_multi_label else 'knn'
    if open_val is None:
        return val, kind, 'it has no head'
    try:
        found = open_val()
    except UserError as error:
        return val, kind, _fact(error)
    # data without a validation split is whole in `found`, unless the teacher's run held images of it out
    is_whole = found.root == labelled.root and len(found) == len(labelled)
    val = Images(val.reader, val.transform, found.class_to_idx) if is_whole else found
    if labelled.is_multi_label:
        return val, kind, f"the images of '{labelled.root}' have several labels"
    return val, 'top1', ''


def _describe_data(options: DataOptions, recorded: dict) -> dict:
    """Facts about the data for the config.json of a student, which has the classes or labels of its teacher."""
    about = {'multi_label': True} if recorded.get('multi_label') else {}
    return about | replace(options, class_map=options.class_map or recorded.get('class_map')).given()


def _fact(error: UserError) -> str:
    """The fault that an error describes, without the advice after it, which is for other commands."""
    # the advice on a class that was not trained on is a sentence of its own
    return re.split(r'; |(?<=[.?]) (?=[A-Z])', str(error))[0].removesuffix('.')


def _open_unlabelled(data_dir: str, recipe: Recipe, data_config: dict, about: dict, reason: str) -> TransferData:
    files = find_files([data_dir])
    if len(files) < 2:
        raise UserError(f"'{data_dir}' has only one image; a transfer needs some to learn from and others to measure")
    names = sorted(files, key=lambda name: hashlib.sha256(Path(name).name.encode(errors='surrogateescape')).digest())
    held_out = {name for name in names if _is_of_val_split(name, data_dir)}
    if not held_out or len(held_out) == len(names):
        held_out = set(names[: max(1, round(_VAL_FRACTION * len(names)))])
    train = {name: read for name, read in files.items() if name not in held_out}
    val = {name: read for name, read in files.items() if name in held_out}
    evaluation = eval_transform(data_config)
    return TransferData(
        UnlabelledImages(train, train_transform(recipe, data_config)),
        UnlabelledImages(train, evaluation),
        UnlabelledImages(val, evaluation),
        'cosine',
        about,
        reason,
    )


def _is_of_val_split(name: str, data_dir: str) -> bool:
    folders = Path(name).relative_to(Path(data_dir).expanduser()).parts[:-1]
    return any(folder.lower() in split_names('val') for folder in folders)


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


def held_out_batches(images: TorchSubset, batch_size: int, accelerator: 'Accelerator') -> list[Tensor]:
    """The share of one process of some images, kept in memory.

    Raises:
        UserError: There are fewer images than processes.
    """
    if len(images) < accelerator.num_processes:
        raise UserError(f'{len(images)} held-out images are too few for {accelerator.num_processes} processes')
    return read_batches(images, range(accelerator.process_index, len(images), accelerator.num_processes), batch_size)


def read_batches(images: TorchSubset, indices: Sequence[int], batch_size: int) -> list[Tensor]:
    """Batches of the images with these indices, in memory."""
    return list(torch.stack([images[index][0] for index in indices]).split(batch_size))
