"""Figures that compare schemes, or the formats under which one run is judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from quantexp.analysis.numerics.lines import (
    Mark,
    add_legend,
    finite,
    legend_inch,
    set_scale,
    write_note,
    write_title,
)
from quantexp.analysis.numerics.series import (
    AS_DECLARED,
    SATURATED,
    SQNR,
    UNDERFLOW,
    Judged,
    Measure,
    Run,
    groups_of,
    in_order,
    modules_of,
)
from quantexp.analysis.scheme_style import SchemeStyle, scheme_styles
from quantexp.analysis.style import LABEL_PT, NOTE_PT, TICK_PT, dress, new_figure
from quantexp.analysis.tensors.place import in_flow
from quantexp.capture.statistics.counts import Counts, from_json

_ROW_INCH, _TOP_INCH, _BOTTOM_INCH, _NAMES_INCH = 0.26, 1.0, 0.75, 1.5
#: The height of the legend.
_ENTRY_INCH = 2.55
_PANEL_INCH, _PANEL_ROW_INCH, _COLUMNS = 2.35, 1.35, 5


@dataclass(frozen=True)
class Contestant:
    """A scheme, or a format under which a run was judged."""

    label: str
    style: SchemeStyle
    judged: Sequence[Judged]


def contestants(runs: Sequence[Run]) -> list[Contestant]:
    """All contestants: each run's own scheme, and each requested format."""
    names = labels_of(runs)
    groups = [(run, group, judged) for run in runs for group, judged in groups_of(run).items()]
    styles = scheme_styles([run.scheme if g == AS_DECLARED else g for run, g, _ in groups])
    schemes = []
    for (run, group, judged), style in zip(groups, styles, strict=True):
        label = names[run.label] if group == AS_DECLARED else group
        if group != AS_DECLARED and len(runs) > 1:
            label = f"{group} ({names[run.label]})"
        schemes.append(Contestant(label, style, judged))
    return schemes


def labels_of(runs: Sequence[Run]) -> dict[str, str]:
    """The scheme of each run if the schemes are distinct, else the run's name."""
    schemes = [run.scheme for run in runs]
    apart = len(set(schemes)) == len(schemes)
    return {run.label: run.scheme if apart else run.label for run in runs}


def fidelity_by_scheme(schemes: Sequence[Contestant]) -> Figure:
    """A row for each operand of each module, with a mark for each contestant at the median of its tensors."""
    everyone = [one for contestant in schemes for one in contestant.judged]
    names = [
        (module, series)
        for module in modules_of(everyone)
        for series in in_order(j.series for j in everyone if j.module == module)
    ]
    width = 11.5
    top = _TOP_INCH + legend_inch(width, [c.label for c in schemes], _ENTRY_INCH)
    height = top + _ROW_INCH * len(names) + _BOTTOM_INCH
    figure = new_figure(width, height)
    axes = figure.subplots(1, 3, sharey=True, width_ratios=[1.5, 1, 1])
    figure.subplots_adjust(
        left=_NAMES_INCH / width,
        right=1 - 0.3 / width,
        top=1 - top / height,
        bottom=_BOTTOM_INCH / height,
        wspace=0.07,
    )
    missing = 0
    for ax, measure in zip(axes, (SQNR, UNDERFLOW, SATURATED), strict=True):
        dress(ax, "", measure.label, "", grid="both")
        set_scale(ax, measure.scale, "x")
        missing += sum(
            _draw_marks(ax, names, c, measure, i, len(schemes)) for i, c in enumerate(schemes)
        )
        for y in range(1, len(names)):
            if names[y][0] != names[y - 1][0]:
                ax.axhline(y - 0.5, color="#BBBBBB", lw=0.8)
    axes[0].set_yticks(range(len(names)), [f"{m} {s}" for m, s in names], fontsize=TICK_PT)
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    write_title(figure, "Quantisation error by scheme", "each operand as each scheme holds it")
    _add_legend(figure, schemes)
    words = "mark: median over tensors, line: least to largest"
    more = f"; {missing} tensors without a finite number are not drawn" if missing else ""
    write_note(figure, words + more)
    return figure


