"""The first part of docs/mixers.md: what the mixers can do, found by trying them, and how fast they are."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from matplotlib.figure import Figure
from pages import BENCHMARKS, latest, to_table
from targets import LAYER, LINEAR

from vitzoo import create_mixer
from vitzoo.bench._harness import LAYER_PASSES
from vitzoo.bench._results import read_rows
from vitzoo.bench.mixers import BASELINE, crossover, format_crossover
from vitzoo.machine import format_machine
from vitzoo.mixers import TokenMixer, mixer_class
from vitzoo.models.inherit import inherit_weights

# of a small layer whose output is examined
DIM, NUM_HEADS, GRID = 24, 2, (28, 28)
N = GRID[0] * GRID[1]
# a token away from the border
MIDDLE = N // 2 + GRID[1] // 2
COLORS = {'forward': 'C0', 'forward + backward': 'C1'}

# measurements of a mixer by pass and number of tokens
Speeds = dict[str, dict[int, dict]]


@dataclass(frozen=True)
class Traits:
    """The properties of a mixer with default options.

    Attributes:
        reads: Number of tokens, of N, on which the output of one token depends.
        chosen: Which tokens these are depends on their content.
        exact: The weights are those of softmax attention over the tokens that are read.
        content_based: The output is not a linear function of the tokens.
        inherits: The part of the weights of softmax attention that it takes: 'all', 'part' or 'none'.
        adds: It has parameters that softmax attention does not have.
        parameters: Number of its parameters.
        grid_bound: It has parameters for one grid.
        approximates: It approximates softmax attention over all tokens.
    """

    reads: int
    chosen: bool
    exact: bool
    content_based: bool
    inherits: str
    adds: bool
    parameters: int
    grid_bound: bool
    approximates: bool


# by what is needed
NEEDS: dict[str, Callable[[str, Traits], bool]] = {
    'exact softmax attention in a fixed part of the grid': lambda _, t: t.exact and t.reads < N and not t.chosen,
    'content-based choice of the tokens attended': lambda _, t: t.chosen,
    'every token reads every token, at linear cost': lambda name, t: t.reads == N and name in LINEAR,
    'an approximation of softmax attention, without training': lambda _, t: t.approximates,
    'inherits every parameter of softmax attention and adds none': lambda _, t: t.inherits == 'all' and not t.adds,
    'no parameters at all': lambda _, t: not t.parameters,
    'weights that do not depend on content': lambda _, t: not t.content_based,
}


@cache
def find_traits(name: str) -> Traits:
    """Find out what a mixer does."""
    mixer = _build(name)
    first, second = (_tokens(seed) for seed in (0, 1))
    (out, read), (other_out, other_read) = (_tokens_read(mixer, x) for x in (first, second))
    with torch.no_grad():
        between = mixer((first + second) / 2, GRID)
    report = inherit_weights(mixer, _build('softmax').state_dict())
    lost = {weight for weight in ('qkv.weight', 'proj.weight') if weight in report.lost}
    own = dict(mixer.named_parameters())
    return Traits(
        reads=int(read.sum()),
        chosen=not torch.equal(read, other_read),
        exact=_is_exact(name, first),
        content_based=not torch.allclose((out + other_out) / 2, between, atol=1e-5),
        inherits=('all', 'part', 'none')[len(lost)],
        adds=any(name in own for name in report.initialized),
        parameters=sum(parameter.numel() for parameter in own.values()),
        grid_bound=mixer.grid_bound,
        approximates=mixer.approximates_softmax,
    )


def _build(name: str, **kwargs) -> TokenMixer:
    torch.manual_seed(0)
    return create_mixer(name, DIM, NUM_HEADS, grid_size=GRID, **kwargs).eval()


def _tokens(seed: int) -> torch.Tensor:
    return torch.randn(1, N, DIM, generator=torch.Generator().manual_seed(seed))


def _tokens_read(mixer: TokenMixer, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output (1, N, DIM), and on which tokens that of the middle token depends, (N,)."""
    x = x.clone().requires_grad_()
    out = mixer(x, GRID)
    out[0, MIDDLE].square().sum().backward()
    return out.detach(), x.grad[0].abs().sum(dim=-1) > 0


@torch.no_grad()
def _is_exact(name: str, x: torch.Tensor) -> bool:
    """Return whether the weights of the middle token in each head are the softmax over the tokens with a weight."""
    cls = mixer_class(name)
    mixer = _build(name, **(dict(rel_bias='none') if cls.has_rel_bias else {}))
    if not mixer.token_weights:
        return False
    q, k, _ = mixer.to_qkv(x, GRID)
    values = torch.eye(N).expand(1, NUM_HEADS, -1, -1)
    weights = mixer.mix(q, k, values, GRID)[0, :, MIDDLE]
    scores = mixer.scale * (q[0, :, MIDDLE, None] @ k[0].mT).squeeze(1)
    expected = scores.masked_fill(weights == 0, -torch.inf).softmax(dim=-1)
    return torch.allclose(weights, expected, atol=1e-6)


