"""`vitzoo bench`: the numbers it computes, and that it refuses invalid comparisons; speeds are not tested."""

import copy
import csv
import math
import platform
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import groupby, product
from pathlib import Path

import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import nn

import vitzoo
from vitzoo.bench import BENCHMARKS, memory, mixers, models, peers, run_benchmark, startup, trainer
from vitzoo.bench import _backends as backends
from vitzoo.bench import _contenders as contenders
from vitzoo.bench import _pairs as pairs
from vitzoo.bench import _roofline as roofline
from vitzoo.bench._harness import LAYER_PASSES, Spread, call_peak_megabytes, copying, matmul, ratios, time_in_turn
from vitzoo.bench._results import BENCHMARK_COLUMNS, append_rows, find_doubt, make_row, read_rows
from vitzoo.errors import UserError, run_command
from vitzoo.export import formats
from vitzoo.machine import describe_machine, format_machine

CPU = torch.device('cpu')


@pytest.fixture
def quick(tmp_path, monkeypatch) -> list[str]:
    """Arguments for the shortest measurement; its files go to the test's folder."""
    monkeypatch.chdir(tmp_path)
    for module in models, roofline:
        monkeypatch.setattr(module, 'matmul', partial(matmul, size=64))
    monkeypatch.setattr(roofline, 'copying', partial(copying, size=64))
    return ['--seconds', '0', '--min-rounds', '1', '--device', 'cpu', '--results-file', 'benchmarks.csv']


def test_contenders_run_in_turn_on_several_inputs():
    calls, seen = [], []
    contenders = {name: lambda number, name=name: (calls.append(name), seen.append(number)) for name in 'AB'}
    times = time_in_turn(contenders, CPU, seconds=0, min_rounds=4)
    assert [name for name, _ in groupby(calls)][-8:] == ['A', 'B'] * 4
    assert {name: len(own) for name, own in times.items()} == {'A': 4, 'B': 4}
    assert len(set(seen)) > 1


def test_rounds_continue_for_the_given_time():
    times = time_in_turn({'A': lambda number: None}, CPU, seconds=0.2, min_rounds=1)
    assert len(times['A']) > 1


def test_a_ratio_is_taken_round_by_round():
    # the machine is ten times slower in the last two rounds, and B always twice as fast
    slow, fast = [2.0, 2.0, 2.0, 20.0, 20.0], [1.0, 1.0, 1.0, 10.0, 10.0]
    assert ratios(slow, fast) == Spread(2.0, 2.0, 2.0, 5)
    with pytest.raises(ValueError):
        ratios(slow, fast[1:])


def test_a_spread_is_median_and_quartiles():
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)


def test_peak_memory_of_a_call_is_that_of_its_live_tensors():
    def call(number: int) -> None:
        a = torch.empty(1_000_000)
        b = a + 1
        del a
        c = torch.empty(500_000)
        del b, c

    assert call_peak_megabytes(call, CPU) == pytest.approx(8.0, abs=0.01)


def test_the_matmul_returns_its_number_of_operations():
    call, flops = matmul(torch.float32, CPU, 64)
    assert call(0).shape == (64, 64)
    assert flops == 2 * 64**3


def test_the_copy_returns_its_number_of_bytes():
    call, moved = copying(CPU, 64)
    assert torch.equal(call(0), torch.ones(64))
    assert moved == 2 * 64 * 4


def test_the_ceiling_is_set_by_products_or_memory_traffic():
    rates = roofline.Rates(flops=200e9, bytes=10e9)
    tensors = [torch.empty(1_000_000), torch.empty(500_000), torch.empty(500_000)]
    work = roofline.Work.of('forward', 300_000_000, tensors)
    assert work == roofline.Work(300_000_000, 8_000_000)
    # 3 ms of products and 0.8 ms of tensors
    found = roofline.roofline(work, rates, seconds=0.004, baseline_seconds=0.006)
    expected = dict(matmul_share=0.75, matmul_gflops=200.0, io_mb=8.0, copy_gbs=10.0, ceiling=2.0)
    assert found == pytest.approx(expected)
    # the gradients of both factors are two more products, and as large as the tensors
    assert roofline.Work.of('forward + backward', 300_000_000, tensors) == roofline.Work(900_000_000, 16_000_000)
    # with few products the tensors set the ceiling: 0.8 ms
    work = roofline.Work.of('forward', 1_000_000, tensors)
    assert roofline.roofline(work, rates, seconds=0.004, baseline_seconds=0.006)['ceiling'] == pytest.approx(7.5)


