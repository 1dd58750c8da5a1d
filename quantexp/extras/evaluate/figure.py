"""The figures of `quantexp evaluate`: differences to bf16 with intervals, and maps of layers and modules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from quantexp.analysis.evaluation_table import Result
from quantexp.analysis.numerics.heat import COLOUR_MAP
from quantexp.analysis.scheme_style import scheme_styles
from quantexp.analysis.style import (
    GREY,
    LABEL_PT,
    NOTE_PT,
    TICK_PT,
    dress,
    new_figure,
    save_figure,
)
from quantexp.model.decoder import layer_words
from quantexp.runs.evaluation import Evaluated, read_evaluation
from quantexp.runs.paths import RunDir
from quantexp.runs.recorded_config import read_config
from quantexp.terminal.escaping import printable

FILE_NAME, EACH_NAME = "evaluation", "evaluation_each"
_ROW_INCH, _FRAME_INCH, _WIDTH_INCH = 0.3, 1.25, 7.5
_CELL_INCH, _MAP_ROW_INCH = 0.5, 0.28
#: The row of whole layers.
_WHOLE = "whole layer"


def draw_results(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw `evaluation.png` and, with layers or modules, `evaluation_each.png`, each as PDF too; returns the files."""
    shown = [one for one in results if one.evaluation is not None and _difference(one) is not None]
    files = []
    if shown:
        files += save_figure(_differences(shown), folder / FILE_NAME, ("png", "pdf"))
    each = [one for one in shown if one.evaluation is not None and one.evaluation["each"]]
    if each:
        files += save_figure(_maps(each), folder / EACH_NAME, ("png", "pdf"))
    return files


def draw_run(run: RunDir) -> None:
    """Draw the results of a run that evaluated into its figures.

    Raises:
        UnreadableError: the results cannot be read.
    """
    scheme = str(read_config(run)["quant"]["name"])
    draw_results([Result(scheme, "", "", read_evaluation(run))], run.figures)


def _difference(result: Result) -> float | None:
    return None if result.evaluation is None else result.evaluation["scheme"].get("difference")


def _differences(results: Sequence[Result]) -> Figure:
    """A row for each evaluation, the smallest difference on top."""
    ordered = sorted(results, key=lambda one: _difference(one) or 0.0)
    styles = scheme_styles([one.scheme for one in ordered])
    height = _FRAME_INCH + _ROW_INCH * len(ordered)
    figure = new_figure(_WIDTH_INCH, height)
    ax = figure.subplots()
    title = "Loss above bf16 with the same weights"
    dress(ax, title, "nats for a token, 95% intervals over documents", "", grid="x")
    ax.axvline(0, color=GREY, linewidth=1.2)
    for row, (result, style) in enumerate(zip(ordered, styles, strict=True)):
        assert result.evaluation is not None
        one = result.evaluation["scheme"]
        if (interval := one.get("interval")) is not None:
            ax.plot(interval, (row, row), color=style.colour, linewidth=2.2)
        ax.plot(_difference(result) or 0.0, row, "o", color=style.colour, markersize=6)
    ax.set_yticks(range(len(ordered)), [printable(one.name) for one in ordered])
    ax.set_ylim(len(ordered) - 0.4, -0.6)
    longest = max(len(one.name) for one in ordered)
    figure.subplots_adjust(
        left=min(0.5, (0.3 + 0.075 * longest) / _WIDTH_INCH),
        right=0.97,
        top=1 - 0.4 / height,
        bottom=0.55 / height,
    )
    return figure


def _maps(results: Sequence[Result]) -> Figure:
    """For each evaluation a map of the divergence: a row for each module, a column for each layer."""
    tables = [_cells(one.evaluation["each"]) for one in results if one.evaluation is not None]
    columns = max(len(layers) for layers, _, _ in tables)
    heights = [0.75 + _MAP_ROW_INCH * len(modules) for _, modules, _ in tables]
    width = 2.6 + max(2.5, min(9.0, _CELL_INCH * columns))
    height = sum(heights) + 0.5
    figure = new_figure(width, height)
    positive = [table[table > 0] for _, _, table in tables if (table > 0).any()]
    low = min((float(each.min()) for each in positive), default=1e-9)
    high = max((float(each.max()) for each in positive), default=1.0)
    norm = LogNorm(low, high if high > low else low * 10)
    top = height - 0.1
    for result, (layers, modules, table), own in zip(results, tables, heights, strict=True):
        inner = _MAP_ROW_INCH * len(modules)
        box = (1.1 / width, (top - 0.3 - inner) / height, (width - 2.6) / width, inner / height)
        ax = figure.add_axes(box)
        dress(ax, printable(result.name), "", "", grid="y")
        ax.grid(visible=False)
        image = ax.imshow(table, aspect="auto", cmap=COLOUR_MAP, norm=norm)
        ax.set_yticks(range(len(modules)), modules, fontsize=TICK_PT)
        step = max(1, len(layers) // 16)
        ax.set_xticks(range(0, len(layers), step), layers[::step])
        top -= own
    bar = figure.add_axes((1 - 1.35 / width, 0.5 / height, 0.14 / width, 1 - 0.95 / height))
    figure.colorbar(image, cax=bar)
    bar.set_ylabel("KL divergence from bf16, nats for a token", fontsize=LABEL_PT)
    bar.tick_params(labelsize=TICK_PT, which="both")
    note = "columns: layers; the scheme in that layer or module alone, everything else in bf16"
    figure.text(0.01, 0.008, note, fontsize=NOTE_PT)
    return figure


def _cells(each: Sequence[Evaluated]) -> tuple[list[str], list[str], np.ndarray]:
    """Layers, modules, and the divergence of each, NaN where there is none."""
    layers = sorted({int(one.get("layer") or 0) for one in each})
    modules = list(dict.fromkeys(one.get("module") or _WHOLE for one in each))
    table = np.full((len(modules), len(layers)), np.nan)
    for one in each:
        place = modules.index(one.get("module") or _WHOLE), layers.index(int(one.get("layer") or 0))
        value = one.get("divergence")
        table[place] = np.nan if value is None else value
    labels = {int(one.get("layer") or 0): str(one.get("module")) for one in each}
    return [layer_words(layer, labels[layer]) for layer in layers], modules, table