def read_speeds() -> dict[str, Speeds]:
    """The latest measurements of each mixer in weights/benchmarks.csv."""
    rows = [row for row in latest(read_rows(BENCHMARKS)) if row['table'] == 'mixers']
    rows = [row for row in rows if all(row[key] == value for key, value in LAYER.items())]
    last_run = {}
    for row in rows:
        last_run[row['name']] = max(last_run.get(row['name'], ''), row['run'])
    speeds: dict[str, Speeds] = {}
    for row in rows:
        if row['run'] == last_run[row['name']]:
            speeds.setdefault(row['name'], {}).setdefault(row['what'], {})[row['tokens']] = row
    return speeds


def needs_table(names: list[str]) -> str:
    """The mixers that meet each need."""
    lines = [
        [need, ', '.join(f'[`{name}`](#{name})' for name in names if meets(name, find_traits(name)))]
        for need, meets in NEEDS.items()
    ]
    return to_table(['property', 'mixers'], lines)


def traits_table(names: list[str], speeds: dict[str, Speeds]) -> str:
    """The properties of each mixer, and the number of tokens from which it is faster than fused softmax attention."""
    head = ['mixer', 'reads', 'exact', 'by content', 'inherits', 'new parameters', 'any grid', 'approximates']
    head += [f'faster, {measured_pass}' for measured_pass in LAYER_PASSES] + ['× at 16,384']
    return to_table(head, [_line(name, find_traits(name), speeds.get(name, {})) for name in names])


def _line(name: str, traits: Traits, speed: Speeds) -> list[str]:
    reads = 'all' if traits.reads == N else f'{traits.reads}{", chosen" if traits.chosen else ""}'
    adds = '–' if not traits.adds else 'yes'
    answers = ['yes' if answer else '–' for answer in (traits.exact, traits.content_based)]
    more = ['yes' if answer else '–' for answer in (not traits.grid_bound, traits.approximates)]
    starts = [
        format_crossover(_ratios(speed[kind])) if kind in speed and name != BASELINE else '' for kind in LAYER_PASSES
    ]
    gains = [f'{speed[kind][16384]["ratio"]:.1f}' if 16384 in speed.get(kind, {}) else '–' for kind in LAYER_PASSES]
    return [f'[`{name}`](#{name})', reads, *answers, traits.inherits, adds, *more, *starts, ', '.join(gains)]


def _ratios(measured: dict[int, dict]) -> dict[int, float]:
    """Speedup over fused softmax attention by number of tokens."""
    return {tokens: row['ratio'] for tokens, row in measured.items()}


def machines(speeds: dict[str, Speeds]) -> list[str]:
    """The machines of the measurements."""
    rows = [row for speed in speeds.values() for measured in speed.values() for row in measured.values()]
    return sorted({f'{format_machine(row)} ({row["run"][:10]})' for row in rows})


def draw_speeds(path: Path, speeds: dict[str, Speeds]) -> None:
    """Draw the numbers of tokens at which each mixer is faster than fused softmax attention, the first to be on top."""
    speeds = {name: speed for name, speed in speeds.items() if not name.startswith(BASELINE)}
    names = sorted(speeds, key=lambda name: _rank(speeds[name]), reverse=True)
    figure = Figure(figsize=(8, 0.24 * len(names) + 1.2), layout='constrained')
    axes = figure.subplots()
    for place, name in enumerate(names):
        for side, measured_pass in zip((0.17, -0.17), LAYER_PASSES):
            if measured_pass in speeds[name]:
                _draw_bar(axes, place + side, _ratios(speeds[name][measured_pass]), COLORS[measured_pass])
    for measured_pass, color in COLORS.items():
        axes.plot([], [], color=color, linewidth=4, label=measured_pass)
    ticks = (196, 784, 1024, 4096, 16384)
    axes.set(xscale='log', xlim=(150, 30000), ylim=(-0.8, len(names) - 0.2), xlabel='tokens')
    axes.set_xticks(ticks, [f'{tick:,}' for tick in ticks], fontsize='small')
    axes.minorticks_off()
    axes.set_yticks(range(len(names)), names, fontsize='small')
    axes.grid(axis='x', alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
    figure.legend(loc='outside upper center', ncols=2, frameon=False)
    figure.savefig(path, dpi=130)


def _rank(speed: Speeds) -> tuple[float, float]:
    """First by the start of the bar of forward + backward, then by the speedup at its end."""
    known = _ratios(speed[LAYER_PASSES[1]])
    return crossover(known) or min(known), -known[max(known)]


def _draw_bar(axes, place: float, known: dict[int, float], color: str) -> None:
    """A bar from the crossover to the largest number of tokens, with the speedup there."""
    start, last = crossover(known), max(known)
    if start > last:
        axes.text(last, place, f'never up to {last:,}  ', color=color, fontsize=6, ha='right', va='center')
        return
    begin = start or min(known)
    axes.plot([begin, last], [place, place], color=color, linewidth=3.5, solid_capstyle='butt')
    if not start:
        # the crossover is below the smallest number of tokens measured
        axes.plot(begin, place, marker='<', color=color, markersize=5)
    axes.text(last, place, f'  × {known[last]:.1f}', color=color, fontsize=6, va='center')
