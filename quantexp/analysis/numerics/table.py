"""Writes the measures of a collection: `numerics.csv`, with a row for each tensor and operand, and `numerics.json`.

A tensor that is no operand, or is not judged, has one row without a format. The JSON holds each tensor once, with its
operands, histograms and notes. Numbers that there are not are empty in the CSV and null in the JSON; infinite ones are
`inf` and `-inf`, in the JSON as texts.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any

from quantexp.analysis.numerics.hif8 import tier_shares
from quantexp.analysis.numerics.measured import Measured
from quantexp.analysis.numerics.operand import Axis, UnderFormat
from quantexp.analysis.numerics.outliers import Outliers
from quantexp.analysis.tensors.place import Place
from quantexp.capture.statistics.counts import Counts, from_json
from quantexp.capture.statistics.errors import Fidelity

_PLACE = (
    *("module", "layer", "layer_type", "operation", "phase", "tensor"),
    *("iteration", "micro_batch", "rank", "quant_type"),
)
_TENSOR = (
    *("source", "shape", "dtype", "count", "nonfinite"),
    *("mean", "std", "abs_max", "skew", "kurtosis", "zero_share"),
)
_OUTLIERS = ("num_groups", "amax_ratio", "largest", "top_energy_share")
_OPERAND = ("slot", "format", "axis", "declared", "num_elements", *Fidelity._fields)
_EXPONENTS = ("scale_exponent_min", "scale_exponent_median", "scale_exponent_max")
_BLOCKS = ("zero_blocks", "nan_blocks")
_TIERS = ("tier_3_bits", "tier_2_bits", "tier_1_bit", "tier_0_bits")
COLUMNS = (
    *("run", *_PLACE, *_TENSOR),
    *(f"channel_{name}" for name in _OUTLIERS),
    *(f"head_{name}" for name in _OUTLIERS),
    *(*_OPERAND, *_EXPONENTS, *_BLOCKS, *_TIERS, "notes"),
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
        "source": _source(one),
        "shape": "x".join(map(str, one.shape)),
        **{name: _cell(getattr(one, name)) for name in _TENSOR[2:]},
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


def tensor_json(one: Measured) -> dict[str, Any]:
    """All measures of one tensor."""
    return {
        **asdict(one.place),
        "source": _source(one),
        "shape": list(one.shape),
        **{name: _plain(getattr(one, name)) for name in _TENSOR[2:]},
        "log2_magnitude": one.log2_magnitude,
        "channels": _outliers_json(one.channels),
        "heads": _outliers_json(one.heads),
        "operands": [_operand_json(operand) for operand in one.operands],
        "notes": list(one.notes),
        **({"largest": list(one.largest)} if one.largest else {}),
    }


def measured_of_json(content: Mapping[str, Any]) -> Measured:
    """The inverse of `tensor_json`."""
    place = Place(**{f.name: content[f.name] for f in fields(Place)})
    numbers: dict[str, Any] = {name: _number(content[name]) for name in _TENSOR[5:]}
    return Measured(
        place,
        tuple(content["shape"]),
        content["dtype"],
        content["source"] == "values",
        content["count"],
        content["nonfinite"],
        **numbers,
        log2_magnitude=content["log2_magnitude"],
        channels=_outliers_of_json(content["channels"]),
        heads=_outliers_of_json(content["heads"]),
        operands=tuple(map(_operand_of_json, content["operands"])),
        notes=tuple(content["notes"]),
        largest=tuple(content.get("largest") or ()),
    )


def _outliers_of_json(content: Mapping[str, Any] | None) -> Outliers | None:
    if content is None:
        return None
    lists = {name: tuple(map(_number, content[name])) for name in ("profile", "ratios")}
    return Outliers(
        content["num_groups"],
        _number(content["amax_ratio"]),
        content["largest"],
        _number(content["top_energy_share"]),
        **lists,
    )


def _operand_of_json(content: Mapping[str, Any]) -> UnderFormat:
    codes = content["code_exponents"]
    return UnderFormat(
        content["slot"],
        content["format"],
        Axis(content["axis"]),
        content["declared"],
        content["num_elements"],
        Fidelity(**{name: _number(content[name]) for name in Fidelity._fields}),
        from_json(content["scale_exponents"]),
        content["zero_blocks"],
        content["nan_blocks"],
        None if codes is None else from_json(codes),
    )


def _number(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def _source(one: Measured) -> str:
    return "values" if one.from_values else "statistics"


def _outlier_cells(kind: str, outliers: Outliers | None) -> dict[str, object]:
    if outliers is None:
        return {}
    return {f"{kind}_{name}": _cell(getattr(outliers, name)) for name in _OUTLIERS}


def _operand_cells(operand: UnderFormat) -> dict[str, object]:
    exponents = operand.scale_exponents
    spread = (exponents.quantile(share) for share in (0.0, 0.5, 1.0))
    cells: dict[str, object] = {
        **{name: _cell(getattr(operand, name)) for name in _OPERAND[:5]},
        **{name: _cell(value) for name, value in operand.fidelity._asdict().items()},
        **dict(zip(_EXPONENTS, map(_cell, spread), strict=True)),
        **{name: getattr(operand, name) for name in _BLOCKS},
    }
    if operand.code_exponents is not None:
        shares = tier_shares(operand.code_exponents).values()
        cells |= dict(zip(_TIERS, map(_cell, shares), strict=True))
    return cells


def _outliers_json(outliers: Outliers | None) -> dict[str, Any] | None:
    if outliers is None:
        return None
    lists = {name: [_plain(v) for v in getattr(outliers, name)] for name in ("profile", "ratios")}
    return {**{name: _plain(getattr(outliers, name)) for name in _OUTLIERS}, **lists}


def _operand_json(operand: UnderFormat) -> dict[str, Any]:
    return {
        **{name: _plain(getattr(operand, name)) for name in _OPERAND[:5]},
        **{name: _plain(value) for name, value in operand.fidelity._asdict().items()},
        "scale_exponents": _counts_json(operand.scale_exponents),
        **{name: getattr(operand, name) for name in _BLOCKS},
        "code_exponents": _counts_json(operand.code_exponents),
    }


def _counts_json(counts: Counts | None) -> dict[str, Any] | None:
    if counts is None:
        return None
    return {"first": counts.first if counts.counts else None, "counts": list(counts.counts)}


def _cell(value: object) -> object:
    """The text of a number; empty for a missing one."""
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
