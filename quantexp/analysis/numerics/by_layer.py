"""Figures over layers, iterations and ranks: heat maps, overflow, differences between ranks, exponents of scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from quantexp.analysis.measures.operand import Axis
from quantexp.analysis.numerics.heat import draw_heat
from quantexp.analysis.numerics.lines import (
    add_legend,
    draw_lines,
    legend_inch,
    mark_of,
    write_note,
    write_title,
)
from quantexp.analysis.numerics.series import (
    AMAX,
    KURTOSIS,
    NONFINITE,
    OPERAND_MEASURES,
    SATURATED,
    SQNR,
    STD,
    TENSOR_MEASURES,
    UNDERFLOW,
    Judged,
    Measure,
    Member,
    Run,
    in_order,
    modules_of,
    operand_members,
    tensor_members,
)
from quantexp.analysis.style import dress, new_figure
from quantexp.capture.statistics.counts import Counts

_OVER_ITERATIONS = (AMAX, STD, KURTOSIS)


def operand_heat(run: Run, group: str, judged: Sequence[Judged]) -> Figure:
    """SQNR, underflow, saturation and relative error of every operand by layer."""
    panels = {measure: operand_members(judged, measure) for measure in OPERAND_MEASURES}
    return draw_heat(f"Numerics by layer: {run.label}", about_group(run, group), panels)


def tensor_heat(run: Run) -> Figure:
    """Magnitude, spread, kurtosis and zeros of every tensor by layer."""
    panels = {measure: tensor_members(run.tensors, measure) for measure in TENSOR_MEASURES}
    return draw_heat(f"Tensors by layer: {run.label}", "values before quantisation", panels)


def overflow(run: Run, group: str, judged: Sequence[Judged]) -> Figure:
    """Saturation and underflow of every operand, and NaN and Inf of its tensor, by layer."""
    rows = {measure: operand_members(judged, measure) for measure in (SATURATED, UNDERFLOW)}
    operands = {j.place: j.series for j in reversed(judged)}
    rows[NONFINITE] = [
        replace(member, series=operands[member.place])
        for member in tensor_members(run.tensors, NONFINITE)
        if member.place in operands
    ]
    title = f"Overflow and underflow by layer: {run.label}"
    about = (
        f"{about_group(run, group)}, after the scale in force; line: median, band: least to largest"
    )
    return draw_lines(title, about, rows, lambda member: member.place.layer, "layer")


def over_iterations(run: Run, groups: dict[str, list[Judged]]) -> Figure | None:
    """Every measure by iteration; None with a single iteration."""
    if len({one.place.iteration for one in run.tensors}) < 2:
        return None
    rows = {measure: tensor_members(run.tensors, measure) for measure in _OVER_ITERATIONS}
    for group, judged in groups.items():
        of_tensors = [replace(one, series=one.place.tensor) for one in judged]
        for measure in (SQNR, UNDERFLOW):
            label = f"{measure.label.partition(' (share')[0]},\n{group}"
            rows[replace(measure, label=label)] = operand_members(of_tensors, measure)
    about = f"scheme {run.scheme}; line: median over layers, band: least to largest"
    title = f"Numerics over iterations: {run.label}"
    return draw_lines(title, about, rows, lambda member: member.place.iteration, "iteration")


def between_ranks(run: Run) -> Figure | None:
    """Each rank relative to the mean over ranks; None with a single rank."""
    ranks = {one.place.rank for one in run.tensors}
    if len(ranks) < 2:
        return None
    rows = {
        Measure(m.name, f"{m.label},\nof the mean over ranks"): _of_the_mean(
            tensor_members(run.tensors, m)
        )
        for m in (STD, AMAX, KURTOSIS)
    }
    title = f"Ranks: {run.label}"
    about = "each tensor against the same tensor of the other ranks (1: all alike); what one rank alone has is left out"
    return draw_lines(title, about, rows, lambda member: member.place.rank, "rank")


def _of_the_mean(members: Sequence[Member]) -> list[Member]:
    """Each number divided by the mean over ranks of the same tensor, iteration and micro-batch."""
    together: dict[object, list[Member]] = {}
    for member in members:
        together.setdefault(replace(member.place, rank=0, quant_type=""), []).append(member)
    relative = []
    for same in together.values():
        average = mean(member.value for member in same)
        if len(same) > 1 and average:
            relative += [replace(member, value=member.value / average) for member in same]
    return relative


def about_group(run: Run, group: str) -> str:
    """`scheme FA_linear_mxfp8, operands as declared`."""
    how = "operands as declared" if group == "as declared" else f"operands under {group}"
    return f"scheme {run.scheme}, {how}"


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
