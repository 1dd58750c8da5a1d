"""Arranges a routed expert's rows by sequence, as its product over tokens does.

The manifest says of which sequence each row of a captured [n, width] is (`row_sequences`). Where blocks, or those of a
Hadamard transform, lie along tokens, the rows are laid out as in training (`quantexp.quant.rows`): [L, B, width], the
rows of each sequence one below the other, and zeros below those. The zeros are no elements of the tensor: what is
judged leaves them out.

    # n rows, B sequences, L rows of the sequence with the most
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quantexp.errors import CaptureError
from quantexp.formats.transform import pieces
from quantexp.quant.rows import Rows

ROW_SEQUENCES = "row_sequences"


@dataclass(frozen=True)
class LaidOut:
    """Rows by sequence."""

    #: [L, B, width].
    x: Tensor
    #: The padding: bool, of x's shape.
    padding: Tensor


def rows_of(metadata: Mapping[str, Any], dim: int) -> Sequence[int] | None:
    """The sequence of each row, if blocks along a dimension of the tensor depend on it."""
    sequences = metadata.get(ROW_SEQUENCES)
    return None if sequences is None or dim != 0 else tuple(sequences)


def laid_out(x: Tensor, sequences: Sequence[int]) -> LaidOut:
    """Arrange the rows of a captured tensor as its blocks along tokens.

    Raises:
        CaptureError: other rows than the manifest says.
    """
    if x.ndim != 2 or x.shape[0] != len(sequences) or min(sequences, default=0) < 0:
        raise CaptureError(
            f"{ROW_SEQUENCES} must have the sequence of each row, got {len(sequences)} for the shape {list(x.shape)}"
        )
    rows = Rows(torch.tensor(sequences, dtype=torch.int64), max(sequences, default=0) + 1)
    taken = rows.laid_out(torch.ones(len(x), 1, dtype=torch.bool))
    laid = rows.laid_out(x)
    return LaidOut(laid, (~taken).expand_as(laid))


def padding_of_transform(padding: Tensor, dim: int, block: int) -> Tensor:
    """The elements of a Hadamard transform along a dimension that contain only padding."""
    first = padding.movedim(dim, 0).clone(memory_format=torch.contiguous_format)
    for start, stop, size in pieces(first.shape[0], block):
        blocks = first[start:stop].view(-1, size, *first.shape[1:])
        blocks.copy_(blocks.all(1, keepdim=True).expand_as(blocks))
    return first.movedim(0, dim)


def num_blocks_of_padding(padding: Tensor, dim: int, block: int) -> int:
    """The number of blocks along a dimension that contain only padding."""
    last = padding.movedim(dim, -1)
    parts = torch.split(last, block, dim=-1)
    return sum(int(part.all(-1).sum()) for part in parts)
