"""Covering arrays: few combinations of options in which every two values of two options occur together at least once.

D. Cohen et al., The AETG System: An Approach to Testing Based on Combinatorial Design, IEEE TSE 23(7), 1997.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import pytest

Factors = Mapping[str, Sequence[str]]
Row = dict[str, str]
# two (factor, value)
Pair = frozenset[tuple[str, str]]

# rows that are built for each one that is kept
CANDIDATES = 4


class Forbidden(NamedTuple):
    """Values of two factors that the program is right to refuse together, and how its sentence begins."""

    factor: str
    values: Sequence[str]
    other: str
    other_values: Sequence[str]
    sentence: str


def covering_array(factors: Factors, forbidden: Sequence[Forbidden] = (), seed: int = 0) -> list[Row]:
    """Rows with one value per factor that together cover every allowed pair; the same rows for the same arguments."""
    clashes, dice, rows = _find_clashes(forbidden), random.Random(seed), []
    missing = dict.fromkeys(allowed_pairs(factors, forbidden))
    while missing:
        start = dict(sorted(next(iter(missing))))
        built = [_complete(start, factors, clashes, missing.keys(), dice) for _ in range(CANDIDATES)]
        row = max(built, key=lambda row: sum(pair in missing for pair in covered_pairs([row])))
        for pair in covered_pairs([row]):
            missing.pop(pair, None)
        rows.append({name: row[name] for name in factors})
    return rows


def allowed_pairs(factors: Factors, forbidden: Sequence[Forbidden] = ()) -> list[Pair]:
    """Every pair of values of two factors that is not forbidden and that a row can hold."""
    clashes = _find_clashes(forbidden)
    pairs = [
        {one: value, other: other_value}
        for one, other in combinations(factors, 2)
        for value in factors[one]
        for other_value in factors[other]
    ]
    return [
        frozenset(pair.items())
        for pair in pairs
        if not any(_clashes(pair, *item, clashes) for item in pair.items()) and _has_room(pair, factors, clashes)
    ]


def covered_pairs(rows: Sequence[Row]) -> set[Pair]:
    """The pairs that occur in some row."""
    return {pair for row in rows for pair in map(frozenset, combinations(row.items(), 2))}


def assert_covered(factors: Factors, forbidden: Sequence[Forbidden], rows: Sequence[Row]) -> int:
    """Check that rows cover every pair that is allowed, and no other; returns the number of pairs."""
    pairs = set(allowed_pairs(factors, forbidden))
    assert pairs == covered_pairs(rows)
    return len(pairs)


def refused_row(factors: Factors, rule: Forbidden) -> Row:
    """A row with the first two values that a rule forbids, and the first value of every other factor."""
    row = {name: values[0] for name, values in factors.items()}
    return row | {rule.factor: rule.values[0], rule.other: rule.other_values[0]}


def for_each_sentence(forbidden: Sequence[Forbidden]) -> pytest.MarkDecorator:
    """Parametrize a test by each `rule` with a sentence, by which a command refuses its pairs."""
    return pytest.mark.parametrize(
        'rule',
        [rule for rule in forbidden if rule.sentence],
        ids=lambda rule: f'{rule.factor}-{rule.values[0]}-{rule.other}'.replace(' ', '_'),
    )


def _find_clashes(forbidden: Sequence[Forbidden]) -> dict[tuple[str, str], set[tuple[str, str]]]:
    """For each (factor, value), those that must not be in the same row."""
    clashes = {}
    for rule in forbidden:
        for one in ((rule.factor, value) for value in rule.values):
            for other in ((rule.other, value) for value in rule.other_values):
                clashes.setdefault(one, set()).add(other)
                clashes.setdefault(other, set()).add(one)
    return clashes


def _complete(row: Row, factors: Factors, clashes: dict, missing: Collection[Pair], dice: random.Random) -> Row:
    """Fill a row factor by factor, each with the value that covers most of what is missing."""
    rest = [name for name in factors if name not in row]
    dice.shuffle(rest)
    for name in rest:
        values = [value for value in factors[name] if not _clashes(row, name, value, clashes)]
        values = [value for value in values if _has_room(row | {name: value}, factors, clashes)]
        if not values:
            raise ValueError(f'the forbidden pairs leave no value for {name} next to {row}')
        gains = [sum(frozenset([(name, value), item]) in missing for item in row.items()) for value in values]
        row = row | {name: dice.choice([value for value, gain in zip(values, gains) if gain == max(gains)])}
    return row


def _has_room(row: Row, factors: Factors, clashes: dict) -> bool:
    """Return True if every factor that is not in the row yet has a value that may join it."""
    # a factor that clashes with nothing in the row can have any of its values
    names = {name for item in row.items() for name, _ in clashes.get(item, ())} - row.keys()
    return all(any(not _clashes(row, name, value, clashes) for value in factors[name]) for name in names)


def _clashes(row: Row, name: str, value: str, clashes: dict) -> bool:
    return any(row.get(other) == taken for other, taken in clashes.get((name, value), ()))
