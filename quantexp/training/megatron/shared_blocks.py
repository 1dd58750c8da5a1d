"""What ranks exchange to round their pieces of parameters as the whole parameters would be: amaxes, and cut blocks.

Every rank of the run calls these functions, and those without pieces, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor

from quantexp.formats import QuantSpec, finite_amax
from quantexp.model.pieces import Box
from quantexp.training.megatron.collectives import gather
from quantexp.training.megatron.rounded_pieces import RoundedPiece


class _Block(NamedTuple):
    """A block that ranks of a pipeline stage share: a parameter, a row, and the block's columns."""

    stage: int
    name: str
    row: int
    columns: tuple[int, int]


#: A cut block's elements by their first column, as every rank contributes its own.
Elements = dict[_Block, dict[int, Tensor]]


def amaxes_of(spec: QuantSpec, pieces: Sequence[RoundedPiece]) -> dict[str, Tensor]:
    """By parameter, the amax of the whole of it; empty if no scale depends on it."""
    if not spec.is_scaled:
        return {}
    own = {piece.name: finite_amax(piece.flat) for piece in pieces}
    values = torch.stack(list(own.values())).tolist() if own else []
    largest: dict[str, float] = {}
    for of_rank in gather(dict(zip(own, values, strict=True))):
        for name, amax in of_rank.items():
            largest[name] = max(amax, largest.get(name, 0.0))
    return {name: amax.new_tensor(largest[name]) for name, amax in own.items()}


def shared_elements(pieces: Sequence[RoundedPiece]) -> Elements:
    """All elements of the blocks that ranks share, of every rank."""
    own: Elements = {}
    for piece in pieces:
        for box in piece.boxes():
            if box.cut is not None:
                values = piece.values(box).detach().to("cpu", copy=True)
                own.setdefault(_block(piece, box), {})[box.column] = values
    together: Elements = {}
    for of_rank in gather(own):
        for block, elements in of_rank.items():
            together.setdefault(block, {}).update(elements)
    return together


def whole_block(
    shared: Mapping[_Block, dict[int, Tensor]], piece: RoundedPiece, box: Box
) -> Tensor:
    """The block that a box is a part of, [1, columns], from the elements of all ranks."""
    elements = shared[_block(piece, box)]
    columns = [elements[column] for column in sorted(elements)]
    return torch.cat(columns, dim=1).to(piece.flat.device)


def _block(piece: RoundedPiece, box: Box) -> _Block:
    assert box.cut is not None
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return _Block(stage, piece.name, box.row, box.cut)
