"""docs/performance.md and docs/targets.md are current, and targets are evaluated on the right rows."""

import re
import shlex
from itertools import product
from pathlib import Path

import docs_mixers
import docs_performance
import docs_targets
import pages
import pytest
import targets
import timm

from vitzoo.bench import _pairs as pairs
from vitzoo.bench import memory, mixers, models, peers, startup
from vitzoo.bench._harness import LAYER_PASSES
from vitzoo.bench._results import append_rows, read_rows
from vitzoo.mixers import TokenMixer, list_mixers, mixer_class

ROOT = Path(__file__).parents[2]
DOCS = ROOT / 'docs'
FOUR = ('ls', 'performer', 'nystrom', 'aft_conv')
RUN = '2026-11-20T12:00:00Z'
MACHINE = dict(cpu='fast, 2 cores', threads=2, torch='2.15.0', timm='1.0.31', python='3.11', load=0.1)
MEASURED = dict(
    **dict(seconds=1.0, seconds_low=0.8, seconds_high=1.25, ratio=1.0, ratio_low=0.9, ratio_high=1.1, rounds=5),
    **dict(peak_mb=10.0, gmacs=50.0, matmul_share=0.5, matmul_gflops=200.0, io_mb=1.0, copy_gbs=20.0, ceiling=1000.0),
)

TARGETS = [target for group in targets.TARGETS.values() for target in group]


def id_of(target) -> str:
    names = target.rows['name'] if isinstance(target.rows['name'], str) else f'{len(target.rows["name"])} mixers'
    return f'{names}-{target.rows.get("tokens")}-{target.rows.get("what")}-{target.reads}'


each_target = pytest.mark.parametrize('target', TARGETS, ids=id_of)


def combinations(target) -> list[dict]:
    """The columns of every row that a target selects."""
    options = {key: value if isinstance(value, tuple) else (value,) for key, value in target.rows.items()}
    return [dict(zip(options, values)) for values in product(*options.values())]


def rows_with_value(target, value: float, **others) -> list[dict]:
    """Rows from which a target reads this value."""
    rows = []
    for asked in combinations(target):
        row = MEASURED | asked | others
        if target.reads == 'ratio':
            row['ratio'] = value
        elif target.reads == 'relative time':
            row['ratio'] = 1 / value
        elif target.reads == 'share of matmul':
            row['matmul_share'] = value
        elif target.reads == 'exponent':
            row['seconds'] = 16**value
            rows.append(row | dict(tokens=1024, seconds=1.0, gmacs=row['gmacs'] / 16))
        elif target.reads == 'memory in GB':
            row['peak_mb'] = 1e3 * value
        else:
            row['peak_mb'] = 50.0 * value
            baseline = 'softmax' if target.reads == 'memory over SDPA' else 'softmax, unfused'
            rows.append(row | dict(name=baseline, peak_mb=50.0))
        rows.append(row)
    return rows


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch) -> None:
    """`append_rows` records the load of this machine if it is busy."""
    monkeypatch.setattr('vitzoo.bench._results.system_load', lambda: 0.1)


def written(tmp_path, rows: list[dict], run: str = RUN, command: str = 'vitzoo bench it') -> list[dict]:
    """The rows, written to a file and read again."""
    path = tmp_path / f'{len(list(tmp_path.iterdir()))}.csv'
    append_rows(str(path), rows, run=run, command=command, **MACHINE)
    return read_rows(str(path))


def verdicts(target, rows: list[dict]) -> set[str]:
    lines = list(targets.read_lines(target, rows))
    assert len(lines) == len(combinations(target))
    return {line.verdict for line in lines}


@pytest.mark.parametrize('tool', [docs_performance, docs_targets], ids=lambda tool: tool.PAGE.name)
def test_the_page_is_current(tool):
    rows = pages.latest(read_rows(pages.BENCHMARKS)) if pages.BENCHMARKS.exists() else []
    text = tool.PAGE.read_text()
    assert pages.fill(text, tool.sections(rows)) == text, 'run `make docs`'
    for picture in re.findall(r'!\[[^]]*\]\((\S+?)\)', text):
        assert (DOCS / picture).exists(), 'run tools/measure.sh'


@each_target
def test_a_target_is_met_on_one_side_of_its_limit_and_missed_on_the_other(target, tmp_path):
    better, worse = (1.001, 0.999) if target.at_most is None else (0.999, 1.001)
    limits = {1000.0: target.at_least or target.at_most}
    if target.stretch is not None:
        ceiling, limit = target.stretch
        limits = {ceiling - 0.01: target.at_least, ceiling: limit}
    for ceiling, limit in limits.items():
        for factor, verdict in ((better, 'met'), (worse, 'missed')):
            rows = rows_with_value(target, limit * factor, ceiling=ceiling)
            assert verdicts(target, written(tmp_path, rows)) == {verdict}


