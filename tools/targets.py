"""Targets for speed and memory, and how each is evaluated on the rows of weights/benchmarks.csv.

A target selects rows by their columns; a tuple of values stands for a row with each of them. The quantity that it
limits is one of `READINGS`. tools/docs_targets.py writes the results to docs/targets.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

from vitzoo.bench._harness import LAYER_PASSES
from vitzoo.bench.mixers import BASELINE, UNFUSED, exponent

LAYER = dict(device='cpu', dtype='float32', dim=384, num_heads=6, batch_size=2)
PEERS = dict(table='peers', tokens=(196, 1024, 4096), what=LAYER_PASSES, **LAYER)
MIXERS = dict(table='mixers', against=BASELINE, **LAYER)
MODELS = dict(table='models', device='cpu', dtype='float32')
CVT_13 = dict(table='peers', name='cvt_13', device='cpu', dtype='float32', img_size=224, batch_size=4)
VIL_LS = MODELS | dict(name='vil_ls_medium', img_size=(224, 384))
DEIT = MODELS | dict(name='deit_softmax_small', img_size=224, against='deit_small_patch16_224 float32')
STARTUP = dict(table='startup', device='cpu')
# according to their docstrings
LINEAR = (
    *('aft_conv', 'aft_local', 'aft_simple', 'agent', 'bigbird', 'cosformer', 'flowformer', 'focused'),
    *(
        'gated_linear',
        'global',
        'hedgehog',
        'hydra',
        'inline',
        'linear',
        'linformer',
        'local',
        'longformer',
        'ls',
        'mala',
        'mhla',
    ),
    *('neighborhood', 'nystrom', 'performer', 'polaformer', 'pool', 'reformer', 'relu_linear', 'rfa', 'set', 'swin'),
    *('ttt', 'vssd', 'xca'),
)
FOUR_TIMES = ('linear', 'nystrom', 'aft_simple', 'aft_conv', 'ls')
TWO_AND_A_HALF_TIMES = ('performer', 'linformer', 'longformer')
IN_BFLOAT16 = (
    *('cvt_ls_13', 'cvt_performer_13', 'cvt_nystrom_13', 'cvt_aft_conv_13'),
    *('vil_ls_small', 'vil_performer_small', 'vil_nystrom_small', 'vil_aft_conv_small'),
    *('deit_ls_small', 'deit_performer_small', 'deit_nystrom_small', 'deit_aft_conv_small'),
    *('aft_ls_small', 'aft_performer_small', 'aft_nystrom_small', 'aft_conv_small'),
)


@dataclass(frozen=True)
class Target:
    """The selected rows, the quantity that is read from them, and its lower or upper limit."""

    rows: dict
    reads: str
    at_least: float | None = None
    at_most: float | None = None
    # a ceiling, and the lower limit where the ceiling is at least that
    stretch: tuple[float, float] | None = None


@dataclass(frozen=True)
class Reading:
    """A quantity read from a row, with its quartiles and its ceiling if they are known.

    `bound` names the limiting factor of the ceiling: 'products' or 'tensors'.
    """

    value: float
    low: float | None = None
    high: float | None = None
    ceiling: float | None = None
    bound: str = ''
    matmul_share: float | None = None


@dataclass(frozen=True)
class Line:
    """A target evaluated on one of its rows."""

    target: Target
    # the columns that select the row
    row: dict
    reading: Reading | None

    @property
    def verdict(self) -> str:
        """One of 'met', 'missed', 'out of reach' and 'not measured'."""
        if self.reading is None:
            return 'not measured'
        if self.satisfies(self.reading.value):
            return 'met'
        return 'missed' if self.reading.ceiling is None or self.satisfies(self.reading.ceiling) else 'out of reach'

    @property
    def at_least(self) -> float | None:
        """The lower limit for the ceiling of this row."""
        target, ceiling = self.target, self.reading and self.reading.ceiling
        if target.stretch is None or ceiling is None:
            return target.at_least
        from_ceiling, limit = target.stretch
        return limit if ceiling >= from_ceiling else target.at_least

    def satisfies(self, value: float) -> bool:
        """Return True if a value is within the limit."""
        least, most = self.at_least, self.target.at_most
        return value >= least if most is None else value <= most


def read_lines(target: Target, rows: list[dict]) -> Iterator[Line]:
    """Evaluate a target on each combination of the values of its columns, using the row of the latest run."""
    # names vary slowest
    columns = dict(name=target.rows['name']) | target.rows
    options = {key: value if isinstance(value, tuple) else (value,) for key, value in columns.items()}
    for values in product(*options.values()):
        wanted = dict(zip(options, values))
        found = [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]
        latest = max(found, key=lambda row: row['run'], default=None)
        yield Line(target, wanted, latest and READINGS[target.reads](latest, rows))


def find_sibling(row: dict, rows: list[dict], **changes) -> dict | None:
    """The row of the same run that differs from `row` in the given columns only."""
    same = {key: row.get(key) for key in ('run', 'name', 'what', 'tokens', *LAYER)} | changes
    return next((other for other in rows if all(other.get(key) == value for key, value in same.items())), None)


def read_ratio(row: dict, rows: list[dict]) -> Reading:
    """The speedup over the baseline."""
    quartiles = row['ratio'], row['ratio_low'], row['ratio_high']
    return Reading(*quartiles, row.get('ceiling'), bound_of(row), row.get('matmul_share'))


def bound_of(row: dict) -> str:
    """The limiting factor of a row's ceiling, '' if it has no ceiling."""
    if row.get('ceiling') is None:
        return ''
    traffic = row['io_mb'] / 1e3 / row['copy_gbs'] if row.get('io_mb') else 0.0
    return 'tensors' if traffic > row['matmul_share'] * row['seconds'] else 'products'


