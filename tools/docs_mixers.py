"""Writes docs/mixers.md from the docstrings of the mixers and from measurements. Run by `make docs`.

A mixer's module docstring is a sentence, the formula (indented), and prose. Three kinds of sentences move from the
prose to the list of facts: those with `O(`, those with "is softmax attention", and the one with the paper's URL. The
rest explains how the paper is applied to a grid and to prefix tokens.
"""

import inspect
import math
import re
import sys
import textwrap
from dataclasses import dataclass, field
from functools import cache

import torch
from docs_choosing import N, draw_speeds, machines, needs_table, read_speeds, traits_table
from pages import ROOT
from safetensors import safe_open
from torch.utils.flop_counter import FlopCounterMode

from vitzoo import create_mixer, list_mixers
from vitzoo.metrics.macs import count_call_macs
from vitzoo.mixers import QKVMixer, TokenMixer, mixer_class

DOCS = ROOT / 'docs'
PAGE = DOCS / 'mixers.md'
# DeiT-Small on 224 x 224 pixels
DIM, NUM_HEADS, GRID = 384, 6, (14, 14)
STDS = (1, 3)
# other settings than the default ones whose error is measured too
ALSO_MEASURED = {'performer': {'with_the_published_eps': {'eps': 1e-4}}}
# mixers whose products are not in the order of the paper, and the setting in which they are
PAPERS_ORDER = {'linformer': {'sum_first': False}}

INTRO = """
# Token mixers

The {count} mixers of vitzoo, each with its formula, its cost, and how its paper is applied
to a grid of image tokens. `make docs` writes this page from their docstrings and their code; a test keeps it current.

## Choosing

{needs}

![The numbers of tokens at which each mixer is faster than fused softmax attention](mixers_speed.png)

Bars begin at the number of tokens from which the mixer is faster than PyTorch's fused softmax attention (at an arrow,
or before) and end at the largest that was measured, with the speedup there. Times are those of a layer with its
projections, on a CPU, from [performance.md](performance.md): {machines}. Accuracy is
not in the figure, because it depends on training: the error below, against softmax attention with the same weights,
exists only for mixers that approximate it.

* **reads**: number of tokens, of {tokens}, on which the output of a token in the middle of a 28 × 28 grid depends;
  **chosen** if its content decides which.
* **exact**: the weights are those of softmax attention over these tokens, without a relative bias.
* **by content**: the output is not a linear function of the tokens.
* **inherits**: how many weights of softmax attention it inherits; **new parameters**: it has others, too.
* **any grid**: has no parameters for one grid, which `set_input_size` resamples. Every mixer works on every grid.
* **approximates**: approximates softmax attention over all tokens, so that a model with inherited weights works to some
  degree without training. The other mixers need training.
* **faster**: the number of tokens from which it is faster than fused softmax attention, in a forward pass and in a
  forward and a backward pass, interpolated; **×**: the speedup at 16,384 tokens, of both.

{traits}

## Costs

There are N tokens: P prefix tokens (class, distillation, register), followed by a grid of H × W in raster order. The
measurements are for a layer of DeiT-Small ({dim} wide, {heads} heads) with default options and no prefix tokens.

* **exponent**: the multiply-accumulates (MACs) of the attention grow as N^exponent from 28 × 28 to 56 × 56 tokens,
  without the linear layers before and after it (`qkv`, `proj`).
* **MMACs**: these MACs in millions, at 14 × 14 and 56 × 56 tokens. The linear layers of softmax attention add
  {projections}, those of {others} another number. Those of `linformer` are for the paper's order of products; as it
  runs, the whole layer has fewer ([below](#linformer)).
* **parameters**: difference from the {parameters} of softmax attention, at 14 × 14 tokens.
* **error**: |out − softmax| / |softmax| of a mixer that approximates softmax attention, on 14 × 14 random tokens whose
  q and k have standard deviation 1 and 3. Random tokens are a hard case: their values average to almost zero, and
  neighbours are not similar. `vitzoo validate --health` measures the error in a model, on images.

Mixers of kernels and feature maps have two options in common. `dwc='v'` adds a 3 × 3 depthwise convolution of the
values to the output, and `dwc='qk'` adds to queries and keys their own; both start at 0, so a model with inherited
weights gives the same output as without. `center_keys=True` subtracts from the keys their mean over the tokens, which
makes no difference to softmax attention but does to most kernels; `agent` and `inline`, to which it makes none, do not
take it.

Second derivatives raise an error in the Triton kernels and in PyTorch's fused attention, which `biformer`, `global`,
`linformer`, `nystrom`, `set`, `softmax`, `srformer` and, without partial tiles, `sinkhorn` use, `neighborhood` and
`swin` without a bias, and others for prefix tokens. On a CPU, within
`torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`, every mixer has them.

On long sequences, from 16 MB of intermediate results per image on, most mixers of kernels and feature maps, and
`aft_conv`, `neighborhood`, `reformer`, `swin`, `ttt`, `vssd` and `xca`, store only their arguments, and recompute a few
heads at a time in the backward pass. Intermediate results of shorter sequences are stored at any batch size. The same
limit holds on a CPU for the weights of the windows of `local`, `longformer` and `ls`; `routing` stores up to 8 MB of
weights per head.

{cheaper}
"""