def test_rates_are_operations_and_bytes_over_the_shortest_time(monkeypatch):
    monkeypatch.setattr(roofline, 'matmul', lambda dtype, device: (print, 6.0))
    monkeypatch.setattr(roofline, 'copying', lambda device: (print, 8.0))
    monkeypatch.setattr(roofline, 'time_in_turn', lambda *args, **kwargs: dict(product=[3.0, 2.0, 9.0], copy=[4.0]))
    assert roofline.measure_rates(torch.float32, CPU) == roofline.Rates(3.0, 2.0)


def test_results_are_appended_under_the_same_columns(tmp_path):
    path = str(tmp_path / 'weights' / 'benchmarks.csv')
    measured = make_row(Spread(0.12345678, 0.1, 0.2, 9), Spread(2.0, 1.5, 2.5, 9), name='ls', tokens=196)
    append_rows(path, [measured], run='first', torch='2.15.0')
    append_rows(path, [measured | dict(name='linear')], run='second', cpu='one, with a comma')
    with open(path) as file:
        assert tuple(csv.DictReader(file).fieldnames) == BENCHMARK_COLUMNS
    first, second = read_rows(path)
    assert (first['run'], first['name'], first['tokens'], first['ratio_low'], first['rounds']) == (
        'first',
        'ls',
        196,
        1.5,
        9,
    )
    assert first['seconds'] == 0.12346 and first['torch'] == '2.15.0' and first['peak_mb'] is None
    assert second['cpu'] == 'one, with a comma' and second['name'] == 'linear'


def test_an_unknown_column_is_an_error(tmp_path):
    with pytest.raises(ValueError, match='speed'):
        append_rows(str(tmp_path / 'benchmarks.csv'), [dict(speed=1)])


def test_a_file_with_other_columns_is_refused_before_anything_is_measured(tmp_path):
    path = tmp_path / 'benchmarks.csv'
    path.write_text(f'{",".join(BENCHMARK_COLUMNS[:-5])}\n')
    with pytest.raises(UserError, match='its columns differ .*command.* choose another file with --results-file'):
        mixers.parse_args(['--results-file', str(path)])
    with pytest.raises(UserError, match='its columns differ'):
        append_rows(str(path), [dict(run='now')])
    assert path.read_text().count('\n') == 1


@pytest.mark.parametrize('content', [','.join(BENCHMARK_COLUMNS).encode('utf-16'), b'x' * 200_000])
def test_a_file_that_is_not_a_table_is_refused_with_a_sentence(content, tmp_path):
    path = tmp_path / 'benchmarks.csv'
    path.write_bytes(content)
    with pytest.raises(UserError, match=r'it is not a table in UTF-8 \(.*\); choose another file with --results-file'):
        mixers.parse_args(['--results-file', str(path)])
    assert path.read_bytes() == content


def test_a_file_without_the_newest_columns_is_still_read(tmp_path):
    path = tmp_path / 'benchmarks.csv'
    path.write_text('run,table,ratio\nnow,peers,1.5\n')
    assert read_rows(str(path)) == [dict(run='now', table='peers', ratio=1.5)]


def test_the_recorded_command_omits_the_results_file(quick):
    argv = ['--what', 'training step', '--results-file', 'a.csv', '--results-file=b.csv', '--batch', '2', 'resnet10t']
    assert models.parse_args(argv).command == "vitzoo bench models --what 'training step' --batch 2 resnet10t"


def test_the_description_of_a_machine_omits_its_host_name():
    machine = describe_machine(CPU)
    assert machine['torch'] == torch.__version__ and machine['threads'] == torch.get_num_threads()
    assert set(machine) < set(BENCHMARK_COLUMNS)
    assert platform.node() not in str(machine)


def test_the_exponent_of_a_power_law_is_its_power():
    times = {196: 7.0, 1024: 3 * 1024**1.5, 4096: 3 * 4096**1.5, 16384: 3 * 16384**1.5}
    assert mixers.exponent(times) == pytest.approx(1.5)
    assert mixers.exponent({1024: 1.0}) is None
    # without 1024 tokens, from the next size on
    assert mixers.exponent({196: 1.0, 3136: 1.0, 12544: 16.0}) == pytest.approx(2.0)


