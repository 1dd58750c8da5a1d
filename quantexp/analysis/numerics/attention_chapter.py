"""The chapter `attention_maps`: every head of every captured layer, in the first and last captured iteration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantexp.analysis.chapter import Chapter, Desk, Source
from quantexp.analysis.numerics.attention import Layer, layers_of, maps_of
from quantexp.analysis.numerics.attention_figure import draw_maps
from quantexp.analysis.numerics.series import slug
from quantexp.errors import CaptureError


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


CHAPTER = Chapter("attention_maps", "attention probabilities by head, with their gradients", draw)
