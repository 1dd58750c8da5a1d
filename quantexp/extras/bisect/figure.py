"""The figure of a search: losses of the replays that decide, and which units each replay quantised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from quantexp.analysis.style import (
    BLACK,
    BLUE,
    GREEN,
    INK,
    LABEL_PT,
    NOTE_PT,
    TICK_PT,
    VERMILLION,
    Page,
    dress,
    new_figure,
    save_figure,
)
from quantexp.extras.bisect.result import Result
from quantexp.extras.bisect.search import Verdict
from quantexp.extras.bisect.trouble import Step
from quantexp.terminal.escaping import printable

FILE_NAME = "bisect"
_WIDTH_INCH, _CURVES_INCH, _ROW_INCH, _NAME_INCH = 7.5, 2.4, 0.19, 0.068
_COLOURS = ("#EEEEEE", "#8FB8D8", VERMILLION)


def draw_result(result: Result, curves: Mapping[str, Sequence[Step]], folder: Path) -> list[Path]:
    """Draw `bisect.png` and `bisect.pdf`; `curves` are replays by name, empty for gradients. Returns the files."""
    return save_figure(_figure(result, curves), folder / FILE_NAME, ("png", "pdf"))


def _figure(result: Result, curves: Mapping[str, Sequence[Step]]) -> Figure:
    units = [printable(unit) for unit in result.units]
    matrix = max(0.5, _ROW_INCH * len(units))
    above = _CURVES_INCH + 0.9 if curves else 0.0
    height = 0.85 + above + 0.35 + matrix + 0.75
    page = Page(new_figure(_WIDTH_INCH, height))
    page.write(0.1, height - 0.12, f"Bisection of {printable(result.run)}", LABEL_PT + 2, bold=True)
    page.write(0.1, height - 0.4, printable(_cut(result.words, 110)), LABEL_PT)
    names = min(2.6, 0.35 + _NAME_INCH * max(map(len, units), default=4))
    width = _WIDTH_INCH - names - 0.3
    if curves:
        box = (0.75, height - 0.85 - _CURVES_INCH, _WIDTH_INCH - 1.05, _CURVES_INCH)
        _draw_curves(page, curves, box, of_norms=result.measure.name == "grad_norm")
    _draw_matrix(page, result, units, (names, 0.75, width, matrix))
    note = "a column for each replay: pale units are in bf16, coloured ones quantised; red: with the trouble"
    page.write(0.1, 0.2, note, NOTE_PT)
    return page.figure


def _cut(words: str, most: int) -> str:
    return words if len(words) <= most else f"{words[: most - 3]}..."


def _draw_curves(
    page: Page,
    curves: Mapping[str, Sequence[Step]],
    box: tuple[float, float, float, float],
    *,
    of_norms: bool,
) -> None:
    """Losses, or gradient norms on a logarithmic axis."""
    ax = page.axes(*box)
    dress(ax, "", "iteration", "gradient norm" if of_norms else "loss, nats")
    if of_norms:
        ax.set_yscale("log")
    styles = ((BLACK, "-"), (BLUE, "-"), (VERMILLION, "--"), (GREEN, "--"))
    for (name, steps), (colour, line) in zip(curves.items(), styles, strict=False):
        x = [step.iteration for step in steps]
        values = [step.grad_norm if of_norms else step.loss for step in steps]
        y = [value if np.isfinite(value) else np.nan for value in values]
        ax.plot(x, y, color=colour, linestyle=line, linewidth=1.5, label=name)
        bad = [step.iteration for step in steps if step.is_nonfinite]
        ax.plot(
            bad,
            [1.0] * len(bad),
            "x",
            color=colour,
            transform=ax.get_xaxis_transform(),
            clip_on=False,
        )
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(fontsize=TICK_PT, frameon=False, labelcolor=INK)


def _draw_matrix(
    page: Page, result: Result, units: Sequence[str], box: tuple[float, float, float, float]
) -> None:
    observed = result.found.observed
    cells = np.zeros((len(units), len(observed)))
    for column, each in enumerate(observed):
        for unit in each.quantised:
            cells[unit, column] = 2 if each.is_trouble else 1
    ax = page.axes(*box)
    dress(ax, "", "replay", "")
    ax.grid(visible=False)
    ax.imshow(cells, aspect="auto", cmap=ListedColormap(_COLOURS), vmin=0, vmax=2)
    size = TICK_PT if len(units) <= 40 else NOTE_PT
    ax.set_yticks(range(len(units)), units, fontsize=size)
    if result.found.verdict is Verdict.FOUND:
        for unit in result.found.cure:
            ax.get_yticklabels()[unit].set_fontweight("bold")
    step = max(1, len(observed) // 24)
    shown = range(0, len(observed), step)
    ax.set_xticks(list(shown), [str(i + 1) for i in shown])
    ax.tick_params(length=0)
    for edge in range(1, len(observed)):
        ax.axvline(edge - 0.5, color="white", lw=0.8)
    for edge in range(1, len(units)):
        ax.axhline(edge - 0.5, color="white", lw=0.8)
