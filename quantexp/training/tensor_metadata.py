"""The metadata of a module's captured tensors. Importing this module imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantexp.schema import AttentionPath

if TYPE_CHECKING:
    from torch import Tensor

    from quantexp.quant.precision import ModulePrecision
    from quantexp.quant.rows import Rows

#: Tensors of a linear layer with one row per token.
_BY_TOKEN = frozenset({"input", "output", "grad_output", "grad_input"})
#: Attention tensors whose metadata includes the mask.
_MASKED = frozenset({"query", "attn_weights"})


def metadata_of(module: object, tensor: str) -> dict[str, object]:
    """The metadata of a module's tensor, without its formats."""
    # Not getattr for each: torch searches three more places for a missing attribute.
    attributes: dict[str, Any] = getattr(module, "__dict__", {})
    metadata: dict[str, object] = {"softmax_scale": attributes.get("softmax_scale")}
    path = attributes.get("path", AttentionPath.plain)
    if path is not AttentionPath.plain:
        metadata["attention"] = path.value
    rows: Rows | None = attributes.get("rows")
    if rows is not None and tensor in _BY_TOKEN:
        metadata |= row_metadata(attributes["precision"], rows)
    mask: Tensor | None = attributes.get("mask")
    if mask is not None and tensor in _MASKED:
        from quantexp.quant.attention.documents import document_starts

        metadata["document_starts"] = document_starts(mask)
    return metadata


def row_metadata(precision: ModulePrecision, rows: Rows) -> dict[str, object]:
    """The metadata of a tensor with one row for each of an expert's tokens.

        row_sequences   the sequence of each row
        row_sources     for each micro-batch that the rows are from, slot -> what its operand depends on: seed and
                        offset of random numbers, random signs; present where several micro-batches draw their own

    Each of several micro-batches has equally many successive sequences.
    """
    from quantexp.capture.operands import slot_key
    from quantexp.quant.sources import as_source
    from quantexp.quant.step_state import current_state

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
