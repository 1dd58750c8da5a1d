"""One forward pass of a module with the backward pass that follows it, and the sources that the watcher saw.

# T tokens, B sequences, I input width, O output width, H query heads, G key-value heads, D head_dim, N = B*H
x, g   [T, B, width], an expert's [rows, width]      w   [O, I]
q      [T, B, H, D]     k, v   [T, B, G, D]          P, dS   [N, T queries, T keys]     dO   [N, T, D]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from quantexp.formats import QuantSpec, Rounding
from quantexp.proof.draws import Moment
from quantexp.proof.histories import Histories
from quantexp.proof.lines import Lines
from quantexp.proof.places import Piece
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.rows import Rows
from quantexp.quant.sites import Operand, Product, Slot

#: The elementwise maximum of an amax over the ranks that hold parts of a module's tensors.
Largest = Callable[[ModuleId, Tensor], Tensor]
#: What an amax belongs to.
AmaxKey = tuple[Operand, QuantSpec, Product | None]
#: The source of pv.fprop.P where that is exp(S - m), beside P, which the backward product multiplies.
EXPONENTIALS = "exponentials"
#: What a source is called.
Source = Operand | str
#: Elements of a source that show whether it has changed.
_SAMPLE = 256


@dataclass
class Call:
    """One forward pass of a module, and the backward pass that follows it."""

    declared: ModulePrecision
    moment: Moment
    largest: Largest
    histories: Histories
    is_recomputed: bool = False
    #: Those of an expert.
    rows: Rows | None = None
    sources: dict[Source, Tensor] = field(default_factory=dict)
    #: Some elements of each source, as bits.
    _seen: dict[Source, Tensor] = field(default_factory=dict)
    #: Amaxes of whole tensors, over all ranks.
    amaxes: dict[AmaxKey, Tensor] = field(default_factory=dict)
    #: Amaxes of P and dS on this rank, which are seen tile by tile.
    own_amaxes: dict[AmaxKey, Tensor] = field(default_factory=dict)
    #: The first query of the tile of P or dS that was seen last.
    tile_start: int = 0
    #: The drawn lines of an operand, and what they must be.
    lines: dict[Slot, tuple[Tensor, Lines]] = field(default_factory=dict)
    #: Complete checks: the projections of the products that were seen, by product.
    projections: dict[Product, object] = field(default_factory=dict)

    @property
    def module(self) -> ModuleId:
        """The module's name in the precision map."""
        return self.declared.module

    def see(self, operand: Source, x: Tensor, *, is_taken: bool = False) -> None:
        """Take a tensor that the watcher has seen at the border as a source.

        `is_taken`: what is compared of it is taken now, so that it does not matter what becomes of it.
        """
        self.sources[operand] = x
        if not is_taken:
            self._seen[operand] = _sample(x).clone()

    def is_unchanged(self, operand: Source) -> bool:
        """Whether a source still has the values that it had when it was seen."""
        if operand not in self._seen:
            return True
        return torch.equal(_sample(self.sources[operand]), self._seen[operand])

    def with_spec(self, slot: Slot, spec: QuantSpec) -> Call:
        """The call if a slot declared this."""
        declared = replace(self.declared, slots=self.declared.slots | {slot: spec})
        return replace(self, declared=declared)

    def spec(self, slot: Slot) -> QuantSpec:
        """What the slot declares."""
        return self.declared.slots[slot]

    def key(self, slot: Slot) -> Source:
        """The source that a slot quantises."""
        return EXPONENTIALS if self.spec(slot).softmax.unnormalised else slot.operand

    def amax_key(self, slot: Slot) -> AmaxKey:
        """Equal for slots of one amax: those that quantise a tensor alike along any axis, under no transform."""
        spec = self.spec(slot)
        return slot.operand, spec.along_any_axis, slot.product if spec.is_transformed else None

    def pieces(self, slot: Slot, shape: tuple[int, ...]) -> list[Piece]:
        """Where the parts of an operand lie in the whole, if random numbers follow from that and it is not whole."""
        if self.spec(slot).rounding is not Rounding.STOCHASTIC:
            return []
        return self.moment.ranks.pieces(self.module.name, slot.operand, shape)

    def of_source(self, source: int) -> Call:
        """The part of an expert's call whose rows are from one micro-batch."""
        assert self.rows is not None
        tokens = self.rows.of_source(source)
        moment = self.moment.later(self.rows.micro_batches[source])
        part = Call(self.declared, moment, self.largest, self.histories, self.is_recomputed)
        for operand, x in self.sources.items():
            part.see(operand, x if operand is Operand.W else x[tokens])
        return part

    def source(self, slot: Slot) -> Tensor:
        """The operand before quantisation, in the layout in which it is quantised.

        An expert's rows are laid out by sequence for its product over tokens, if an operand of that has blocks.
        """
        return self.laid_out(slot, self.sources[self.key(slot)])

    def laid_out(self, slot: Slot, x: Tensor) -> Tensor:
        """A tensor like a slot's source as it entered the module, in the layout in which it is quantised."""
        is_by_sequence = slot.product is Product.WGRAD and self.rows is not None
        if not is_by_sequence or not any(
            self.spec(Slot(slot.site, slot.product, operand)).has_blocks
            for operand in (Operand.G, Operand.X)
        ):
            return x
        assert self.rows is not None
        return laid_out(self.rows, x)


def laid_out(rows: Rows, x: Tensor) -> Tensor:
    """An expert's rows [n, width] as [L, B, width], each sequence's in order, padded with zeros."""
    order = torch.argsort(rows.sequence, stable=True)
    counts = torch.bincount(rows.sequence, minlength=rows.num_sequences)
    longest = int(counts.max()) if len(x) else 0
    result = x.new_zeros(longest, rows.num_sequences, x.shape[-1])
    for sequence, own in enumerate(torch.split(order, counts.tolist())):
        result[: len(own), sequence] = x[own]
    return result


def _sample(x: Tensor) -> Tensor:
    """Some elements of a tensor, spread over it, as bits, so that NaN equals itself."""
    size, stride, start = _places(x.shape, x.stride(), x.is_contiguous())
    some = x.as_strided(size, stride, x.storage_offset() + start)
    return some.view(torch.int32 if x.element_size() == 4 else torch.int16)


@lru_cache(maxsize=256)
def _places(
    shape: tuple[int, ...], strides: tuple[int, ...], is_contiguous: bool
) -> tuple[list[int], list[int], int]:
    """Size, strides and start of a few elements of memory, or of each dimension, more of the last."""
    if is_contiguous:
        shape, strides = (math.prod(shape),), (1,)
        steps = [shape[0] // _SAMPLE | 1]
        starts = [steps[0] // 2]
    else:
        steps = [max(1, extent // 2) for extent in shape[:-1]]
        steps.append(max(1, shape[-1] // (_SAMPLE // 4)))
        starts = [extent // 2 % step for extent, step in zip(shape, steps, strict=True)]
    return (
        [len(range(*each)) for each in zip(starts, shape, steps, strict=True)],
        [stride * step for stride, step in zip(strides, steps, strict=True)],
        sum(start * stride for start, stride in zip(starts, strides, strict=True)),
    )
