"""HiF8's detailed analysis: the used precision tiers, and the format's values over the data at the actual scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from quantexp.analysis.measures.hif8 import Tier, tier_of, tier_shares
from quantexp.analysis.numerics.by_layer import about_group
from quantexp.analysis.numerics.lines import finite, mark_of, write_note, write_title
from quantexp.analysis.numerics.series import Judged, Run, in_order, modules_of
from quantexp.analysis.style import (
    BLUE,
    GREY,
    INK,
    NOTE_PT,
    ORANGE,
    SKY,
    TICK_PT,
    VERMILLION,
    dress,
    new_figure,
    power_of_two,
)
from quantexp.analysis.tensors.place import Place
from quantexp.capture.reader import CapturedTensor
from quantexp.capture.statistics.counts import Counts, of_exponents
from quantexp.formats.codes import code_values
from quantexp.formats.table import HIF8

TIER_COLOURS = {Tier.THREE: BLUE, Tier.TWO: SKY, Tier.ONE: ORANGE, Tier.NONE: VERMILLION}
_ZERO = "became zero"
_ROW_INCH, _TOP_INCH, _BOTTOM_INCH = 0.22, 1.0, 0.75
#: Bins per octave in the histogram of values.
BINS = 8


def hif8_of(judged: Sequence[Judged]) -> list[Judged]:
    """The HiF8 operands by tensor: without blocks, all products of a tensor use the same operand."""
    tensors: dict[Place, Judged] = {}
    for one in judged:
        if one.operand.code_exponents is not None:
            tensors.setdefault(one.place, replace(one, series=one.place.tensor))
    return list(tensors.values())


def hif8_tiers(run: Run, group: str, judged: Sequence[Judged]) -> Figure:
    """The fraction of each tier for every operand (left), and the used exponents (right)."""
    names = [
        (module, series)
        for module in modules_of(judged)
        for series in in_order(j.series for j in judged if j.module == module)
    ]
    height = _TOP_INCH + max(2.4, _ROW_INCH * len(names)) + _BOTTOM_INCH
    width = 11.0
    figure = new_figure(width, height)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.15])
    figure.subplots_adjust(
        left=0.155,
        right=0.985,
        top=1 - _TOP_INCH / height,
        bottom=_BOTTOM_INCH / height,
        wspace=0.17,
    )
    dress(left, "", "share of the non-zero elements (mean over tensors)", "", grid="x")
    for y, name in enumerate(names):
        _draw_bar(left, y, [j for j in judged if (j.module, j.series) == name])
    left.set_yticks(range(len(names)), [f"{m} {s}" for m, s in names], fontsize=TICK_PT)
    left.set_ylim(len(names) - 0.4, -0.6)
    left.set_xlim(0, 1)
    left.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    _draw_exponents(right, judged)
    write_title(figure, f"HiF8, use of its tiers: {run.label}", about_group(run, group))
    handles = [Patch(color=colour, label=tier.value) for tier, colour in TIER_COLOURS.items()]
    _write_legend(figure, [*handles, Patch(color=GREY, label=_ZERO)])
    write_note(
        figure,
        "after the scale in force; right: elements of all layers by the exponent of their value, shaded by tier",
    )
    return figure


def _write_legend(figure: Figure, handles: Sequence[Artist]) -> None:
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 1 - 0.52 / figure.get_figheight()),
        ncols=5,
        frameon=False,
        fontsize=TICK_PT,
    )


def _draw_bar(ax: Axes, y: int, same: Sequence[Judged]) -> None:
    shares = [
        (tier_shares(j.operand.code_exponents), j.operand.fidelity.underflow_share)
        for j in same
        if j.operand.code_exponents is not None
    ]
    shares = [(tiers, zero) for tiers, zero in shares if math.isfinite(zero)]
    if not shares:
        ax.text(0.01, y, "no element that is not zero", va="center", fontsize=NOTE_PT, color=INK)
        return
    left = 0.0
    for tier, colour in TIER_COLOURS.items():
        kept = [0.0 if zero == 1 else (1 - zero) * tiers[tier] for tiers, zero in shares]
        ax.barh(y, mean(kept), left=left, height=0.7, color=colour)
        left += mean(kept)
    ax.barh(y, mean(zero for _, zero in shares), left=left, height=0.7, color=GREY)


def _draw_exponents(ax: Axes, judged: Sequence[Judged]) -> None:
    dress(ax, "", "exponent E of the HiF8 value", "share of elements", grid="y")
    for exponent in range(HIF8.emin, HIF8.emax + 1):
        colour = TIER_COLOURS[tier_of(exponent)]
        ax.axvspan(exponent - 0.5, exponent + 0.5, color=colour, alpha=0.13, lw=0)
    sums: dict[str, Counts] = {}
    for one in judged:
        assert one.operand.code_exponents is not None
        sums[one.series] = sums.get(one.series, Counts()) + one.operand.code_exponents
    for series in in_order(sums):
        counts, mark = sums[series], mark_of(series)
        total = max(1, counts.total)
        xs = [counts.first - 1, *(e for e, _ in counts.items()), counts.first + len(counts.counts)]
        ys = [0.0, *(n / total for _, n in counts.items()), 0.0]
        ax.step(xs, ys, where="mid", color=mark.colour, ls=mark.line, lw=1.4, label=series)
    ax.set_xlim(HIF8.emin - 0.5, HIF8.emax + 0.5)
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    ax.legend(fontsize=TICK_PT, frameon=False, loc="upper left", ncols=2)


@dataclass(frozen=True)
class Shown:
    """A tensor whose values are drawn, with the reason for its selection."""

    judged: Judged
    #: The exponent of the scale, by which the values are divided.
    scale_exponent: int


def chosen(judged: Sequence[Judged]) -> list[Shown]:
    """The tensor with the lowest SQNR of each kind."""
    worst: dict[str, Judged] = {}
    for one in judged:
        known = worst.get(one.series)
        lower = known is None or one.operand.fidelity.sqnr_db < known.operand.fidelity.sqnr_db
        if math.isfinite(one.operand.fidelity.sqnr_db) and lower:
            worst[one.series] = one
    return [
        Shown(one, exponent)
        for one in worst.values()
        if (exponent := one.operand.scale_exponents.quantile(0.5)) is not None
    ]


def fine_magnitudes(entry: CapturedTensor) -> Counts:
    """Counts by floor(8 log2 |x|), without zeros, NaN and Inf."""
    total = Counts()
    for part in torch.split(entry.torch().reshape(-1), 1 << 20):
        magnitude = part.double().abs()
        kept = magnitude[(magnitude > 0) & magnitude.isfinite()]
        if kept.numel():
            bins = (BINS * kept.log2()).floor().long()
            first = int(bins.min())
            total += of_exponents(torch.bincount(bins - first).tolist(), first)
    return total


def hif8_values(run: Run, group: str, counted: Mapping[str, tuple[Shown, Counts]]) -> Figure:
    """A panel for each tensor with its histogram and all values of HiF8 at the tensor's scale."""
    height = 0.95 + 1.75 * len(counted) + 0.7
    width = 10.0
    figure = new_figure(width, height)
    axes = figure.subplots(len(counted), 1, squeeze=False)
    figure.subplots_adjust(
        left=0.085, right=0.985, top=1 - 1.15 / height, bottom=0.75 / height, hspace=0.62
    )
    for (label, (shown, counts)), ax in zip(counted.items(), axes[:, 0], strict=True):
        _draw_values(ax, label, shown, counts)
    axes[-1, 0].set_xlabel("magnitude |x|", fontsize=TICK_PT + 1, color=INK)
    write_title(figure, f"HiF8, its values over the data: {run.label}", about_group(run, group))
    handles = [
        Line2D([], [], color=colour, lw=2, label=tier.value)
        for tier, colour in TIER_COLOURS.items()
    ]
    elements = Patch(color="#BBBBBB", label="elements, eight bins an octave")
    _write_legend(figure, [*handles, elements])
    write_note(
        figure,
        "comb above: the positive values of HiF8 at the scale in force; "
        "of each kind of tensor the one with the lowest SQNR",
    )
    return figure


