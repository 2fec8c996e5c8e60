"""Accuracies of students next to those of their teachers and of models with the same mixers from scratch."""

import json
import warnings
from collections.abc import Callable
from functools import cache
from statistics import fmean
from typing import Any, NamedTuple

from vitzoo.data.options import DATA_OPTIONS
from vitzoo.load import build_on_meta
from vitzoo.mixers import TokenMixer, mixer_class
from vitzoo.mixers.base import named_mixers
from vitzoo.models._mixer_paths import block_of
from vitzoo.models.swap import swap_mixer, without_warnings
from vitzoo.options import keyword
from vitzoo.study.plan import Study, StudyCell
from vitzoo.study.results import ResultColumn, Row, score_column, sides

# options of a transfer and of an evaluation that choose the validation images
_DATA = ('data_dir', *(name for name in DATA_OPTIONS if name != 'train_split'))
# other names that the commands have for these
_OTHER_NAMES = {'dataset': 'data_dir', 'split': 'val_split'}


class KeptAccuracy(NamedTuple):
    """Accuracies of a converted model in percent, means over the seeds that it shares with the other model.

    Args:
        teacher: None if it was evaluated at another image size.
        scratch: Of the same mixer trained from scratch in the way of the teacher, if the study has it for all seeds, at
            the same image size.
        start: Of the converted model before any training, if the transfers recorded it.
        matched: Of the converted model after the matching of its blocks, if the transfers recorded it.
        zero: Of the converted and trained model whose attention is set to zero, if the transfers recorded it.
        is_alike: Whether the model from scratch has the mixer in the same blocks, with as many heads, as the student.
        has_same_options: Whether the mixer of the model from scratch has the options of the student's, which begins
            with those that come nearest to softmax attention.
    """

    mixer: str
    teacher: float | None
    student: float
    scratch: float | None
    start: float | None
    matched: float | None
    zero: float | None
    is_alike: bool
    has_same_options: bool

    @property
    def share(self) -> float | None:
        """Percentage of the teacher's accuracy, None if that is zero or not comparable."""
        return 100 * self.student / self.teacher if self.teacher else None


def find_kept(study: Study, way: list[Row], rows: list[Row]) -> list[KeptAccuracy]:
    """The kept accuracies of a way's converted models, whose teacher is among the rows of the whole study."""
    score = score_column(study, way)
    if score is None:
        return []
    known = {(row.way, row.model): row for row in rows if score in row.by_seed}
    found = []
    for row in way:
        if not row.is_converted or row.baseline not in known:
            continue
        teacher_way, name = row.baseline
        of_scratch = teacher_way, _same_mixer(name, row.mixer)
        students = row.by_seed.get(score, {})
        seeds = sorted(students.keys() & known[row.baseline].by_seed[score].keys())
        student = _mean(students, seeds)
        if student is not None:
            teacher, scratch = (
                _comparable_mean(known.get(key), row, score, seeds) for key in (row.baseline, of_scratch)
            )
            is_alike = scratch is None or _is_alike(of_scratch[1], name, row.mixer, _kept_blocks(study, row, seeds))
            has_same_options = scratch is None or _has_same_options(of_scratch[1], name, _cell_of(study, row))
            recorded = _recorded(study, row, score, seeds)
            found.append(KeptAccuracy(row.mixer, teacher, student, scratch, *recorded, is_alike, has_same_options))
    return found


def _comparable_mean(other: Row | None, row: Row, score: ResultColumn, seeds: list[int]) -> float | None:
    """The mean of another row over some seeds, if there is one that was evaluated at the image size of a row."""
    if other is None or not row.has_size_of(other, score.evaluation):
        return None
    return _mean(other.by_seed[score], seeds)


def _mean(values: dict[int, float], seeds: list[int]) -> float | None:
    """The mean over some seeds; None if there are none, or if one has no value."""
    return fmean(values[seed] for seed in seeds) if seeds and all(seed in values for seed in seeds) else None


def _same_mixer(teacher: str, mixer: str) -> str:
    """The model of a teacher's size and body that has a mixer; 'aft_conv_nano' is the body AFT with 'aft_conv'."""
    # 'cvt_13' has softmax attention, too
    body, _, size = teacher.partition('_softmax_' if '_softmax_' in teacher else '_')
    return f'{mixer}_{size}' if mixer.startswith(f'{body}_') else f'{body}_{mixer}_{size}'


def _is_alike(scratch: str, teacher: str, mixer: str, kept: list[set[str]] | None) -> bool:
    """Return True if a model has the layers of a teacher whose attention is replaced by a mixer.

    Args:
        kept: Blocks that keep the teacher's attention, in the student of each seed; None if they are not known.
    """
    own = [layer[1:] for layer in _layers(scratch)]
    return kept is not None and all(own == _layers_of_student(teacher, mixer, blocks) for blocks in kept)