def test_the_crossover_is_where_the_ratio_passes_1_for_good():
    # a ratio of sqrt(N / 900)
    ratio = {n: (n / 900) ** 0.5 for n in (196, 784, 1024, 3136)}
    assert mixers.crossover(ratio) == pytest.approx(900)
    assert mixers.crossover({196: 0.5, 784: 0.9}) == math.inf
    assert mixers.crossover({196: 1.1, 784: 2.0}) == 0
    # faster, slower, faster: only the last time counts
    assert mixers.crossover({100: 2.0, 400: 0.5, 1600: 2.0}) == pytest.approx(800)


def test_a_cost_is_extrapolated_by_its_linear_and_quadratic_parts():
    cost = {n: 3.0 * n + 0.01 * n**2 for n in (196, 784, 1024)}
    assert mixers.extrapolate(cost, 4096) == pytest.approx(3.0 * 4096 + 0.01 * 4096**2)
    assert mixers.extrapolate({196: 2.0}, 392) == 8.0
    assert mixers.extrapolate({}, 392) == 0.0


def test_every_mixer_is_measured_against_fused_softmax(quick, monkeypatch, capsys):
    # a figure of all mixers takes ten seconds
    plots = []
    monkeypatch.setattr(mixers, 'plot_scaling', lambda path, quantity, rows, title: plots.append((path, len(rows))))
    cells = mixers.main([*quick, '--tokens', '16', '--dim', '24', '--heads', '3', '--batch', '1'])
    names = {name for name, _, _ in cells}
    assert names == {*vitzoo.list_mixers(), 'softmax, unfused'}
    assert set(cells) == {(name, what, 16) for name in names for what in LAYER_PASSES}
    assert all(cell.ratio.median == 1 for (name, _, _), cell in cells.items() if name == 'softmax')
    rows = read_rows('benchmarks.csv')
    assert len(rows) == len(cells) and len({fields['run'] for fields in rows}) == 1
    assert all(fields['peak_mb'] > 0 and fields['seconds'] > 0 for fields in rows)
    assert {fields['command'] for fields in rows} == {rows[0]['command']}
    assert rows[0]['command'].startswith('vitzoo bench mixers --seconds 0 ')
    check_limits(cells)
    assert 'crossover' in capsys.readouterr().out
    assert plots == [('mixers_time.png', len(rows)), ('mixers_memory.png', len(rows))]


def check_limits(cells: dict) -> None:
    """Softmax attention is four linear layers, and scores and values: here of 16 tokens, 24 wide."""
    macs, numbers = 4 * 16 * 24 * 24 + 2 * 16 * 16 * 24, 2 * 16 * 24 + 4 * 24 * 24 + 4 * 24
    for what, products, moves in (('forward', 1, 1), ('forward + backward', 3, 2)):
        limits, time = cells['softmax', what, 16].limits, cells['softmax', what, 16].times.median
        assert limits['gmacs'] == macs / 1e9 and limits['io_mb'] == moves * numbers * 4 / 1e6
        seconds = 2 * products * macs / 1e9 / limits['matmul_gflops']
        assert limits['matmul_share'] == pytest.approx(seconds / time)
        assert limits['ceiling'] == pytest.approx(time / max(seconds, limits['io_mb'] / 1e3 / limits['copy_gbs']))
        assert cells['softmax, unfused', what, 16].limits['gmacs'] == macs / 1e9


def test_memory_of_a_mixer_is_that_of_its_tensors_and_is_plotted(quick):
    cells = mixers.main(
        [*quick, '--mixers', 'softmax', '--tokens', '256', '--dim', '24', '--heads', '3', '--batch', '1']
    )
    fused, unfused = (cells[name, 'forward', 256].peak_mb for name in ('softmax', 'softmax, unfused'))
    # 3 heads of 256 x 256 weights in float32
    assert unfused - fused > 3 * 256 * 256 * 4 / 1e6
    for plot in ('mixers_time.png', 'mixers_memory.png'):
        with open(plot, 'rb') as file:
            assert file.read(4) == b'\x89PNG'


