"""What the metadata of an expert's tensors says about their rows.

    row_sequences   the sequence of each row
    row_sources     for each micro-batch that the rows are from, slot -> what its operand depends on: seed and offset of
                    random numbers, random signs; present where several micro-batches draw their own

Each of several micro-batches has equally many successive sequences.
"""

from __future__ import annotations

from quantexp.capture.operands import slot_key
from quantexp.quant.precision import ModulePrecision
from quantexp.quant.rows import Rows
from quantexp.quant.sources import as_source
from quantexp.quant.step_state import current_state


def row_metadata(precision: ModulePrecision, rows: Rows) -> dict[str, object]:
    """The metadata of a tensor with one row for each of an expert's tokens."""
    metadata: dict[str, object] = {"row_sequences": rows.sequence.tolist()}
    drawn = {
        slot_key(slot): spec
        for slot, spec in precision.slots.items()
        if spec.needs_step_state and current_state().draws_again(spec)
    }
    if rows.num_sources == 1 or not drawn:
        return metadata
    sources = []
    for source in range(rows.num_sources):
        with as_source(rows, source):
            sources.append({key: current_state().record(spec) for key, spec in drawn.items()})
    return {**metadata, "row_sources": sources}