@dataclass
class Text:
    """The parts of a mixer's docstrings."""

    sentence: str
    # prose, formulas and lists, in Markdown
    body: list[str] = field(default_factory=list)
    costs: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    paper: str = ''


@dataclass
class Costs:
    """Parameters of a mixer's layer, and MACs of its attention and of its linear layers by side of the grid."""

    parameters: int
    attention: dict[int, int]
    projections: dict[int, int]

    def layer(self, side: int) -> int:
        """MACs of the whole layer on a square grid."""
        return self.attention[side] + self.projections[side]

    def exponent(self, with_projections: bool = False) -> str:
        """Exponent of the growth of the MACs with the number of tokens, from 28 x 28 to 56 x 56."""
        small, large = (self.layer(side) if with_projections else self.attention[side] for side in (28, 56))
        return f'{math.log(large / small, 4):.2f}'


@dataclass
class Entry:
    """The facts about a mixer.

    Attributes:
        more: Number of parameters that softmax attention does not have; negative if there are fewer.
        health: Results for each standard deviation in STDS; None if it does not approximate softmax attention.
        onnx: It exports to ONNX.
    """

    name: str
    text: Text
    costs: Costs
    more: int
    health: dict[str, list[float]] | None
    onnx: bool


def main() -> None:
    """Write the page."""
    PAGE.write_text(render(measure_health()))
    draw_speeds(DOCS / 'mixers_speed.png', read_speeds())
    print(f'wrote {PAGE}', file=sys.stderr)


def render(health: dict[str, dict[str, list[float]]]) -> str:
    """The whole page; `health` has a number for each mixer, sign and standard deviation in STDS."""
    # softmax first
    names = sorted(own_mixers(), key=lambda name: (name != 'softmax', name))
    texts = {name: read_text(name) for name in names}
    costs = {name: measure_costs(name) for name in names}
    onnx = exports_to_onnx()
    reference, speeds = costs['softmax'], read_speeds()
    intro = INTRO.strip().format(
        count=len(names),
        dim=DIM,
        heads=NUM_HEADS,
        projections=' and '.join(millions(reference.projections[side]) for side in (14, 56)),
        others=', '.join(f'`{name}`' for name, of in costs.items() if of.projections != reference.projections),
        parameters=f'{reference.parameters:,}',
        cheaper=cheaper(costs),
        needs=needs_table(names),
        machines='; '.join(machines(speeds)),
        tokens=N,
        traits=traits_table(names, speeds),
    )
    rows = [
        ['mixer', 'complexity', 'exponent', 'MMACs 14 × 14', '56 × 56', 'parameters', 'error at 1', 'at 3']
        + ['`attn_drop`', 'ONNX'],
        ['---', '---', *['---:'] * 6, *[':---:'] * 2],
    ]
    sections = []
    for name in names:
        more = costs[name].parameters - reference.parameters
        entry = Entry(name, texts[name], costs[name], more, health.get(name), onnx[name])
        rows.append(overview_row(entry))
        sections.append(section(entry))
    table = '\n'.join(f'| {" | ".join(row)} |' for row in rows)
    return '\n\n'.join([intro, table, *sections]) + '\n'


def overview_row(entry: Entry) -> list[str]:
    """A mixer's line of the overview."""
    cls = mixer_class(entry.name)
    return [
        f'[`{entry.name}`](#{entry.name})',
        complexities(entry.text.costs),
        entry.costs.exponent(),
        millions(entry.costs.attention[14]),
        millions(entry.costs.attention[56]),
        f'{entry.more:+,}'.replace('-', '−') if entry.more else '0',
        *([f'{error:.2f}' for error in entry.health['softmax_error']] if entry.health else ['', '']),
        *('yes' if answer else '–' for answer in (cls.attn_weights, entry.onnx)),
    ]


