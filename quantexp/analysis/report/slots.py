"""The content of a slot in the map: its quantisation error, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from quantexp.analysis.measures.measured import Measured
from quantexp.analysis.measures.operand import UnderFormat
from quantexp.analysis.tensors.operands import is_taken, operand_called, takes_copy
from quantexp.quant.sites import PRODUCTS, Operand
from quantexp.quant.slots import WORKING

FORWARD, BACKWARD = "forward", "backward"
_DIGITS = 6


class State(StrEnum):
    """Why a slot has no SQNR; a slot that has one is `judged`."""

    JUDGED = "judged"
    #: The slot has the working precision.
    UNQUANTISED = "unquantised"
    #: The slot reuses the forward's quantised copy.
    REUSED = "reused"
    #: The slot quantises the forward's quantised copy again.
    OF_FORWARD = "of the forward copy"
    #: Nothing was rounded: the SQNR is infinite.
    EXACT = "exact"
    #: No finite element differs from zero.
    EMPTY = "empty"
    #: A finite value became infinite.
    INFINITE = "infinite"
    #: Only statistics were captured, and no format was judged.
    STATISTICS = "statistics"
    #: The deadline had passed.
    LATE = "late"
    #: The values cannot be read or judged.
    FAILED = "failed"


@dataclass(frozen=True)
class SlotCell:
    """One slot of one module."""

    operation: str
    #: `x fprop`, or the tensor's name if `capture.format` judged it.
    name: str
    state: State
    format: str = ""
    sqnr_db: float | None = None
    underflow_share: float | None = None
    saturated_share: float | None = None
    #: The number of judged elements; 0 means all.
    num_elements: int = 0
    reason: str = ""


def slots_of_tensor(known: Mapping[str, Any], measured: Measured | State) -> Iterator[SlotCell]:
    """The slots of a tensor, from its line; a single one if only `capture.format` judged it."""
    operand = operand_called(str(known.get("layer_type")), str(known.get("tensor")))
    formats = known.get("formats")
    slots = formats if isinstance(formats, dict) else {}
    filled = {
        name: s
        for name, s in slots.items()
        if name.rpartition(".")[2] == operand and (operand != Operand.P or is_taken(known, s))
    }
    judged = {} if isinstance(measured, State) else {one.slot: one for one in measured.operands}
    if "" in judged and not any(slot for slot in judged):
        yield _of_capture_format(known, judged[""])
        return
    for name, settings in filled.items():
        product, _, operand = name.rpartition(".")
        product = product.rpartition(".")[2]
        operation = FORWARD if product == "fprop" else BACKWARD
        shown = f"{operand} {product}"
        if settings.get("reuse"):
            yield SlotCell(operation, shown, State.REUSED)
        elif takes_copy(settings):
            yield SlotCell(operation, shown, State.OF_FORWARD, str(settings.get("format")))
        elif one := judged.get(f"{product}.{operand}"):
            yield _judged(operation, shown, one)
        elif settings.get("format") == WORKING:
            yield SlotCell(operation, shown, State.UNQUANTISED)
        else:
            state, reason = _why_not(measured)
            yield SlotCell(operation, shown, state, str(settings.get("format")), reason=reason)


def _of_capture_format(known: Mapping[str, Any], one: UnderFormat) -> SlotCell:
    operation = str(known.get("operation") or FORWARD)
    cell = _judged(operation, str(known.get("tensor")), one)
    return SlotCell(**{**cell.__dict__, "format": f"{cell.format} (capture.format)"})


def _judged(operation: str, name: str, one: UnderFormat) -> SlotCell:
    fidelity = one.fidelity
    return SlotCell(
        operation,
        name,
        _state(fidelity.sqnr_db),
        one.format,
        number(fidelity.sqnr_db),
        number(fidelity.underflow_share),
        number(fidelity.saturated_share),
        one.num_elements,
    )


def _state(sqnr_db: float) -> State:
    if math.isnan(sqnr_db):
        return State.EMPTY
    if math.isinf(sqnr_db):
        return State.EXACT if sqnr_db > 0 else State.INFINITE
    return State.JUDGED


def _why_not(measured: Measured | State) -> tuple[State, str]:
    if isinstance(measured, State):
        return measured, ""
    if not measured.from_values:
        return State.STATISTICS, ""
    empty = measured.count == measured.nonfinite or "all zero" in measured.notes
    return (State.EMPTY, "") if empty else (State.FAILED, "; ".join(measured.notes))


def number(value: object) -> float | int | None:
    """A number rounded to the shown digits; None for a missing number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(f"{value:.{_DIGITS}g}")


_SLOTS = [
    f"{operand} {product.value}"
    for products in PRODUCTS.values()
    for product, shape in products.items()
    for operand in (shape.left, shape.right)
]


def place_of_slot(name: str) -> int:
    """The sort key of a slot within its module; a tensor's name comes last."""
    return _SLOTS.index(name) if name in _SLOTS else len(_SLOTS)
