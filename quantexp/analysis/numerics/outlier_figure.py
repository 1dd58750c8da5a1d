"""Figures of outlier channels and heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from quantexp.analysis.measures.outliers import profile_ranks
from quantexp.analysis.numerics.heat import COLOUR_MAP, hatch, label_powers
from quantexp.analysis.numerics.lines import draw_lines, set_scale, write_note, write_title
from quantexp.analysis.numerics.series import Measure, Member, Run, Scale, in_order
from quantexp.analysis.style import LABEL_PT, NOTE_PT, dress, new_figure

_COLUMNS, _TOP_INCH, _GAP_INCH = 4, 0.75, 0.75

_ROWS = (
    Measure("amax_ratio", "largest amax\n/ median", Scale.LOG2),
    Measure("top_energy_share", "energy in the\ntop 1 % of channels", Scale.PERCENT),
)


def outliers_by_layer(run: Run) -> Figure | None:
    """The ratio of the largest channel to the median, by layer; None without channels."""
    channels = [(one.place, one.channels) for one in run.tensors if one.channels is not None]
    if not channels:
        return None
    rows = {
        measure: [
            Member(place, place.tensor, getattr(outliers, measure.name))
            for place, outliers in channels
        ]
        for measure in _ROWS
    }
    title = f"Channels that stand out: {run.label}"
    about = "of each channel the largest magnitude and the sum of squares; line: median, band: least to largest"
    return draw_lines(title, about, rows, lambda member: member.place.layer, "layer")


def channel_profile(run: Run) -> Figure | None:
    """The largest magnitudes of all channels in descending order; None without channels."""
    members = [
        Member(one.place, one.place.tensor, value, at=rank)
        for one in run.tensors
        if (measured := one.channels) is not None
        for rank, value in zip(profile_ranks(measured.num_groups), measured.profile, strict=True)
    ]
    if not members:
        return None
    measure = Measure("profile", "channel's amax\n/ median", Scale.LOG2)
    title = f"Channels in the order of their largest magnitude: {run.label}"
    about = "a steep left end: a few channels stand out; line: median over layers, band: least to largest"
    figure = draw_lines(
        title, about, {measure: members}, lambda member: member.at, "channel, by rank"
    )
    for ax in figure.axes:
        set_scale(ax, Scale.LOG2, "x")
    return figure


def heads(run: Run) -> Figure | None:
    """Every head of every layer, with a panel for each tensor; None without heads."""
    by_tensor: dict[str, dict[int, list[tuple[float, ...]]]] = {}
    for one in run.tensors:
        if one.heads is not None and one.heads.ratios:
            by_layer = by_tensor.setdefault(one.place.tensor, {})
            by_layer.setdefault(one.place.layer, []).append(one.heads.ratios)
    if not by_tensor:
        return None
    names = in_order(by_tensor)
    columns = min(_COLUMNS, len(names))
    rows = -(-len(names) // columns)
    most = max(len(layers) for layers in by_tensor.values())
    panel = max(0.7, min(4.0, 0.16 * most))
    width, height = 12.0, _TOP_INCH + rows * (panel + _GAP_INCH) + 0.25
    figure = new_figure(width, height)
    axes = figure.subplots(rows, columns, squeeze=False)
    figure.subplots_adjust(
        left=0.05,
        right=0.93,
        top=1 - (_TOP_INCH + 0.1) / height,
        bottom=(_GAP_INCH + 0.05) / height,
        hspace=_GAP_INCH / panel,
        wspace=0.14,
    )
    cells = {name: _head_cells(by_tensor[name]) for name in names}
    norm = LogNorm(*_reach(cells.values()))
    for ax, name in zip_longest(axes.flat, names):
        if name is None:
            ax.set_visible(False)
            continue
        dress(ax, "", "head", "layer" if ax in axes[:, 0] else "", grid="both")
        ax.set_title(name, fontsize=LABEL_PT, loc="left")
        ax.grid(visible=False)
        hatch(ax)
        image = ax.imshow(cells[name], aspect="auto", cmap=COLOUR_MAP, norm=norm)
        layers = sorted(by_tensor[name])
        step = -(-len(layers) // 12)
        ax.set_yticks(range(0, len(layers), step), [str(v) for v in layers[::step]])
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    bar_axes = figure.add_axes((0.945, 0.25, 0.012, 0.5))
    bar = figure.colorbar(image, cax=bar_axes)
    bar.ax.set_title("amax\n/ median", fontsize=NOTE_PT)
    label_powers(bar.ax)
    about = "largest magnitude of each head over that of the layer's median head; median over iterations"
    write_title(figure, f"Heads: {run.label}", about)
    if any(np.isnan(values).any() for values in cells.values()):
        write_note(figure, "hatched: no such head, or zeros alone")
    return figure


def _head_cells(layers: Mapping[int, Sequence[tuple[float, ...]]]) -> np.ndarray:
    """[layers, heads]; NaN if a layer has fewer heads."""
    most = max(len(ratios) for same in layers.values() for ratios in same)
    cells = np.full((len(layers), most), np.nan)
    for row, layer in enumerate(sorted(layers)):
        same = [ratios for ratios in layers[layer] if len(ratios) == len(layers[layer][0])]
        cells[row, : len(same[0])] = np.median(np.array(same), axis=0)
    return cells


def _reach(cells: Iterable[np.ndarray]) -> tuple[float, float]:
    known = np.concatenate([c[np.isfinite(c) & (c > 0)] for c in cells])
    low, high = (float(known.min()), float(known.max())) if known.size else (1.0, 1.0)
    return min(low, 0.5), max(high, 2.0)