def section(entry: Entry) -> str:
    """A mixer's section."""
    cls = mixer_class(entry.name)
    keywords = ', '.join(f'{key}={value!r}' for key, value in options(cls).items())
    costs, more = entry.costs, entry.more
    compared = f', {abs(more):,} {"more" if more > 0 else "fewer"} than softmax attention' if more else ''
    measured = f' Measured: N^{costs.exponent()}, and N^{costs.exponent(True)} with the linear layers.'
    if entry.name in PAPERS_ORDER:
        measured += describe_order(costs, measure_costs(entry.name, papers_order=False))
    facts = {
        'Paper': entry.text.paper,
        'Equal to': name_official_code(entry.name),
        'Cost': ' '.join(entry.text.costs) + measured,
        'Parameters': f'{costs.parameters:,}{compared}.',
        'Limit': ' '.join(entry.text.limits),
        'On random tokens': signs(entry.health) if entry.health else '',
        'Properties': properties(cls, entry.onnx),
        'Options': f'`{keywords}`.' if keywords else '',
    }
    lines = '\n'.join(f'* **{key}**: {value}' for key, value in facts.items() if value)
    about = ' '.join(inspect.getdoc(cls).split())
    return '\n\n'.join([f'## `{entry.name}`', entry.text.sentence, *entry.text.body, about, lines])


def name_official_code(mixer: str) -> str:
    """The classes of the authors or of others that a test compares the mixer with, and the grids."""
    whose, links = '', dict[str, list[str]]()
    for case, source in official_sources().items():
        grid = case.rpartition('_')[2]
        if case.startswith(f'{mixer}_'):
            repository, file, layer, commit = source.split(';')[0].split()
            whose = source.rpartition('; ')[2]
            link = f'[`{layer}`](https://github.com/{repository}/blob/{commit}/{file})'
            links.setdefault(link, []).append(grid.replace('x', ' × '))
    found = [f'{link} on {" and ".join(grids)} tokens' for link, grids in links.items()]
    return f'{whose} {" and ".join(found)}, in its output and gradient, as a test shows.' if found else ''


@cache
def official_sources() -> dict[str, str]:
    """Source, commit, arguments, weights and owner of each recording of tools/record_official.py."""
    with safe_open(ROOT / 'tests' / 'golden' / 'awkward.safetensors', 'pt') as recordings:
        return dict(sorted(recordings.metadata().items()))


def own_mixers() -> list[str]:
    """The mixers of vitzoo, without those of plugins."""
    return [name for name in list_mixers() if mixer_class(name).__module__.startswith('vitzoo.')]


def read_text(name: str) -> Text:
    """Split a mixer's module docstring into its parts."""
    first, *blocks = inspect.getdoc(inspect.getmodule(mixer_class(name))).split('\n\n')
    text = Text(' '.join(first.split()))
    for block in blocks:
        if block.startswith('    '):
            text.body.append(f'```text\n{textwrap.dedent(block)}\n```')
        elif block.startswith('* '):
            text.body.append(read_bullets(name, block, text))
        else:
            sentences = re.split(r'(?<=\.)\s+(?=[A-Z])', ' '.join(block.split()))
            text.body.append(' '.join(sentence for sentence in sentences if not take_fact(sentence, text)))
    # join the parts of a formula
    body = '\n\n'.join(part for part in text.body if part).replace('\n```\n\n```text\n', '\n\n')
    text.body = [body] if body else []
    return text


def take_fact(sentence: str, text: Text) -> bool:
    """Add a sentence to the facts if it is one of them, and return whether it is."""
    if 'https://' in sentence:
        text.paper = re.sub(r'^([^;]*), (https://\S+)$', r'[\1](\2)', sentence)
    elif re.search(r'\bO\(', sentence):
        text.costs.append(sentence.removeprefix('Cost: '))
    elif 'is softmax attention' in sentence:
        text.limits.append(sentence)
    else:
        return False
    return True


def read_bullets(name: str, block: str, text: Text) -> str:
    """The variants in a docstring: all of them, or only the mixer's own if each variant is a mixer."""
    bullets = [' '.join(bullet.split()) for bullet in re.split(r'^\* ', block, flags=re.MULTILINE)[1:]]
    own = [bullet for bullet in bullets if name.endswith('_' + bullet.partition(':')[0])]
    if not own:
        return '\n'.join(f'* {bullet}' for bullet in bullets)
    formula, _, cost = own[0].partition(': ')[2].rpartition('; ')
    text.costs.append(f'{cost}.')
    return f'Here {formula}.'


def complexities(costs: list[str]) -> str:
    """The expressions O(...) in some sentences."""
    found = re.findall(r'O\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)', ' '.join(costs))
    return ', '.join(f'`{expression}`' for expression in found)


def options(cls: type[TokenMixer]) -> dict[str, object]:
    """The keywords specific to a mixer, with their defaults."""
    common = {key for base in (TokenMixer, QKVMixer) for key in inspect.signature(base.__init__).parameters}
    own = {}
    for base in cls.__mro__[: cls.__mro__.index(QKVMixer if issubclass(cls, QKVMixer) else TokenMixer)]:
        parameters = inspect.signature(base.__init__).parameters
        own |= {key: parameters[key].default for key in parameters if key not in common | set(own)}
    return own


