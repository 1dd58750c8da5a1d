"""The operands that one forward pass of a module, and its backward pass, must multiply.

A `Call` holds the sources that the watcher has seen at the module's border. `Images` makes of them what each slot
declares: of whole operands, or of some lines of them.

    # T tokens, B sequences, I input width, O output width, H query heads, G key-value heads, D head_dim, N = B*H
    x, g   [T, B, width], an expert's [rows, width]      w   [O, I]
    q      [T, B, H, D]     k, v   [T, B, G, D]          P, dS   [N, T queries, T keys]     dO   [N, T, D]

A scale that depends on an amax has that of the whole tensor, over all ranks that hold parts of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quantexp.formats import Family, Place, QuantSpec, Scaling, saturated
from quantexp.proof.arithmetic.parts import part_of
from quantexp.proof.arithmetic.transform import transformed
from quantexp.proof.bits import is_same_memory, num_unequal
from quantexp.proof.call import Call
from quantexp.proof.draws import Randomness, is_stochastic
from quantexp.proof.image import derivative, image, num_differing, own_amax
from quantexp.proof.lines import Lines
from quantexp.quant.records import part_record, part_words
from quantexp.quant.sites import Operand, Product, Slot, captured_dim, dim_of, operands_of


class Plane(NamedTuple):
    """A matrix of an operand's source, and where it lies in the whole source."""

    x: Tensor
    #: The place of element (r, c) in row-major order is start + r stride + c; a stride of 0 is the number of columns.
    start: int = 0
    stride: int = 0
    #: The numbers r and c of its rows and columns; None means all.
    rows: Tensor | None = None
    columns: Tensor | None = None
    #: Sequences that are interleaved along the rows, where blocks run along these.
    sequences: int = 1
    #: Whether x is the expected operand already, as lines of some cannot be made alone.
    is_expected: bool = False

    def positions(self, picked: Tensor, *, are_columns: bool) -> Tensor:
        """The places of the elements of some columns, or of some rows."""
        rows, columns = (
            torch.arange(extent, device=self.x.device) if numbers is None else numbers
            for extent, numbers in zip(self.x.shape, (self.rows, self.columns), strict=True)
        )
        rows, columns = (rows, columns[picked]) if are_columns else (rows[picked], columns)
        return self.start + rows[:, None] * (self.stride or self.x.shape[1]) + columns


def is_along_rows(slot: Slot, spec: QuantSpec) -> bool:
    """Whether an operand's blocks run along the first dimension of its plane."""
    return dim_of(slot.operand, spec) in (0, -2)


@cache
def reduces_rows(slot: Slot) -> bool:
    """Whether the product reduces over the first dimension of its operand's plane."""
    return captured_dim(slot.operand, slot.axis) in (0, -2)


@dataclass(frozen=True)
class Piece:
    """A part of an operand: what it is, in words, its source, and what that must become."""

    name: str
    source: Tensor
    spec: QuantSpec
    expected: Tensor


