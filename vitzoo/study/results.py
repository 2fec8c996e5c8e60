"""The results of a study: a row for each model and way, with estimates over the seeds."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple

from vitzoo.metrics.oversmoothing import MEASURES
from vitzoo.options import size as parse_size
from vitzoo.report.records import SCORES
from vitzoo.report.transfers import read_transfer
from vitzoo.study.intervals import Estimate, estimate, judge, paired_difference
from vitzoo.study.plan import Study, StudyCell


class Metric(NamedTuple):
    """A number in the record of an evaluation.

    Args:
        sign: 1 if higher is better, -1 if lower is, 0 for one that is not judged.
        is_exact: True if it is counted, so that it has no interval unless the models of the seeds differ.
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
        by_seed: What they are estimated from.
        differences: Of the seeds that the baseline also has.
        verdicts: 'better', 'worse' or an empty string.
        doubts: Columns of speeds that were measured on a busy machine or in uneven rounds, and of speeds and memory
            that were measured on several machines in this way.
        rank: Of the mean of the score of `score_column`, among the models of the same way; 0 without it.
        records: The records of the evaluations, means over the seeds.
        machines: On which they were evaluated, where that is known.
        images: Fingerprints of the images by evaluation and seed, where they are known.
        mixer: Of a converted model.
        transfers: Results of its conversion by seed.
    """

    way: str
    model: str
    baseline: tuple[str, str] | None
    values: dict[ResultColumn, Estimate] = field(default_factory=dict)
    by_seed: dict[ResultColumn, dict[int, float]] = field(default_factory=dict)
    differences: dict[ResultColumn, Estimate] = field(default_factory=dict)
    verdicts: dict[ResultColumn, str] = field(default_factory=dict)
    doubts: set[ResultColumn] = field(default_factory=set)
    rank: int = 0
    records: dict[str, dict] = field(default_factory=dict)
    machines: set[str] = field(default_factory=set)
    images: dict[tuple[str, int], str] = field(default_factory=dict)
    mixer: str = ''
    transfers: dict[int, dict] = field(default_factory=dict)

    @property
    def is_converted(self) -> bool:
        """True if a transfer made this model, whose baseline is its teacher."""
        return bool(self.mixer)

    def img_size(self, evaluation: str) -> tuple[int, int] | None:
        """Height and width of the images of an evaluation, None if they are not recorded."""
        size = self.records.get(evaluation, {}).get('img_size')
        return None if size is None else sides(size)

    def has_size_of(self, other: 'Row', evaluation: str) -> bool:
        """Return True unless another row is known to have images of another size in an evaluation."""
        sizes = {self.img_size(evaluation), other.img_size(evaluation)} - {None}
        return len(sizes) < 2

    @property
    def is_baseline(self) -> bool:
        """True if others of the same way are compared with this row."""
        return self.baseline == (self.way, self.model)


def collect(study: Study, read: Callable[[StudyCell, str], dict | None] | None = None) -> list[Row]:
    """The rows that have results, of each way by rank.

    Args:
        read: The record of a cell's evaluation, None if there is none; by default `read_cell`.
    """
    read = read or read_cell
    found: dict[tuple[str, str], dict[str, dict[int, dict]]] = defaultdict(lambda: defaultdict(dict))
    baselines, mixers = {}, {}
    for cell in study.cells:
        baselines[cell.way, cell.model] = study.baseline_of(cell)
        mixers[cell.way, cell.model] = cell.options['mixer'] if cell.teacher is not None else ''
        for evaluation in cell.evaluations:
            record = read(cell, evaluation)
            if record is not None:
                found[cell.way, cell.model][evaluation][cell.seed] = record
    values = {key: _values(records) for key, records in found.items()}
    rows = []
    for (way, model), columns in values.items():
        seeds_of = found[way, model]
        # the first evaluation may be the last that was computed
        names = [name for name in study.evaluations_of(way) if name in seeds_of]
        records = {name: _average_evaluations(list(seeds_of[name].values())) for name in names}
        row = Row(way, model, baselines[way, model], records=records, mixer=mixers[way, model])
        cells = [(name, seed, record) for name, seeds in seeds_of.items() for seed, record in seeds.items()]
        row.transfers = {seed: record['transfer'] for _, seed, record in cells if record.get('transfer')}
        row.images = {(name, seed): record['images'] for name, seed, record in cells if record.get('images')}
        for column, seeds in columns.items():
            row.values[column], row.by_seed[column] = estimate(list(seeds.values())), seeds
        rows.append(row)
    known = {(row.way, row.model): row for row in rows}
    for row in rows:
        if row.baseline in known and not row.is_baseline:
            _compare(row, known[row.baseline])
    _doubt_costs(rows, found)
    return _rank(study, rows)


def _compare(row: Row, baseline: Row) -> None:
    """Add the differences to the baseline; a converted model has none to its teacher at another image size."""
    for column, seeds in row.by_seed.items():
        if column.metric.is_exact or (row.is_converted and not row.has_size_of(baseline, column.evaluation)):
            continue
        difference = paired_difference(seeds, baseline.by_seed.get(column, {}))
        if difference is not None:
            row.differences[column] = difference
            row.verdicts[column] = judge(difference, column.metric.sign)


def read_cell(cell: StudyCell, evaluation: str) -> dict | None:
    """The record of an evaluation with its machine, that of the first with the results of a transfer, too."""
    record = cell.record.results(evaluation)
    if record is None:
        return None
    transfer = read_transfer(str(cell.folder)) if evaluation == next(iter(cell.evaluations)) else {}
    return record | cell.record.finished[evaluation]['place'] | transfer


def group_records(study: Study, records: dict[str, dict]) -> dict[str, dict]:
    """The records of evaluations by name, those of the same inputs merged under the first such name of the study."""
    groups: dict[str, list[dict]] = defaultdict(list)
    for name, record in records.items():
        groups[same_inputs(study, name)].append(record)
    return {name: merge_records(found) for name, found in groups.items()}


def same_inputs(study: Study, evaluation: str) -> str:
    """The first evaluation of the study with the inputs of this one."""
    return next(name for name in study.evaluations if _inputs(study, name) == _inputs(study, evaluation))


def merge_records(records: Iterable[dict]) -> dict:
    """The records of evaluations of the same inputs as one; of equal keys the first value that is not None counts.

    Measures of the tokens are joined, and corruptions bring the clean accuracy of their own evaluation.
    """
    merged: dict = {}
    for record in records:
        known = {key: value for key, value in merged.items() if value is not None}
        if record.get('corrupt') and 'corrupt' not in known:
            known |= {key: record[key] for key in ('top1', 'n') if key in record}
        statistics = (record.get('token_statistics') or {}) | known.get('token_statistics', {})
        merged = merged | record | known | (dict(token_statistics=statistics) if statistics else {})
    return merged


def has_more(record: dict, first: dict) -> bool:
    """Return True if a record has corruptions, the health of mixers, or measures of the tokens that the first lacks."""
    added = set(record.get('token_statistics') or {}) - set(first.get('token_statistics') or {})
    return any(record.get(key) for key in ('corrupt', 'health')) or not added.isdisjoint(MEASURES)


def average(records: Sequence[Any]) -> Any:
    """The means of all numbers in records of the same form, in nested mappings and lists, too; of others the first.

    A value that is None in some of the records is the mean of the others. What only some of the mappings have, such as
    the health of a block in which other seeds kept softmax attention, is left out.
    """
    records = [record for record in records if record is not None]
    if not records:
        return None
    first = records[0]
    if isinstance(first, dict):
        found = {key: [record[key] for record in records if key in record] for key in dict.fromkeys(chain(*records))}
        # the doubt about the speed of one seed is one about the mean
        return {
            key: average(values)
            for key, values in found.items()
            if len(values) == len(records) or isinstance(values[0], str)
        }
    if isinstance(first, list) and len({len(record) for record in records}) == 1:
        return [average(values) for values in zip(*records)]
    known = [value for value in records if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return fmean(known) if known and len(set(known)) > 1 else first


def _average_evaluations(records: list[dict]) -> dict:
    """The `average` of records of an evaluation; what one of them lacks was not measured, as if it were None."""
    return {key: average([record.get(key) for record in records]) for key in dict.fromkeys(chain(*records))}


def visible_columns(study: Study, rows: list[Row]) -> list[ResultColumn]:
    """The columns of a way's table: accuracies of every evaluation, costs and oversmoothing of the first."""
    first, *others = study.evaluations_of(rows[0].way)
    # the accuracies that rank come first
    keys = [*SCORES, *(key for key in METRICS if key not in (*SCORES, 'top5', 'loss', 'corrupt_relative'))]
    columns = [ResultColumn(first, key) for key in keys]
    for evaluation in others:
        is_repeated = _inputs(study, evaluation) == _inputs(study, first)
        columns += [
            ResultColumn(evaluation, key) for key in keys if METRICS[key].sign and not (is_repeated and key in SCORES)
        ]
    return [column for column in columns if any(column in row.values for row in rows)]


