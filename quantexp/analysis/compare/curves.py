"""The figure of a comparison: losses of all schemes, their gaps to the baseline, and a forest plot. PNG and PDF.

The forest plot has each scheme's gap at the end with its interval over seeds, and the floors of chance.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from quantexp.analysis.compare.comparison import Comparison
from quantexp.analysis.compare.floors import Floors
from quantexp.analysis.compare.gap import running_mean, window_of
from quantexp.analysis.compare.lines import Band, Line, lines_of, scheme_label
from quantexp.analysis.compare.verdicts import Verdict, Verdicts
from quantexp.analysis.scheme_style import SchemeStyle
from quantexp.analysis.style import (
    GREY,
    INK,
    NOTE_PT,
    TICK_PT,
    dress,
    name_lines,
    new_figure,
    save_figure,
    say_instead,
)
from quantexp.terminal.escaping import printable

FILE_NAME = "compare"
_WIDTH_INCH, _HEIGHT_INCH = 9.0, 7.0
#: Of the forest plot: a scheme, and what surrounds the schemes.
_ROW_INCH, _FRAME_INCH = 0.42, 0.9
#: The font size of labels.
_LETTER_INCH = 0.075
_MOST_LABEL_INCH = 3.2


def draw_curves(comparison: Comparison, verdicts: Verdicts, folder: Path) -> list[Path]:
    """Draw `compare.png` and `compare.pdf` in `folder`; with intervals over seeds, they are a third part."""
    judged = [verdict for verdict in verdicts.schemes if verdict.interval]
    extra_inch = _ROW_INCH * (len(judged) + LEGEND_ROWS) + _FRAME_INCH if judged else 0.0
    figure = new_figure(_WIDTH_INCH, _HEIGHT_INCH + extra_inch)
    heights = [4.2, 2.8, *([extra_inch] if judged else [])]
    top, bottom, *forest = figure.subplots(len(heights), 1, height_ratios=heights)
    bottom.sharex(top)
    lines = lines_of(comparison)
    drawn = [line for line in lines if line.losses.iterations]
    gaps = [line for line in drawn if line.gaps.iterations]
    dress(top, "a  Training loss", "", "loss, nats a token")
    dress(bottom, "b  Gap to the baseline, paired by iteration", "iteration", "gap, nats a token")
    bottom.axhline(0, color=GREY, linewidth=1.2)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    names = [line.label for line in drawn]
    names += [words for verdict in judged for words in lines_beside(verdict)]
    longest = max(map(len, names), default=0)
    label_inch = min(_MOST_LABEL_INCH, 0.3 + _LETTER_INCH * longest)
    height = _HEIGHT_INCH + extra_inch
    figure.subplots_adjust(
        left=0.09,
        right=1 - label_inch / _WIDTH_INCH,
        top=1 - 0.35 / height,
        bottom=(0.95 if judged else 0.75) / height,
        hspace=0.35 if judged else 0.2,
    )
    losses = [line for line in drawn if not line.is_perturbed]
    _draw(top, losses, [line.losses for line in losses])
    _draw(bottom, gaps, [line.gaps for line in gaps])
    if not drawn:
        say_instead(top, "no run has a loss")
    if not gaps:
        say_instead(bottom, "no run has a baseline to be held against")
    if judged:
        styles = {scheme_label(comparison.rows[line.rows[0]]): line.style for line in lines}
        draw_forest(forest[0], verdicts, judged, styles, "c")
    windows = [window for line in drawn if (window := window_of(len(line.losses.mean))) > 1]
    notes = [verdicts.noise]
    if windows:
        notes.append(f"lines: mean over {max(windows)} iterations, faint: each iteration")
    if any(len(line.rows) > 1 for line in drawn):
        notes.append("of several seeds: the mean, and a band from the least to the largest")
    figure.text(0.01, 0.008, "\n".join(notes[::-1]), fontsize=NOTE_PT + 1, color=INK)
    return save_figure(figure, folder / FILE_NAME, ("png", "pdf"))


def _draw(ax: Axes, lines: Sequence[Line], bands: Sequence[Band]) -> None:
    """Draw the lines with their bands, each with its name at the right end."""
    ends = []
    for line, band in zip(lines, bands, strict=True):
        end = draw_band(ax, band, line.style, is_baseline=line.is_baseline)
        ends.append((*end, line.label, line.style))
    name_lines(ax, ends)


def draw_band(
    ax: Axes, band: Band, style: SchemeStyle, *, is_baseline: bool
) -> tuple[float, float]:
    """Draw one line, with many points as a running mean over faint points; returns its right end."""
    x, (low, mean, high) = band.iterations, (band.low, band.mean, band.high)
    if (window := window_of(len(x))) > 1:
        ax.plot(x, mean, color=style.colour, linewidth=0.5, alpha=0.25, zorder=1.5)
        low, mean, high = (
            tuple(running_mean(np.array(y), window).tolist()) for y in (low, mean, high)
        )
    if low != high:
        ax.fill_between(x, low, high, color=style.colour, alpha=0.18, linewidth=0)
    ax.plot(
        x,
        mean,
        color=style.colour,
        linestyle=style.linestyle,
        linewidth=2.4 if is_baseline else 1.5,
        marker=style.marker if len(x) == 1 else None,
    )
    return x[-1], mean[-1]


_SEED_SHADE, _CHAOS_SHADE = 0.12, 0.3
#: The letters of a line beside the plot.
_LETTERS = 40
#: The height of the legend above the schemes, in rows.
LEGEND_ROWS = 0.8


def lines_beside(verdict: Verdict) -> list[str]:
    """The verdict and its reasons in lines that fit beside the plot."""
    reasons = [textwrap.wrap(reason, _LETTERS) for reason in verdict.note.split("; ")]
    return [verdict.short_words, *(line for lines in reasons for line in lines)]


def draw_forest(
    ax: Axes,
    verdicts: Verdicts,
    judged: Sequence[Verdict],
    styles: Mapping[str, SchemeStyle],
    letter: str,
) -> None:
    """Draw a row for each scheme with an interval: the gaps of its seeds, their mean, its interval, its verdict."""
    title = f"{letter}  Mean of {verdicts.window}: 95% intervals over seeds"
    dress(ax, title, f"{verdicts.measure} above {judged[0].against}'s", "")
    (floors,) = verdicts.floors if len(verdicts.floors) == 1 else (None,)
    if floors is not None:
        _draw_floors(ax, floors)
    ax.axvline(0, color=GREY, linewidth=1.2)
    for row, verdict in enumerate(judged):
        style = styles[verdict.label]
        assert verdict.interval is not None
        ax.plot(verdict.interval, (row, row), color=style.colour, linewidth=2.2)
        ax.plot(verdict.mean, row, "o", color=style.colour, markersize=6)
        ax.plot(
            verdict.gaps, [row + 0.28] * len(verdict.gaps), "|", color=style.colour, markersize=5
        )
        lines = [f"{verdict.label}, {len(verdict.seeds)} seeds", *lines_beside(verdict)]
        words = "\n".join(map(printable, lines))
        place = {"xy": (1.01, row), "xycoords": ("axes fraction", "data")}
        ax.annotate(words, **place, va="center", fontsize=TICK_PT, color=INK, annotation_clip=False)  # type: ignore[arg-type]
    largest = max(abs(x) for verdict in judged for x in (*verdict.gaps, *(verdict.interval or ())))
    limit = 1.15 * max(largest, (floors and floors.chaos) or 0.0) or 1.0
    ax.set_xlim(-limit, limit)
    ax.set_ylim(len(judged) - 0.5, -0.5 - (LEGEND_ROWS if ax.get_legend() else 0))
    ax.set_yticks([])


def _draw_floors(ax: Axes, floors: Floors) -> None:
    """Bands that hold 19 of 20 differences of two bf16 runs; that of seeds may reach beyond the axis."""
    bands = (
        (floors.seed, "another seed", _SEED_SHADE),
        (floors.chaos, "last bits of the weights", _CHAOS_SHADE),
    )
    for floor, name, shade in bands:
        if floor is not None:
            label = f"{name}: {floor:.2g}"
            ax.axvspan(-floor, floor, color=GREY, alpha=shade, linewidth=0, label=label)
    if any(floor is not None for floor, *_ in bands):
        ax.legend(
            title="two bf16 runs differ, 19 of 20 times by less",
            loc="upper left",
            ncols=2,
            alignment="left",
            fontsize=NOTE_PT,
            title_fontsize=NOTE_PT,
            frameon=False,
        )
