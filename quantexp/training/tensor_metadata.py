"""The metadata of a module's captured tensors. Importing this module imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quantexp.schema import AttentionPath

if TYPE_CHECKING:
    from torch import Tensor

    from quantexp.quant.rows import Rows

#: Tensors of a linear layer with one row per token.
_BY_TOKEN = frozenset({"input", "output", "grad_output", "grad_input"})
#: Attention tensors whose metadata includes the mask.
_MASKED = frozenset({"query", "attn_weights"})


def metadata_of(module: object, tensor: str) -> dict[str, object]:
    """The metadata of a module's tensor, without its formats."""
    from quantexp.capture.record.rows import row_metadata

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
