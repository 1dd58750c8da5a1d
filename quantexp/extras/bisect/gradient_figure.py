"""The heat maps of `quantexp bisect --gradient`: a row for each unit, a column for each group of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure

from quantexp.analysis.numerics.heat import COLOUR_MAP, hatch
from quantexp.analysis.style import LABEL_PT, NOTE_PT, TICK_PT, Page, dress, new_figure, save_figure
from quantexp.extras.bisect.gradient_table import by_unit, scheme_of
from quantexp.runs.gradients import Distance, Gradients, Pass
from quantexp.terminal.escaping import printable

FILE_NAME = "gradients"
_CELL_INCH, _ROW_INCH, _BAR_INCH, _GAP_INCH = 0.55, 0.2, 1.1, 0.85
_NAME_INCH = 0.068
_TOP_INCH, _BOTTOM_INCH, _MOST_INCH = 0.55, 0.3, 11.0
#: What float64 sums of float32 gradients can tell from zero.
_LEAST = 1e-12


@dataclass(frozen=True)
class _Panel:
    title: str
    rows: list[str]
    cells: np.ndarray
    norm: Normalize


def draw_gradients(scheme: str, gradients: Gradients, folder: Path) -> list[Path]:
    """Draw `gradients.png` and `gradients.pdf`; returns the files."""
    return save_figure(_figure(scheme, gradients), folder / FILE_NAME, ("png", "pdf"))


def _figure(scheme: str, gradients: Gradients) -> Figure:
    panels = _panels(scheme, gradients)
    columns = [*gradients["groups"], "all"]
    names = max((len(row) for panel in panels for row in panel.rows), default=8) * _NAME_INCH + 0.3
    cells = min(_MOST_INCH, max(2.6, _CELL_INCH * len(columns)))
    heights = [max(0.4, _ROW_INCH * len(panel.rows)) for panel in panels]
    height = _TOP_INCH + sum(heights) + _GAP_INCH * len(panels) + _BOTTOM_INCH
    page = Page(new_figure(max(6.0, names + cells + _BAR_INCH), height))
    page.write(0.1, height - 0.12, "Gradient against bf16", LABEL_PT + 3, bold=True)
    about = f"{printable(scheme)}, iteration {gradients['iteration']}, same weights and tokens"
    page.write(0.1, height - 0.4, about, LABEL_PT)
    top = height - _TOP_INCH
    for panel, own in zip(panels, heights, strict=True):
        bottom = top - 0.3 - own
        _draw(page, panel, columns, (names, bottom, cells, own))
        top = bottom - (_GAP_INCH - 0.3)
    note = "columns: parameters of one layer, or beside the layers; hatched: not finite, or zero in bf16"
    page.write(0.1, 0.2, note, NOTE_PT)
    return page.figure


def _panels(scheme: str, gradients: Gradients) -> list[_Panel]:
    units, whole = by_unit(gradients["passes"]), scheme_of(gradients["passes"])
    alone = {f"all of {scheme}": whole, **{unit: pair[0] for unit, pair in units.items()}}
    rows = [printable(name) for name in alone]
    distances = _cells(list(alone.values()), lambda one: one["distance"])
    angles = _cells(list(alone.values()), _angle)
    panels = [_Panel("quantised alone: |g - b| / |b|", rows, distances, _log(distances))]
    if units:
        left = _cells([pair[1] for pair in units.values()], lambda one: one["distance"])
        with np.errstate(divide="ignore", invalid="ignore"):
            share = left / distances[:1]
        share[~np.isfinite(share)] = np.nan
        most = max(1.0, float(np.nanmax(share, initial=0.0)))
        title = "left out: |g - b| over that of the whole scheme"
        panels.append(_Panel(title, rows[1:], share, Normalize(0, most)))
    panels.append(_Panel("quantised alone: 1 - cosine of g and b", rows, angles, _log(angles)))
    return panels


def _angle(one: Distance) -> float | None:
    return None if one["cosine"] is None else 1 - one["cosine"]


def _cells(passes: Sequence[Pass], number: Callable[[Distance], float | None]) -> np.ndarray:
    """A row for each pass, a column for each group and one for all parameters; NaN where there is no number."""
    table = [[number(each) for each in (*one["groups"], one["whole"])] for one in passes]
    return np.array([[math.nan if x is None else x for x in row] for row in table])


def _log(cells: np.ndarray) -> Normalize:
    positive = cells[cells > _LEAST]
    low, high = (float(positive.min()), float(positive.max())) if positive.size else (1e-9, 1.0)
    norm = LogNorm(low, high if high > low else low * 10)
    norm.clip = True  # an exact zero has the colour of the least
    return norm


def _draw(
    page: Page, panel: _Panel, columns: Sequence[str], box: tuple[float, float, float, float]
) -> None:
    left, bottom, width, height = box
    ax = page.axes(*box)
    dress(ax, "", "", "")
    ax.set_title(panel.title, fontsize=LABEL_PT, loc="left")
    ax.grid(visible=False)
    hatch(ax)
    image = ax.imshow(panel.cells, aspect="auto", cmap=COLOUR_MAP, norm=panel.norm)
    ax.set_yticks(range(len(panel.rows)), panel.rows)
    step = max(1, math.ceil(len(columns) * 0.4 / width))
    shown = [*range(0, len(columns) - 1, step), len(columns) - 1]
    ax.set_xticks(shown, [columns[i].removeprefix("layer ") for i in shown])
    turned = max(map(len, columns)) * _NAME_INCH > width / len(columns)
    if turned:
        ax.tick_params(axis="x", labelrotation=30)
        for label in ax.get_xticklabels():
            label.set_horizontalalignment("right")
    ax.tick_params(length=0, labelsize=TICK_PT)
    bar = page.figure.colorbar(image, cax=page.axes(left + width + 0.12, bottom, 0.13, height))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=TICK_PT)
