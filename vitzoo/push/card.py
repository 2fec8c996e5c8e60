"""The model card of a run, in the form of timm's `generate_readme`."""

import csv
import re
from dataclasses import dataclass, field
from pathlib import Path

import timm
import torch
from safetensors.torch import load_file

import vitzoo
from vitzoo.about import describe_architecture, find_file
from vitzoo.cite import find_papers, read_papers
from vitzoo.push.folder import (
    CONFIG,
    RECIPE,
    WEIGHTS,
    describe_precision,
    read_json,
    read_recipe,
    without_paths,
)
from vitzoo.report.records import interval, num_scored
from vitzoo.study.intervals import estimate
from vitzoo.study.record import CELL_FILE, EVALUATIONS, read_cell_file, read_evaluation
from vitzoo.train.checkpoint import list_checkpoints
from vitzoo.transfer.origin import find_command
from vitzoo.transfer.record import RECORD
from vitzoo.transfer.summary import minutes

LOCAL = 'local-dir:'
_SCORES = {'top1': 'Top-1', 'top5': 'Top-5', 'map': 'mAP', 'corrupt_top1': 'Corrupted top-1'}


@dataclass
class RunFacts:
    """Facts about a run that its weights do not tell.

    Args:
        command: 'train' or 'transfer'; empty for a model of `vitzoo convert`.
        hours: Time of the training, None if unknown.
        seeds: By evaluation and score, the values of all finished seeds of the same cell of a study; empty for the
            best epoch, which a study does not evaluate.
    """

    command: str
    hours: float | None
    seeds: dict[tuple[str, str], list[float]] = field(default_factory=dict)


def read_facts(run: Path) -> RunFacts:
    """Read the files of a run."""
    transfer, cell = find_file(run, RECORD), find_file(run, CELL_FILE)
    # a folder that was pushed has no record of its transfer
    command = 'transfer' if transfer else find_command(read_recipe(run))
    if cell is not None:
        finished = read_cell_file(cell)['finished']
        hours = finished[command]['seconds'] / 3600 if command in finished else None
        return RunFacts(command, hours, _scores_of_seeds(cell.parent) if cell.parent == run else {})
    if transfer is not None:
        return RunFacts(command, minutes(read_json(transfer)) / 60)
    return RunFacts(command, _training_hours(run) if command == 'train' else None)


def make_card(name: str, folder: Path, record: dict, run: RunFacts, data_dir: str = 'unknown') -> dict:
    """The card of a folder of `write_folder`, for `generate_readme`.

    Args:
        name: By which timm loads it, such as hf-hub:ORG/NAME.
        record: That of `vitzoo validate` for these weights.
        data_dir: The data of the record, for a model that does not name its own.
    """
    config = read_json(folder / CONFIG)
    data = config['vitzoo'].get('data_dir') or without_paths(data_dir)
    details = {
        'Model': f'{describe_architecture(config)}, {record["params"] / 1e6:.2f} M parameters, {record["gmacs"]:.3f}'
        f' GMACs for images of {record["img_size"]} pixels',
        'Data': f'{data}, {config["num_classes"]} classes',
        'Licence': config['pretrained_cfg']['license'],
        'Accuracy': [_format_score(record, key) for key in _SCORES if record.get(key) is not None],
        'Weights': describe_precision(load_file(folder / WEIGHTS)),
        'Versions': f'vitzoo {vitzoo.__version__}, timm {timm.__version__}, torch {torch.__version__}',
    }
    if run.command:
        details['Training'] = _format_training(run)
    if any(len(values) > 1 for values in run.seeds.values()):
        details['Several seeds'] = [_format_seeds(*column, values) for column, values in run.seeds.items()]
    place = ''
    if name.startswith(LOCAL):
        # a card has no path of a machine, and the folder may be moved
        place, name = '# in the folder that contains this one\n', f'{LOCAL}{folder.name}'
    create = f"{place}model = timm.create_model('{name}', pretrained=True)"
    usage = f'```python\nimport timm\nimport vitzoo\n\n{create}\n```\n'
    recipe = f'\n## Recipe\n```yaml\n{(folder / RECIPE).read_text(encoding="utf-8")}```' if run.command else ''
    return dict(
        **_format_license(config['pretrained_cfg']['license']),
        tags=['image-classification', 'timm', 'vitzoo'],
        description=f'{describe_architecture(config)} for the {config["num_classes"]} classes of {data}.',
        details=details,
        usage=usage + recipe,
        citation=_citations(folder),
    )


