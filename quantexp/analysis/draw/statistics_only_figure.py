"""The figure of a tensor's distribution from its statistics only: octaves, quantiles, and the range of its format.

a  share of the elements by octave of their magnitude, over the range of each declared format at the scale of the
   largest element, and of the format that the capture judged it in at the scale of the median block
b  a box plot of the signed values
c  the captured quantiles against those of a normal distribution of the same mean and standard deviation
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import NormalDist
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from quantexp.analysis.draw.distribution import (
    HEIGHT_INCH,
    WIDTH_INCH,
    draw_values,
    finish_normal,
    log2_axis,
    note_what_has_no_place,
)
from quantexp.analysis.draw.titles import write_titles
from quantexp.analysis.measures.counted import StatisticsOnly
from quantexp.analysis.measures.operand import largest_scale_exponent
from quantexp.analysis.quick.by_kind import representable
from quantexp.analysis.style import (
    BLACK,
    INK,
    NOTE_PT,
    TICK_PT,
    dress,
    new_figure,
    quant_colour,
    say_instead,
)
from quantexp.analysis.tensors.operands import declared_operands
from quantexp.capture.statistics.counts import from_json
from quantexp.errors import CaptureError
from quantexp.formats.definitions.files import format_of_record
from quantexp.formats.types import Format

_BOX = ("0.001", "0.01", "0.25", "0.5", "0.75", "0.99", "0.999")
#: The exponent of E8M0's byte 0, the scale of zero blocks.
_ZERO_BLOCK = -127


def draw_statistics_only(content: StatisticsOnly, source: str) -> Figure:
    """The figure; `source` names the run or folder."""
    figure = new_figure(WIDTH_INCH, HEIGHT_INCH)
    write_titles(figure, content, source)
    ranges = dict(ranges_of(content))
    left = figure.add_gridspec(
        2,
        1,
        left=0.075,
        right=0.575,
        top=0.82,
        bottom=0.12,
        height_ratios=[6, 0.5 + 0.5 * max(1, len(ranges))],
        hspace=0.06,
    )
    right = figure.add_gridspec(
        2, 1, left=0.655, right=0.985, top=0.82, bottom=0.12, height_ratios=[1, 4.2], hspace=0.6
    )
    colour = quant_colour(str(content.entry.metadata.get("quant_type")))
    bars, strip = (figure.add_subplot(left[row]) for row in range(2))
    _draw_octaves(bars, strip, content, ranges, colour)
    marks = _box_of(content.record)
    draw_values(figure.add_subplot(right[0]), marks, content.finding, colour)
    _draw_normal(figure.add_subplot(right[1]), content, colour)
    figure.text(0.02, 0.012, "from captured statistics, no values", fontsize=NOTE_PT, color=INK)
    return figure


def ranges_of(statistics: StatisticsOnly) -> Iterator[tuple[str, tuple[Format, float]]]:
    """Label -> format and scale."""
    abs_max = statistics.record["abs_max"]
    if not abs_max:
        return
    try:
        declared = declared_operands(statistics.entry.metadata)
    except CaptureError:
        declared = []
    for one in declared:
        exponent = largest_scale_exponent(one, abs_max)
        label = f"{one.format.name} at the scale of the largest element"
        yield label, (one.format, 2.0**exponent)
    judged: Mapping[str, Any] = statistics.record.get("fidelity") or {}
    blocks, _ = from_json(judged.get("scale_exponents")).without(_ZERO_BLOCK)
    if (middle := blocks.quantile(0.5)) is not None:
        fmt = format_of_record(judged)
        yield f"{fmt.name} in the median block", (fmt, 2.0**middle)


def _draw_octaves(
    bars: Axes,
    strip: Axes,
    statistics: StatisticsOnly,
    ranges: Mapping[str, tuple[Format, float]],
    colour: str,
) -> None:
    dress(bars, "a  Magnitudes", "", "share of elements per octave")
    octaves = from_json(statistics.record.get("log2_magnitude"))
    strip.set_yticks([])
    strip.tick_params(labelsize=TICK_PT, colors=INK)
    for side in ("top", "right", "left"):
        strip.spines[side].set_visible(False)
    if not octaves.counts:
        say_instead(bars, statistics.finding or "no element to draw")
        strip.set_axis_off()
        return
    finite = statistics.record["count"] - statistics.record["nonfinite"]
    for exponent, count in octaves.items():
        low = 2.0**exponent
        bars.fill_between([low, 2 * low], count / finite, color=colour, alpha=0.75, lw=0)
    ends = [2.0**octaves.first, 2.0 ** (octaves.first + len(octaves.counts))]
    for row, (label, (fmt, scale)) in enumerate(ranges.items()):
        least, normal, largest = (scale * value for value in representable(fmt))
        shade = quant_colour(fmt.name)
        strip.fill_between([least, normal], row - 0.05, row + 0.42, color=shade, alpha=0.25, lw=0)
        strip.fill_between([normal, largest], row - 0.05, row + 0.42, color=shade, alpha=0.7, lw=0)
        place = strip.get_yaxis_transform()
        strip.text(0.005, row - 0.3, label, transform=place, fontsize=6, va="center", color=INK)
        ends += [least, largest]
    strip.set_ylim(max(1, len(ranges)) - 0.4, -0.6)
    if not ranges:
        place = strip.get_yaxis_transform()
        words = "no product quantises it"
        strip.text(0.01, 0, words, transform=place, fontsize=NOTE_PT, va="center")
    bars.set_ylim(0, 1.22 * max(octaves.counts) / finite)
    bars.yaxis.set_major_formatter(PercentFormatter(1, 0))
    for ax in (bars, strip):
        log2_axis(ax, (min(ends) / 2, max(ends) * 2))
    bars.tick_params(axis="x", length=0, labelbottom=False)
    strip.set_xlabel("|x|   (pale: subnormal)", fontsize=9, color=INK)
    note_what_has_no_place(bars, statistics.record)


def _box_of(record: Mapping[str, Any]) -> list[float]:
    quantiles = record.get("quantiles")
    if not quantiles:
        return []
    return [record["min"], *(quantiles[share] for share in _BOX), record["max"]]


def _draw_normal(ax: Axes, statistics: StatisticsOnly, colour: str) -> None:
    dress(ax, "c  Against a normal", "standard normal quantile", "(x - mean) / std", grid="both")
    record = statistics.record
    if not record.get("std") or not record.get("quantiles"):
        say_instead(ax, statistics.finding or "one value alone: no spread")
        return
    zs = [NormalDist().inv_cdf(float(share)) for share in record["quantiles"]]
    values = [(value - record["mean"]) / record["std"] for value in record["quantiles"].values()]
    ax.plot([zs[0], zs[-1]], [zs[0], zs[-1]], color=BLACK, lw=0.9, ls="--")
    ax.plot(zs, values, "o-", ms=4, mew=0, lw=0.8, color=colour)
    finish_normal(ax, record, max(map(abs, values)))
