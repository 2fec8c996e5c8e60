"""Mixers of other packages: an installed plugin works in every backbone and test, and a broken one is named."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path

import pytest

from vitzoo.mixers import base
from vitzoo.mixers._plugins import load_plugins

ROOT = Path(__file__).parents[2]
TOY = '''"""Toy attention: every token gates the mean of all keys times values.

    out_i = q_i * mean_j k_j * v_j

Linear in the number of tokens: O(N dim). A toy, https://example.org
"""

from vitzoo.mixers import QKVMixer, register_mixer


def toy_naive(q, k, v):
    """Every pair written out; q, k and v of shape (B, num_heads, N, head_dim)."""
    return (q.unsqueeze(3) * k.unsqueeze(2) * v.unsqueeze(2)).mean(dim=3)


@register_mixer('toy')
class Toy(QKVMixer):
    """Toy attention; keywords as in `QKVMixer`."""

    op = staticmethod(lambda q, k, v: q * (k * v).mean(dim=2, keepdim=True))
    op_naive = staticmethod(toy_naive)

    def mix(self, q, k, v, grid_size):
        return self.op(q, k, v)
'''


def install(folder: Path, name: str, source: str, entry_point: str) -> None:
    """Write a distribution of one module as pip installs it."""
    module = name.replace('-', '_')
    (folder / f'{module}.py').write_text(source)
    info = folder / f'{module}-1.2.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n')
    (info / 'entry_points.txt').write_text(f'[vitzoo.mixers]\n{entry_point}\n')
    invalidate_caches()


def run(folder: Path, *command: str) -> subprocess.CompletedProcess:
    """Run Python in a subprocess with the plugins of a folder installed."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get('PYTHONPATH')])])
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=path),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope='module')
def toy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('toy')
    install(folder, 'vit-toy', TOY, 'toy = vit_toy')
    return folder


REPORT_PROBE = """
import timm, torch
from vitzoo.cli import main
from vitzoo.validate import evaluation

evaluation.measure_throughput = lambda *args: evaluation.Speed(1.0)
print(*timm.list_models('*_toy_*'))
for name in ('deit_toy_tiny', 'cvt_toy_13', 'vil_toy_tiny', 'aft_toy_tiny'):
    print(*timm.create_model(name, img_size=32, num_classes=3).eval()(torch.randn(2, 3, 32, 32)).shape)
main(['list', '--mixers'])
main(['validate', 'deit_toy_tiny', '--no-data', '--img-size', '32', '--batch-size', '1'])
"""


def test_a_plugins_mixer_is_in_every_backbone_in_the_list_and_in_the_report(toy):
    child = run(toy, '-c', REPORT_PROBE)
    assert child.returncode == 0, child.stderr
    names, *lines = child.stdout.splitlines()
    assert {name.partition('_toy_')[0] for name in names.split()} == {'aft', 'cvt', 'deit', 'vil'}
    assert lines[:4] == ['2 3'] * 4
    assert 'toy' in lines and 'softmax' in lines
    (row,) = [line.split() for line in lines if line.startswith('deit_toy_tiny')]
    params, gmacs = row[4:6]
    assert float(params) > 5 and float(gmacs) > 0


def test_a_plugins_mixer_is_held_to_the_contract_and_pinned_names_stay(toy):
    files = 'mixers/test_contract models/test_models models/test_timm_api metrics/test_macs'
    files = [f'tests/{name}.py' for name in files.split()]
    # without the long ones, those with processes of their own, and closed forms, which only our own mixers have
    words = ('any_image_size', 'compiled', 'saved_model', 'intermediates', 'closed_form')
    left_out = ' and '.join(f'not {word}' for word in words)
    chosen = f'(toy and {left_out}) or registered_names'
    child = run(toy, '-m', 'pytest', *files, '-n', '0', '-vv', '-p', 'no:cacheprovider', '-k', chosen)
    assert child.returncode == 0, child.stdout + child.stderr
    passed = set(re.findall(r'::(test_\w+)(?:\[.*toy.*\])? PASSED', child.stdout))
    assert {
        'test_the_registered_names_are_these',
        'test_fast_op_equals_naive_form_with_gradients',
        'test_a_sample_does_not_depend_on_its_batch',
        'test_values_and_gradients_stay_finite',
        'test_an_image_does_not_depend_on_its_batch',
        'test_forward_and_backward_are_finite_and_reach_every_parameter',
        'test_a_traced_model_gives_the_same_logits',
        'test_every_mixer_can_be_counted',
    } <= passed


@pytest.fixture
def site(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder whose plugins are installed during the test, without keeping their mixers."""
    monkeypatch.setattr(base, '_mixers', dict(base._mixers))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith('vit_')]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ('source', 'entry_point', 'reason'),
    [
        ('import no_such_module', 'toy = vit_broken', "ModuleNotFoundError: No module named 'no_such_module'"),
        (TOY, 'toy = vit_broken:Toi', "AttributeError: module 'vit_broken' has no attribute 'Toi'"),
        (TOY.replace("'toy'", "'ls'"), 'ls = vit_broken', "ValueError: The mixer name 'ls' is taken by vitzoo"),
        (TOY, 'tou = vit_broken', "it registers no mixer 'tou'."),
        ('', 'softmax = vit_broken', "it registers no mixer 'softmax'."),
    ],
    ids=['import', 'attribute', 'taken', 'misspelt', 'empty'],
)
def test_a_broken_plugin_is_named(source, entry_point, reason, site):
    install(site, 'vit-broken', source, entry_point)
    with pytest.raises(RuntimeError) as caught:
        load_plugins()
    message = str(caught.value)
    assert message.startswith(f"The plugin vit-broken 1.2 fails to load from its entry point '{entry_point}'")
    assert '`pip uninstall vit-broken`' in message and reason in message
    cause = caught.value.__cause__
    assert cause is None if 'registers' in reason else reason.startswith(type(cause).__name__)


def test_of_two_plugins_with_one_name_the_second_in_the_alphabet_is_refused(site):
    install(site, 'vit-zoo', TOY, 'toy = vit_zoo')
    install(site, 'vit-toy', TOY, 'toy = vit_toy')
    with pytest.raises(RuntimeError, match=r"The plugin vit-zoo 1\.2 .* 'toy' is taken by vit_toy"):
        load_plugins()


def test_a_package_may_bring_several_mixers(site):
    other = TOY.partition('@register')[2].partition('class')[2]
    source = f"{TOY}\n\n@register_mixer('toy_2')\nclass Second{other.removeprefix(' Toy')}"
    install(site, 'vit-toys', source, 'toy_2 = vit_toys\ntoy = vit_toys')
    load_plugins()
    assert {'toy', 'toy_2'} <= set(base.list_mixers())


def test_importing_a_plugin_before_vitzoo_is_refused(tmp_path):
    install(tmp_path, 'vit-toy', TOY, 'toy = vit_toy')
    # the plugin is still incomplete when vitzoo looks for its mixer
    child = run(tmp_path, '-c', 'import vit_toy')
    assert child.returncode == 1
    last = child.stderr.splitlines()[-1]
    assert last.startswith('RuntimeError: The plugin vit-toy 1.2') and last.endswith('import vitzoo before vit_toy.')