def read_relative_time(row: dict, rows: list[dict]) -> Reading:
    """The time relative to the baseline."""
    return Reading(1 / row['ratio'], 1 / row['ratio_high'], 1 / row['ratio_low'])


def read_share(row: dict, rows: list[dict]) -> Reading:
    """The share of the rate of large matrix products; its quartiles follow from those of the time."""
    share, seconds = row['matmul_share'], row['seconds']
    return Reading(share, share * seconds / row['seconds_high'], share * seconds / row['seconds_low'])


def read_exponent(row: dict, rows: list[dict]) -> Reading | None:
    """The exponent of the time from 1,024 tokens to those of the row; the ceiling is that of its products."""
    first = find_sibling(row, rows, tokens=1024)
    if first is None:
        return None
    power = exponent({each['tokens']: each['seconds'] for each in (first, row)})
    if not (first.get('gmacs') and row.get('gmacs')):
        return Reading(power)
    least = exponent({each['tokens']: each['gmacs'] for each in (first, row)})
    return Reading(power, ceiling=least, bound='products', matmul_share=row['matmul_share'])


def read_gigabytes(row: dict, rows: list[dict]) -> Reading:
    """The peak memory in GB; it is the same in every run and has no quartiles."""
    return Reading(row['peak_mb'] / 1e3)


def read_memory(baseline: str) -> Callable[[dict, list[dict]], Reading | None]:
    """A reading of the peak memory relative to another mixer; it is the same in every run and has no quartiles."""

    def read(row: dict, rows: list[dict]) -> Reading | None:
        other = find_sibling(row, rows, name=baseline)
        return other and Reading(row['peak_mb'] / other['peak_mb'])

    return read


