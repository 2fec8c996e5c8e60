"""The tables of docs/swap.md are current; a few cells are computed again, since all take half a minute."""

from pathlib import Path

import docs_swap
import pytest

PAGE = Path(__file__).parents[2] / 'docs' / 'swap.md'


def cells(table: str) -> dict[str, list[str]]:
    """The cells of a table by the mixers of their row."""
    text = PAGE.read_text().partition(f'<!-- {table}: made by')[2].partition(f'<!-- end of {table} -->')[0]
    rows = [[cell.strip(' `') for cell in line.strip('|').split('|')] for line in text.splitlines() if line[:1] == '|']
    return {mixer.strip('`'): values for mixers, *values in rows[2:] for mixer in mixers.split(', ')}


@pytest.mark.parametrize('mixer', ['aft_conv', 'longformer', 'pool', 'softmax', 'srformer'])
def test_the_weights_that_a_mixer_inherits_are_current(mixer):
    assert cells('weights')[mixer] == [docs_swap.lost_weights(mixer, family) for family in docs_swap.FAMILIES]


@pytest.mark.parametrize('mixer', ['linear', 'local', 'ls'])
def test_the_effect_of_a_shift_of_rotary_positions_is_current(mixer):
    (stated,) = cells('rotary')[mixer]
    assert float(stated) == pytest.approx(docs_swap.shift_error(mixer), rel=0.2, abs=1e-6)


def test_every_mixer_is_in_the_tables():
    assert set(cells('weights')) == set(docs_swap.own_mixers())
    assert set(cells('rotary')) == {m for m in docs_swap.own_mixers() if docs_swap.mixer_class(m).has_rope}


def test_the_macs_are_current():
    assert cells('crossover')['softmax'][0] == f'{docs_swap.gmacs("softmax", 224):.1f}'


def test_times_on_the_page_are_kept():
    times, machine = docs_swap.read_times(PAGE.read_text())
    assert [times['ls', size] for size in docs_swap.SIZES] == cells('crossover')['ls'][-3:]
    assert machine in PAGE.read_text()
