"""The chapter `comparisons`: several schemes, or the formats under which one run is judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from quantexp.analysis.chapter import Chapter, Desk, Source
from quantexp.analysis.numerics.comparison import (
    contestants,
    fidelity_by_scheme,
    labels_of,
    magnitudes_by_scheme,
)
from quantexp.analysis.numerics.drift import drift_from
from quantexp.analysis.numerics.gather import Run, gather
from quantexp.analysis.numerics.heat import draw_heat
from quantexp.analysis.numerics.series import Measure, Member, Scale, slug
from quantexp.analysis.tensors.place import Place
from quantexp.capture.reader import CapturedTensor
from quantexp.quant.label import is_unquantised

DRIFT = Measure("drift", "difference, of the reference's norm", Scale.PERCENT)


def draw(sources: Sequence[Source], desk: Desk) -> list[Path]:
    """Compare the fidelity of several schemes or formats for the same operands; nothing for a single one."""
    runs = [run for run in gather(sources, desk) if run.tensors]
    written: list[Path] = []
    compared = contestants(runs)
    if len(compared) > 1:
        written += desk.save(fidelity_by_scheme(compared), "error_by_scheme")
    if len(runs) > 1:
        figure = magnitudes_by_scheme(runs)
        written += desk.save(figure, "magnitudes_by_scheme") if figure is not None else []
        written += _draw_drift(sources, runs, desk)
    return written


def reference_of(sources: Sequence[Source]) -> Source:
    """The source that the others are compared with: the first in bf16, or the first of all."""
    return next((s for s in sources if is_unquantised(s.scheme)), sources[0])


def look_from(reference: Source) -> Callable[[CapturedTensor], float | None]:
    """The look at each stored tensor of another source."""
    return partial(drift_from, reference=str(reference.capture.folder))


def _draw_drift(sources: Sequence[Source], runs: Sequence[Run], desk: Desk) -> list[Path]:
    """Compare every run with the reference."""
    reference = reference_of(sources)
    names = labels_of(runs)
    written: list[Path] = []
    for source in sources:
        if source is reference or source.label not in names:
            continue
        members = [
            Member(place, place.tensor, value)
            for entry, value in desk.each(look_from(reference), source.entries)
            for place in [Place.of(entry.metadata)]
            if value is not None and not place.is_scale
        ]
        if members:
            name = f"difference_{slug(names[source.label])}"
            written += desk.save(_drift_figure(names, source, reference, members), name)
        else:
            desk.say(
                f"{source.label}: no tensor that {reference.label} has too, no difference drawn"
            )
    return written


def _drift_figure(
    names: dict[str, str], source: Source, reference: Source, members: Sequence[Member]
) -> Figure:
    title = f"{names[source.label]} against {names.get(reference.label, reference.label)}"
    about = "the same tensor of both runs: |a - b| / |a|, a of the reference; values before quantisation"
    return draw_heat(title, about, {DRIFT: members})


CHAPTER = Chapter("comparisons", "schemes, or formats, beside each other", draw)
