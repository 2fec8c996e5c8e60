"""A classifier and the images to classify, as `vitzoo predict` and `vitzoo explain` open them."""

import argparse
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.progress import track
from torch.utils.data import DataLoader

from vitzoo.data import eval_loader, eval_transform
from vitzoo.data.unlabelled import ImageFiles
from vitzoo.errors import UserError
from vitzoo.load import LoadedModel, find_model, load_as_chosen
from vitzoo.options import check_model_kwargs, check_num_classes


def load_classifier(args: argparse.Namespace) -> LoadedModel:
    """Load the model of --model onto --device.

    Raises:
        UserError: There is no such model, it has no weights or no classifier, or --num-classes is given without a
            --checkpoint.
    """
    name = find_model(args.model)
    check_num_classes(args.num_classes, args.checkpoint)
    check_model_kwargs(args.model_kwargs)
    loaded = load_as_chosen(name, args)
    loaded.require_weights()
    if loaded.model.num_classes < 1:
        raise UserError(f'{name} has no classifier, so it predicts no classes; give a model that was trained on some')
    loaded.model.to(args.device)
    return loaded


def open_images(files: dict[str, Callable[[], bytes]], data_config: dict, args: argparse.Namespace) -> DataLoader:
    """A loader of files from `find_files`, as the model expects them."""
    dataset = ImageFiles(files, eval_transform(data_config))
    # for a single batch, starting workers costs more than it saves
    return eval_loader(dataset, args.batch_size, args.workers if len(files) > args.batch_size else 0)


def skip_unreadable(records: Iterable[dict], total: int, unreadable: list[str], activity: str) -> Iterator[dict]:
    """Yield records with a progress bar, except those of unreadable images, which are printed and listed."""
    console = Console(stderr=True)
    for record in track(records, activity, total, console=console, disable=not console.is_terminal):
        if 'error' not in record:
            yield record
            continue
        unreadable.append(record['file'])
        message = f'vitzoo: cannot read {record["file"]}: {record["error"]}'
        console.print(message, markup=False, emoji=False, highlight=False, soft_wrap=True)