@each_target
def test_a_target_without_its_rows_is_not_measured(target, tmp_path):
    rows = written(tmp_path, rows_with_value(target, target.at_least or target.at_most))
    assert verdicts(target, []) == {'not measured'}
    for key, value in dict(device='cuda', table='trainer', name='another').items():
        assert verdicts(target, [row | {key: value} for row in rows]) == {'not measured'}


@pytest.mark.parametrize('title', targets.REASONS)
def test_every_target_that_is_not_met_has_a_reason(title):
    rows = pages.latest(read_rows(pages.BENCHMARKS))
    lines = [line for target in targets.TARGETS[title] for line in targets.read_lines(target, rows)]
    unmet = [line for line in lines if line.verdict in ('missed', 'out of reach')]
    assert [line.row['name'] for line in unmet if not docs_targets.reason_of(line, targets.REASONS[title])] == []
    assert {docs_targets.reason_of(line, targets.REASONS[title]) for line in lines if line.verdict == 'met'} <= {''}


def test_a_target_above_the_ceiling_is_out_of_reach(tmp_path):
    target = targets.Target(targets.CVT_13 | dict(what='forward'), 'ratio', at_least=1.2)
    assert verdicts(target, written(tmp_path, rows_with_value(target, 1.1, ceiling=1.19))) == {'out of reach'}
    assert verdicts(target, written(tmp_path, rows_with_value(target, 1.1, ceiling=1.21))) == {'missed'}
    # a measurement counts even above the ceiling, which is only as accurate as the rates
    assert verdicts(target, written(tmp_path, rows_with_value(target, 1.2, ceiling=1.19))) == {'met'}


def test_a_reading_has_its_quartiles_and_what_bounds_it(tmp_path):
    (target,) = targets.TARGETS['bfloat16 against float32'][:1]
    limits = dict(ratio_low=1.5, ratio_high=1.7, ceiling=4.0, matmul_share=0.4, seconds=0.01)
    (row,) = written(tmp_path, rows_with_value(target, 1.6, **limits))
    expected = targets.Reading(1.6, 1.5, 1.7, 4.0, 'products', 0.4)
    assert targets.read_ratio(row, [row]) == expected
    # 200 MB at 20 GB/s take 10 ms, and the products 4
    assert targets.read_ratio(row | dict(io_mb=200.0), [row]).bound == 'tensors'
    assert targets.read_ratio(row | dict(io_mb=79.0), [row]).bound == 'products'


def test_readings_by_hand(tmp_path):
    (row,) = written(tmp_path, [MEASURED | dict(ratio=0.8, ratio_low=0.5, ratio_high=1.0)])
    assert targets.read_relative_time(row, []) == targets.Reading(1.25, 1.0, 2.0)
    assert targets.read_share(row, []) == targets.Reading(0.5, 0.4, 0.625)


def test_an_exponent_is_that_of_the_time_and_its_ceiling_that_of_the_products(tmp_path):
    target = targets.Target(targets.MIXERS | dict(name='ls', what='forward', tokens=16384), 'exponent', at_most=1.1)
    first, last = written(tmp_path, rows_with_value(target, 1.25))
    assert targets.read_exponent(last, [first, last]) == targets.Reading(1.25, None, None, 1.0, 'products', 0.5)
    assert verdicts(target, [first, last]) == {'missed'}
    assert verdicts(target, [first, last | dict(gmacs=100.0)]) == {'out of reach'}
    assert verdicts(target, [last]) == {'not measured'}


def test_memory_is_compared_within_a_run(tmp_path):
    target = targets.Target(targets.MEMORY | dict(name='ls'), 'memory over SDPA', at_most=1.0)
    early, late = (written(tmp_path, rows_with_value(target, 1.0), run=run) for run in ('2026-01', '2026-02'))
    baseline, own = late
    rows = [*early, baseline | dict(peak_mb=20.0), own]
    (line,) = targets.read_lines(target, rows)
    assert line.reading.value == 2.5
    # the row of another run is not used
    assert verdicts(target, [*early, own]) == {'not measured'}


def test_the_latest_run_of_a_command_counts(tmp_path):
    target = targets.Target(targets.CVT_13 | dict(what='forward'), 'ratio', at_least=1.2)
    early = written(tmp_path, rows_with_value(target, 1.5), run='2026-01')
    late = written(tmp_path, rows_with_value(target, 1.1), run='2026-02')
    other = written(tmp_path, rows_with_value(target, 1.3), run='2026-01', command='vitzoo bench peers')
    assert pages.latest([*late, *early, *other]) == [*late, *other]
    on_a_gpu = [row | dict(device='cuda', gpu='H200', run='2026-03') for row in early]
    assert pages.latest([*early, *on_a_gpu]) == [*early, *on_a_gpu]
    assert verdicts(target, [*late, *other]) == {'missed'}


