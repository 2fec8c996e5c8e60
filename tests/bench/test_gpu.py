"""Estimates for a GPU: bytes, FLOPs and time of known operations, and the page and the command that use them."""

import docs_export
import docs_gpu
import measure_gpu
import pytest
import torch
from helpers import build as build_mixer
from torch import nn

from vitzoo.bench._gpu import Gpu, GpuEstimate, estimate_mixer, memory_bytes
from vitzoo.bench.mixers import UNFUSED
from vitzoo.errors import UserError
from vitzoo.metrics.macs import count_call_macs

SIMPLE = Gpu('simple', {torch.float32: 1e9, torch.bfloat16: 2e9}, 1e6)


class Known(nn.Module):
    """A linear layer, a view, a sum with a broadcast bias and fused attention."""

    dim, num_prefix_tokens, grid_size = 8, 1, (3, 5)

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor, grid_size: tuple[int, int]) -> torch.Tensor:
        x = self.proj(x)
        x = x + x[:, :1].expand(-1, 16, -1)
        q = x.unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(q, q, q).squeeze(1)


def test_an_estimate_adds_the_kernels_of_a_forward_pass():
    estimate = estimate_mixer(Known(), batch_size=2, dtype=torch.float32, gpu=SIMPLE)
    tokens, weights, first = 2 * 16 * 8 * 4, 8 * 8 * 4, 2 * 8 * 4
    assert estimate.kernels == 3
    # the layer; the sum, which reads its first row again; q, k, v and the output
    assert estimate.bytes == (2 * tokens + weights) + (2 * tokens + first) + 4 * tokens
    assert estimate.flops == 2 * 2 * 16 * 8 * 8 + 2 * 2 * 16 * 16 * (8 + 8)
    # memory limits all of them
    assert estimate.seconds == estimate.memory_seconds == pytest.approx(estimate.bytes / 1e6)
    fast = Gpu('fast memory', SIMPLE.flops, 1e18)
    assert estimate_mixer(Known(), 2, torch.float32, fast).seconds == pytest.approx(estimate.flops / 1e9)
    half = estimate_mixer(Known(), 2, torch.bfloat16, fast)
    assert (half.bytes, half.flops) == (estimate.bytes // 2, estimate.flops)
    assert half.seconds == pytest.approx(estimate.flops / 2e9)


def test_repeated_elements_are_in_memory_once():
    x = torch.empty(4, 6, device='meta')
    assert memory_bytes([x[:, :1].expand(4, 100)]) == 4 * 4
    # windows of 3 with a step of 1
    assert memory_bytes([x.flatten().unfold(0, 3, 1)]) == 4 * 24
    assert memory_bytes([x, x[0]]) == 4 * (24 + 6)


@pytest.mark.parametrize('name', ['softmax', 'linear', 'ls'])
def test_the_products_of_an_estimate_are_those_that_are_counted(name):
    mixer = build_mixer(name, dtype=torch.float32)
    macs = count_call_macs(mixer, torch.empty(3, 20, mixer.dim, device='meta'), mixer.grid_size)
    # the counter adds element-wise products of mixers
    assert estimate_mixer(mixer, 3, torch.float32).flops == pytest.approx(2 * macs, rel=0.05)


def test_the_table_of_an_accelerator_has_a_line_per_mixer_and_the_measurements(monkeypatch, tmp_path):
    monkeypatch.setattr(docs_gpu, 'own_mixers', lambda: ['linear', 'softmax'])
    found = docs_gpu.estimates((196, 1024, 4096, 16384))
    text = docs_gpu.render(found, [])
    assert text.count('| `linear` |') == text.count('| `softmax` |') == 2
    assert 'Not yet measured.' in text and text.endswith('No kernel was timed.\n\nNo model was timed.')
    # linear attention needs fewer products, and the more so the more tokens there are
    ratio = {size: found['softmax'][size].flops / estimate.flops for size, estimate in found['linear'].items()}
    assert sorted(ratio.values()) == list(ratio.values()) and ratio[16384] > 5
    case = dict(table='mixers', what='forward', device='cuda', dtype='bfloat16', dim=384, num_heads=6, batch_size=16)
    machine = dict(run='2026-12-01T00:00:00Z', gpu='NVIDIA H100', cpu='x, 2 cores', load=0.1, torch='2', timm='1')
    row = case | machine | dict(name='linear', threads=1, python='3', peak_mb=1500.0)
    seconds = 2 * found['linear'][16384].seconds
    rows = [row | dict(tokens=4096, ratio=2.25), row | dict(tokens=4096, ratio=1.5, what='forward + backward')]
    rows += [row | dict(tokens=16384, ratio=1.75, what='forward + backward')]
    rows += [row | dict(tokens=16384, ratio=3.5, seconds=seconds, backend='cuda-graphs')]
    text = docs_gpu.render(found, rows)
    assert '| `linear` | – | – | 2.25 | – | ≤ 4,096 | – | – | – | 3.50 | ≤ 16,384 | 2.0 |' in text
    assert '| `linear` | – | – | 1.50 | 1.75 | ≤ 4,096 | – | – | – | – | – | 1,500 |' in text
    assert 'Measured on 2026-12-01: NVIDIA H100' in text


def test_models_have_their_speed_in_each_backend():
    row = dict(name='cvt_13', what='forward', batch_size=64)
    rows = [
        row | dict(backend='eager', seconds=0.064, ratio=1.0),
        row | dict(backend='compile', seconds=0.032, ratio=2.0),
    ]
    rows += [row | dict(backend='cuda-graphs', seconds=0.016, ratio=4.0, difference=1.5e-3)]
    rows += [row | dict(what='latency', batch_size=1, backend='eager', seconds=0.01, ratio=1.0)]
    table = docs_gpu.model_table(rows)
    assert '| `cvt_13` | forward | 64 | 1,000 | 2,000 | 4,000 | 2.00 | 4.00 | 2e-03 |' in table
    assert '| `cvt_13` | latency | 1 | 100 | – | – | – | – | – |' in table


def test_the_estimates_are_those_of_the_gpu_that_was_measured(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(docs_gpu, 'estimates', lambda gpu: given.append(gpu.name) or {})
    monkeypatch.setattr(docs_gpu, 'render', lambda found, rows: '')
    for name in ('NVIDIA H200', 'NVIDIA H100 80GB HBM3'):
        rows = [dict(run='2026-12-01', table='kernels', device='cuda', gpu=name, what='forward', tokens=4)]
        monkeypatch.setattr(docs_gpu, 'read_rows', lambda path, rows=rows: rows)
        docs_gpu.main(page=tmp_path / 'gpu.md')
    docs_gpu.main(tmp_path / 'none.csv', tmp_path / 'gpu.md')
    assert given == ['H200', 'H100', 'H100']


@pytest.mark.parametrize('newest', ['H100', 'A100'])
def test_the_page_shows_only_the_gpu_that_was_measured_last(newest):
    case = dict(table='mixers', name='linear', what='forward', device='cuda', dtype='bfloat16', dim=384, num_heads=6)
    case |= dict(batch_size=16, tokens=196, cpu='x, 2 cores', load=0.1, torch='2', timm='1', threads=1, python='3')
    rows = []
    for gpu, ratio in dict(H100=2.25, A100=1.75).items():
        on_gpu = case | dict(gpu=gpu, ratio=ratio, run='2026-12-03' if gpu == newest else '2026-12-01')
        rows += [on_gpu, on_gpu | dict(tokens=1024, ratio=ratio + 1), on_gpu | dict(table='models')]
        rows += [on_gpu | dict(table='kernels', against='kernel', seconds=ratio)]
    # an earlier run of another command on the same GPU
    rows += [rows[0] | dict(gpu=newest, run='2026-12-02', tokens=tokens, ratio=9.5) for tokens in (196, 4096)]
    estimate = GpuEstimate(1, 1, 1, 1.0)
    rows += [rows[0] | dict(gpu=newest, device='cpu', tokens=16384, run='2026-12-04')]
    found = {name: dict.fromkeys((196, 1024, 4096, 16384), estimate) for name in ('softmax', 'linear')}
    # the page starts from all rows
    text = docs_gpu.render(found, docs_gpu.shown_rows(rows))
    ratio = rows[0 if newest == 'H100' else 4]['ratio']
    assert f'| {ratio:.2f} | {ratio + 1:.2f} | 9.50 | – |' in text
    assert f'Measured on 2026-12-02, 2026-12-03: {newest};' in text
    assert f'| `linear` | bfloat16 | 6 | forward | 196 | {1e3 * ratio:.2f} |' in text


def test_a_kernel_has_a_line_for_each_case_with_its_speedups():
    case = dict(name='aft_conv', dtype='bfloat16', num_heads=6, what='forward', tokens=1024)
    rows = [case | dict(against='kernel', seconds=1.5e-3, ratio=1.0), case | dict(against='pytorch', ratio=2.0)]
    assert '| `aft_conv` | bfloat16 | 6 | forward | 1,024 | 1.50 | 2.00 | – | – | – |' in docs_gpu.kernel_table(rows)


def test_the_page_of_gpus_has_every_mixer():
    text = docs_gpu.PAGE.read_text().partition('Triton kernels, and')[0]
    lines = [line.split('`')[1] for line in text.splitlines() if line.startswith('| `')]
    # the work, the estimates, and the measurements of both passes
    assert sorted(line for line in lines if line != UNFUSED) == sorted(4 * docs_gpu.own_mixers())


def test_the_page_of_gpus_is_current(tmp_path):
    docs_gpu.main(page=tmp_path / 'gpu.md')
    assert (tmp_path / 'gpu.md').read_text() == docs_gpu.PAGE.read_text(), 'run `make docs`'


def test_without_a_gpu_the_measurement_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(UserError, match='there is no CUDA device; try the commands without one with --toy'):
        measure_gpu.main([])


@pytest.mark.slow
def test_the_commands_of_the_measurement_run_at_toy_sizes(capfd):
    measure_gpu.main(['--toy'])
    out, err = capfd.readouterr()
    assert 'forward + backward' in out and 'deit_linear_nano' in out and 'gpu.md' in err


def test_a_measurement_that_takes_too_long_is_stopped_and_the_page_is_written(monkeypatch, tmp_path, capsys):
    written = []
    monkeypatch.setattr(docs_gpu, 'main', lambda *paths: written.append(paths))
    measure_gpu.measure(('list', 'list'), 'cpu', tmp_path / 'a.csv', tmp_path / 'a.md', tmp_path / 'a', minutes=0)
    assert capsys.readouterr().out.count('vitzoo list') == 1 and len(written) == 1


def test_the_table_of_backends_has_a_line_per_model_and_pass():
    assert 'Not yet measured.' in docs_export.render([])
    row = dict(table='backends', name='cvt_13', batch_size=4, device='cpu', gpu=None, command=docs_export.FORWARD)
    row |= dict(run='2026-12-01T00:00:00Z', cpu='x, 2 cores', threads=2, load=0.1, torch='2', timm='1', python='3')
    row |= dict(versions=None, dtype='float32', what='forward', seconds=0.5)
    rows = [row | dict(backend='eager', ratio=1.0, difference=None)]
    rows += [row | dict(backend='compile', ratio=1.25, difference=1.2e-6)]
    rows += [row | dict(backend='openvino', ratio=2.0, difference=3.4e-6)]
    row |= dict(command=docs_export.TRAINING)
    rows += [row | dict(what='training step', backend='eager', ratio=1.0, difference=None, seconds=2.0)]
    rows += [row | dict(what='training step', backend='compile', ratio=1.5, difference=None)]
    lines = docs_export.render(rows).splitlines()
    assert '| `cvt_13` | forward | 8.0 | 1.25 | 1e-06 | 2.00 | 3e-06 |' in lines
    assert '| `cvt_13` | training step | 2.0 | 1.50 | – |' in lines


def test_the_page_of_exports_is_current():
    rows = docs_export.latest(docs_export.read_rows(str(docs_export.BENCHMARKS)))
    text = docs_export.PAGE.read_text()
    assert docs_export.fill(text, {'backends': docs_export.render(rows)}) == text, 'run `make docs`'
    assert len(docs_export.MODELS.split()) == 12
