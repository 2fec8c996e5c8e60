"""The scores under corruptions of an evaluation that is not finished, so that it continues after an interruption.

They are in `<results file>.unfinished` until the results of all models are written: for each model a digest of
everything that its scores depend on, and the counts of each corruption and severity. Scores with another digest are
computed again. Batch size, workers and processes may change, because they do not affect the scores.
"""

import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import cv2
import numpy
import PIL
import timm
import torch

import vitzoo
from vitzoo._files import replace_file
from vitzoo.data import Images
from vitzoo.data.held_out import hash_file
from vitzoo.errors import UserError
from vitzoo.validate.options import EvalOptions
from vitzoo.validate.scoring import Evaluation

Condition = tuple[str, int]


class UnfinishedScores:
    """Counts of correct images and of all images by corruption and severity, the same in all processes.

    Without a results file, nothing is read or written.

    Raises:
        UserError: The file cannot be read.
    """

    def __init__(self, evaluation: Evaluation, images: Images) -> None:
        # None in a process that does not read and write it
        self.name, self.path = evaluation.name, _unfinished_file(evaluation.options) if evaluation.is_main else None
        self.counts: dict[Condition, tuple[int, int]] = {}
        if self.path is not None:
            self.digest = _digest(evaluation, images)
            self._read(self.path)
        if evaluation.accelerator is not None:
            from accelerate.utils import broadcast_object_list

            (self.counts,) = broadcast_object_list([self.counts])

    def add(self, condition: Condition, correct: int, count: int) -> None:
        """Add the counts of a condition, and write the file."""
        self.counts[condition] = correct, count
        if self.path is None:
            return
        counts = {f'{corruption} {severity}': both for (corruption, severity), both in self.counts.items()}
        found = _read_json(self.path) | {self.name: dict(digest=self.digest, counts=counts)}
        _write_json(self.path, found)

    def _read(self, path: Path) -> None:
        """Read the counts of the model if their digest is the same."""
        found = _read_json(path).get(self.name)
        if found is None:
            return
        if found['digest'] != self.digest:
            print(
                f'vitzoo: {path} has scores of {self.name} with other weights, images, options or versions;'
                f' computing all again',
                file=sys.stderr,
            )
            return
        for key, (correct, count) in found['counts'].items():
            corruption, severity = key.split()
            self.counts[corruption, int(severity)] = correct, count
        print(f'vitzoo: {self.name}: {len(self.counts)} corruptions are in {path}', file=sys.stderr)


def remove_unfinished(options: EvalOptions, names: Iterable[str]) -> None:
    """Remove the scores of models whose results are written, and the file if it has no others."""
    path = _unfinished_file(options)
    # without --corrupt, the scores are of an evaluation that may still continue
    if path is None or not options.corrupt or not path.exists():
        return
    names = set(names)
    if left := {name: found for name, found in _read_json(path).items() if name not in names}:
        _write_json(path, left)
    else:
        path.unlink()


def _unfinished_file(options: EvalOptions) -> Path | None:
    return Path(f'{options.results_file}.unfinished') if options.results_file else None


def _read_json(path: Path) -> dict:
    """The content of the file by model, empty if there is none.

    Raises:
        UserError: It cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding='utf-8'))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read '{path}': {error}; remove it to compute the corruptions again") from error


def _write_json(path: Path, found: dict) -> None:
    with replace_file(path) as partial:
        partial.write_text(json.dumps(found, indent=1), encoding='utf-8')


def _digest(evaluation: Evaluation, images: Images) -> str:
    """SHA-256 of everything that the scores of a model depend on."""
    name, model, options = evaluation.name, evaluation.model, evaluation.options
    digest, config = hashlib.sha256(), Path(name.removeprefix('local-dir:')).expanduser() / 'config.json'
    versions = [f'{module.__name__} {module.__version__}' for module in (cv2, numpy, PIL, timm, torch, vitzoo)]
    facts = [name, str(model), evaluation.data_config, options.amp_dtype, str(options.device), images.targets, versions]
    # the arguments of the model, which its description may not have
    facts.append(options.model_kwargs)
    digest.update(repr(facts).encode(errors='surrogateescape'))
    digest.update(config.read_bytes() if config.is_file() else b'')
    for key, tensor in model.state_dict().items():
        digest.update(f'{key} {tensor.dtype} {tuple(tensor.shape)}'.encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    for index in range(len(images)):
        digest.update(f'{images.filename(index)} {hash_file(images.reader, index)}'.encode(errors='surrogateescape'))
    return digest.hexdigest()
