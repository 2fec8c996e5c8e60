"""Reads the folder of a model by a command or by timm, and returns a result to compare with that of another folder."""

import json
from pathlib import Path
from shlex import split

import torch
from toys import read_metrics

from vitzoo.about import read_about
from vitzoo.convert import convert
from vitzoo.data import resolve_data_config
from vitzoo.errors import UserError
from vitzoo.export.command import export_to_file
from vitzoo.export.formats import FILE_FORMATS
from vitzoo.load import load_model
from vitzoo.predict import predict
from vitzoo.train.loop import train
from vitzoo.transfer.command import transfer
from vitzoo.validate.command import validate

# sentences with which readers are right to refuse a folder: models without classes, and tokens that no student can have
REFUSALS = {'predict': 'has no classifier', 'transfer': 'form a single row or column'}


@torch.no_grad()
def run_loaded(folder: Path, size: tuple[int, int] | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits of the model in a folder for random images."""
    model = load_model(str(folder), img_size=size).model
    sides, generator = resolve_data_config(model, size)['input_size'], torch.Generator().manual_seed(0)
    return model.to(dtype)(torch.randn(2, *sides, generator=generator).to(dtype))


def read_validation(folder: Path, data_dir: str, root: Path) -> dict:
    is_multi_label = read_about(str(folder)).get('multi_label', False)
    # a model of one label per image has to be one of the three classes
    has_labels = load_model(str(folder)).model.num_classes == (4 if is_multi_label else 3)
    images = ['--data-dir', data_dir] if has_labels else ['--no-data']
    (record,) = validate([str(folder), *images, '--workers', '0'])
    return {key: record[key] for key in ('n', 'top1', 'top5', 'loss', 'map', 'params', 'gmacs')}


def read_predictions(folder: Path, data_dir: str, root: Path) -> list:
    predict([data_dir, '--model', str(folder), '--workers', '0', '--out', str(root / f'{folder.name}.json')])
    return json.loads((root / f'{folder.name}.json').read_text())


def read_training(folder: Path, data_dir: str, root: Path) -> list:
    run = root / f'run_{folder.name}'
    words = '--batch-size 8 --epochs 1 --warmup-epochs 0 --lr 1e-3 --workers 0 --checkpoint-hist 1'
    words += ' --multi-label' if any(Path(data_dir).rglob('labels.csv')) else ''
    train(['--model', str(folder), '--data-dir', data_dir, *split(words), '--output', str(run)])
    return read_metrics(run)


def read_transfer(folder: Path, data_dir: str, root: Path) -> list:
    words = '--mixer linear --probe-only --batch-size 8 --workers 0'
    (result,) = transfer([str(folder), '--data-dir', data_dir, *split(words)])
    return [json.dumps(block) for block in result['probe']]


def read_export(folder: Path, data_dir: str, root: Path) -> tuple[dict, list]:
    path, extra = root / f'{folder.name}.pt2', {'vitzoo': ''}
    export_to_file([str(folder), '--to', 'torch', '--out', str(path)])
    torch.export.load(path, extra_files=extra)
    facts = json.loads(extra['vitzoo'])
    logits = FILE_FORMATS['torch'].open(path)(torch.zeros(3, *facts['input_size']))
    return facts | dict(model=None, license=None), logits.tolist()


def read_converted(folder: Path, data_dir: str, root: Path) -> list:
    out = root / f'{folder.name}_again'
    torch.manual_seed(0)
    convert(['--from', str(folder), '--swap', 'softmax:0', '--out', str(out)])
    return run_loaded(out).tolist()


READERS = {
    'timm': lambda folder, *_: run_loaded(folder).tolist(),
    'size': lambda folder, *_: run_loaded(folder, (64, 32)).tolist(),
    'half': lambda folder, *_: run_loaded(folder, dtype=torch.bfloat16).tolist(),
    'validate': read_validation,
    'predict': read_predictions,
    'train': read_training,
    'transfer': read_transfer,
    'export': read_export,
    'convert': read_converted,
}


def read(reader: str, folder: Path, data_dir: str, root: Path) -> object:
    """The result of a reader for a folder, or the sentence with which it is right to refuse it."""
    try:
        return READERS[reader](folder, data_dir, root)
    except UserError as error:
        if REFUSALS.get(reader, 'no refusal') not in str(error):
            raise
        return str(error).replace(str(folder), 'FOLDER')
