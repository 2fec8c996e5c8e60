"""Time and memory of every mixer over the number of tokens, in one figure with a panel for each mixer."""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# column of the results file, factor, and label of the axis
_QUANTITIES = {
    'time': ('seconds', 1e3, 'milliseconds'),
    'memory': ('peak_mb', 1.0, 'peak memory in MB'),
}
_LINE_STYLES: dict[str, dict[str, Any]] = {
    'forward': dict(color='C0', marker='o'),
    'forward + backward': dict(color='C1', marker='s'),
}
_PANELS_PER_ROW = 7
_TICKS = (196, 1024, 4096, 16384)


def plot_scaling(path: str, quantity: str, rows: list[dict], title: str, baseline: str = 'softmax') -> None:
    """Draw the 'time' or 'memory' of the mixers in `rows`, each panel with the baseline in grey."""
    # imported here because matplotlib takes a second
    from matplotlib.figure import Figure

    curves, label = _curves(quantity, rows), _QUANTITIES[quantity][2]
    # the unfused form of the baseline comes first
    names = sorted({name for name, _ in curves} - {baseline}, key=lambda name: (not name.startswith(baseline), name))
    columns = min(_PANELS_PER_ROW, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(2.1 * columns + 0.6, 1.9 * lines + 1.2), layout='constrained')
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, name in zip(grid, names):
        _draw_panel(axes, name, curves, baseline)
    for axes in grid[len(names) :]:
        axes.axis('off')
    # set last, because log scales replace the ticks
    sizes = sorted({tokens for points in curves.values() for tokens, _ in points})
    grid[0].set_xticks([tokens for tokens in _TICKS if tokens in sizes] or sizes)
    grid[0].xaxis.set_major_formatter('{x:,.0f}')
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside lower center', ncols=len(labels), frameon=False)
    figure.supylabel(label, fontsize='medium')
    figure.suptitle(f'{label} of a layer, by number of tokens\n{title}', fontsize='medium')
    figure.savefig(path, dpi=130)


def _curves(quantity: str, rows: list[dict]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Points (tokens, value) by mixer and pass."""
    column, factor, _ = _QUANTITIES[quantity]
    curves = defaultdict(list)
    for row in rows:
        curves[row['name'], row['what']].append((row['tokens'], factor * row[column]))
    return {curve: sorted(points) for curve, points in curves.items()}


def _draw_panel(axes: 'Axes', name: str, curves: dict, baseline: str) -> None:
    for measured_pass, style in _LINE_STYLES.items():
        if (baseline, measured_pass) in curves:
            grey: dict[str, Any] = dict(
                color='0.65', linewidth=1, linestyle='--' if measured_pass == 'forward' else '-'
            )
            axes.plot(*zip(*curves[baseline, measured_pass]), **grey, label=f'softmax (fused), {measured_pass}')
        if (name, measured_pass) in curves:
            axes.plot(*zip(*curves[name, measured_pass]), **style, markersize=3, linewidth=1.4, label=measured_pass)
    axes.set(xscale='log', yscale='log')
    axes.set_title(name, fontsize='small')
    axes.tick_params(labelsize='x-small')
    axes.minorticks_off()
    axes.grid(alpha=0.3)