class Images:
    """The expected operands of one call."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def source(self, slot: Slot) -> Tensor:
        """What a slot quantises, in that layout: the expected copy that it takes, or what the watcher saw."""
        call, copy = self.call, self.call.spec(slot).of
        if copy is None:
            return call.source(slot)
        if not copy.reuse:
            return Images(call.with_spec(slot, copy)).whole(slot)
        return call.laid_out(slot, self.whole(slot._replace(product=Product.FPROP)))

    def amax(self, slot: Slot) -> Tensor | None:
        """The amax that determines a tensor scale; None without one."""
        call, spec = self.call, self.call.spec(slot)
        if not spec.is_scaled:
            return None
        key = call.amax_key(slot)
        if key not in call.amaxes:
            own = call.own_amaxes.get(key)
            own = own_amax_of(call, slot, self.source(slot)) if own is None else own
            call.amaxes[key] = call.largest(call.module, own)
            if spec.scaling is Scaling.DELAYED:
                call.histories.see(spec, own)
        if spec.scaling is Scaling.DELAYED:
            known = call.histories.amax(spec, call.amaxes[key].device)
            return call.amaxes[key] if known is None else known
        return call.amaxes[key]

    def num_differing(self, slot: Slot, operand: Tensor) -> int:
        """How many elements of a whole operand, in its source's layout, are not those expected."""
        call, spec = self.call, self.call.spec(slot)
        x = self.source(slot)
        if not spec.quantised:
            is_equal = is_same_memory(operand, x) or torch.equal(operand, x)
            return 0 if is_equal else num_differing(operand, x, spec, -1)
        axis = dim_of(slot.operand, spec)
        if self._is_by_source(slot):
            return num_unequal(operand, self.whole(slot))
        options = call.moment.randomness(spec, x.device)
        positions = positions_of(call, slot, tuple(x.shape), x.device)
        return num_differing(
            operand, x, spec, axis, amax=self.amax(slot), positions=positions, **options
        )

    def whole(self, slot: Slot) -> Tensor:
        """The whole expected operand, in its source's layout."""
        call, spec = self.call, self.call.spec(slot)
        x = self.source(slot)
        if not spec.quantised or x.numel() == 0:
            return x
        if spec.parts:
            (piece,) = self.pieces(slot)
            return piece.expected
        axis = dim_of(slot.operand, spec)
        if not self._is_by_source(slot):
            options = call.moment.randomness(spec, x.device)
            positions = positions_of(call, slot, tuple(x.shape), x.device)
            return image(x, spec, axis, amax=self.amax(slot), positions=positions, **options)
        assert call.rows is not None
        result = torch.zeros_like(x)
        flat, parts = result.view(-1, x.shape[-1]), []
        for source, later in enumerate(call.rows.micro_batches):
            tokens = call.rows.of_source(source, is_laid_out=x.dim() == 3)
            part = x.reshape(-1, x.shape[-1])[tokens]
            if x.dim() == 3:
                part = part.view(-1, x.shape[1] // call.rows.num_sources, x.shape[-1])
            parts.append((tokens, part, call.moment.later(later).randomness(spec, x.device)))
        amaxes = self._amaxes_by_source(spec, axis, parts)
        for (tokens, part, options), amax in zip(parts, amaxes, strict=True):
            if part.numel():
                own = image(part, spec, axis, amax=amax, **options)
                flat[tokens] = own.reshape(-1, x.shape[-1])
        return result

    def _amaxes_by_source(
        self, spec: QuantSpec, axis: int, parts: Sequence[tuple[Tensor, Tensor, Randomness]]
    ) -> Sequence[Tensor | None]:
        if not spec.is_scaled:
            return [None] * len(parts)
        own = [
            own_amax(part, spec, axis, options.get("signs"))
            if part.numel()
            else torch.zeros((), device=part.device)
            for _, part, options in parts
        ]
        if spec.scaling is Scaling.DELAYED:
            self.call.histories.see(spec, torch.stack(own).amax())
            known = self.call.histories.amax(spec, own[0].device)
            if known is not None:
                return [known] * len(parts)
        return list(self.call.largest(self.call.module, torch.stack(own)).unbind())

    def _is_by_source(self, slot: Slot) -> bool:
        """Whether an expert's rows are quantised by the micro-batch that they come from."""
        rows, spec = self.call.rows, self.call.spec(slot)
        if rows is None or len(rows.micro_batches) == 1 or slot.operand is Operand.W:
            return False
        return spec.draws or spec.is_transformed or spec.is_scaled

    def clipped(self, forward: Slot) -> Tensor | None:
        """Where a forward operand saturated whose slot then clips the gradient, in its source's layout; else None.

        The elements are those of `quantexp.formats.saturated`, which training asks too.
        """
        call = self.call
        spec = call.declared.slots.get(forward)
        if spec is None or not spec.clip_gradient or forward.operand not in call.sources:
            return None
        x, axis = call.sources[forward.operand], dim_of(forward.operand, spec)
        if not self._is_by_source(forward):
            v = transformed(x, spec, axis % x.dim(), None)
            return saturated(v, spec, axis=axis, amax=self.amax(forward))
        assert call.rows is not None
        result = torch.zeros_like(x, dtype=torch.bool)
        for source in range(call.rows.num_sources):
            part = call.of_source(source)
            own = Images(part).clipped(forward)
            if own is not None:
                result[call.rows.of_source(source)] = own
        return result

    def derivative(self, forward: Slot) -> Tensor | None:
        """What the gradient of a weight is multiplied by whose slot has `dge`, in the weight's layout; else None."""
        spec = self.call.declared.slots.get(forward)
        if spec is None or spec.dge is None or forward.operand not in self.call.sources:
            return None
        w, axis = self.call.sources[forward.operand], dim_of(forward.operand, spec)
        return derivative(w, spec, axis % w.dim(), spec.dge, self.amax(forward))

    def is_summed(self, slot: Slot) -> bool:
        """Whether its product is that of sums of parts, its own or the other operand's."""
        left, right = map(self.call.spec, operands_of(slot.site, slot.product))
        return any(spec.num_pieces > 1 for spec in (left, right) if spec.parts)

    def pieces(self, slot: Slot) -> Iterator[Piece]:
        """The parts that an operand must be the sum of; the operand alone if it has none."""
        spec, x = self.call.spec(slot), self.source(slot)
        if not spec.parts:
            yield Piece("operand", x, spec, self.whole(slot))
            return
        rest = x.float()
        before = [part for part in spec.parts if not part.from_error]
        after = [part for part in spec.parts if part.from_error]
        for part in (*before, None, *after):
            own = replace(spec, parts=()) if part is None else part.spec
            taken = rest if part is None else part_of(rest, part, is_weight=spec.weight)
            if own is None:
                rest = rest - taken.to(x.dtype).float()
                continue
            name = "remainder" if part is None else part_words(part_record(part))
            piece = Piece(name, taken, own, self.rounded(slot, taken, own).to(x.dtype))
            rest = rest - piece.expected.float()
            yield piece

    def rounded(self, slot: Slot, x: Tensor, spec: QuantSpec) -> Tensor:
        """What a part of an operand must become, in float32."""
        call, axis = self.call, dim_of(slot.operand, spec)
        options = call.moment.randomness(spec, x.device)
        positions = positions_of(call, slot, tuple(x.shape), x.device)
        amax = None
        if spec.is_scaled and x.numel():
            amax = call.largest(call.module, own_amax(x, spec, axis, options.get("signs")))
        return image(x, spec, axis, amax=amax, positions=positions, **options)

    def multiplied(self, slot: Slot, pieces: Sequence[Piece] | None = None) -> Tensor:
        """The matrix that a product of sums multiplies: `pieces` along the reduced axis, each beside each other's."""
        left, right = operands_of(slot.site, slot.product)
        other = right if slot.is_left else left
        repeats = self.call.spec(other).num_pieces
        own = [_matrix(piece.expected) for piece in pieces or self.pieces(slot)]
        own = [each for each in own for _ in range(repeats)] if slot.is_left else own * repeats
        return torch.cat(own, dim=0 if reduces_rows(slot) else 1)

    def is_made_whole(self, slot: Slot) -> bool:
        """Whether lines of the expected operand cannot be made without the others."""
        spec = self.call.spec(slot)
        if not spec.quantised:
            return False
        if spec.fmt.family is Family.PYTHON:
            return True  # the class may look at the whole tensor
        if spec.of is not None:
            return True  # blocks of the forward copy cross its lines
        shape = tuple(self.call.source(slot).shape)
        is_parted = bool(spec.parts or self.call.pieces(slot, shape))
        return is_parted or self._is_by_source(slot)

    def lines(self, slot: Slot, plane: Plane, picked: Tensor) -> Lines:
        """Some lines of the expected matrix, [lines, K]: rows of the plane, or columns if the product reduces rows.

        Those of the source are taken at once, and become what they must when they are asked for.
        """
        call, spec = self.call, self.call.spec(slot)
        along_rows, k_rows = is_along_rows(slot, spec), reduces_rows(slot)
        sub = plane.x[:, picked] if k_rows else plane.x[picked]
        if not spec.quantised or plane.is_expected:
            return Lines(sub.t() if k_rows else sub)
        source, shape, axis = sub, None, 0 if along_rows else -1
        if k_rows:
            source, axis = sub.t(), -1 - axis
        if along_rows and plane.sequences > 1:
            B = plane.sequences
            shape, axis = ((-1, sub.shape[0] // B, B), 1) if k_rows else ((-1, B, sub.shape[1]), 0)
        options: dict[str, Any] = {**call.moment.randomness(spec, sub.device)}
        if (amax := self.amax(slot)) is not None:
            options["amax"] = amax
        if is_stochastic(spec):
            positions = plane.positions(picked, are_columns=k_rows)
            positions = positions.t() if k_rows else positions
            options["positions"] = positions if shape is None else positions.reshape(shape)
        return Lines(source, spec, shape, axis, options)


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def own_amax_of(call: Call, slot: Slot, x: Tensor) -> Tensor:
    """The amax of a part of an operand, after its transform."""
    spec = call.spec(slot)
    signs = call.moment.randomness(spec, x.device).get("signs")
    return own_amax(x, spec, dim_of(slot.operand, spec), signs)


def positions_of(
    call: Call, slot: Slot, shape: tuple[int, ...], device: torch.device
) -> Tensor | None:
    """The places of a rank's part of an operand in the whole operand; None if it is the whole, or nothing is drawn."""
    pieces = call.pieces(slot, shape)
    if not pieces:
        return None
    positions = torch.empty(shape, dtype=torch.int64, device=device)
    for indices, place in pieces:
        target = positions[indices]
        target.copy_(places_of(place, tuple(target.shape), device))
    return positions


def places_of(place: Place, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The places of a piece's elements in the whole tensor, in row-major order."""
    places = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(shape))):
        along = (torch.arange(shape[dim], device=device) + place.start[dim]) * stride
        places = places + along.view(-1, *[1] * (len(shape) - 1 - dim))
        stride *= place.whole[dim]
    return places.expand(shape)
