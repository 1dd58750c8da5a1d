"""The chapter `attention_maps`: every head of every captured layer, in the first and last captured iteration.

Probabilities are on a logarithmic scale, with the gradients beside them if captured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, SymLogNorm
from matplotlib.figure import Figure
from torch import Tensor

from quantexp.analysis.chapter import Chapter, Desk, Source
from quantexp.analysis.numerics.attention import Layer, Maps, layers_of, maps_of, masked
from quantexp.analysis.numerics.lines import write_note, write_title
from quantexp.analysis.numerics.series import slug
from quantexp.analysis.style import INK, NOTE_PT, TICK_PT, new_figure
from quantexp.errors import CaptureError

#: The lower end of the colour scale.
LEAST_PROBABILITY = 1e-4
_PROBABILITY_MAP, _GRADIENT_MAP = "cividis", "RdBu_r"
_HIDDEN = "#E4E4E4"
_MAP_INCH, _TOP_INCH, _BOTTOM_INCH, _LEFT_INCH, _BAR_INCH = 1.25, 0.95, 0.55, 0.5, 0.85
#: Heads in a row, without and with gradients.
_COLUMNS, _PAIRS = 8, 4


def draw(sources: Sequence[Source], desk: Desk) -> list[Path]:
    """Draw a figure for each layer, and report omitted layers."""
    written: list[Path] = []
    for source in sources:
        attentions = layers_of(source.entries)
        drawable = [layer for layer in attentions if layer.can_be_drawn]
        if source.names.mask_documents and any(layer.lacks_mask for layer in drawable):
            desk.say(
                f"{source.label}: attention of {sum(layer.lacks_mask for layer in drawable)} modules not drawn: "
                "dataset.mask_documents kept documents apart, and the capture does not say where they begin; capture "
                "again, or with capture.attn_weights=true"
            )
            drawable = [layer for layer in drawable if not layer.lacks_mask]
        chosen = _ends(drawable)
        if len(chosen) < len(drawable):
            desk.say(
                f"{source.label}: attention of the first and the last captured iteration, first micro-batch, rank 0, "
                f"is drawn: {len(chosen)} of {len(drawable)}"
            )
        if bare := sum(not layer.can_be_drawn for layer in attentions):
            desk.say(
                f"{source.label}: {bare} attention modules without maps: neither attn_weights "
                "nor query and key were captured"
            )
        folder = f"{slug(source.label)}/" if len(sources) > 1 else ""
        for layer in chosen:
            try:
                figure = draw_maps(maps_of(layer), source.label)
            except (CaptureError, OSError) as error:
                desk.say(
                    f"{source.label}: attention of layer {layer.place.layer} not drawn: {error}"
                )
                continue
            several = len({one.place.iteration for one in chosen}) > 1
            end = f"_iteration{layer.place.iteration}" if several else ""
            written += desk.save(figure, f"{folder}L{layer.place.layer}{end}")
    return written


def _ends(layers: Sequence[Layer]) -> list[Layer]:
    """The captures of the first and last iteration, with the first micro-batch and rank of each layer."""
    iterations = [layer.place.iteration for layer in layers]
    ends = {min(iterations, default=0), max(iterations, default=0)}
    first: dict[tuple[int, int], Layer] = {}
    for layer in layers:
        if layer.place.iteration in ends:
            first.setdefault((layer.place.iteration, layer.place.layer), layer)
    return list(first.values())


def draw_maps(maps: Maps, label: str) -> Figure:
    """A map for each head, or two side by side with gradients."""
    with_gradient = maps.gradient is not None
    num_heads = maps.probabilities.shape[0]
    columns = min(_PAIRS if with_gradient else _COLUMNS, num_heads)
    rows = -(-num_heads // columns)
    across = columns * (2 if with_gradient else 1)
    width = max(6.5, _LEFT_INCH + across * _MAP_INCH + _BAR_INCH * (1 + with_gradient))
    height = _TOP_INCH + rows * (_MAP_INCH + 0.17) + _BOTTOM_INCH
    figure = new_figure(width, height)
    hidden = masked(maps.num_queries, maps.num_keys, maps.starts).numpy()
    images = {}
    for head in range(num_heads):
        row, column = divmod(head, columns)
        for part, values in enumerate((maps.probabilities, maps.gradient)):
            if values is None:
                continue
            place = column * (1 + with_gradient) + part
            box = (
                (_LEFT_INCH + place * _MAP_INCH) / width,
                (height - _TOP_INCH - row * (_MAP_INCH + 0.17) - _MAP_INCH) / height,
                (_MAP_INCH - 0.1) / width,
                (_MAP_INCH - 0.1) / height,
            )
            ax = figure.add_axes(box)
            shown = np.ma.array(values[head].numpy(), mask=hidden)
            images[part] = _draw_map(ax, shown, part, maps)
            if part == 0:
                ax.set_title(f"head {maps.heads[head]}", fontsize=NOTE_PT, loc="left", pad=2)
            _dress(ax, maps.num_keys, is_corner=row == rows - 1 and place == 0)
    _add_bars(figure, images, _LEFT_INCH + across * _MAP_INCH)
    _write(figure, maps, label)
    return figure


def _draw_map(ax: Axes, values: np.ma.MaskedArray, part: int, maps: Maps) -> object:
    colours = colormaps[_GRADIENT_MAP if part else _PROBABILITY_MAP].with_extremes(bad=_HIDDEN)
    if part == 0:
        norm: LogNorm | SymLogNorm = LogNorm(LEAST_PROBABILITY, 1)
        values = np.ma.maximum(values, LEAST_PROBABILITY)
    else:
        assert maps.gradient is not None
        norm = _gradient_norm(maps.gradient)
    return ax.imshow(values, cmap=colours, norm=norm, interpolation="nearest")


def _gradient_norm(gradient: Tensor) -> SymLogNorm:
    """The colour scale of gradients: three decades of each sign, up to the maximum of all heads."""
    known = gradient[gradient.isfinite()]
    top = float(known.abs().max()) if known.numel() else 0.0
    top = top or 1.0
    return SymLogNorm(linthresh=top / 1000, vmin=-top, vmax=top)


def _dress(ax: Axes, num_keys: int, *, is_corner: bool) -> None:
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_linewidth(0.4)
        spine.set_color("#999999")
    if is_corner:
        ax.set_xlabel(f"key, 0 .. {num_keys - 1}", fontsize=NOTE_PT, color=INK, labelpad=2)
        ax.set_ylabel("query", fontsize=NOTE_PT, color=INK, labelpad=2)


def _add_bars(figure: Figure, images: dict[int, object], left_inch: float) -> None:
    width, height = figure.get_size_inches()
    tall = min(2.2, height - _TOP_INCH - _BOTTOM_INCH)
    for part, image in images.items():
        left = left_inch + 0.1 + part * _BAR_INCH
        box = (
            left / width,
            (height - _TOP_INCH - tall) / height,
            0.11 / width,
            (tall - 0.1) / height,
        )
        bar = figure.colorbar(image, cax=figure.add_axes(box))  # type: ignore[arg-type]
        bar.ax.minorticks_off()
        bar.ax.tick_params(labelsize=NOTE_PT)
        bar.ax.set_title("dP" if part else "P", fontsize=TICK_PT, loc="left", pad=4)
        if part:
            top = bar.ax.get_ylim()[1]
            ticks = [-top, -top / 100, 0, top / 100, top]
            bar.ax.set_yticks(ticks, [f"{t:.0e}" if t else "0" for t in ticks])


def _write(figure: Figure, maps: Maps, label: str) -> None:
    place = maps.place
    how = "recomputed from query and key before quantisation" if maps.recomputed else "as captured"
    write_title(figure, f"Attention of layer {place.layer}: {label}", "")
    micro_batch = "" if place.micro_batch is None else f", micro-batch {place.micro_batch}"
    about = f"P {how}; iteration {place.iteration}{micro_batch}, rank {place.rank}, first sequence"
    if maps.gradient is not None:
        about += "; right of each map the gradient of P"
    width, height = figure.get_size_inches()
    figure.text(0.12 / width, 1 - 0.5 / height, about, fontsize=TICK_PT, color=INK)
    mask = "causal mask" if maps.starts is None else "mask, causal and within documents"
    notes = [f"grey: keys behind the {mask}; P below {LEAST_PROBABILITY:g} has its colour"]
    side = maps.probabilities.shape[-1]
    if side < maps.num_keys:
        tokens = math.ceil(maps.num_keys / side)
        notes.append(f"a pixel is the largest P (mean gradient) of {tokens} x {tokens} tokens")
    if bool(maps.probabilities.isnan().any()):
        notes.append("white: NaN")
    write_note(figure, "; ".join(notes))


CHAPTER = Chapter("attention_maps", "attention probabilities by head, with their gradients", draw)
