"""Keeps Adam's moments in number formats: each is rounded after every step, as the next step reads it.

A step computes with what it read, and updates the weights with the moments before they are rounded, as a kernel would
that holds them in registers. The numbers do not depend on the layout: the ranks of a distributed optimizer exchange the
few blocks that the ends of their ranges cut, and the amaxes of formats with one scale a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor

from quantexp.formats import finite_amax
from quantexp.model.pieces import Box
from quantexp.proof.draws import Moment
from quantexp.proof.outside_products import StateWatch
from quantexp.quant.outside_products import StateSlot
from quantexp.training.megatron.collectives import gather
from quantexp.training.megatron.parameters import Part
from quantexp.training.megatron.rounded_pieces import RoundedPiece, draw_of
from quantexp.training.megatron.state_shards import held_pieces


class _Block(NamedTuple):
    """A block that ranks of a pipeline stage share: a parameter, a row, and the block's columns."""

    stage: int
    name: str
    row: int
    columns: tuple[int, int]


#: A cut block's elements by their first column, as every rank contributes its own.
_Elements = dict[_Block, dict[int, Tensor]]


class Moments:
    """The moments that this rank holds of those that a scheme rounds."""

    def __init__(
        self, slots: Sequence[StateSlot], optimizer: Any, parts: Mapping[str, Part], seed: int
    ) -> None:
        self.slots, self.seed = slots, seed
        self._held = held_pieces(optimizer, parts)
        cuts = any(
            box.cut
            for slot in slots
            for name, held in self._held.items()
            for box in RoundedPiece(name, held.piece, held.main, slot.spec).boxes()
        )
        #: Whether ranks must exchange anything, the same on all.
        self._exchanges_blocks = any(gather(cuts))

    @torch.no_grad()
    def round(self, iteration: int, watch: StateWatch | None) -> None:
        """Round what the step has written; every rank calls this. `watch` judges what Adam then holds."""
        for slot in self.slots:
            pieces = [
                RoundedPiece(name, held.piece, held.moment(slot.operand).view(-1), slot.spec)
                for name, held in self._held.items()
                if held.steps and slot.operand in held.kinds
            ]
            self._round(slot, pieces, iteration, watch)

    def _round(
        self, slot: StateSlot, pieces: list[RoundedPiece], iteration: int, watch: StateWatch | None
    ) -> None:
        amaxes = self._amaxes(slot, pieces)
        shared = self._shared(pieces)
        for piece in pieces:
            amax = amaxes.get(piece.name)
            if watch is not None and amax is not None:
                watch.scale(slot, piece.name, finite_amax(piece.flat), amax)
            stream = f"{piece.name} {slot}"
            draw = draw_of(slot.spec, self.seed, stream, iteration)
            seen_draw = Moment(self.seed, iteration).draw(slot.spec, stream)
            for box in piece.boxes():
                whole, column = piece.values(box), box.column
                if box.cut is not None:
                    whole, column = _whole(shared[_block(piece, box)], whole), box.cut[0]
                before = None if watch is None else whole.clone()
                piece.round(whole, box.row, column, amax, draw)
                own = whole[:, box.column - column : box.column - column + box.columns]
                if box.cut is not None:
                    piece.values(box).copy_(own)
                if watch is not None and before is not None:
                    own.copy_(self._read(piece, slot, box))
                    place = piece.place(box.row, column)
                    watch.see(slot, piece.name, whole, before, amax, place, seen_draw)

    def _read(self, piece: RoundedPiece, slot: StateSlot, box: Box) -> Tensor:
        """What Adam's state holds in a box, as the next step reads it."""
        flat = self._held[piece.name].moment(slot.operand).reshape(-1)
        return flat[box.first : box.stop].view(box.rows, box.columns)

    def _amaxes(self, slot: StateSlot, pieces: list[RoundedPiece]) -> dict[str, Tensor]:
        """By parameter, the amax of the whole moment; empty if no scale depends on it."""
        if not slot.spec.is_scaled:
            return {}
        own = {piece.name: finite_amax(piece.flat) for piece in pieces}
        values = torch.stack(list(own.values())).tolist() if own else []
        largest: dict[str, float] = {}
        for of_rank in gather(dict(zip(own, values, strict=True))):
            for name, amax in of_rank.items():
                largest[name] = max(amax, largest.get(name, 0.0))
        return {name: amax.new_tensor(largest[name]) for name, amax in own.items()}

    def _shared(self, pieces: list[RoundedPiece]) -> _Elements:
        """All elements of the blocks that ranks share, of every rank."""
        if not self._exchanges_blocks:
            return {}
        own: _Elements = {}
        for piece in pieces:
            for box in piece.boxes():
                if box.cut is not None:
                    values = piece.values(box).detach().to("cpu", copy=True)
                    own.setdefault(_block(piece, box), {})[box.column] = values
        together: _Elements = {}
        for of_rank in gather(own):
            for block, elements in of_rank.items():
                together.setdefault(block, {}).update(elements)
        return together


def _block(piece: RoundedPiece, box: Box) -> _Block:
    assert box.cut is not None
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return _Block(stage, piece.name, box.row, box.cut)


def _whole(elements: dict[int, Tensor], like: Tensor) -> Tensor:
    """A block, [1, columns], from the elements of all ranks by their first column."""
    return torch.cat([elements[column] for column in sorted(elements)], dim=1).to(like.device)
