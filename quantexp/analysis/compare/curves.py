"""The figure of a comparison: losses of all runs, and below them their gaps to the baseline. PNG and PDF."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from quantexp.analysis.compare.comparison import Comparison, Row
from quantexp.analysis.compare.look import look_of
from quantexp.analysis.compare.smooth import running_mean, window_of
from quantexp.analysis.style import INK, NOTE_PT, dress, new_figure, save_figure, say_instead

FILE_NAME = "compare"


def draw_curves(comparison: Comparison, folder: Path) -> list[Path]:
    """Draw to `folder`/compare.png and compare.pdf."""
    figure = new_figure(9, 7)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[1.5, 1])
    drawn = [row for row in comparison.rows if row.side.losses.losses]
    for row in drawn:
        losses = row.side.losses
        _line(top, row, losses.iterations, losses.losses)
    gaps = [row for row in drawn if comparison.rows[row.baseline] is not row and row.gap]
    bottom.axhline(0, color="#999999", linewidth=1.2)
    for row in gaps:
        assert row.gap is not None
        _line(bottom, row, row.gap.iterations, row.gap.gaps)
    dress(top, "a  Training loss", "", "loss, nats a token")
    dress(bottom, "b  Gap to the baseline, paired by iteration", "iteration", "gap, nats a token")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    if drawn:
        columns = 1 if len(drawn) <= 12 else 2
        top.legend(fontsize=NOTE_PT + 1, frameon=False, ncols=columns, handlelength=3.2)
    else:
        say_instead(top, "no run has a loss")
    if not gaps:
        say_instead(bottom, "no run has a baseline to be held against")
    figure.text(0.01, 0.008, comparison.noise, fontsize=NOTE_PT + 1, color=INK)
    figure.subplots_adjust(left=0.09, right=0.985, top=0.95, bottom=0.1, hspace=0.2)
    return save_figure(figure, folder / FILE_NAME, ("png", "pdf"))


def _line(ax: Axes, row: Row, x: tuple[int, ...], y: tuple[float, ...]) -> None:
    """One curve; of many points the running mean, with every point faintly behind it."""
    look = look_of(row.side.scheme)
    window = window_of(len(x))
    if window > 1:
        ax.plot(x, y, color=look.colour, linewidth=0.5, alpha=0.25, zorder=1.5)
    marker = "o" if len(x) == 1 else None
    width = 2.0 if row.side.is_baseline else 1.4
    style = (0, look.dash) if look.dash else "solid"
    # A label that begins with an underscore is left out of legends.
    label = row.label.lstrip("_") + (f" (mean over {window})" if window > 1 else "")
    means = running_mean(y, window) if window > 1 else y
    ax.plot(
        x, means, color=look.colour, linestyle=style, linewidth=width, marker=marker, label=label
    )