READINGS = {
    'ratio': read_ratio,
    'relative time': read_relative_time,
    'share of matmul': read_share,
    'exponent': read_exponent,
    'memory over unfused softmax': read_memory(UNFUSED),
    'memory over SDPA': read_memory(BASELINE),
    'memory in GB': read_gigabytes,
}
# the rows in which both sides compute the same
SAME_FORMULA = {
    'performer': 'performer-pytorch',
    'nystrom': 'nystrom-attention',
    'linformer': 'linformer',
    'linear': 'linear-attention-transformer (its softmax of q and k)',
    'reformer': 'reformer-pytorch',
    'sinkhorn': 'sinkhorn-transformer (its segments)',
    'routing': 'routing-transformer',
    'aft_simple': 'aft-pytorch',
    'aft_full': 'aft-pytorch (its bias without factors)',
    'local': 'local-attention',
    'ls': 'long-short-transformer (keys as values)',
}
MEMORY = MIXERS | dict(table='memory', name=LINEAR, what='forward + backward', tokens=4096)
TRAINING_MEMORY = dict(
    table='training memory',
    name=tuple(f'deit_{name}_small' for name in LINEAR),
    **dict(img_size=1024, batch_size=2, dtype='float32', device='cpu'),
)
# by the title of their section
TARGETS = {
    'The same formula on both sides': tuple(
        Target(PEERS | dict(name=name, against=against), 'ratio', at_least=1.0, stretch=(1.5, 1.2))
        for name, against in SAME_FORMULA.items()
    ),
    'Each mixer by its own formula': (
        Target(PEERS | dict(name='performer', against='performer-pytorch'), 'ratio', at_least=2.0),
        Target(PEERS | dict(name='nystrom', against='nystrom-attention'), 'ratio', at_least=1.2),
        Target(PEERS | dict(name='linformer', against='linformer'), 'ratio', at_least=1.3),
        Target(PEERS | dict(name='linear', against='linear-attention-transformer'), 'ratio', at_least=1.1),
        Target(PEERS | dict(name='reformer', against='reformer-pytorch'), 'ratio', at_least=2.0),
        Target(PEERS | dict(name='sinkhorn', against='sinkhorn-transformer'), 'ratio', at_least=1.2),
        Target(PEERS | dict(name='routing', against='routing-transformer'), 'ratio', at_least=1.2),
        Target(PEERS | dict(name=('aft_simple', 'aft_full'), against='aft-pytorch'), 'ratio', at_least=1.2),
        Target(PEERS | dict(name='local', against='local-attention'), 'ratio', at_least=1.2),
        Target(PEERS | dict(name='ls', against='long-short-transformer'), 'ratio', at_least=1.2),
    ),
    'Layers against fused softmax attention (SDPA)': (
        Target(MIXERS | dict(tokens=4096, what=LAYER_PASSES, name=FOUR_TIMES), 'ratio', at_least=4.0),
        Target(MIXERS | dict(tokens=4096, what=LAYER_PASSES, name=TWO_AND_A_HALF_TIMES), 'ratio', at_least=2.5),
        Target(
            MIXERS | dict(tokens=16384, what=LAYER_PASSES, name=FOUR_TIMES + TWO_AND_A_HALF_TIMES),
            'ratio',
            at_least=10.0,
        ),
    ),
    'Exponent of the time from 1,024 to 16,384 tokens, linear mixers': (
        Target(MIXERS | dict(tokens=16384, what=LAYER_PASSES, name=LINEAR), 'exponent', at_most=1.1),
    ),
    '`cvt_13` against CvT-13 of the transformers package': (
        Target(CVT_13 | dict(what='forward'), 'ratio', at_least=1.2),
        Target(CVT_13 | dict(what='training step'), 'ratio', at_least=1.3),
    ),
    'Share of the rate of matrix products, `vil_ls_medium`': (
        Target(VIL_LS | dict(what='forward'), 'share of matmul', at_least=0.85),
        Target(VIL_LS | dict(what='training step'), 'share of matmul', at_least=0.70),
    ),
    'bfloat16 against float32': (
        *(
            Target(MODELS | dict(name=name, what='forward', dtype='bfloat16', against=f'{name} float32'), 'ratio', 2.0)
            for name in IN_BFLOAT16
        ),
    ),
    "`deit_softmax_small` against timm's `deit_small_patch16_224`": (
        Target(DEIT | dict(what=('forward', 'training step')), 'ratio', at_least=0.99),
    ),
    'Peak memory, forward + backward at 4,096 tokens, linear mixers': (
        Target(MEMORY, 'memory over unfused softmax', at_most=0.25),
        Target(MEMORY, 'memory over SDPA', at_most=1.0),
    ),
    'Peak memory of a training step, `deit_<linear mixer>_small`, 1,024 px, batch size 2, GB': (
        Target(TRAINING_MEMORY, 'memory in GB', at_most=8.0),
    ),
    'Startup against timm': (
        Target(STARTUP | dict(name='import vitzoo'), 'relative time', at_most=1.3),
        Target(STARTUP | dict(name='create cvt_ls_13'), 'relative time', at_most=1.5),
    ),
}
# why targets are missed or out of reach, by section and name
_REASONS_AGAINST_PACKAGES = {
    'performer': 'the features: maxima, exponentials and sums of 256 numbers for each query and key',
    'nystrom': 'the pseudo-inverse: 24 products of 64 x 64 matrices for each head',
    'linformer': 'up to 256 tokens, the rank, both sides do the same products; with more, ours does fewer',
    'linear': 'another formula: elu + 1 with shifted exponents takes more passes than the softmax of the package',
    'reformer': 'sorting, gathering and scattering; the backward pass computes the scores again',
    'sinkhorn': 'copies of a block and of what is sorted to it; the package takes the sorted keys for values',
    'routing': 'one softmax over all clusters of a token, where the package has one for each; copies of their tokens',
    'aft_simple': 'the same products on both sides; keys and values are read out of the rows of a joint projection',
    'aft_full': 'the largest exponents, which the package does not subtract: its exponentials overflow at 89',
    'local': 'products of 49 to 64 queries with less than 200 keys, which are slower than large ones',
    'ls': 'products of 49 queries with less than 200 keys, and copies of the keys of neighbouring windows',
}
# where ours keeps to the formula of the paper
_REASONS_BY_FORMULA = {
    'aft_full': 'another formula: a bias that is a product of factors, and the largest exponents, which are subtracted',
    'ls': 'another formula: values have a projection of their own, which the package saves',
}
_REASONS_OF_MEMORY = {
    'aft_local': 'terms of keys and values with the halos of their windows',
    'agent': 'gradients of the convolution, and the biases of agents and tokens',
    'bigbird': 'gathered keys and values: 13 blocks for each block of a head',
    'focused': 'norms over all heads, for which a whole sample is computed again at once',
    'gated_linear': 'gates and decays of each token and channel',
    'global': 'a copy of the tokens after the memory tokens, and padded gradients of the memory',
    'ls': 'normalized keys and values besides the projected ones',
    'mala': 'the output gate, and the gradient of the convolution',
    'mhla': 'the gradient of the convolution',
    'neighborhood': 'keys and values gathered for each window of a head',
    'polaformer': 'the output gate, and the gradient of the convolution',
    'ttt': 'the inner training: results of a head before and after its step, and an additional head',
    'vssd': 'twice the width between its projections',
}
REASONS = {
    'The same formula on both sides': _REASONS_AGAINST_PACKAGES,
    'Each mixer by its own formula': _REASONS_AGAINST_PACKAGES | _REASONS_BY_FORMULA,
    'Peak memory, forward + backward at 4,096 tokens, linear mixers': _REASONS_OF_MEMORY,
}
