"""Panels of the quick analysis: the kinds of tensor, and the loss; each function draws one panel on its axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.transforms import blended_transform_factory

from quantexp.analysis.numerics.lines import set_scale
from quantexp.analysis.numerics.series import Scale
from quantexp.analysis.quick.by_kind import OfKind
from quantexp.analysis.scheme_style import BASELINE, scheme_style
from quantexp.analysis.style import (
    BLUE,
    TICK_PT,
    VERMILLION,
    dress,
    name_lines,
    power_of_two,
    quant_colour,
    say_instead,
)
from quantexp.runs.metrics import LossCurve

#: Heights of a kind's histogram and of its format's range, in rows.
_RIDGE, _BAND = 0.78, 0.86
_RIDGE_COLOUR = "#4A4A4A"
#: Bins with a smaller fraction of a kind's elements do not widen the axis.
_LEAST_SHARE = 1e-4
_NORMAL_ALPHA, _SUBNORMAL_ALPHA = 0.34, 0.13
#: Curves with fewer points have markers.
_FEW_POINTS = 40
#: The position of a legend between axes and title.
_ABOVE: dict[str, Any] = {
    "loc": "lower left",
    "bbox_to_anchor": (0.0, 1.0),
    "ncols": 2,
    "frameon": False,
    "fontsize": TICK_PT,
    "borderaxespad": 0.1,
    "borderpad": 0.2,
}
_TITLE_PAD_PT = 20


def draw_magnitudes(ax: Axes, kinds: Sequence[OfKind], *, is_assumed: bool = False) -> None:
    """Draw a histogram of log2 |x| for each kind, each scaled to its maximum, over the range of its format."""
    dress(ax, "a  Magnitudes and the format's range", "magnitude |x|", "", "x", _TITLE_PAD_PT)
    drawn = [one for one in kinds if one.exponents.counts]
    if not drawn:
        say_instead(ax, "no finite element but zero")
        return
    edges: list[int] = []
    for row, one in enumerate(kinds):
        _draw_band(ax, row, one)
        if one.exponents.counts:
            edges += _draw_ridge(ax, row, one)
    ax.set_xlim(min(edges) - 1, max(edges) + 1)
    ax.set_ylim(len(kinds) - 0.45, -0.55)
    ax.set_yticks(range(len(kinds)), [_row_name(one, is_assumed) for one in kinds])
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: power_of_two(round(value))))
    _explain_bands(ax, kinds)


def _draw_ridge(ax: Axes, row: int, one: OfKind) -> list[int]:
    """Draw a histogram; returns its first and last relevant bin."""
    counts = one.exponents
    highest = max(counts.counts)
    exponents = [exponent for exponent, _ in counts.items()]
    xs = [*exponents, exponents[-1] + 1]
    base = row + _BAND / 2
    tops = [base - _RIDGE * count / highest for count in counts.counts]
    ax.fill_between(
        xs, base, [*tops, tops[-1]], step="post", color=_RIDGE_COLOUR, alpha=0.85, lw=0, zorder=3
    )
    zeros = one.num_zeros / one.num_finite
    if zeros >= 0.001:
        place = blended_transform_factory(ax.transAxes, ax.transData)
        words = f"{zeros:.1%} zero"
        ax.text(0.99, row - 0.28, words, transform=place, ha="right", va="center", fontsize=TICK_PT)
    kept = [e for e, count in counts.items() if count >= _LEAST_SHARE * counts.total]
    return [kept[0], kept[-1] + 1]


def _draw_band(ax: Axes, row: int, one: OfKind) -> None:
    if one.range is None:
        return
    least, normal, largest = map(
        math.log2, (one.range.least, one.range.least_normal, one.range.largest)
    )
    colour = quant_colour(one.formats[0])
    bottom, top = row - _BAND / 2, row + _BAND / 2
    for left, right, alpha in (
        (least, normal, _SUBNORMAL_ALPHA),
        (normal, largest, _NORMAL_ALPHA),
    ):
        ax.fill_between([left, right], bottom, top, color=colour, alpha=alpha, lw=0, zorder=1)
    ax.vlines([least, largest], bottom, top, color=colour, lw=1.4, zorder=4)


def _row_name(one: OfKind, is_assumed: bool) -> str:
    if not one.formats:
        return f"{one.kind.value}\nnot quantised"
    formats = ", ".join(one.formats[:2]) + (", ..." if len(one.formats) > 2 else "")
    return f"{one.kind.value}\n{'if ' if is_assumed else ''}{formats}"


def _explain_bands(ax: Axes, kinds: Sequence[OfKind]) -> None:
    bands = [one for one in kinds if one.range is not None]
    if not bands:
        return
    colour = quant_colour(bands[0].formats[0])
    of_median = all(one.range is not None and one.range.of_median for one in bands)
    where = "the median scale" if of_median else "the scale of the largest element"
    ax.legend(
        handles=[
            Patch(color=colour, alpha=_NORMAL_ALPHA, lw=0, label=f"range at {where}"),
            Patch(color=colour, alpha=_SUBNORMAL_ALPHA, lw=0, label="subnormal"),
        ],
        handlelength=1.4,
        columnspacing=1.2,
        **_ABOVE,
    )


def draw_shares(ax: Axes, kinds: Sequence[OfKind]) -> None:
    """Draw underflow and saturation of each kind: a mark at the median operand, a line to the worst."""
    dress(ax, "b  Underflow, saturation", "share of elements", "", "x", _TITLE_PAD_PT)
    set_scale(ax, Scale.SHARE, "x")
    for colour, marker, offset, name, values in (
        (BLUE, "o", -0.14, "became zero", [one.underflow for one in kinds]),
        (VERMILLION, "D", 0.14, "saturated", [one.saturated for one in kinds]),
    ):
        rows = [(row + offset, shares) for row, shares in enumerate(values) if shares]
        middles = [median(shares) for _, shares in rows]
        ax.hlines(
            [y for y, _ in rows], middles, [max(shares) for _, shares in rows], color=colour, lw=1.6
        )
        ax.plot(
            middles, [y for y, _ in rows], marker, color=colour, ms=5, label=name, clip_on=False
        )
    for row, one in enumerate(kinds):
        if not one.underflow and not one.saturated:
            place = blended_transform_factory(ax.transAxes, ax.transData)
            words = "no operand judged" if one.formats else "not quantised"
            ax.text(0.5, row, words, transform=place, ha="center", va="center", fontsize=TICK_PT)
    ax.set_ylim(len(kinds) - 0.45, -0.55)
    ax.set_yticks(range(len(kinds)), [""] * len(kinds))
    ax.tick_params(axis="y", length=0)
    ax.legend(handletextpad=0.1, columnspacing=0.8, **_ABOVE)


#: Letters of a name for which there is room beside the panel.
_LONGEST_NAME = 18


def draw_loss(
    ax: Axes, curve: LossCurve, scheme: str, letter: str, baseline: LossCurve | None = None
) -> None:
    """Draw the training loss by iteration, and that of the matched bf16 run if there is one."""
    dress(ax, f"{letter}  Training loss", "iteration", "loss (nats/token)", grid="both")
    curves = [(curve, scheme)]
    if baseline is not None and baseline.iterations:
        curves = [(baseline, BASELINE), (curve, scheme)]
    if not curve.iterations:
        say_instead(ax, "no finite loss" if curve.nonfinite else "no training loss recorded")
        return
    ends = []
    for one, name in curves:
        style = scheme_style(name)
        marker = style.marker if len(one.iterations) < _FEW_POINTS else ""
        ax.plot(
            one.iterations,
            one.losses,
            color=style.colour,
            linestyle=style.linestyle,
            lw=1.6,
            marker=marker,
            ms=3.5,
            zorder=2 if name == BASELINE else 3,
        )
        shown = name if len(name) <= _LONGEST_NAME else "this scheme"  # which the title names
        ends.append((one.iterations[-1], one.losses[-1], shown, style))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    ax.margins(x=0.03, y=0.1)
    if len(ends) > 1:
        name_lines(ax, ends)
    if curve.nonfinite:
        more = f" and {len(curve.nonfinite) - 1} more" if len(curve.nonfinite) > 1 else ""
        words = f"not finite: iteration {curve.nonfinite[0]}{more}"
        ax.text(0.98, 0.96, words, transform=ax.transAxes, ha="right", va="top", fontsize=TICK_PT)
