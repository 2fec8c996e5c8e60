"""Writes the tables of docs/swap.md. Run by `make docs`.

With --measure, it first times the model of the last table again, which takes some minutes on an idle machine; without,
the times on the page are kept.
"""

import logging
import re
import sys
import warnings

import timm
import torch
from docs_mixers import own_mixers
from pages import ROOT, fill, to_table
from timm.layers import RotaryEmbeddingCat

import vitzoo
from vitzoo.bench._harness import Spread, time_in_turn
from vitzoo.machine import describe_machine, format_machine
from vitzoo.metrics import count_macs
from vitzoo.mixers import mixer_class
from vitzoo.mixers._rope import Rope

PAGE = ROOT / 'docs' / 'swap.md'
TINY = dict(img_size=64, embed_dim=48, num_heads=4, depth=1, num_classes=5)
FAMILIES = {
    'ViT': ('vit_tiny_patch16_224', {}),
    'DINOv3, PE': ('vit_small_patch16_dinov3_qkvb', {}),
    'EVA-02': ('eva02_base_patch16_clip_224', {}),
    'qk_norm': ('vit_tiny_patch16_224', {'qk_norm': True}),
    'BEiT, RelPos': ('beit_base_patch16_224', {}),
    'CaiT': ('cait_xxs24_224', {}),
    'SAM': ('samvit_base_patch16_224', {'global_attn_indexes': (0,)}),
}
LABELS = {
    'qkv': 'q, k, v',
    'proj': 'proj',
    'q_norm': 'qk_norm',
    'k_norm': 'qk_norm',
    'scale_norm': 'scale_norm',
    'rel_bias': 'bias',
    'prefix_bias': 'bias of the class token',
    'proj_l': 'talking heads',
    'proj_w': 'talking heads',
}
MODEL, SIZES = 'vit_small_patch16_dinov3', (224, 512, 1024)
MIXERS = ('softmax', 'ls', 'nystrom', 'linear')
DIM, GRID, SHIFT = 64, (14, 14), 5


def main(argv: list[str]) -> None:
    """Write the page."""
    # weights that are lost are the content of a table
    logging.disable()
    warnings.filterwarnings('ignore', 'nystrom with num_landmarks')
    page = PAGE.read_text()
    times = measure_times() if argv == ['--measure'] else read_times(page)
    PAGE.write_text(fill(page, tables(*times)))
    print(f'wrote {PAGE}', file=sys.stderr)


def tables(times: dict[tuple[str, int], str], machine: str) -> dict[str, str]:
    """The tables of the page by name."""
    return {
        'weights': weights_table(),
        'rotary': rotary_table(),
        'crossover': f'{crossover_table(times)}\n\n{machine}',
    }


def weights_table() -> str:
    """The weights of the attention of each family that mixers inherit; those that inherit the same have one line."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for mixer in own_mixers():
        groups.setdefault(tuple(lost_weights(mixer, family) for family in FAMILIES), []).append(f'`{mixer}`')
    # the largest group first
    lines = sorted(groups.items(), key=lambda group: -len(group[1]))
    return to_table(['mixers', *FAMILIES], [[', '.join(mixers), *cells] for cells, mixers in lines])


def lost_weights(mixer: str, family: str) -> str:
    """A cell: all, or the weights that the mixer does not inherit."""
    name, kwargs = FAMILIES[family]
    try:
        model = vitzoo.swap_mixer(timm.create_model(name, **TINY, **kwargs), mixer)
    except ValueError:
        return 'refused'
    report = model.inheritance[0]
    parts = {}
    for tensor in report.lost:
        label = LABELS[tensor.split('.')[0]]
        parts[label] = parts.get(label, False) or tensor not in report.dropped
    return (
        'without ' + ', '.join(f'part of {part}' if kept else part for part, kept in parts.items()) if parts else 'all'
    )


def rotary_table() -> str:
    """The mixers with rotary positions, and how far their output depends on more than offsets."""
    lines = [[f'`{mixer}`', f'{shift_error(mixer):.1e}'] for mixer in own_mixers() if mixer_class(mixer).has_rope]
    return to_table(['mixer', 'change by a shift'], lines)


@torch.no_grad()
def shift_error(mixer: str) -> float:
    """Relative change of the output if every position moves by the same offset, on random tokens."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, GRID[0] * GRID[1], DIM, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    layer = vitzoo.create_mixer(mixer, DIM, 2, grid_size=GRID, dtype=torch.float64).eval()
    for name, parameter in layer.named_parameters():
        if name == 'qkv.weight':
            # queries and keys of standard deviation 1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / DIM**0.5)
    outputs = []
    for offset in (0, SHIFT):
        embed = RotaryEmbeddingCat(DIM // 2, in_pixels=False, feat_shape=GRID, grid_offset=offset).get_embed()
        outputs.append(layer(x, GRID, Rope(embed.double())))
    return float((outputs[1] - outputs[0]).norm() / outputs[0].norm())


def crossover_table(times: dict[tuple[str, int], str]) -> str:
    """MACs and time of a model at several image sizes."""
    header = ['mixer', *(f'{size}: GMACs' for size in SIZES), *(f'{size}: seconds' for size in SIZES)]
    lines = [
        [f'`{mixer}`', *(f'{gmacs(mixer, size):.1f}' for size in SIZES), *(times[mixer, size] for size in SIZES)]
        for mixer in MIXERS
    ]
    return to_table(header, lines)


def build(mixer: str, size: int, **kwargs) -> torch.nn.Module:
    """The model of the last table."""
    return vitzoo.swap_mixer(timm.create_model(MODEL, img_size=size, **kwargs).eval(), mixer)


def gmacs(mixer: str, size: int) -> float:
    return count_macs(build(mixer, size, device='meta'), size) / 1e9


@torch.no_grad()
def measure_times() -> tuple[dict[tuple[str, int], str], str]:
    """Median seconds for one image, by mixer and size, and a line on the machine."""
    times = {}
    for size in SIZES:
        images = torch.randn(3, 1, 3, size, size)
        models = {mixer: build(mixer, size) for mixer in MIXERS}
        calls = {mixer: lambda i, model=model, x=images: model(x[i % 3]) for mixer, model in models.items()}
        samples = time_in_turn(calls, torch.device('cpu'), seconds=5, min_rounds=3)
        times |= {(mixer, size): f'{Spread.of(samples[mixer]).median:.2f}' for mixer in MIXERS}
    return times, f'Times: one image in float32; {format_machine(describe_machine(torch.device("cpu")))}.'


def read_times(page: str) -> tuple[dict[tuple[str, int], str], str]:
    """The times and the line on the machine that the page has."""
    table = page.partition('<!-- crossover: made by `make docs` -->')[2].partition('<!-- end of crossover -->')[0]
    rows = [[cell.strip(' `') for cell in line.strip('|').split('|')] for line in table.splitlines()]
    cells = {row[0]: row[-len(SIZES) :] for row in rows if row[0] in MIXERS}
    times = {(mixer, size): cells.get(mixer, ['–'] * len(SIZES))[i] for mixer in MIXERS for i, size in enumerate(SIZES)}
    machine = re.search(r'^Times: .*$', table, re.MULTILINE)
    return times, machine.group() if machine else 'Not timed yet.'


if __name__ == '__main__':
    main(sys.argv[1:])