def _draw_values(ax: Axes, label: str, shown: Shown, counts: Counts) -> None:
    sqnr_db = shown.judged.operand.fidelity.sqnr_db
    scale = shown.scale_exponent
    dress(ax, "", "", "share", grid="y")
    ax.set_title(
        f"{label}: scale {power_of_two(scale)}, {sqnr_db:.1f} dB",
        fontsize=TICK_PT + 1,
        loc="left",
    )
    total = max(1, counts.total)
    edges = [b / BINS for b, _ in counts.items()]
    shares = [n / total for _, n in counts.items()]
    if shares:
        ax.stairs(shares, [*edges, edges[-1] + 1 / BINS], fill=True, color="#BBBBBB")
    top = max(shares, default=1.0)
    for value in code_values(HIF8)[: HIF8.sign_bit]:
        if value > 0 and math.isfinite(value):
            colour = TIER_COLOURS[tier_of(math.frexp(value)[1] - 1)]
            ax.vlines(math.log2(value) + scale, 1.06 * top, 1.22 * top, color=colour, lw=0.8)
    amax = finite([(edges[-1] + 1 / BINS) if edges else math.nan])
    lowest = HIF8.emin - 1 + scale
    ax.axvspan(-2000, lowest, color=VERMILLION, alpha=0.1, lw=0)
    left = min([lowest - 2.0, *edges[:1]])
    ax.set_xlim(max(left, lowest - 12), max([HIF8.emax + scale + 0.5, *amax]))
    ax.set_ylim(0, 1.28 * top)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=14))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda e, _: power_of_two(round(e))))
    ax.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=1))
    ax.text(
        lowest - 0.3,
        0.6 * top,
        "becomes zero",
        fontsize=NOTE_PT,
        rotation=90,
        ha="right",
        va="center",
        color=INK,
    )