def score_column(study: Study, rows: list[Row]) -> ResultColumn | None:
    """The accuracy that ranks the models of a way, None if its first evaluation has none."""
    first = study.evaluations_of(rows[0].way)[0]
    columns = (ResultColumn(first, key) for key in SCORES)
    return next((column for column in columns if any(column in row.values for row in rows)), None)


def mixed_evaluations(study: Study, rows: list[Row]) -> list[str]:
    """The evaluations in which models of the same seed had different images."""
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    for row in rows:
        for place, images in row.images.items():
            found[place].add(images)
    mixed = {name for (name, _), images in found.items() if len(images) > 1}
    return [name for name in study.evaluations if name in mixed]


def size_columns(study: Study, rows: list[Row]) -> list[ResultColumn]:
    """The accuracies of a way that differ in the size of the images only, the first of which ranks its models."""
    score = score_column(study, rows)
    if score is None:
        return []
    names = study.evaluations_of(rows[0].way)
    same = [name for name in names if _inputs(study, name, 'img_size') == _inputs(study, names[0], 'img_size')]
    return [ResultColumn(name, score.key) for name in same]


def teachers_of(way: list[Row]) -> set[tuple[str, str] | None]:
    """Way and model of the teachers of a way's converted models."""
    return {row.baseline for row in way if row.is_converted}


