"""The heat map of the quick analysis: SQNR of every operand by layer and slot, with those labelled that stand out.

A row is one operand of one product of one module (`fc1  fprop x`), all experts as one; where there are too many rows,
one operand of a module with the worst of its products, then one module. A cell is the lowest SQNR of its tensors. Where
nothing was judged, the cells are how far the largest magnitude stands above the root mean square, which says how much
of a format's range outliers take.

A row stands out if its worst cell is more than a margin worse than the median cell. Numbers within the margin of each
other are in no order of merit: random weights of one distribution differ by some tenths of a dB.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from quantexp.analysis.measures.measured import Measured
from quantexp.analysis.numerics.series import in_order
from quantexp.analysis.quick.first_look import FirstLook, Look
from quantexp.analysis.style import INK, NOTE_PT, TICK_PT, dress
from quantexp.analysis.tensors.place import Kind, experts_as_one, in_flow
from quantexp.model.decoder import OUTPUT, layer_words

#: Maximum rows.
MOST_ROWS = 32
#: The distance from the cells to the left end of the modules' names.
MODULES_INCH = 1.5
#: Maximum labelled operands.
NUM_WORST = 5
#: How much worse than the median an operand must be to be labelled: twice the error's energy, twice the outlier.
SQNR_MARGIN_DB, CREST_MARGIN_OCTAVES = 3.0, 1.0
#: Maximum layers for numbers inside the cells.
_FEW_LAYERS = 4
_LEAST_SPAN = 3.0
_NO_NUMBER = "#E8E8E8"
_MAP = "viridis"
_OPERANDS = ("x", "w", "g", "q", "k", "dS", "P", "v", "dO")
_PRODUCTS = ("fprop", "dgrad", "dgrad_q", "dgrad_k", "dgrad_p", "dgrad_v", "wgrad")


@dataclass(frozen=True)
class Cell:
    """One number of one tensor, with its position."""

    module: str
    #: `fprop.x`; for statistics the tensor's name.
    series: str
    layer: int
    value: float
    #: The tensor, for the list of the worst.
    name: str


@dataclass(frozen=True)
class Grid:
    """A heat map."""

    #: Module and the rest of the row's name; empty if the row is a module.
    rows: tuple[tuple[str, str], ...]
    #: Numbers, `output` for the output layer, `?` for one that is not known.
    layers: tuple[str, ...]
    #: NaN for missing values; inf and -inf stay.
    values_RL: np.ndarray
    #: The median of the finite cells; NaN without one.
    typical: float
    #: The tensors that stand out, at most one a row: name, value, row and column. The worst are first, and those within
    #: the margin of each other as their rows are.
    worst: tuple[tuple[str, float, int, int], ...]
    #: How many more stand out.
    num_more: int
    #: Additional descriptions of rows.
    aggregated: str


def sqnr_grid(look: FirstLook) -> Grid | None:
    """SQNR in dB; None without judged operands."""
    cells = [
        Cell(
            experts_as_one(measured.place.module),
            operand.slot or measured.place.tensor,
            measured.place.layer,
            operand.fidelity.sqnr_db,
            _named(measured, operand.slot),
        )
        for measured in _measured(look)
        for operand in measured.operands
    ]
    return grid_of(cells, min, MOST_ROWS, SQNR_MARGIN_DB) if cells else None


def crest_grid(look: FirstLook) -> Grid | None:
    """log2 of the largest magnitude over the root mean square; None without statistics."""
    cells = [
        Cell(
            experts_as_one(measured.place.module),
            measured.place.tensor,
            measured.place.layer,
            math.log2(measured.abs_max / rms),
            _named(measured, ""),
        )
        for measured in _measured(look)
        if (rms := math.hypot(measured.mean, measured.std)) > 0
    ]
    return grid_of(cells, max, MOST_ROWS, CREST_MARGIN_OCTAVES) if cells else None


def _measured(look: FirstLook) -> Iterable[Measured]:
    def is_number(one: Look) -> bool:
        return one.kind is not Kind.SCALE

    return (one.measured for one in look.tensors if is_number(one))


def _named(measured: Measured, slot: str) -> str:
    place = measured.place
    product, _, operand = slot.rpartition(".")
    layer = f"L{place.layer} " if place.layer >= 0 and place.module != OUTPUT else ""
    what = f"{product} {operand}" if slot else place.tensor
    return f"{layer}{place.module} {what}"


def grid_of(
    cells: Sequence[Cell],
    worst_of: Callable[[Iterable[float]], float],
    most_rows: int,
    margin: float,
) -> Grid:
    """Arrange the cells; cells with the same position show the `worst_of` (min or max) their numbers.

    `margin` is how much worse than the median a row must be to stand out.
    """
    name: Callable[[Cell], tuple[str, str]]
    for name, aggregated in _LEVELS:  # noqa: B007  (the last one that is tried is taken)
        rows = _rows_in_order({name(cell) for cell in cells})
        if len(rows) <= most_rows:
            break
    layers = sorted({cell.layer for cell in cells})
    labels = {c.layer: layer_words(c.layer, c.module) if c.layer >= 0 else "?" for c in cells}
    places: dict[tuple[int, int], list[Cell]] = {}
    for cell in cells:
        if not math.isnan(cell.value):
            place = (rows.index(name(cell)), layers.index(cell.layer))
            places.setdefault(place, []).append(cell)
    values = np.full((len(rows), len(layers)), math.nan)
    of_row: dict[int, tuple[str, float, int, int]] = {}
    for (row, column), members in sorted(places.items()):
        values[row, column] = value = worst_of(cell.value for cell in members)
        known = of_row.get(row)
        if known is None or (value != known[1] and worst_of((value, known[1])) == value):
            who = next(cell.name for cell in members if cell.value == value)
            of_row[row] = (who, value, row, column)
    finite = values[np.isfinite(values)]
    typical = float(np.median(finite)) if finite.size else math.nan
    sign = -1.0 if worst_of is min else 1.0

    def badness(one: tuple[str, float, int, int]) -> float:
        return sign * one[1]

    limit = sign * typical + margin if finite.size else -sys.float_info.max
    # An SQNR of infinity, where nothing was rounded, is below any limit.
    outstanding = [one for one in of_row.values() if badness(one) > limit]
    worst = _in_groups(sorted(outstanding, key=badness, reverse=True), margin)
    names = tuple(labels[layer] for layer in layers)
    shown, num_more = tuple(worst[:NUM_WORST]), max(0, len(worst) - NUM_WORST)
    return Grid(tuple(rows), names, values, typical, shown, num_more, aggregated)


def _in_groups(
    worst: Sequence[tuple[str, float, int, int]], margin: float
) -> list[tuple[str, float, int, int]]:
    """Sorted tensors, with those within the margin of the first of their group in the order of their rows."""
    if not worst:
        return []
    first = worst[0][1]
    size = sum(one[1] == first or abs(one[1] - first) <= margin for one in worst)
    return [*sorted(worst[:size], key=lambda one: one[2]), *_in_groups(worst[size:], margin)]


def _by_slot(cell: Cell) -> tuple[str, str]:
    product, _, operand = cell.series.rpartition(".")
    return cell.module, f"{product} {operand}" if product else cell.series


def _by_operand(cell: Cell) -> tuple[str, str]:
    return cell.module, cell.series.rpartition(".")[2]


def _by_module(cell: Cell) -> tuple[str, str]:
    return cell.module, ""


_LEVELS: tuple[tuple[Callable[[Cell], tuple[str, str]], str], ...] = (
    (_by_slot, ""),
    (_by_operand, "the worst product of each operand"),
    (_by_module, "the worst operand of each module"),
)


def _rows_in_order(rows: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The order of rows: modules as in the forward pass, forward products first."""
    different = list(rows)
    modules = in_flow(module for module, _ in different)
    order = in_order(words for _, words in different)

    def place(row: tuple[str, str]) -> tuple[int, int, int, int]:
        module, words = row
        product, _, operand = words.rpartition(" ")
        known = _OPERANDS.index(operand) if operand in _OPERANDS else len(_OPERANDS)
        rank = _PRODUCTS.index(product) if product in _PRODUCTS else len(_PRODUCTS)
        return modules.index(module), rank, known, order.index(words)

    return sorted(different, key=place)


