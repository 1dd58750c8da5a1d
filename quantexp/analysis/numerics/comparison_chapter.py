"""The chapter `comparisons`: several schemes, or the formats under which one run is judged.

Of several runs also the drift of each tensor: |a - b| / |a|, b of the run, a of the reference.

    drift = sqrt(sum (a - b)^2 / sum a^2)      over the elements that are finite in both; NaN where a has none but zeros

The same tensor is that of the same module, layer, operation, iteration, micro-batch and rank, and of the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from quantexp.analysis.chapter import Chapter, Desk, Source
from quantexp.analysis.numerics.comparison import (
    contestants,
    fidelity_by_scheme,
    labels_of,
    magnitudes_by_scheme,
)
from quantexp.analysis.numerics.heat import draw_heat
from quantexp.analysis.numerics.series import Measure, Member, Run, Scale, runs_of, slug
from quantexp.analysis.tensors.place import Place
from quantexp.capture.reader import CapturedTensor, open_capture
from quantexp.quant.label import is_unquantised

_CHUNK_ELEMENTS = 1 << 20
DRIFT = Measure("drift", "difference, of the reference's norm", Scale.PERCENT)


def draw(sources: Sequence[Source], desk: Desk) -> list[Path]:
    """Compare the fidelity of several schemes or formats for the same operands; nothing for a single one."""
    runs = runs_of(sources)
    written: list[Path] = []
    compared = contestants(runs)
    if len(compared) > 1:
        written += desk.save(fidelity_by_scheme(compared), "error_by_scheme")
    if len(runs) > 1:
        figure = magnitudes_by_scheme(runs)
        written += desk.save(figure, "magnitudes_by_scheme") if figure is not None else []
        written += _draw_drift(sources, runs, desk)
    return written


def _reference_of(sources: Sequence[Source]) -> Source:
    """The source that the others are compared with: the first in bf16, or the first of all."""
    return next((s for s in sources if is_unquantised(s.scheme)), sources[0])


def _draw_drift(sources: Sequence[Source], runs: Sequence[Run], desk: Desk) -> list[Path]:
    """Compare every run with the reference."""
    reference = _reference_of(sources)
    names = labels_of(runs)
    written: list[Path] = []
    for source in sources:
        if source is reference or source.label not in names:
            continue
        drift = partial(drift_from, reference=str(reference.capture.folder))
        members = [
            Member(place, place.tensor, value)
            for entry, value in desk.each(drift, source.entries)
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


def drift_from(entry: CapturedTensor, reference: str) -> float | None:
    """The drift of a tensor from a reference capture; None if the reference does not have the tensor.

    Raises:
        CaptureError: one of them cannot be read.
    """
    partner = _index(reference).get(same_tensor(entry.metadata))
    if partner is None:
        return None
    a, b = partner.torch(), entry.torch()
    if a.shape != b.shape or partner.metadata.get("sample") != entry.metadata.get("sample"):
        return None
    return drift(a, b)


def drift(a: Tensor, b: Tensor) -> float:
    """|a - b| / |a| of two tensors of one shape."""
    energy = apart = 0.0
    a_N, b_N = a.reshape(-1), b.reshape(-1)
    for start in range(0, a_N.numel(), _CHUNK_ELEMENTS):
        x, y = (t[start : start + _CHUNK_ELEMENTS].double() for t in (a_N, b_N))
        known = x.isfinite() & y.isfinite()
        x, y = x[known], y[known]
        energy += float(torch.dot(x, x))
        apart += float((x - y).square().sum())
    return math.sqrt(apart / energy) if energy else math.nan


def same_tensor(metadata: Mapping[str, Any]) -> tuple[Any, ...]:
    """The identity of a tensor within its run."""
    place = Place.of(metadata)
    return (
        *(place.module, place.layer, place.operation, place.tensor),
        *(place.iteration, place.micro_batch, place.rank),
    )


@lru_cache(maxsize=2)
def _index(folder: str) -> dict[tuple[Any, ...], CapturedTensor]:
    return {
        same_tensor(entry.metadata): entry for entry in open_capture(Path(folder)).with_values()
    }


CHAPTER = Chapter("comparisons", "schemes, or formats, beside each other", draw)