def _format_score(record: dict, key: str) -> str:
    if key == 'map':
        return f'{_SCORES[key]} {record[key]:.2f} % on {record["n"]:,} validation images'
    n = num_scored(record)
    low, high = interval(record[key], n)
    labelled = '' if n == record['n'] else ' with a label'
    return (
        f'{_SCORES[key]} {record[key]:.2f} %, 95 % interval {low:.2f} to {high:.2f} (Wilson) over {n:,}'
        f' validation images{labelled}'
    )


def _format_seeds(evaluation: str, key: str, values: list[float]) -> str:
    found = estimate(values)
    spread = '' if found.half_width is None else f' ± {found.half_width:.2f}'
    return f'{_SCORES[key]}, {evaluation}: {found.mean:.2f}{spread} % over {found.n} seeds (95 % interval, Student t)'


def _format_training(run: RunFacts) -> str:
    teacher = ' TEACHER' if run.command == 'transfer' else ''
    command = f'`vitzoo {run.command}{teacher} --config {RECIPE} --output DIR`'
    return command if run.hours is None else f'{run.hours:.2f} hours, {command}'


def _format_license(text: str) -> dict[str, str]:
    """The entries of the card's header; a licence in words is 'other', with a name, as the hub has it."""
    if re.fullmatch(r'[a-z0-9.-]+', text):
        return dict(license=text)
    return dict(license='other', license_name=re.sub(r'[^a-z0-9]+', '-', text.lower()).strip('-'))


def _citations(folder: Path) -> list[str]:
    papers = read_papers()
    sources = dict.fromkeys(source for source, _ in find_papers(str(folder)))
    return [papers[source].bibtex for source in sources if source in papers]


def _training_hours(run: Path) -> float | None:
    """Time of the optimizer steps, from the speeds in metrics.csv."""
    path = find_file(run, 'metrics.csv')
    if path is None:
        return None
    with path.open(newline='', encoding='utf-8') as file:
        rows = [row for row in csv.DictReader(file) if row.get('images_per_second')]
    speeds = [float(row['images_per_second']) for row in rows]
    # earlier versions rounded slow ones to 0
    if not rows or not all(speeds):
        return None
    steps = [int(row['step']) for row in rows]
    lengths = [end - start for start, end in zip([0, *steps], steps)]
    batch_size = _images_per_step(path.parent, lengths)
    if batch_size is None:
        return None
    return sum(n * batch_size / speed for n, speed in zip(lengths, speeds)) / 3600


def _images_per_step(run: Path, lengths: list[int]) -> int | None:
    """The batch size of a run whose epochs have these numbers of steps; None if nothing tells it."""
    # a batch size that was reduced to the dataset leaves one step per epoch
    if max(lengths) > 1:
        return read_recipe(run).get('batch_size')
    checkpoints = list_checkpoints(run / 'checkpoints')
    return read_json(checkpoints[-1] / 'state.json')['data']['images_per_step'] if checkpoints else None


def _scores_of_seeds(cell: Path) -> dict[tuple[str, str], list[float]]:
    """The scores of a cell of a study and of its other seeds that are finished, by evaluation and score."""
    found: dict[tuple[str, str], list[float]] = {}
    # those of evaluations that were not finished are hidden
    for path in sorted(cell.resolve().parent.glob(f'seed-*/{EVALUATIONS}/[!.]*.json')):
        record = read_evaluation(path)
        for key in _SCORES:
            if record.get(key) is not None:
                found.setdefault((path.stem, key), []).append(record[key])
    return found