def build(name: str, grid_size: tuple[int, int], **kwargs) -> TokenMixer:
    """A mixer with the dimensions of the measurements."""
    torch.manual_seed(0)
    return create_mixer(name, DIM, NUM_HEADS, grid_size=grid_size, **kwargs).eval()


def describe_order(papers: Costs, ours: Costs) -> str:
    """MACs of the layer in the order of the paper's products, and in that in which they run."""
    counts = [' and '.join(millions(costs.layer(side)) for side in (14, 56)) for costs in (papers, ours)]
    return (
        f' In the order of the paper the layer has {counts[0]} million MACs at 14 × 14 and 56 × 56 tokens, as it runs'
        f' {counts[1]}.'
    )


@cache
def measure_costs(name: str, papers_order: bool = True) -> Costs:
    """Count parameters and MACs on the meta device."""
    parameters = sum(parameter.numel() for parameter in build(name, GRID, device='meta').parameters())
    attention, projections = {}, {}
    kwargs = PAPERS_ORDER.get(name, {}) if papers_order else {}
    for side in (14, 28, 56):
        mixer, grid_size = build(name, (side, side), device='meta', **kwargs), (side, side)
        x = torch.empty(1, side * side, DIM, device='meta')
        projections[side] = count_projections(mixer, x, grid_size)
        attention[side] = count_call_macs(mixer, x, grid_size) - projections[side]
    return Costs(parameters, attention, projections)


def count_projections(mixer: TokenMixer, x: torch.Tensor, grid_size: tuple[int, int]) -> int:
    """MACs of the linear layers that compute q, k and v, and of the output projection."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        mixer(x, grid_size)
    # mixers without `qkv` have separate layers
    names = ('qkv', 'proj') if isinstance(mixer, QKVMixer) else ('q', 'kv', 'v', 'in_proj', 'proj')
    counts = counter.get_flop_counts()
    return sum(sum(counts.get(f'{type(mixer).__name__}.{name}', {}).values()) for name in names) // 2


def measure_health() -> dict[str, dict[str, list[float]]]:
    """The results of `health` of all mixers that approximate softmax attention, on the same random tokens."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, NUM_HEADS, GRID[0] * GRID[1], DIM // NUM_HEADS)
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))

    @torch.no_grad()
    def measure(mixer: QKVMixer) -> dict[str, list[float]]:
        runs = [mixer.health(std * q, std * k, v, GRID) for std in STDS]
        return {sign: [run[sign].mean().item() for run in runs] for sign in runs[0]}

    health = {}
    for name in own_mixers():
        mixer = build(name, GRID, dtype=torch.float64)
        if mixer.approximates_softmax:
            health[name] = measure(mixer)
            for setting, kwargs in ALSO_MEASURED.get(name, {}).items():
                signs = measure(build(name, GRID, dtype=torch.float64, **kwargs))
                health[name] |= {f'{sign}_{setting}': values for sign, values in signs.items()}
    return health


def exports_to_onnx() -> dict[str, bool]:
    """The mixers that export to ONNX, by docs/export.md, which a test checks with onnxruntime."""
    rows = re.findall(r'^\| `(\w+)` \| \w+ \| (yes|no) \|$', (DOCS / 'export.md').read_text(), re.MULTILINE)
    return {name: answer == 'yes' for name, answer in rows}


def cheaper(costs: dict[str, Costs]) -> str:
    """A sentence on the number of mixers with fewer MACs than softmax attention."""
    counts = [sum(of.layer(side) < costs['softmax'].layer(side) for of in costs.values()) for side in (14, 56)]
    return (
        f'Most are designed for many tokens: with their linear layers, {counts[0]} of the other {len(costs) - 1} have'
        f' fewer MACs than softmax attention at 14 × 14, and {counts[1]} at 56 × 56.'
    )


def millions(macs: int) -> str:
    """In millions, with one decimal below a hundred."""
    return f'{macs / 1e6:,.{int(macs < 1e8)}f}' if macs else '0'


def signs(health: dict[str, list[float]]) -> str:
    """The results of `health` at each standard deviation; a test parses this form."""
    numbers = {sign: ' and '.join(f'{value:.2f}' for value in values) for sign, values in health.items()}
    listed = ', '.join(f'{sign.replace("_", " ")} {pair}' for sign, pair in numbers.items())
    return f'{listed}, for q and k of standard deviation {" and ".join(map(str, STDS))}.'


def properties(cls: type[TokenMixer], onnx: bool) -> str:
    """Grid, options and export of a mixer."""
    grid = 'parameters for one grid' if cls.grid_bound else 'any grid without resampling'
    drop = '`attn_drop`' if cls.attn_weights else 'no `attn_drop`'
    bias = 'relative positions by `rel_bias`' if cls.has_rel_bias else 'no relative positions'
    return f'{grid}; {drop}; {bias}; {"exports" if onnx else "does not export"} to ONNX.'


if __name__ == '__main__':
    main()
