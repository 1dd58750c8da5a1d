"""The chapter `numerics`: the table of every measure, and the figures of each run.

The table is `numerics.csv`, with a row for each tensor and operand, and `numerics.json`. A tensor that is no operand,
or is not judged, has one row without a format. The JSON has each tensor once, with its operands, histograms and notes.
Missing numbers are empty in the CSV and null in the JSON; infinite ones are `inf` and `-inf`, in the JSON as texts.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from quantexp.analysis.chapter import Chapter, Desk, Source
from quantexp.analysis.measures.hif8 import tier_shares
from quantexp.analysis.measures.measured import Measured
from quantexp.analysis.measures.operand import UnderFormat
from quantexp.analysis.measures.outliers import Outliers
from quantexp.analysis.measures.row import OPERAND, OUTLIERS, TENSOR, tensor_json
from quantexp.analysis.numerics.by_layer import (
    between_ranks,
    operand_heat,
    over_iterations,
    overflow,
    scale_exponents,
    tensor_heat,
)
from quantexp.analysis.numerics.directions import rows_and_columns
from quantexp.analysis.numerics.hif8_figure import (
    chosen,
    fine_magnitudes,
    hif8_of,
    hif8_tiers,
    hif8_values,
)
from quantexp.analysis.numerics.outlier_figure import channel_profile, heads, outliers_by_layer
from quantexp.analysis.numerics.passes import forward_and_backward
from quantexp.analysis.numerics.series import AS_DECLARED, Judged, Run, groups_of, runs_of, slug
from quantexp.analysis.tensors.place import Place

#: A figure's name, and the figure or the reason for its absence.
Drawn = tuple[str, Figure | str]


def draw(sources: Sequence[Source], desk: Desk) -> list[Path]:
    """Write the table of all sources, and draw the figures of each, in separate folders for several sources."""
    runs = runs_of(sources)
    if not runs:
        return []
    by_label = {run.label: run.tensors for run in runs}
    written = [desk.write_text("numerics.csv", csv_text(by_label))]
    written.append(desk.write_text("numerics.json", json_text(by_label)))
    for source in sources:
        for run in runs:
            if run.label == source.label:
                folder = f"{slug(run.label)}/" if len(runs) > 1 else ""
                written += _draw_run(run, source, desk, folder)
    return written


def _draw_run(run: Run, source: Source, desk: Desk, folder: str) -> list[Path]:
    written: list[Path] = []
    groups = groups_of(run)
    for name, drawn in _figures(run, groups):
        if isinstance(drawn, str):
            desk.say(f"{run.label}: no {name}: {drawn}")
        else:
            written += desk.save(drawn, folder + name)
    for group, judged in groups.items():
        written += _draw_hif8(run, group, hif8_of(judged), source, desk, folder)
    return written


def _figures(run: Run, groups: dict[str, list[Judged]]) -> Iterator[Drawn]:
    yield "tensors_by_layer", tensor_heat(run)
    for group, judged in groups.items():
        end = _end(group)
        yield f"numerics_by_layer{end}", operand_heat(run, group, judged)
        yield f"overflow{end}", overflow(run, group, judged)
        yield f"scale_exponents{end}", scale_exponents(run, group, judged)
    if not groups:
        yield "numerics_by_layer", "no operand of a matrix product was judged"
    for group, judged in (groups or {AS_DECLARED: []}).items():
        figure = forward_and_backward(run, group, judged)
        why = "no gradient beside its tensor was captured"
        yield f"forward_against_backward{_end(group)}", figure or why
    yield "iterations", over_iterations(run, groups) or "one iteration alone"
    yield "ranks", between_ranks(run) or "one rank alone, nothing to compare"
    yield "rows_against_columns", rows_and_columns(run) or "no tensor was judged along both axes"
    yield "channels", outliers_by_layer(run) or "no tensor with channels was looked at"
    yield "channel_profile", channel_profile(run) or "no tensor with channels was looked at"
    yield "heads", heads(run) or "no tensor with heads was looked at"


def _draw_hif8(
    run: Run, group: str, judged: Sequence[Judged], source: Source, desk: Desk, folder: str
) -> list[Path]:
    if not judged:
        return []
    written = desk.save(hif8_tiers(run, group, judged), f"{folder}hif8_tiers{_end(group)}")
    entries = {Place.of(entry.metadata): entry for entry in source.entries}
    shown = {one.judged.place: one for one in chosen(judged)}
    looked = desk.each(fine_magnitudes, [entries[place] for place in shown])
    counted = {
        place.label: (shown[place], counts)
        for entry, counts in looked
        for place in [Place.of(entry.metadata)]
    }
    if counted:
        written += desk.save(hif8_values(run, group, counted), f"{folder}hif8_values{_end(group)}")
    return written


def _end(group: str) -> str:
    return "" if group == AS_DECLARED else f"_{slug(group)}"


CHAPTER = Chapter("numerics", "what formats leave of the tensors, by layer, operand and rank", draw)


_PLACE = (
    *("module", "layer", "layer_type", "operation", "phase", "tensor"),
    *("iteration", "micro_batch", "rank", "quant_type"),
)
_EXPONENTS = ("scale_exponent_min", "scale_exponent_median", "scale_exponent_max")
_BLOCKS = ("zero_blocks", "nan_blocks")
_TIERS = ("tier_3_bits", "tier_2_bits", "tier_1_bit", "tier_0_bits")
COLUMNS = (
    *("run", *_PLACE, "source", "shape", *TENSOR),
    *(f"channel_{name}" for name in OUTLIERS),
    *(f"head_{name}" for name in OUTLIERS),
    *(*OPERAND, *_EXPONENTS, *_BLOCKS, *_TIERS, "notes"),
)


def csv_text(measured_of: Mapping[str, Iterable[Measured]]) -> str:
    """Write `numerics.csv` for several runs by their labels."""
    stream = io.StringIO()
    rows = csv.DictWriter(stream, COLUMNS, restval="", lineterminator="\n")
    rows.writeheader()
    for run, tensors in measured_of.items():
        for one in tensors:
            rows.writerows({"run": run, **row} for row in rows_of(one))
    return stream.getvalue()


def rows_of(one: Measured) -> Iterator[dict[str, object]]:
    """The rows of a tensor, without the run."""
    tensor = {
        **{name: _cell(getattr(one.place, name)) for name in _PLACE},
        "source": one.source,
        "shape": "x".join(map(str, one.shape)),
        **{name: _cell(getattr(one, name)) for name in TENSOR},
        **_outlier_cells("channel", one.channels),
        **_outlier_cells("head", one.heads),
        "notes": "; ".join(one.notes),
    }
    if not one.operands:
        yield tensor
    for operand in one.operands:
        yield {**tensor, **_operand_cells(operand)}


def json_text(measured_of: Mapping[str, Iterable[Measured]]) -> str:
    """Write `numerics.json` for several runs by their labels, with a line for each tensor."""
    runs = []
    for run, tensors in measured_of.items():
        lines = ",\n  ".join(json.dumps(tensor_json(one)) for one in tensors)
        runs.append(f"{json.dumps(run)}: [\n  {lines}\n]")
    return "{" + ",\n".join(runs) + "}\n"


def _outlier_cells(kind: str, outliers: Outliers | None) -> dict[str, object]:
    if outliers is None:
        return {}
    return {f"{kind}_{name}": _cell(getattr(outliers, name)) for name in OUTLIERS}


def _operand_cells(operand: UnderFormat) -> dict[str, object]:
    exponents = operand.scale_exponents
    spread = (exponents.quantile(share) for share in (0.0, 0.5, 1.0))
    cells: dict[str, object] = {
        **{name: _cell(getattr(operand, name)) for name in OPERAND[:5]},
        **{name: _cell(value) for name, value in operand.fidelity._asdict().items()},
        **dict(zip(_EXPONENTS, map(_cell, spread), strict=True)),
        **{name: getattr(operand, name) for name in _BLOCKS},
    }
    if operand.code_exponents is not None:
        shares = tier_shares(operand.code_exponents).values()
        cells |= dict(zip(_TIERS, map(_cell, shares), strict=True))
    return cells


def _cell(value: object) -> object:
    """The text of a number; empty for a missing one."""
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value