def test_peaks_of_mixers_are_measured_without_times(quick, capsys):
    small = ['--mixers', 'linear', '--tokens', '16', '256', '--dim', '24', '--heads', '3', '--batch', '1']
    rows = memory.main([*quick, *small])
    peaks = {(row['name'], row['what'], row['tokens']): row['peak_mb'] for row in rows}
    assert set(peaks) == set(product(('softmax', 'softmax, unfused', 'linear'), LAYER_PASSES, (16, 256)))
    # 3 heads of 256 x 256 weights in float32
    assert peaks['softmax, unfused', 'forward', 256] - peaks['softmax', 'forward', 256] > 3 * 256 * 256 * 4 / 1e6
    ratio = memory.ratio_to_baseline(peaks, 'linear', 'forward', 256)
    assert 0 < ratio < memory.ratio_to_baseline(peaks, 'softmax, unfused', 'forward', 256)
    assert f'{peaks["linear", "forward", 256]:,.1f} ×{ratio:.2f}' in capsys.readouterr().out
    written = read_rows('benchmarks.csv')
    assert [row['peak_mb'] for row in written] == [pytest.approx(row['peak_mb'], rel=1e-4) for row in rows]
    assert {(row['table'], row['seconds'], row['ratio']) for row in written} == {('memory', None, None)}


def test_memory_of_training_includes_weights_gradients_and_the_moments_of_adamw(quick, capsys):
    small = ['--models', 'deit_linear_tiny', 'resnet10t', '--img-size', '32', '--batch', '2']
    rows = memory.main([*quick, *small])
    printed = capsys.readouterr().out
    assert [(row['name'], row['img_size'], row['batch_size']) for row in rows] == [
        ('deit_linear_tiny', 32, 2),
        ('resnet10t', 32, 2),
    ]
    for row in rows:
        weights = models.weights_megabytes(models.random_model(row['name'], 32, CPU))
        # with so few pixels, activations are small
        assert 4 * weights < row['peak_mb'] < 6 * weights
        assert f'{row["peak_mb"]:,.0f}' in printed
    written = read_rows('benchmarks.csv')
    assert [row['peak_mb'] for row in written] == [pytest.approx(row['peak_mb'], rel=1e-4) for row in rows]
    assert {(row['table'], row['what'], row['seconds']) for row in written} == {
        ('training memory', 'training step', None)
    }


def test_mixers_that_exceed_the_memory_limit_are_reported_as_skipped(quick, monkeypatch, capsys):
    monkeypatch.setattr(mixers, 'plot_scaling', lambda *args: None)
    small = ['--mixers', 'linear', 'aft_full', '--tokens', '16', '100', '--dim', '24', '--heads', '3', '--batch', '1']
    cells = mixers.main([*quick, *small, '--max-memory', '0.0001'])
    assert {n for name, _, n in cells if name == 'aft_full'} == {16}
    assert 'skipped: aft_full forward at 100 tokens' in capsys.readouterr().out


def test_where_softmax_exceeds_the_memory_limit_no_mixer_is_measured(quick, monkeypatch, capsys):
    monkeypatch.setattr(mixers, 'plot_scaling', lambda *args: None)
    small = ['--mixers', 'pool', '--tokens', '64', '256', '400', '--dim', '32', '--heads', '2', '--batch', '2']
    cells = mixers.main([*quick, *small, '--max-memory', '0.001'])
    assert {n for _, _, n in cells} == {64}
    assert 'skipped: all others forward at 256 tokens, as they are compared with softmax' in capsys.readouterr().out


