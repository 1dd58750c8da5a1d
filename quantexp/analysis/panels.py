"""The plain panels of the quick analysis, each a function that draws one on its axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from quantexp.analysis.inventory import Kind, Tally
from quantexp.analysis.magnitude import EXPONENTS, MagnitudeHistogram
from quantexp.analysis.run_record import LossCurve
from quantexp.analysis.style import (
    INK,
    KIND_COLOURS,
    TICK_PT,
    dress,
    quant_colour,
    say_instead,
)

NO_TENSORS = "no tensors captured"
_MEGABYTE = 1e6
#: Curves with fewer points show them.
_FEW_POINTS = 40


def draw_magnitudes(ax: Axes, magnitudes: Mapping[Kind, MagnitudeHistogram]) -> None:
    """Shares of elements by binary exponent, one step line for each kind of tensor."""
    dress(
        ax, "a  Magnitudes", "binary exponent, floor(log$_2$ |x|)", "share of elements", grid="both"
    )
    drawn = {kind: h for kind in Kind if (h := magnitudes.get(kind)) is not None and h.finite}
    if not drawn:
        say_instead(ax, NO_TENSORS if not magnitudes else "no finite element")
        return
    for kind, histogram in drawn.items():
        label = kind.value + _left_out(histogram)
        colour = KIND_COLOURS[kind]
        ax.step(EXPONENTS, histogram.shares, where="mid", color=colour, lw=1.8, label=label)
    occupied = [
        e for h in drawn.values() for e, s in zip(EXPONENTS, h.shares, strict=True) if s > 1e-4
    ]
    if occupied:
        ax.set_xlim(min(occupied) - 2, max(occupied) + 2)
    ax.set_ylim(0, 1.35 * max(max(h.shares) for h in drawn.values()) or 1)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    ax.legend(fontsize=TICK_PT, frameon=False, loc="upper left", ncols=2)


def draw_by_quant_type(ax: Axes, tallies: Mapping[str, Mapping[Kind, Tally]]) -> None:
    """Megabytes, one bar for each quantisation type in its colour, with the number of tensors."""
    dress(ax, "b  Captured, by quantisation type", "megabytes", "", grid="x")
    if not tallies:
        say_instead(ax, NO_TENSORS)
        return
    names = sorted(tallies)
    for row, name in enumerate(names):
        ax.barh(row, _megabytes(tallies[name]), height=0.6, color=quant_colour(name))
    _label_rows(ax, names, tallies)


def draw_by_class(
    ax: Axes, title: str, names: Sequence[str], tallies: Mapping[str, Mapping[Kind, Tally]]
) -> None:
    """Megabytes, a bar for each class, made up of the kinds of tensor, and numbers of tensors."""
    dress(ax, title, "megabytes", "", grid="x")
    if not tallies:
        say_instead(ax, NO_TENSORS)
        return
    for row, name in enumerate(names):
        left = 0.0
        for kind in Kind:
            width = tallies[name].get(kind, Tally()).num_bytes / _MEGABYTE
            ax.barh(row, width, left=left, height=0.6, color=KIND_COLOURS[kind])
            left += width
    _label_rows(ax, names, tallies)


def draw_loss(ax: Axes, curve: LossCurve) -> None:
    """Training loss by iteration."""
    dress(ax, "f  Training loss", "iteration", "loss (nats/token)", grid="both")
    if not curve.iterations:
        say_instead(ax, "no finite loss" if curve.nonfinite else "no training loss recorded")
        return
    marker = "o" if len(curve.iterations) < _FEW_POINTS else ""
    ax.plot(curve.iterations, curve.losses, color=INK, lw=1.4, marker=marker, ms=3.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    ax.margins(x=0.03, y=0.1)
    if curve.nonfinite:
        more = f" and {len(curve.nonfinite) - 1} more" if len(curve.nonfinite) > 1 else ""
        words = f"not finite: iteration {curve.nonfinite[0]}{more}"
        ax.text(0.98, 0.96, words, transform=ax.transAxes, ha="right", va="top", fontsize=TICK_PT)


def _left_out(histogram: MagnitudeHistogram) -> str:
    """What no bin counts, for the legend, from a tenth of a percent."""
    beyond = histogram.underflow + histogram.overflow
    shares = {
        "zero": histogram.zeros / histogram.finite,
        "beyond the bins": beyond / histogram.finite,
    }
    words = [f"{share:.1%} {what}" for what, share in shares.items() if share >= 0.001]
    return f" ({', '.join(words)})" if words else ""


def _megabytes(kinds: Mapping[Kind, Tally]) -> float:
    return sum(t.num_bytes for t in kinds.values()) / _MEGABYTE


def _label_rows(
    ax: Axes, names: Sequence[str], tallies: Mapping[str, Mapping[Kind, Tally]]
) -> None:
    """Names left of the bars, numbers of tensors and megabytes right of them, first row on top."""
    widest = max(_megabytes(tallies[name]) for name in names)
    for row, name in enumerate(names):
        megabytes = _megabytes(tallies[name])
        number = sum(t.num_tensors for t in tallies[name].values())
        words = f" {number} tensor{'s' * (number != 1)}, {megabytes:,.4g} MB"
        ax.text(megabytes, row, words, va="center", ha="left", fontsize=TICK_PT, color=INK)
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(max(len(names), 3) - 0.4, -0.6)
    ax.set_xlim(0, 1.9 * widest or 1)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=5))
