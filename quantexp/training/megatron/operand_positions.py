"""Where the parts of a linear layer's operands lie in the whole operands, for the random numbers of their elements.

A rank's part consists of pieces (gate and up of fc1, two chunks of a sequence under context parallelism); each is a
range along every axis. The parts are those that captures describe (`quantexp.capture.division`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

from quantexp.capture.division import Holder
from quantexp.capture.parts import Part, Range
from quantexp.formats import Place
from quantexp.quant.precision import declared_maps
from quantexp.quant.sites import Operand, Site
from quantexp.quant.step_state import Piece
from quantexp.schema import Experiment

#: The captured tensor that has an operand's shape and division.
_TENSORS = {Operand.X: "input", Operand.W: "weight", Operand.G: "grad_output"}


class Positions:
    """The pieces of a rank's operands, by stream and shape."""

    def __init__(self, experiment: Experiment, rank: int) -> None:
        self._holder = Holder.of(experiment, rank)
        self._tensors = {
            entry.spec.stream: (entry.module.name, _TENSORS[entry.slot.operand])
            for declared in declared_maps(experiment.model, experiment.quant)
            for module in declared.values()
            for entry in module.entries()
            if entry.spec.needs_step_state and entry.slot.site is Site.LINEAR
        }
        self._pieces = lru_cache(maxsize=4096)(self._find)

    def __call__(self, stream: str, shape: tuple[int, ...]) -> Sequence[Piece]:
        """See `PiecesOf`; attention's operands have none."""
        return self._pieces(stream, shape)

    def _find(self, stream: str, shape: tuple[int, ...]) -> Sequence[Piece]:
        if stream not in self._tensors:
            return ()
        part = self._holder.part(*self._tensors[stream], shape)
        return list(pieces_of(part)) if part.cuts else ()


def pieces_of(part: Part) -> Iterator[Piece]:
    """Every piece of a part."""
    along = [list(_placed(part.ranges(axis))) for axis in range(len(part.whole))]
    for piece in itertools.product(*along):
        slices, starts = zip(*piece, strict=True)
        yield tuple(slices), Place(part.whole, tuple(starts))


def _placed(ranges: Sequence[Range]) -> Iterator[tuple[slice, int]]:
    """The slice of the part, and the start in the whole, of each range along an axis."""
    at = 0
    for start, stop in ranges:
        yield slice(at, at + stop - start), start
        at += stop - start
