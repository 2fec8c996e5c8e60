"""The results of a study: a row for each model and way, with estimates over the seeds."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vitzoo.study.intervals import Estimate, estimate, judge, paired_difference
from vitzoo.study.plan import Study, StudyCell


class Metric(NamedTuple):
    """A number in the record of an evaluation.

    Args:
        sign: 1 if higher is better, -1 if lower is, 0 for one that is not judged.
        is_exact: True if it does not depend on the seed, so that it has no interval.
    """

    title: str
    digits: int
    sign: int = 0
    factor: float = 1.0
    is_exact: bool = False


# by the key of the record
METRICS = {
    'top1': Metric('top-1 %', 2, 1),
    'top5': Metric('top-5 %', 2, 1),
    'map': Metric('mAP %', 2, 1),
    'loss': Metric('loss', 4, -1),
    'corrupt_top1': Metric('corrupted top-1 %', 2, 1),
    'corrupt_relative': Metric('corrupted, % of clean', 2, 1),
    'params': Metric('params M', 2, factor=1e-6, is_exact=True),
    'gmacs': Metric('GMACs', 3, is_exact=True),
    'images_per_second': Metric('images/s', 0),
    'peak_memory_mb': Metric('peak MB', 0),
    'oversmoothing': Metric('last cosine', 3),
}


class ResultColumn(NamedTuple):
    """A metric of an evaluation."""

    evaluation: str
    key: str

    @property
    def metric(self) -> Metric:
        """The metric."""
        return METRICS[self.key]


@dataclass
class Row:
    """A model in one way, over its seeds.

    Args:
        values: Estimates by column.
        differences: Of the seeds that the baseline also has.
        verdicts: 'better', 'worse' or an empty string.
        doubts: Columns of speeds that were measured on a busy machine.
        rank: Of the mean of the first column, among the models of the same way; 0 without it.
    """

    way: str
    model: str
    baseline: tuple[str, str] | None
    values: dict[ResultColumn, Estimate] = field(default_factory=dict)
    differences: dict[ResultColumn, Estimate] = field(default_factory=dict)
    verdicts: dict[ResultColumn, str] = field(default_factory=dict)
    doubts: set[ResultColumn] = field(default_factory=set)
    rank: int = 0

    @property
    def is_baseline(self) -> bool:
        """True if others of the same way are compared with this row."""
        return self.baseline == (self.way, self.model)


def collect(study: Study, read: Callable[[StudyCell, str], dict | None] | None = None) -> list[Row]:
    """The rows that have results, of each way by rank.

    Args:
        read: The record of a cell's evaluation, None if there is none; by default it is read from the cell's folder.
    """
    read = read or (lambda cell, evaluation: cell.record.results(evaluation))
    values: dict[tuple[str, str], dict[ResultColumn, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    baselines, doubts = {}, defaultdict(set)
    for cell in study.cells:
        baselines[cell.way, cell.model] = study.baseline_of(cell)
        for evaluation in cell.evaluations:
            record = read(cell, evaluation) or {}
            for key in METRICS:
                value = _scalar(record.get(key))
                if value is not None:
                    values[cell.way, cell.model][ResultColumn(evaluation, key)][cell.seed] = value
            if record.get('speed_doubt'):
                doubts[cell.way, cell.model].add(ResultColumn(evaluation, 'images_per_second'))
    rows = []
    for (way, model), columns in values.items():
        row = Row(way, model, baselines[way, model], doubts=doubts[way, model])
        reference = {} if row.is_baseline or row.baseline is None else values.get(row.baseline, {})
        for column, seeds in columns.items():
            row.values[column] = estimate(list(seeds.values()))
            difference = None if column.metric.is_exact else paired_difference(seeds, reference.get(column, {}))
            if difference is not None:
                row.differences[column] = difference
                row.verdicts[column] = judge(difference, column.metric.sign)
        rows.append(row)
    return _rank(study, rows)


def visible_columns(study: Study, rows: list[Row]) -> list[ResultColumn]:
    """The columns of a way's table: accuracies of every evaluation, costs and oversmoothing of the first."""
    first, *others = study.evaluations_of(rows[0].way)
    keys = [key for key in METRICS if key not in ('top5', 'loss', 'corrupt_relative')]
    columns = [ResultColumn(first, key) for key in keys]
    for evaluation in others:
        is_repeated = _inputs(study, evaluation) == _inputs(study, first)
        columns += [
            ResultColumn(evaluation, key)
            for key in keys
            if METRICS[key].sign and not (is_repeated and key in ('top1', 'map'))
        ]
    return [column for column in columns if any(column in row.values for row in rows)]


def pareto_front(rows: list[Row], score: ResultColumn, cost: ResultColumn, sign: int) -> list[Row]:
    """The rows of a way than which no other has a better mean accuracy without a worse mean cost, or the reverse.

    Args:
        sign: 1 if a higher cost is better, as for images/s, else -1.
    """
    known = [row for row in rows if score in row.values and cost in row.values]
    points = [(row.values[score].mean, sign * row.values[cost].mean) for row in known]
    return [
        row
        for row, (y, x) in zip(known, points)
        if not any(other_y >= y and other_x >= x and (other_y, other_x) != (y, x) for other_y, other_x in points)
    ]


def _inputs(study: Study, evaluation: str) -> dict:
    """The options of an evaluation that the accuracy on clean images depends on."""
    added = ('corrupt', 'suite', 'data_root', 'allow_partial', 'measures', 'health', 'batch_size', 'workers')
    return {key: value for key, value in study.evaluations[evaluation].items() if key not in added}


def _scalar(value: Any) -> float | None:
    """A number of a record; of the oversmoothing of all blocks, that of the last."""
    if isinstance(value, list):
        value = value[-1] if value else None
    return None if value is None else float(value)


def _rank(study: Study, rows: list[Row]) -> list[Row]:
    """Sort by way and accuracy, and number the models of each way."""
    ways = list(dict.fromkeys(cell.way for cell in study.cells))

    def accuracy(row: Row) -> float:
        first = study.evaluations_of(row.way)[0]
        found = row.values.get(ResultColumn(first, 'top1')) or row.values.get(ResultColumn(first, 'map'))
        return found.mean if found else -1.0

    for way in ways:
        scores = sorted((accuracy(row) for row in rows if row.way == way), reverse=True)
        for row in rows:
            if row.way == way and accuracy(row) >= 0:
                # equal means have the same rank
                row.rank = scores.index(accuracy(row)) + 1
    return sorted(rows, key=lambda row: (ways.index(row.way), -accuracy(row)))
