"""Accuracies that conversions keep: of students beside those of their teacher and of the same mixers from scratch."""

from statistics import fmean
from typing import NamedTuple

from vitzoo.data.options import DATA_OPTIONS
from vitzoo.study.plan import Study, StudyCell
from vitzoo.study.results import ResultColumn, Row, score_column, sides

# options of a transfer and of an evaluation that choose the validation images
_DATA = ('data_dir', *(name for name in DATA_OPTIONS if name != 'train_split'))


class KeptAccuracy(NamedTuple):
    """Accuracies of a converted model in percent, means over the seeds that it shares with the other model.

    Args:
        scratch: Of the same mixer trained from scratch in the way of the teacher, if the study has it.
        start: Of the converted model before any training, if its transfer recorded it.
        zero: Of the converted and trained model whose attention is set to zero, if its transfer recorded it.
    """

    mixer: str
    teacher: float
    student: float
    scratch: float | None
    start: float | None
    zero: float | None

    @property
    def share(self) -> float | None:
        """Percentage of the teacher's accuracy, None if that is zero."""
        return 100 * self.student / self.teacher if self.teacher else None


def find_kept(study: Study, way: list[Row], rows: list[Row]) -> list[KeptAccuracy]:
    """The kept accuracies of a way's converted models, whose teacher is among the rows of the whole study."""
    score = score_column(study, way)
    if score is None:
        return []
    known = {(row.way, row.model): row.by_seed[score] for row in rows if score in row.by_seed}
    found = []
    for row in way:
        if not row.is_converted or row.baseline is None:
            continue
        teacher_way, name = row.baseline
        students = known.get((row.way, row.model), {})
        teachers = known.get(row.baseline, {})
        scratch = known.get((teacher_way, _same_mixer(name, row.mixer)), {})
        teacher, student = _mean(teachers, students), _mean(students, teachers)
        if teacher is not None and student is not None:
            accuracies = teacher, student, _mean(scratch, students)
            found.append(KeptAccuracy(row.mixer, *accuracies, *_recorded(study, row, score, teachers)))
    return found


def _mean(values: dict[int, float], others: dict[int, float]) -> float | None:
    """The mean over the seeds that others have, too; None if there are none."""
    shared = [value for seed, value in values.items() if seed in others]
    return fmean(shared) if shared else None


def _same_mixer(teacher: str, mixer: str) -> str:
    """The model of a teacher's size and body that has a mixer; 'aft_conv_nano' is the body AFT with 'aft_conv'."""
    # 'cvt_13' has softmax attention, too
    body, _, size = teacher.partition('_softmax_' if '_softmax_' in teacher else '_')
    return f'{mixer}_{size}' if mixer.startswith(f'{body}_') else f'{body}_{mixer}_{size}'


def _recorded(
    study: Study, row: Row, score: ResultColumn, teachers: dict[int, float]
) -> tuple[float | None, float | None]:
    """Accuracies before training and without attention, if the transfer measured them on the inputs of the score."""
    cell = next(cell for cell in study.cells if (cell.way, cell.model) == (row.way, row.model))
    if not _has_inputs(cell, study.evaluations[score.evaluation]):
        return None, None
    shared = [found for seed, found in row.transfers.items() if seed in teachers and seed in row.by_seed[score]]
    starts = [found.get('start', {}).get(score.key) for found in shared]
    zeros = [found.get('controls', {}).get('zero', {}).get(score.key) for found in shared]
    start, zero = ([value for value in values if value is not None] for values in (starts, zeros))
    return fmean(start) if start else None, fmean(zero) if zero else None


def _has_inputs(cell: StudyCell, evaluation: dict) -> bool:
    """Return True if an evaluation has the data of a transfer, and does not change the size of the images."""
    size = evaluation.get('img_size')
    teachers = cell.teacher.options.get('img_size') if cell.teacher is not None else None
    own = cell.options.get('img_size') or teachers
    # a student keeps the size of its conversion
    has_size = size is None or (own is not None and sides(size) == sides(own))
    return has_size and all(evaluation.get(key) == cell.options.get(key) for key in _DATA)
