"""The forest plot: each scheme's gap at the end with its interval over seeds, and the floors of chance."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from quantexp.analysis.compare.floors import Floors
from quantexp.analysis.compare.verdicts import Verdict, Verdicts
from quantexp.analysis.scheme_style import SchemeStyle
from quantexp.analysis.style import GREY, INK, NOTE_PT, TICK_PT, dress
from quantexp.terminal.escaping import printable

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
