"""The state that products of a run need in any layout: random numbers, delayed scales, amaxes of divided operands.

The random numbers of elements follow from where the parts of a rank's operands lie in the whole operands. A rank's part
consists of pieces (gate and up of fc1, two chunks of a sequence under context parallelism); each is a range along every
axis. The parts are those that captures describe (`quantexp.capture.division`), but for two kinds of attention's
operands, as the products take them:

    k, v        of whole sequences: context parallelism gathers them before they are quantised
    P, dS, dO   [sequences x heads, queries, ...]: each sequence has its own range of heads
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from quantexp.capture.division import Holder
from quantexp.capture.operands import SOURCES
from quantexp.capture.parts import Part, Range
from quantexp.formats import Place
from quantexp.formats.types import Scaling
from quantexp.model.layout import Layout
from quantexp.model.shards import Shard
from quantexp.quant.precision import declared_maps, distinct_slots
from quantexp.quant.sites import Operand
from quantexp.quant.step_state import Piece, StepState, use_step_state
from quantexp.quant.whole_amax import use_reduction
from quantexp.schema import Experiment
from quantexp.training.megatron.collectives import reduce_amax


@contextlib.contextmanager
def use_numerics(experiment: Experiment, *, weights_once: bool) -> Iterator[StepState]:
    """Quantise inside as the experiment's layout requires; `weights_once` is that of `StepState`."""
    layout = Layout.of(experiment)
    is_divided = layout.tensor * layout.context * layout.expert_tensor > 1
    state = StepState(experiment.training.seed, weights_once=weights_once)
    if is_divided:
        state.pieces_of = Positions(experiment, torch.distributed.get_rank())
    with (
        use_step_state(state),
        use_reduction(reduce_amax) if is_divided else contextlib.nullcontext(),
    ):
        yield state


def has_delayed_scales(experiment: Experiment) -> bool:
    """Whether any slot has a scale that follows the amaxes of earlier iterations."""
    return any(
        spec.scaling is Scaling.DELAYED
        for declared in declared_maps(experiment.model, experiment.quant)
        for slots in distinct_slots(declared)
        for spec in slots.values()
    )


#: Operands with sequences and heads in one axis; ranks divide all of them like P.
_BY_HEAD = frozenset({Operand.P, Operand.DS, Operand.DO})
#: Operands that every rank of a context-parallel group has whole.
_GATHERED = frozenset({Operand.K, Operand.V})


class Positions:
    """The pieces of a rank's operands, by stream and shape."""

    def __init__(self, experiment: Experiment, rank: int) -> None:
        self._holder = Holder.of(experiment, rank)
        layout = self._holder.layout
        self._holder_of_gathered = replace(self._holder, layout=replace(layout, context=1))
        self._num_heads = experiment.model.num_attention_heads // layout.tensor
        self._operands = {
            entry.spec.stream: (entry.module.name, entry.slot.operand)
            for declared in declared_maps(experiment.model, experiment.quant)
            for module in declared.values()
            for entry in module.entries()
            if entry.spec.needs_step_state
        }
        self._pieces = lru_cache(maxsize=4096)(self._find)

    def __call__(self, stream: str, shape: tuple[int, ...]) -> Sequence[Piece]:
        """See `PiecesOf`."""
        return self._pieces(stream, shape)

    def _find(self, stream: str, shape: tuple[int, ...]) -> Sequence[Piece]:
        module, operand = self._operands[stream]
        if operand in _BY_HEAD:
            return self._by_head(module, shape)
        holder = self._holder_of_gathered if operand in _GATHERED else self._holder
        part = holder.part(module, SOURCES[operand], shape)
        return list(pieces_of(part)) if part.cuts else ()

    def _by_head(self, module: str, shape: tuple[int, ...]) -> Sequence[Piece]:
        """The pieces of [sequences x heads, queries, ...]."""
        num_sequences = shape[0] // self._num_heads
        by_sequence = (num_sequences, self._num_heads, *shape[1:])
        part = self._holder.part(module, SOURCES[Operand.P], by_sequence)
        if not part.cuts:
            return ()
        each = Shard(0, tuple((index, index + 1) for index in range(num_sequences)))
        pieces = pieces_of(replace(part, cuts=(each, *part.cuts)))
        return [_joined(piece, self._num_heads) for piece in pieces]


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


def _joined(piece: Piece, num_own_heads: int) -> Piece:
    """A piece of one sequence of [sequences, heads, ...], in [sequences x heads, ...]."""
    (sequences, heads, *others), place = piece
    (num_sequences, num_heads, *extents), (sequence, head, *starts) = place.whole, place.start
    first = sequences.start * num_own_heads
    own = slice(first + heads.start, first + heads.stop)
    start = (sequence * num_heads + head, *starts)
    return (own, *others), Place((num_sequences * num_heads, *extents), start)
