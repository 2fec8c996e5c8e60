"""docs/mixers.md agrees with the docstrings and the code of the mixers."""

import re
from pathlib import Path

import docs_choosing
import docs_mixers
import pytest

DOCS = Path(__file__).parents[2] / 'docs'
PAGE = DOCS / 'mixers.md'


def sections(page: str) -> dict[str, str]:
    parts = re.split(r'^## `(\w+)`$', page, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def health_on(page: str) -> dict[str, dict[str, list[float]]]:
    """The measurements that a page reports, by mixer and sign."""
    health = {}
    for name, text in sections(page).items():
        line = re.search(r'^\* \*\*On random tokens\*\*: (.*)$', text, re.MULTILINE)
        if line:
            signs = re.findall(r'([a-z ]+?) (\d+\.\d\d) and (\d+\.\d\d)', line.group(1))
            health[name] = {sign.strip().replace(' ', '_'): [float(a), float(b)] for sign, a, b in signs}
    return health


def test_the_page_of_mixers_is_current():
    page = PAGE.read_text()
    assert docs_mixers.render(health_on(page)) == page, 'run `make docs`'


def test_the_measured_errors_are_current():
    stated, measured = health_on(PAGE.read_text()), docs_mixers.measure_health()
    assert {name: list(signs) for name, signs in stated.items()} == {
        name: list(signs) for name, signs in measured.items()
    }
    assert len(stated) >= 9
    for name, signs in measured.items():
        for sign, values in signs.items():
            # kernels differ between versions of torch; 0.005 is what rounding to two digits takes
            assert stated[name][sign] == pytest.approx(values, rel=0.1, abs=0.005), (name, sign)


def test_every_mixer_has_its_facts():
    page = PAGE.read_text()
    found = sections(page)
    assert sorted(found) == sorted(docs_mixers.own_mixers())
    for name, text in found.items():
        sentence = text.strip().splitlines()[0]
        assert sentence[0].isupper() and sentence.endswith('.') and 'https' not in sentence, name
        assert re.search(r'^```text\n.+?\n```$', text, re.MULTILINE | re.DOTALL), f'{name} has no formula'
        facts = dict(re.findall(r'^\* \*\*([\w ]+)\*\*: (.+)$', text, re.MULTILINE))
        assert 'https://arxiv.org/abs/' in facts['Paper'] and 'O(' in facts['Cost'], name
        assert {'Parameters', 'Properties'} <= set(facts)
        assert f'| [`{name}`](#{name}) | `O(' in page


def test_the_numbers_are_those_of_the_closed_forms():
    d, N = docs_mixers.DIM, 14 * 14
    softmax = docs_mixers.measure_costs('softmax')
    assert softmax.parameters == 4 * d * d + 4 * d
    assert softmax.attention == {14: 2 * N**2 * d, 28: 2 * (4 * N) ** 2 * d, 56: 2 * (16 * N) ** 2 * d}
    assert softmax.projections[14] == 4 * N * d * d
    assert softmax.exponent() == '2.00' and float(softmax.exponent(with_projections=True)) < 2
    linformer = docs_mixers.measure_costs('linformer')
    # E and F of rank 64, each applied once, and scores and values of 64 keys
    assert linformer.attention[14] == 4 * N * 64 * d
    assert linformer.parameters - softmax.parameters == 2 * N * 64
    # the queries of reduced keys and values are still linear layers before the attention
    srformer = docs_mixers.measure_costs('srformer')
    assert srformer.projections[14] == 2 * N * d * d + 2 * N // 4 * d * d
    assert srformer.attention[14] == 2 * N * N // 4 * d + N * d * d


def test_the_cost_grows_as_the_docstrings_say():
    linear, quadratic = [], []
    for name in docs_mixers.own_mixers():
        said = ' '.join(docs_mixers.read_text(name).costs)
        macs = docs_mixers.measure_costs(name).attention
        if said.startswith('Linear in the number of tokens') or re.fullmatch(r'O\(N [^N]+\)\.', said):
            linear.append(name)
            assert macs[56] <= 4.3 * macs[28], name
        if said.startswith('Quadratic') or said == 'O(N^2 dim).':
            quadratic.append(name)
            assert 8 * macs[28] <= macs[56] <= 16.1 * macs[28], name
    assert len(linear) >= 17 and len(quadratic) >= 4


def test_a_family_shares_a_docstring_and_each_of_its_mixers_has_its_own_formula():
    conv, full = docs_mixers.read_text('aft_conv'), docs_mixers.read_text('aft_full')
    assert conv.sentence == full.sentence and conv.paper == full.paper
    assert (conv.costs, full.costs) == (['O(N k^2 dim).'], ['O(N^2 dim).'])
    assert 'k x k kernel' in conv.body[0] and 'k x k kernel' not in full.body[0]


def test_options_are_a_mixers_own():
    classes = {name: docs_mixers.mixer_class(name) for name in ('aft_local', 'pool', 'hydra', 'xca', 'global')}
    assert docs_mixers.options(classes['aft_local']) == {'window_size': 4, 'bias_dim': 128}
    assert docs_mixers.options(classes['pool']) == {'pool_size': 3}
    assert docs_mixers.options(classes['xca']) == {}
    # those of all kernel mixers
    assert docs_mixers.options(classes['hydra']) == {'dwc': 'none', 'center_keys': False}
    assert docs_mixers.options(classes['global']) == {'num_global': 64}


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('softmax', dict(reads=784, exact=True, inherits='all', adds=False, approximates=False)),
        ('swin', dict(reads=49, exact=True, chosen=False, adds=True)),
        ('pool', dict(reads=9, exact=False, content_based=False, inherits='none', parameters=0)),
        ('routing', dict(exact=True, chosen=True, approximates=True)),
        ('synthesizer', dict(reads=784, content_based=True, inherits='part', grid_bound=True)),
    ],
)
def test_traits_are_what_a_mixer_does(name, expected):
    traits = docs_choosing.find_traits(name)
    assert {key: getattr(traits, key) for key in expected} == expected
    assert (traits.reads < docs_choosing.N) == (name in ('swin', 'pool', 'routing'))


def test_the_latest_run_of_a_mixer_gives_its_speeds(monkeypatch):
    row = dict(
        table='mixers', name='ls', what='forward', tokens=1024, ratio=2.0, command='a', gpu='', **docs_choosing.LAYER
    )
    early = row | dict(run='2026-01', ratio=0.5)
    rows = [
        early,
        early | dict(tokens=4096),
        row | dict(run='2026-02', command='b'),
        row | dict(run='2026-03', dim=192),
    ]
    monkeypatch.setattr(docs_choosing, 'read_rows', lambda path: rows)
    assert {n: row['ratio'] for n, row in docs_choosing.read_speeds()['ls']['forward'].items()} == {1024: 2.0}