def draw_grid(ax: Axes, grid: Grid, title: str, unit: str, *, low_is_worst: bool) -> None:
    """Draw the cells, their numbers if they fit, frames and numbers for the worst ones, and a colour bar."""
    dress(ax, title, "layer", "", grid="x")
    ax.grid(visible=False)
    finite = grid.values_RL[np.isfinite(grid.values_RL)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if high - low < _LEAST_SPAN and finite.size:
        low, high = (low + high - _LEAST_SPAN) / 2, (low + high + _LEAST_SPAN) / 2
    colours = colormaps[_MAP if low_is_worst else f"{_MAP}_r"].with_extremes(bad=_NO_NUMBER)
    shown = np.clip(grid.values_RL, low, high)
    image = ax.imshow(
        np.ma.masked_invalid(shown),
        cmap=colours,
        vmin=low,
        vmax=high,
        aspect="auto",
        interpolation="nearest",
    )
    _name_rows(ax, grid.rows)
    _name_layers(ax, grid.layers)
    if len(grid.layers) <= _FEW_LAYERS:
        _write_numbers(ax, grid, colours, low, high)
    for number, (_, _, row, column) in enumerate(grid.worst, start=1):
        _frame(ax, number, row, column, len(grid.layers))
    figure = ax.get_figure(root=True)
    assert figure is not None
    bar = figure.colorbar(image, ax=ax, fraction=0.04, pad=0.02, aspect=35)
    bar.ax.tick_params(labelsize=TICK_PT, colors=INK)
    bar.ax.set_title(unit, fontsize=TICK_PT, color=INK)
    bar.outline.set_visible(False)


def _name_rows(ax: Axes, rows: Sequence[tuple[str, str]]) -> None:
    """Draw the slot beside each row, the module left of its first row, and a line between modules."""
    ax.set_yticks(range(len(rows)), [words or module for module, words in rows], fontsize=TICK_PT)
    ax.tick_params(axis="y", length=0)
    for i, (module, words) in enumerate(rows):
        if i and rows[i - 1][0] == module:
            continue
        if i:
            ax.axhline(i - 0.5, color="white", lw=2.5)
        if words:
            ax.annotate(
                module,
                (0, i),
                xycoords=("axes fraction", "data"),
                xytext=(-MODULES_INCH * 72, 0),
                textcoords="offset points",
                ha="left",
                va="center",
                fontsize=TICK_PT,
                fontweight="bold",
                color=INK,
            )


def _name_layers(ax: Axes, layers: Sequence[str]) -> None:
    step = max(1, -(-len(layers) // 14))
    places = range(0, len(layers), step)
    ax.set_xticks(places, [layers[i] for i in places])
    for side in ("left", "bottom"):
        ax.spines[side].set_visible(False)


def _write_numbers(ax: Axes, grid: Grid, colours: object, low: float, high: float) -> None:
    for row, values in enumerate(grid.values_RL):
        for column, value in enumerate(values):
            if math.isnan(value):
                continue
            words = f"{value:.1f}" if math.isfinite(value) else "exact" if value > 0 else "inf"
            red, green, blue, _ = colours(np.clip((value - low) / (high - low), 0, 1))  # type: ignore[operator]
            is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
            ax.text(
                column,
                row,
                words,
                ha="center",
                va="center",
                fontsize=NOTE_PT,
                color="white" if is_dark else "black",
            )


def _frame(ax: Axes, number: int, row: int, column: int, num_layers: int) -> None:
    edges = Rectangle(
        (column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="#D00000", lw=1.6, zorder=4
    )
    ax.add_patch(edges)
    is_wide = num_layers <= _FEW_LAYERS
    ax.text(
        column - 0.47 if is_wide else column,
        row,
        str(number),
        ha="left" if is_wide else "center",
        va="center",
        fontsize=NOTE_PT,
        fontweight="bold",
        color="white",
        zorder=5,
        bbox={"boxstyle": "square,pad=0.12", "facecolor": "#D00000", "edgecolor": "none"},
    )