def _layers_of_student(teacher: str, mixer: str, kept: set[str]) -> list[tuple[type, int]]:
    """The kind and the number of heads of each mixer of a teacher's student."""
    starts = tuple(f'{block}.' for block in kept)
    return [
        (kind if path.startswith(starts) else mixer_class(mixer), num_heads)
        for path, kind, num_heads in _layers(teacher)
    ]


def _has_same_options(scratch: str, teacher: str, cell: StudyCell) -> bool:
    """Return True if the mixers of a model have the options and parameters of those of a teacher's student."""
    mixer, given = str(cell.options['mixer']), cell.options.get('mixer_kwargs') or {}
    # a list has KEY=VALUE
    pairs = given.items() if isinstance(given, dict) else [keyword(text) for text in given]
    options = {str(key).removeprefix(f'{mixer}.'): value for key, value in pairs}
    student = _forms(teacher, mixer, json.dumps(options))
    forms = [(form, student[path]) for path, form in _forms(scratch).items() if path in student]
    # with another mixer or other heads, which has a mark of its own, shapes differ for that reason
    return all(a == b for a, b in forms if (a['kind'], a['num_heads']) == (b['kind'], b['num_heads']))


def _kept_blocks(study: Study, row: Row, seeds: list[int]) -> list[set[str]] | None:
    """The blocks of a teacher that its student of each seed keeps, as the transfers recorded them; None if unknown."""
    if str(_cell_of(study, row).options.get('keep_softmax') or 0) == '0':
        return [set()]
    searches: list[Any] = [row.transfers.get(seed, {}).get('keep_softmax') for seed in seeds]
    if not all(searches):
        return None
    return [{block_of(path) for path in rounds[-1]['kept']} for rounds in searches]


def _layers(name: str) -> list[tuple[str, type, int]]:
    """The path, the kind and the number of heads of each mixer of a model."""
    return [(path, form['kind'], form['num_heads']) for path, form in _forms(name).items()]


@cache
def _forms(name: str, mixer: str | None = None, options: str = '{}') -> dict[str, dict[str, Any]]:
    """The kind, the options and the shapes of the parameters of each mixer of a model by its path.

    Args:
        mixer: The model is a teacher, and these are those of its student with this mixer.
        options: The arguments of the student's mixer as JSON.
    """
    with warnings.catch_warnings(), without_warnings():
        # those on its options come up where it is trained
        warnings.simplefilter('ignore')
        model = build_on_meta(name)
        if mixer is not None:
            swap_mixer(model, mixer, **{**mixer_class(mixer).start_arguments, **json.loads(options)})
    return {path: _form(layer) for path, layer in named_mixers(model)}


def _form(mixer: TokenMixer) -> dict[str, Any]:
    options = {name: value for name, value in vars(mixer).items() if isinstance(value, bool | int | float | str | None)}
    return {'kind': type(mixer), **options, **{name: tensor.shape for name, tensor in mixer.state_dict().items()}}


def _recorded(
    study: Study, row: Row, score: ResultColumn, seeds: list[int]
) -> tuple[float | None, float | None, float | None]:
    """Accuracies before training, after matching and without attention, if all transfers measured them.

    Only on the inputs of the score.
    """
    transfers = row.transfers if _has_inputs(_cell_of(study, row), study.evaluations[score.evaluation]) else {}

    def mean(find: Callable[[dict], dict | None]) -> float | None:
        found = {seed: (find(transfer) or {}).get(score.key) for seed, transfer in transfers.items()}
        return _mean({seed: value for seed, value in found.items() if value is not None}, seeds)

    return (
        mean(lambda transfer: transfer.get('start')),
        mean(lambda transfer: transfer.get('matched')),
        mean(lambda transfer: transfer.get('controls', {}).get('zero')),
    )


def _cell_of(study: Study, row: Row) -> StudyCell:
    """The first cell of a row."""
    return next(cell for cell in study.cells if (cell.way, cell.model) == (row.way, row.model))


def _has_inputs(cell: StudyCell, evaluation: dict) -> bool:
    """Return True if an evaluation has the data of a transfer, and does not change the size of the images."""
    size = evaluation.get('img_size')
    teachers = cell.teacher.options.get('img_size') if cell.teacher is not None else None
    own = cell.options.get('img_size') or teachers
    # a student keeps the size of its conversion
    has_size = size is None or (own is not None and sides(size) == sides(own))
    return has_size and _data_of(evaluation) == _data_of(cell.options)


def _data_of(options: dict) -> dict:
    """The options that choose the validation images, by their first names."""
    named = {_OTHER_NAMES.get(key, key): value for key, value in options.items()}
    return {key: named.get(key) for key in _DATA}