@pytest.mark.parametrize(
    ('argv', 'message'),
    [
        (['mixers', '--mixers', 'perfomer'], 'did you mean performer'),
        (['mixers', '--tokens', '200'], 'not a square'),
        (['memory', '--tokens', '200'], 'not a square'),
        (['memory', '--mixers', 'perfomer'], 'did you mean performer'),
        (['memory', '--models', 'resnet5000'], 'unknown model'),
        (['memory', '--models', 'resnet10t', '--mixers', 'ls'], '--mixers describes layers'),
        (['memory', '--models', 'resnet10t', '--tokens', '196'], '--tokens describes layers'),
        (['memory', '--img-size', '224'], '--img-size is that of --models'),
        (['peers', '--pairs', 'nystorm'], 'did you mean nystrom'),
        (['models', 'resnet5000'], 'unknown model'),
        (['mixer'], 'did you mean mixers'),
        (['mixers', '--mixers', 'ls', '--dim', '30', '--heads', '4'], '--dim 30 is not divisible by --heads 4'),
        (['peers', '--pairs', 'linear', '--dim', '30', '--heads', '4'], '--dim 30 is not divisible by --heads 4'),
        (['kernels', '--dim', '30', '--heads', '4'], '--dim 30 is not divisible by --heads 4'),
        (['mixers', '--dim', '30', '--heads', '2'], 'mala cannot be made with --dim 30 --heads 2: .* multiple of 4'),
        (['mixers', '--max-seconds', '-1'], "'-1' is not a number of 0 or more"),
        (['mixers', '--max-memory', 'nan'], "'nan' is not a number of 0 or more"),
        (['mixers', '--plots', 'file/nope/p'], "cannot create the folder of 'file/nope/p_time.png'"),
        (['mixers', '--dtype', 'float16', '--device', 'cpu'], 'float16 needs a GPU'),
        (['models', 'resnet10t', '--dtype', 'float32', 'float16', '--device', 'cpu'], 'float16 needs a GPU'),
        (['models', 'resnet10t', '--against', 'resnet5000'], "unknown model 'resnet5000'"),
        (['startup', '--model', 'run'], "'run' is a trained model; give the name of its architecture"),
        (['startup', '--model', 'hf-hub:me/x'], "'hf-hub:me/x' is a trained model"),
        (['startup', '--against', 'local-dir:nowhere'], "'local-dir:nowhere' is a trained model"),
    ],
)
def test_a_user_error_names_the_mistake_before_anything_is_measured(argv, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('file').touch()
    Path('run').mkdir()
    Path('run', 'config.json').write_text('{}')
    for module in memory, mixers, models, peers, startup:
        monkeypatch.setattr(module, 'start_run', pytest.fail)
    with pytest.raises(UserError, match=message):
        run_benchmark(argv)


@pytest.mark.parametrize('table', BENCHMARKS)
def test_every_table_has_help_of_its_own(table, capsys):
    with pytest.raises(SystemExit) as end:
        import_module(f'vitzoo.bench.{table}').main(['--help'])
    assert end.value.code == 0
    assert f'vitzoo bench {table}' in capsys.readouterr().out


def test_models_are_measured_beside_their_arithmetic(quick, capsys):
    names = ['deit_linear_tiny', '--against', 'resnet10t', '--img-size', '32', '--batch', '2']
    rows = models.main([*names, *quick])
    assert {(fields['name'], fields['what']) for fields in rows} == {
        (name, what) for name in ('deit_linear_tiny', 'resnet10t') for what in models.MODEL_PASSES
    }
    sizes = {name: models.random_model(name, 32, CPU) for name in ('deit_linear_tiny', 'resnet10t')}
    sizes = {name: sum(p.numel() for p in model.parameters()) * 4 / 1e6 for name, model in sizes.items()}
    for fields in rows:
        assert fields['against'] == 'resnet10t float32'
        assert fields['batch_size'] == (1 if fields['what'] == 'latency' else 2)
        assert fields['matmul_share'] > 0 and fields['gmacs'] > 0
        work = 2 * fields['gmacs'] * fields['batch_size'] * models.MODEL_PASSES[fields['what']][1]
        # the share is a median of rounds, of which there is one here
        assert fields['matmul_share'] == pytest.approx(work / fields['matmul_gflops'] / fields['seconds'])
        # a step holds the gradients too
        assert fields['peak_mb'] > sizes[fields['name']] * (2 if fields['what'] == 'training step' else 1)
    assert len(read_rows('benchmarks.csv')) == len(rows)


def test_a_model_is_measured_at_its_own_size_by_default(quick):
    (fields,) = models.main(['test_vit2', '--batch', '1', '--what', 'forward', *quick])
    assert fields['img_size'] == timm.get_pretrained_cfg('test_vit2').input_size[-1] != 224


def test_a_model_for_images_that_are_not_square_needs_a_size(tmp_path):
    model = timm.create_model('test_vit', img_size=(32, 48))
    timm.models.save_for_hf(model, str(tmp_path / 'run'), safe_serialization=True)
    with pytest.raises(UserError, match='images of 32 x 48, which are not square; give --img-size'):
        models.main([str(tmp_path / 'run')])


def test_precisions_of_a_model_are_compared_in_turn(quick):
    rows = models.main(['resnet10t', '--dtype', 'float32', 'bfloat16', '--img-size', '32', '--what', 'forward', *quick])
    assert [(fields['dtype'], fields['against']) for fields in rows] == [
        ('float32', 'resnet10t float32'),
        ('bfloat16', 'resnet10t float32'),
    ]
    assert rows[0]['ratio'] == 1


BACKENDS = ['--backend', 'eager,onnxruntime', '--img-size', '32', '--batch', '2', '--what', 'forward', 'training step']


def test_backends_are_timed_in_turn_and_their_logits_compared(quick, monkeypatch, capsys):
    calls = []

    def run_with(backend: str, model: nn.Module, images: torch.Tensor):
        wrong = 0.5 if backend == 'onnxruntime' else 0.0
        return lambda x: (calls.append(backend), model(x) + wrong)[1]

    monkeypatch.setattr(models, 'run_with', run_with)
    monkeypatch.setattr(backends, 'check_packages', lambda *args: None)
    rows = models.main(['resnet10t', *BACKENDS, *quick])
    found = [(fields['what'], fields['backend'], fields['against']) for fields in rows]
    assert found == [
        ('forward', 'eager', 'resnet10t float32 eager'),
        ('forward', 'onnxruntime', 'resnet10t float32 eager'),
        ('training step', 'eager', 'resnet10t float32 eager'),
    ]
    assert [fields['difference'] for fields in rows] == [None, pytest.approx(0.5), None]
    # the warm-up of 30 calls and the one round; a call of less than a hundredth of a second is repeated within a round
    assert calls.count('onnxruntime') >= 32
    printed = capsys.readouterr().out
    assert 'skipped: resnet10t training step with onnxruntime, which cannot train' in printed
    assert 'largest difference of logits' in printed and '5.0e-01' in printed
    assert [(row['table'], row['backend']) for row in read_rows('benchmarks.csv')] == [
        ('backends', fields['backend']) for fields in rows
    ]


@pytest.mark.slow
def test_all_backends_give_the_logits_of_a_model(quick):
    for package in ('onnxruntime', 'onnxscript', 'openvino'):
        pytest.importorskip(package)
    names = 'eager,compile,onnxruntime,openvino'
    options = ['--backend', names, '--img-size', '32', '--batch', '2']
    rows = models.main(['deit_linear_nano', *options, *quick])
    assert [fields['backend'] for fields in rows if fields['what'] == 'latency'] == names.split(',')
    differences = [fields['difference'] for fields in rows if fields['difference'] is not None]
    assert len(differences) == 6 and max(differences) < 1e-4


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ('--backend onnxrun', "unknown backend 'onnxrun', did you mean onnxruntime?"),
        ('--backend eager,onnxruntime --dtype bfloat16', 'the backend onnxruntime runs in float32, not bfloat16'),
        ('--backend openvino', '--backend openvino needs packages that are not installed: pip install nowhere'),
    ],
)
def test_a_backend_that_cannot_run_is_refused_with_a_sentence(options, message, quick, monkeypatch, capsys):
    for name, packages in (('onnx', ()), ('openvino', ('nowhere',))):
        monkeypatch.setitem(formats.FILE_FORMATS, name, formats.Format('', packages, None, None))
    with pytest.raises(SystemExit) as end:
        run_command(models.main, ['resnet10t', *options.split(), *quick])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_training_step_of_backends_that_cannot_train_is_refused():
    with pytest.raises(UserError, match='onnxruntime and openvino cannot train; add --backend eager'):
        models.parse_args(['resnet10t', '--backend', 'onnxruntime,openvino', '--what', 'training step'])