def _draw_marks(
    ax: Axes,
    names: Sequence[tuple[str, str]],
    contestant: Contestant,
    measure: Measure,
    place: int,
    number: int,
) -> int:
    """Draw one contestant, vertically offset from the others; returns the number of tensors not drawn."""
    offset = 0.6 * ((place + 0.5) / number - 0.5)
    missing = 0
    values: dict[tuple[str, str], list[float]] = {}
    for one in contestant.judged:
        key = (one.module, one.series)
        values.setdefault(key, []).append(getattr(one.operand.fidelity, measure.name))
    style = contestant.style
    for key, numbers in values.items():
        kept = finite(numbers)
        missing += len(numbers) - len(kept)
        if kept:
            y = names.index(key) + offset
            ax.hlines(y, min(kept), max(kept), color=style.colour, lw=1.0, alpha=0.5)
            ax.plot(
                [median(kept)], [y], style.marker, color=style.colour, ms=4.5, mew=0, clip_on=False
            )
    return missing


def magnitudes_by_scheme(runs: Sequence[Run]) -> Figure | None:
    """Magnitudes of each kind of tensor, one line for each run; None without statistics."""
    names = labels_of(runs)
    each = zip(runs, scheme_styles([run.scheme for run in runs]), strict=True)
    styles = {run.label: style for run, style in each}
    sums: dict[str, dict[str, Counts]] = {}
    for run in runs:
        for one in run.tensors:
            counts = from_json(one.log2_magnitude)
            if counts.counts and not one.place.is_scale:
                by_run = sums.setdefault(one.place.kind, {})
                by_run[run.label] = by_run.get(run.label, Counts()) + counts
    if not sums:
        return None
    modules = in_flow(kind.partition(" ")[0] for kind in sums)
    kinds = [
        f"{m} {t}"
        for m in modules
        for t in in_order(k.partition(" ")[2] for k in sums if k.partition(" ")[0] == m)
    ]
    columns = min(_COLUMNS, len(kinds))
    rows = -(-len(kinds) // columns)
    width = max(7.0, 0.6 + columns * _PANEL_INCH + 0.2)
    top = _TOP_INCH + 0.15 + legend_inch(width, list(names.values()), _ENTRY_INCH)
    height = top + rows * (_PANEL_ROW_INCH + 0.3) + 0.5
    figure = new_figure(width, height)
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    figure.subplots_adjust(
        left=0.65 / width,
        right=1 - 0.2 / width,
        top=1 - top / height,
        bottom=0.75 / height,
        hspace=0.45,
        wspace=0.1,
    )
    for place, ax in enumerate(axes.flat):
        if place >= len(kinds):
            ax.set_visible(False)
            continue
        last, first = place + columns >= len(kinds), place % columns == 0
        dress(ax, "", "log2 |x|" if last else "", "share" if first else "", grid="both")
        ax.set_title(kinds[place], fontsize=LABEL_PT, loc="left")
        _draw_histograms(ax, sums[kinds[place]], styles)
    shares = (n / c.total for by_run in sums.values() for c in by_run.values() for n in c.counts)
    axes[0, 0].set_ylim(0, 1.06 * max(shares))
    write_title(
        figure,
        "Magnitudes by scheme",
        "the same tensors of each run, all layers; before quantisation",
    )
    _legend(
        figure,
        {names[label]: Mark(style.colour, "", style.linestyle) for label, style in styles.items()},
    )
    return figure


def _draw_histograms(
    ax: Axes, by_run: Mapping[str, Counts], styles: Mapping[str, SchemeStyle]
) -> None:
    for label, counts in by_run.items():
        xs = [counts.first - 1, *(e for e, _ in counts.items()), counts.first + len(counts.counts)]
        ys = [0.0, *(n / counts.total for _, n in counts.items()), 0.0]
        style = styles[label]
        ax.step(xs, ys, where="mid", color=style.colour, lw=1.2, ls=style.linestyle)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    ax.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    ax.tick_params(labelsize=NOTE_PT)


def _add_legend(figure: Figure, schemes: Sequence[Contestant]) -> None:
    _legend(figure, {c.label: Mark(c.style.colour, c.style.marker, "") for c in schemes})


def _legend(figure: Figure, marks: Mapping[str, Mark]) -> None:
    add_legend(figure, marks, entry_inch=_ENTRY_INCH)
