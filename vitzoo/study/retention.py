"""Accuracies that conversions keep: of students beside those of their teacher and of the same mixers from scratch."""

from statistics import fmean
from typing import NamedTuple

from vitzoo.study.plan import Study
from vitzoo.study.results import ResultColumn, Row, score_column


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
            found.append(KeptAccuracy(row.mixer, *accuracies, *_recorded(row, score)))
    return found


def _mean(values: dict[int, float], others: dict[int, float]) -> float | None:
    """The mean over the seeds that others have, too; None if there are none."""
    shared = [value for seed, value in values.items() if seed in others]
    return fmean(shared) if shared else None


def _same_mixer(teacher: str, mixer: str) -> str:
    """The model of a teacher's size and body that has a mixer; 'aft_conv_nano' is the body AFT with 'aft_conv'."""
    body, _, size = teacher.partition('_softmax_')
    return f'{mixer}_{size}' if mixer.startswith(f'{body}_') else f'{body}_{mixer}_{size}'


def _recorded(row: Row, score: ResultColumn) -> tuple[float | None, float | None]:
    """Accuracies before training and without attention, as the transfer recorded them."""
    transfer = row.records.get(score.evaluation, {}).get('transfer', {})
    scores = transfer.get('start', {}), transfer.get('controls', {}).get('zero', {})
    start, zero = (found.get(score.key) for found in scores)
    return start, zero
