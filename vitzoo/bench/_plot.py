"""How time and memory grow with the number of tokens: every mixer in one figure, a small panel for each."""

from collections import defaultdict

# what a panel shows of the rows, and its label
QUANTITIES = {
    'time': ('seconds', 1e3, 'milliseconds'),
    'memory': ('peak_mb', 1.0, 'peak memory in MB'),
}
STYLES = {'forward': dict(color='C0', marker='o'), 'forward + backward': dict(color='C1', marker='s')}
COLUMNS = 7
TICKS = (196, 1024, 4096, 16384)


def plot_scaling(path: str, quantity: str, rows: list[dict], title: str, baseline: str = 'softmax') -> None:
    """Draw 'time' or 'memory' of the mixers in `rows`, in each panel beside that of the baseline in grey."""
    # matplotlib takes a second to import
    from matplotlib.figure import Figure

    curves, label = _curves(quantity, rows), QUANTITIES[quantity][2]
    # the reference's other form first
    names = sorted({name for name, _ in curves} - {baseline}, key=lambda name: (not name.startswith(baseline), name))
    columns = min(COLUMNS, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(2.1 * columns + 0.6, 1.9 * lines + 1.2), layout='constrained')
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, name in zip(grid, names):
        _draw_panel(axes, name, curves, baseline)
    for axes in grid[len(names) :]:
        axes.axis('off')
    # after log axes have made their own
    sizes = sorted({tokens for points in curves.values() for tokens, _ in points})
    grid[0].set_xticks([tokens for tokens in TICKS if tokens in sizes] or sizes)
    grid[0].xaxis.set_major_formatter('{x:,.0f}')
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside lower center', ncols=len(labels), frameon=False)
    figure.supylabel(label, fontsize='medium')
    figure.suptitle(f'{label} of a layer, by number of tokens\n{title}', fontsize='medium')
    figure.savefig(path, dpi=130)


def _curves(quantity: str, rows: list[dict]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """Points (tokens, value) of each mixer, forward and with backward."""
    key, factor, _ = QUANTITIES[quantity]
    curves = defaultdict(list)
    for row in rows:
        curves[row['name'], row['what']].append((row['tokens'], factor * row[key]))
    return {key: sorted(points) for key, points in curves.items()}


def _draw_panel(axes, name: str, curves: dict, baseline: str) -> None:
    for what, style in STYLES.items():
        if (baseline, what) in curves:
            grey = dict(color='0.65', linewidth=1, linestyle='--' if what == 'forward' else '-')
            axes.plot(*zip(*curves[baseline, what]), **grey, label=f'softmax (fused), {what}')
        if (name, what) in curves:
            axes.plot(*zip(*curves[name, what]), **style, markersize=3, linewidth=1.4, label=what)
    axes.set(xscale='log', yscale='log')
    axes.set_title(name, fontsize='small')
    axes.tick_params(labelsize='x-small')
    axes.minorticks_off()
    axes.grid(alpha=0.3)