@pytest.mark.parametrize('table', docs_performance.TITLES)
def test_an_interrupted_run_is_shown_only_if_there_is_no_complete_one(table, capsys):
    rows = [row for row in pages.latest(read_rows(pages.BENCHMARKS)) if row['table'] == table]
    run = [row for row in rows if pages.command_of(row) == pages.command_of(rows[0])]
    again = [row | dict(run='9999-01-01T00:00:00Z') for row in run]
    part = again[: len(run) // 4 * 2]
    assert pages.latest([*run, *part]) == run
    assert 'left out an interrupted run, that of 9999' in capsys.readouterr().err
    assert pages.latest([*run, *again]) == again
    # a mixer that the earlier run did not have
    longer = [*part, part[-1] | dict(name='another')]
    assert pages.latest([*run, *longer]) == longer
    assert pages.latest(part) == part
    assert 'Measured on 9999-01-01' in docs_performance.sections(part)['benchmarks']


def test_memory_that_was_not_measured_is_a_dash(tmp_path):
    row = example_rows()['mixers'] | dict(table='memory', against='softmax')
    cases = [('softmax', 196, 20.0), ('ls', 196, 10.0), ('softmax', 1024, 40.0)]
    rows = written(tmp_path, [row | dict(name=name, tokens=tokens, peak_mb=peak) for name, tokens, peak in cases])
    page = docs_performance.sections(rows)['benchmarks']
    assert '| `softmax` | 20.0 | 1.00 | 40.0 | 1.00 |' in page and '| `ls` | 10.0 | 0.50 | – | – |' in page
    assert '| `ls` | 10.0 | – |' in docs_performance.sections(rows[1:2])['benchmarks']


def test_the_page_has_the_verdict_of_every_target(tmp_path):
    target = targets.Target(targets.CVT_13 | dict(what='forward'), 'ratio', at_least=1.2)
    rows = written(tmp_path, rows_with_value(target, 1.1, ceiling=1.15, matmul_share=0.94))
    parts = docs_targets.sections(rows)
    page = parts['targets']
    assert '| forward | ≥ 1.2 | 1.100 | 0.900 – 1.100 | **out of reach** | 1.15, products | 94% |' in page
    assert '| training step | ≥ 1.3 |  |  | not measured |  |  |' in page
    count = sum(len(combinations(target)) for target in TARGETS)
    assert f'| all | 0 | 0 | 1 | {count - 1} |' in parts['overview']
    assert page.count('not measured |') == count - 1


def test_every_table_of_the_page_has_its_command_and_machine(tmp_path):
    rows = []
    for number, (table, row) in enumerate(example_rows().items()):
        theirs = row | dict(name='theirs', against=row['name'], ratio=None)
        pair = [row, theirs] if table == 'peers' else [row]
        rows += written(tmp_path, pair, command=f'vitzoo bench {table} --seconds {number}')
    page = docs_performance.sections(rows)['benchmarks']
    for number, table in enumerate(example_rows()):
        command = f'```sh\nvitzoo bench {table} --seconds {number}\n```'
        assert f'{command}\n\nMeasured on 2026-11-20: fast, 2 cores, 2 threads; torch 2.15.0' in page
    assert page.count('large copies: 20.0 GB/s') == len(rows) - 1
    assert '| forward | 0 of 1, × 1.0 |' in page and '| forward + backward | – |' in page
    assert '| `ls` | 1.00? | never up to 1,024 | – | 1,000 ms? | 10 | 1000.0 | 50% |' in page
    assert '| `ls` | long-short | 1,024 | forward | 1,000 ms? | 1,000 ms? | 1.00 | 0.90 – 1.10 | 5 |' in page
    assert '| `cvt_13` | 224 | float32 | forward | 4 | 4.0? | 1,000 ms? | 800 ms – 1,250 ms |' in page
    assert '| import vitzoo | 1,000 ms? | 1.00 | import timm |' in page


def example_rows() -> dict[str, dict]:
    shape = MEASURED | dict(device='cpu', dtype='float32', what='forward')
    layer = shape | dict(name='ls', dim=384, num_heads=6, tokens=1024, batch_size=2)
    return {
        'mixers': layer | dict(table='mixers', against='softmax'),
        'peers': layer | dict(table='peers', against='long-short'),
        'models': shape | dict(table='models', name='cvt_13', against='cvt_13 float32', img_size=224, batch_size=4),
        'startup': MEASURED | dict(table='startup', device='cpu', name='import vitzoo', against='import timm'),
    }


def test_the_linear_mixers_are_linear_by_their_docstrings():
    said = {name: ' '.join(docs_mixers.read_text(name).costs) for name in docs_mixers.own_mixers()}
    linear = [
        name
        for name, cost in said.items()
        if cost.startswith('Linear in the number of tokens') or re.fullmatch(r'O\(N [^N]+\)\.', cost)
    ]
    assert sorted(targets.LINEAR) == sorted(linear)


def test_every_backbone_is_timed_in_bfloat16_with_each_of_four_mixers():
    found = [(name.partition('_')[0], timm.create_model(name, device='meta')) for name in targets.IN_BFLOAT16]
    kinds = {(family, *sorted(mixers_of(model) & set(FOUR))) for family, model in found}
    assert kinds == set(product(('cvt', 'vil', 'deit', 'aft'), FOUR))


def mixers_of(model) -> set[str]:
    classes = {type(module) for module in model.modules() if isinstance(module, TokenMixer)}
    return {name for name in list_mixers() if mixer_class(name) in classes}


def test_every_layer_that_has_a_peer_has_a_target():
    aimed_at = {(row['name'], row['against']) for target in TARGETS for row in combinations(target) if 'against' in row}
    for pair in pairs.PAIRS:
        assert pair.note or not pair.is_layer or (pair.name, pair.package) in aimed_at


def test_the_script_measures_every_target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = (ROOT / 'tools' / 'measure.sh').read_text().replace('\\\n', ' ')
    commands = [shlex.split(line) for line in script.splitlines() if line.startswith('bench ')]
    found = [row for _, table, *argv in commands for row in PLANNED[table](MODULES[table].parse_args(argv))]
    for target in TARGETS:
        for asked in combinations(target):
            asked.pop('device')
            assert any(asked.items() <= row.items() for row in found), asked


def planned_layers(args, table: str, names: list[tuple[str, str]]) -> list[dict]:
    shape = dict(table=table, dim=args.dim, num_heads=args.heads, batch_size=args.batch, dtype='float32')
    return [
        shape | dict(name=name, against=against, tokens=tokens, what=what)
        for (name, against), tokens, what in product(names, args.tokens, LAYER_PASSES)
    ]


def planned_mixers(args) -> list[dict]:
    assert args.dtype == 'float32'
    return planned_layers(args, 'mixers', [(name, 'softmax') for name in mixers.select_mixers(args.mixers)])


def planned_memory(args) -> list[dict]:
    assert args.dtype == 'float32'
    if args.models:
        shape = dict(table='training memory', img_size=args.img_size, batch_size=args.batch, dtype=args.dtype)
        return [shape | dict(name=name) for name in models.find_models(args.models)]
    return planned_layers(args, 'memory', [(name, 'softmax') for name in mixers.select_mixers(args.mixers)])


def planned_peers(args) -> list[dict]:
    assert args.pairs is None
    layers = [pair for pair in pairs.PAIRS if pair.is_layer]
    names = [(pair.name, f'{pair.package} ({pair.note})' if pair.note else pair.package) for pair in layers]
    model = dict(table='peers', name='cvt_13', dtype='float32', img_size=224, batch_size=2 * args.batch)
    return planned_layers(args, 'peers', names) + [model | dict(what=what) for what in peers.PEER_MODEL_PASSES]


def planned_models(args) -> list[dict]:
    keys = ('name', 'img_size', 'dtype', 'what')
    return [
        dict(zip(keys, values))
        | dict(table='models', against=f'{args.against or values[0]} {values[2] if args.against else args.dtype[0]}')
        for name in models.find_models(args.models)
        for values in product([name], args.img_size or [models.own_size(name)], args.dtype, args.passes)
    ]


def planned_startup(args) -> list[dict]:
    return [dict(table='startup', name=name) for name in ('import vitzoo', f'create {args.model}')]


MODULES = dict(mixers=mixers, memory=memory, peers=peers, models=models, startup=startup)
PLANNED = dict(
    mixers=planned_mixers, memory=planned_memory, peers=planned_peers, models=planned_models, startup=planned_startup
)


def test_times_of_uneven_rounds_are_marked():
    uneven, even = MEASURED | MACHINE, MEASURED | MACHINE | dict(seconds_low=0.95, seconds_high=1.05)
    assert [docs_performance.mark('1.00', row) for row in (uneven, even)] == ['1.00?', '1.00']
    assert '1 of 2 times are marked' in docs_performance.format_doubts([uneven, even])
    assert docs_performance.format_doubts([even]) == ''
