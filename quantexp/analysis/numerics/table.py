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

from quantexp.analysis.measures.hif8 import tier_shares
from quantexp.analysis.measures.measured import Measured
from quantexp.analysis.measures.operand import UnderFormat
from quantexp.analysis.measures.outliers import Outliers
from quantexp.analysis.measures.row import OPERAND, OUTLIERS, TENSOR, tensor_json

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
