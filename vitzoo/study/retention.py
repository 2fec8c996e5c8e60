"""Accuracies that conversions keep: of students beside those of their teacher and of the same mixers from scratch."""

from typing import NamedTuple

from vitzoo.study.plan import Study
from vitzoo.study.results import ResultColumn, Row, score_column


class KeptAccuracy(NamedTuple):
    """Accuracies of a converted model in percent, means over the seeds.

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
    def share(self) -> float:
        """Percentage of the teacher's accuracy."""
        return 100 * self.student / self.teacher


def find_kept(study: Study, way: list[Row], rows: list[Row]) -> list[KeptAccuracy]:
    """The kept accuracies of a way's converted models, whose teacher is among the rows of the whole study."""
    score = score_column(study, way)
    if score is None:
        return []
    known = {(row.way, row.model): row.values[score].mean for row in rows if score in row.values}
    found = []
    for row in way:
        if row.is_converted and row.baseline in known and (row.way, row.model) in known:
            teacher_way, teacher = row.baseline
            scratch = known.get((teacher_way, _same_mixer(teacher, row.mixer)))
            accuracies = known[row.baseline], known[row.way, row.model], scratch
            found.append(KeptAccuracy(row.mixer, *accuracies, *_recorded(row, score)))
    return found


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