def pareto_front(rows: list[Row], score: ResultColumn, cost: ResultColumn, sign: int) -> list[Row]:
    """The rows of a way than which no other has a better mean accuracy without a worse mean cost, or the reverse.

    Args:
        sign: 1 if a higher cost is better, as for images/s, else -1.
    """
    known = [row for row in rows if score in row.values and cost in row.values]
    points = [(_without_error(row.values[score].mean), sign * row.values[cost].mean) for row in known]
    return [
        row
        for row, (y, x) in zip(known, points)
        if not any(other_y >= y and other_x >= x and (other_y, other_x) != (y, x) for other_y, other_x in points)
    ]


def _inputs(study: Study, evaluation: str, *others: str) -> dict:
    """The options of an evaluation that the accuracy on clean images depends on, without some others."""
    added = (*others, 'corrupt', 'measures', 'health', 'batch_size', 'workers')
    options = study.evaluations[evaluation]
    options = options | {'img_size': sides(options['img_size'])} if options.get('img_size') else options
    return {key: value for key, value in options.items() if key not in added}


def sides(img_size: int | str | list[int]) -> tuple[int, int]:
    """Height and width of an image size as options have it: 224, '224x288' or [224, 288]."""
    return parse_size('x'.join(map(str, img_size)) if isinstance(img_size, list) else str(img_size))


def _values(records: dict[str, dict[int, dict]]) -> dict[ResultColumn, dict[int, float]]:
    """The numbers of a row by column and seed."""
    values: dict[ResultColumn, dict[int, float]] = defaultdict(dict)
    for evaluation, seeds in records.items():
        for seed, record in seeds.items():
            for key in METRICS:
                value = _scalar(record.get(key))
                if value is not None:
                    values[ResultColumn(evaluation, key)][seed] = value
    return values


def _doubt_costs(rows: list[Row], found: dict[tuple[str, str], dict[str, dict[int, dict]]]) -> None:
    """Mark the speeds of a busy machine, and the speeds and memory of an evaluation on several machines."""
    machines: dict[tuple[str, str], set[str | None]] = defaultdict(set)
    for (way, _), evaluations in found.items():
        for evaluation, seeds in evaluations.items():
            machines[way, evaluation] |= {record.get('measured_on') for record in seeds.values()}
    for row in rows:
        for evaluation, seeds in found[row.way, row.model].items():
            row.machines |= {record['measured_on'] for record in seeds.values() if record.get('measured_on')}
            speed, memory = (ResultColumn(evaluation, key) for key in ('images_per_second', 'peak_memory_mb'))
            if any(record.get('speed_doubt') for record in seeds.values()):
                row.doubts.add(speed)
            if len(machines[row.way, evaluation]) > 1:
                row.doubts |= {speed, memory}
            row.doubts &= row.values.keys()


def _scalar(value: Any) -> float | None:
    """A number of a record; of the oversmoothing of all blocks, that of the last."""
    if isinstance(value, list):
        value = value[-1] if value else None
    return None if value is None else float(value)


def _without_error(mean: float) -> float:
    """A mean accuracy without errors of rounding, by which means of the same number of images differ."""
    return round(mean, 9)


def _rank(study: Study, rows: list[Row]) -> list[Row]:
    """Sort by way and accuracy, and number the models of each way."""
    ways = list(dict.fromkeys(cell.way for cell in study.cells))

    scores = {way: score_column(study, found) for way in ways if (found := [row for row in rows if row.way == way])}

    def accuracy(row: Row) -> float:
        score = scores[row.way]
        found = row.values.get(score) if score is not None else None
        return _without_error(found.mean) if found else -1.0

    for way in ways:
        accuracies = sorted((accuracy(row) for row in rows if row.way == way), reverse=True)
        for row in rows:
            if row.way == way and accuracy(row) >= 0:
                # equal means have the same rank
                row.rank = accuracies.index(accuracy(row)) + 1
    return sorted(rows, key=lambda row: (ways.index(row.way), -accuracy(row)))