class Linear(nn.Module):
    """A layer with weights of the given size, for pairs."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.proj = nn.Linear(24, 24)
        nn.init.constant_(self.proj.weight, 0.1)
        self.proj.weight.data.add_(torch.eye(24) * weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)


def pair(theirs: float, **kwargs) -> pairs.Pair:
    def make(shape: pairs.Shape) -> tuple[nn.Module, nn.Module]:
        ours, other = Linear(1.0), Linear(theirs)
        other.proj.bias.data.copy_(ours.proj.bias)
        return ours, other

    return pairs.Pair('linear', 'torch', make, **dict(difference=pairs.output_difference(make)) | kwargs)


def measure_pairs(monkeypatch, quick: list[str], *made: pairs.Pair) -> list[dict]:
    monkeypatch.setattr(peers, 'PAIRS', made)
    return peers.main([*quick, '--tokens', '16', '--dim', '24', '--heads', '3'])


def test_a_pair_with_the_same_outputs_gets_a_ratio(monkeypatch, quick, capsys):
    rows = measure_pairs(monkeypatch, quick, pair(theirs=1.0))
    assert [fields['what'] for fields in rows[::2]] == list(LAYER_PASSES)
    ours, theirs = rows[:2]
    assert ours['against'] == 'torch' and ours['versions'] == f'torch {version("torch")}'
    assert ours['ratio'] == pytest.approx(theirs['seconds'] / ours['seconds'])
    # two images of 16 tokens through one linear layer
    seconds = 2 * 2 * 16 * 24 * 24 / 1e9 / ours['matmul_gflops']
    assert ours['gmacs'] == 16 * 24 * 24 / 1e9 and ours['io_mb'] == (2 * 2 * 16 * 24 + 24 * 24 + 24) * 4 / 1e6
    assert ours['matmul_share'] == pytest.approx(seconds / ours['seconds'])
    assert rows[2]['matmul_share'] == pytest.approx(3 * seconds / rows[2]['seconds'])
    assert ours['ceiling'] == pytest.approx(theirs['seconds'] / max(seconds, ours['io_mb'] / 1e3 / ours['copy_gbs']))
    assert 'linear against torch' in capsys.readouterr().out


def test_a_pair_with_other_outputs_is_refused(monkeypatch, quick, capsys):
    assert measure_pairs(monkeypatch, quick, pair(theirs=1.01)) == []
    out = capsys.readouterr().out
    assert 'refused: linear against torch: with the same weights the outputs differ by' in out
    assert 'linear against torch  ' not in out


def test_a_pair_whose_outputs_are_not_finite_is_refused(monkeypatch, quick):
    assert measure_pairs(monkeypatch, quick, pair(theirs=math.nan)) == []


def test_a_pair_whose_op_is_wrong_is_refused(monkeypatch, quick, capsys):
    cls = vitzoo.mixers.mixer_class('linear')
    monkeypatch.setattr(cls, 'op', staticmethod(lambda q, k, v: v))
    assert measure_pairs(monkeypatch, quick, pair(theirs=1.0, difference=None)) == []
    assert 'our op differs from its naive form' in capsys.readouterr().out


@pytest.mark.parametrize('name', sorted({pair.name for pair in pairs.PAIRS} & set(vitzoo.list_mixers())))
def test_the_op_of_every_pair_equals_its_naive_form(name):
    assert peers.op_error(name) < peers.OP_TOLERANCE


@pytest.mark.parametrize('pair', pairs.PAIRS, ids=lambda pair: f'{pair.name}-{pair.package}{pair.note}')
def test_a_peer_gives_the_outputs_of_our_layer_where_it_is_installed(pair):
    if peers.installed_version(pair.package) is None:
        pytest.skip(f'{pair.package} is not installed')
    assert peers.parity_failure(pair, pairs.Shape(256, 48, 3)) == ''


@pytest.mark.parametrize(('tokens', 'clusters'), [(1, 1), (9, 3), (25, 5), (121, 11), (196, 7), (225, 5), (1024, 8)])
def test_clusters_of_equal_size_exist_for_every_square(tokens, clusters):
    assert pairs.Shape(tokens, 24, 3).num_clusters() == clusters


def test_without_any_package_the_error_names_the_extra(monkeypatch, quick):
    monkeypatch.setattr(peers, 'installed_version', lambda package: None)
    with pytest.raises(UserError, match=r'vitzoo-models\[bench\]'):
        peers.main(quick)


def test_a_step_of_the_trainer_is_timed_against_a_plain_loop(quick):
    (fields,) = trainer.main([*quick, '--models', 'deit_linear_tiny', '--img-size', '32', '--batch', '2'])
    assert fields['ratio'] > 0 and fields['against'] == 'bare loop'


def test_a_step_of_a_trained_model_or_of_one_for_any_image_size_is_timed(quick):
    model = timm.create_model('deit_linear_nano', img_size=32, num_classes=10)
    save_for_hf(model, 'run')
    rows = trainer.main([*quick, '--models', 'run', 'resnet10t', '--img-size', '32', '--batch', '2'])
    assert [fields['name'] for fields in rows] == ['run', 'resnet10t']


@pytest.mark.parametrize(
    'argv', [('trainer', '--models', 'cvt_nano'), ('models', 'cvt_nano', '--what', 'training step')], ids=' '.join
)
def test_a_batch_that_a_model_cannot_be_trained_on_is_a_user_error(argv, quick):
    with pytest.raises(UserError, match='cvt_nano cannot be trained on --batch 1, choose a larger one: Expected more'):
        run_benchmark([*argv, '--img-size', '32', '--batch', '1', *quick])


def test_both_loops_train_the_same_weights(quick):
    recipe = dict(model='deit_linear_tiny', img_size=32, batch_size=2, workers=0, lr=1e-3)
    run = trainer.make_run(trainer.make_recipe(recipe))
    batches = [[torch.randn(2, 3, 32, 32), torch.tensor([number, 2])] for number in range(2)]
    model = copy.deepcopy(run.raw_model)
    ours = trainer.vitzoo_step(run, batches)
    plain = trainer.plain_step(run.recipe, model, run.plan.steps_per_epoch, batches)
    for number in range(3):
        ours(number)
        plain(number)
    before = run.raw_model.state_dict()
    assert all(torch.equal(own, before[key]) for key, own in model.state_dict().items())
    assert run.step == 3


def test_startup_compares_imports_and_creation(quick, monkeypatch):
    imported = []
    monkeypatch.setattr(startup, 'import_in_new_process', lambda name: lambda number: imported.append(name))
    rows = startup.main([*quick, '--model', 'deit_linear_tiny', '--against', 'resnet10t'])
    assert [fields['name'] for fields in rows] == [
        'import timm',
        'import vitzoo',
        'create resnet10t',
        'create deit_linear_tiny',
    ]
    assert {*imported} == {'timm', 'vitzoo'}


def test_kernels_are_measured_on_a_gpu_only(capsys):
    with pytest.raises(SystemExit) as end:
        run_command(run_benchmark, ['kernels', '--device', 'cpu'])
    assert end.value.code == 2
    assert capsys.readouterr().err.count('CUDA') == 1


@pytest.mark.filterwarnings('ignore:flex_attention called without torch.compile')
@pytest.mark.parametrize('task', [task for task in contenders.KERNEL_TASKS if task.flex], ids=lambda task: task.name)
def test_flex_attention_computes_what_the_op_does(task):
    torch.manual_seed(0)
    case = task.make(90 if task.name == 'performer' else 100, 2, 2, 16)
    with torch.no_grad():
        torch.testing.assert_close(task.flex(*case.args()), task.op(*case.args()), rtol=1e-4, atol=1e-5)


def test_the_bytes_of_a_case_are_those_of_its_tensors():
    case = contenders.make_aft_conv(16, 2, 3, 8).to(CPU, torch.bfloat16)
    forward = 2 * (3 * 2 * 3 * 16 * 8 + 2 * 3 * 16 + 3 * 11 * 11)
    assert (case.bytes(False), case.bytes(True)) == (forward, 3 * forward)


def test_rounds_that_disagree_and_a_busy_machine_are_printed(tmp_path, capsys, monkeypatch):
    even, uneven = Spread(1.0, 0.95, 1.1, 9), Spread(1.0, 0.9, 1.2, 9)
    rows = [make_row(times, name=name, what='forward') for name, times in (('a', even), ('b', uneven))]
    append_rows(str(tmp_path / 'rows.csv'), rows, table='mixers')
    assert capsys.readouterr().out == 'uneven rounds: b forward; measure again on a quiet machine\n'
    machine = dict(cpu='fast, 2 cores', threads=2, gpu=None, torch='2', timm='1', python='3', load=3.1)
    # the machine became busy after the first row
    monkeypatch.setattr('vitzoo.bench._results.system_load', lambda: 3.1)
    monkeypatch.setattr('os.cpu_count', lambda: 2)
    append_rows(str(tmp_path / 'rows.csv'), rows, **{**machine, 'load': 0.4})
    assert capsys.readouterr().out == 'busy machine: a forward, b forward; measure again on a quiet machine\n'
    found = [find_doubt(row) for row in read_rows(str(tmp_path / 'rows.csv'))]
    assert found == [None, 'uneven rounds', 'busy machine', 'busy machine']
    assert find_doubt({**machine, 'gpu': 'fast'}) is None
    assert format_machine(machine).endswith('load 3.1 (busy machine: the times are unreliable)')
    assert format_machine({**machine, 'load': 3.0}).endswith('load 3.0')
