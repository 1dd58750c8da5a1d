"""Scale exponents: the count of each exponent of the actual scales, for each operand of each module."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from quantexp.analysis.measures.operand import Axis
from quantexp.analysis.numerics.by_layer import about_group
from quantexp.analysis.numerics.lines import add_legend, legend_inch, write_note, write_title
from quantexp.analysis.numerics.marks import mark_of
from quantexp.analysis.numerics.series import Judged, Run, in_order, modules_of
from quantexp.analysis.style import dress, new_figure
from quantexp.capture.statistics.counts import Counts

_PANEL_INCH, _ROW_INCH, _COLUMNS = 3.1, 2.0, 3
_TOP_INCH, _BOTTOM_INCH, _LEFT_INCH = 0.98, 0.75, 0.7


def scale_exponents(run: Run, group: str, judged: Sequence[Judged]) -> Figure:
    """A panel for each module, over the blocks of all layers and iterations."""
    modules = modules_of(judged)
    columns = min(_COLUMNS, len(modules))
    rows = -(-len(modules) // columns)
    width = max(6.5, _LEFT_INCH + columns * _PANEL_INCH + 0.2)
    top = _TOP_INCH + legend_inch(width, {j.series for j in judged})
    height = top + rows * _ROW_INCH + (rows - 1) * 0.45 + _BOTTOM_INCH
    figure = new_figure(width, height)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True)
    figure.subplots_adjust(
        left=_LEFT_INCH / width,
        right=1 - 0.2 / width,
        top=1 - top / height,
        bottom=_BOTTOM_INCH / height,
        hspace=0.42,
        wspace=0.25,
    )
    zero = nan = 0
    for place, ax in enumerate(axes.flat):
        if place >= len(modules):
            ax.set_visible(False)
            continue
        sums: dict[str, Counts] = {}
        for one in judged:
            if one.module == modules[place]:
                counts = sums.get(one.series, Counts())
                sums[one.series] = counts + one.operand.scale_exponents
                zero += one.operand.zero_blocks
                nan += one.operand.nan_blocks
        last = place + columns >= len(modules)
        ax.tick_params(labelbottom=last)
        unit = "share of scales" if place % columns == 0 else ""
        dress(ax, modules[place], "exponent of the scale" if last else "", unit, grid="both")
        for series in in_order(sums):
            counts, mark = sums[series], mark_of(series)
            xs = [
                counts.first - 1,
                *(e for e, _ in counts.items()),
                counts.first + len(counts.counts),
            ]
            ys = [0.0, *(n / max(1, counts.total) for _, n in counts.items()), 0.0]
            ax.step(xs, ys, where="mid", color=mark.colour, ls=mark.line, lw=1.3)
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    write_title(figure, f"Scale exponents: {run.label}", f"{about_group(run, group)}; all layers")
    add_legend(figure, {name: mark_of(name) for name in in_order(j.series for j in judged)})
    write_note(figure, _note(judged, zero, nan))
    return figure


def _note(judged: Sequence[Judged], zero: int, nan: int) -> str:
    axes = {j.operand.axis for j in judged}
    unit = {
        frozenset({Axis.TENSOR}): "one scale a tensor",
        frozenset({Axis.ROWS, Axis.COLUMNS}): "one scale a block",
    }.get(frozenset(axes), "one scale a block, or a tensor where the format has no blocks")
    words = [f"a value is its code times 2^exponent (nvfp4: rounded down); {unit}"]
    if zero:
        words.append(f"{zero} blocks of zeros are left out")
    if nan:
        words.append(f"{nan} blocks with NaN or Inf are left out")
    return "; ".join(words)
