"""Compares the operand of one product call with the image of its source, whatever layout it is multiplied in."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from quantexp.formats import Place, Scaling
from quantexp.proof.bits import num_unequal
from quantexp.proof.call import Call
from quantexp.proof.draws import is_stochastic
from quantexp.proof.expected import Images, places_of, positions_of, reduces_rows
from quantexp.proof.findings import Finding, Status
from quantexp.proof.image import image
from quantexp.proof.verdict import Explain, compared, other_shape
from quantexp.quant.precision import Entry
from quantexp.quant.product_context import Part
from quantexp.quant.sites import Operand, Product, Slot, dim_of

#: Operands that exist as tiles, and those that every tile takes a part of.
TILES = (Operand.P, Operand.DS)
_OF_ROWS = (Operand.Q, Operand.DO)
#: Operands of T x D that are multiplied transposed.
_TRANSPOSED = (Operand.K, Product.FPROP), (Operand.V, Product.DGRAD_P)
TRANSPOSED_TILES = (Product.DGRAD_V, Product.DGRAD_K)


def whole_finding(call: Call, entry: Entry, x: Tensor, source: Tensor, explain: Explain) -> Finding:
    """The result for a whole operand in its source's layout."""
    axis = dim_of(entry.slot.operand, entry.spec)
    number = Images(call).num_differing(entry.slot, x)
    other = _of_high(call, entry.slot) if number else None
    if other is not None and not Images(other).num_differing(entry.slot, x):
        explain = _explained_of_high
    return compared(x, _seen(call, entry.slot, source), entry.spec, axis, number, explain)


def _seen(call: Call, slot: Slot, source: Tensor) -> Tensor:
    """What a quantised operand differs from: its source, or the tensor of which that is a stored copy."""
    return call.source(slot) if call.spec(slot).is_of_stored else source


def _of_high(call: Call, slot: Slot) -> Call | None:
    """The call if the slot quantised the tensor in high precision in place of the forward copy.

    None if it does so anyway, or has a scale of the whole tensor, for which a diagnosis does not ask other ranks.
    """
    spec = call.spec(slot)
    if spec.of is None or spec.is_scaled:
        return None
    return call.with_spec(slot, replace(spec, of=None))


def _explained_of_high(*_: object) -> str:
    return "; it is quantised from the tensor in high precision, not from its copy"


def sum_finding(call: Call, entry: Entry, x: Tensor, explain: Explain) -> Finding:
    """The result for an operand of a product of sums, the matrix that is multiplied: parts along the reduced axis."""
    slot, spec, images = entry.slot, entry.spec, Images(call)
    source, axis = images.source(slot), dim_of(slot.operand, spec)
    pieces = list(images.pieces(slot))
    expected = images.multiplied(slot, pieces)
    if x.shape != expected.shape:
        words = f"it has the shape {tuple(x.shape)}, and its sum of parts {tuple(expected.shape)}"
        return Finding(Status.MISMATCH, words, quantised=True)
    dim = 0 if reduces_rows(slot) else 1
    extent, number = source.numel() // x.shape[1 - dim], num_unequal(x, expected)
    step = x.shape[dim] // len(pieces) if slot.is_left else extent
    for index, piece in enumerate(pieces if number else ()):
        own = x.narrow(dim, index * step, extent).reshape(source.shape)
        wrong = num_unequal(own, piece.expected)
        if wrong and spec.parts:
            words = f"{wrong} of {own.numel()} elements are not those of its {piece.name}"
            whole = images.rounded(slot, source.float(), piece.spec).to(x.dtype)
            words += (
                ": it is that of the whole operand"
                if torch.equal(own, whole)
                else explain(own, piece.source, piece.spec, axis)
            )
            return Finding(Status.MISMATCH, words, quantised=True)
    first = x if spec.parts else x.narrow(dim, 0, extent).reshape(source.shape)
    return compared(first, _seen(call, slot, source), spec, axis, number, explain)


def attention_finding(
    call: Call,
    entry: Entry,
    x: Tensor,
    explain: Explain,
    part: Part | None = None,
    *,
    is_stack: bool = False,
) -> Finding:
    """The result for an operand of attention, a stack of matrices; of a tile, its part of the whole operand."""
    images, other = Images(call), _of_high(call, entry.slot)
    own, expected = (
        _matrices(call, entry.slot, each, part, is_stack=is_stack)
        for each in (images.source(entry.slot), images.whole(entry.slot))
    )
    if x.shape != expected.shape:
        return other_shape(x, expected)
    number = num_unequal(x, expected)
    if number and other is not None:
        of_high = Images(other).whole(entry.slot)
        if not num_unequal(x, _matrices(call, entry.slot, of_high, part, is_stack=is_stack)):
            explain = _explained_of_high
    is_reduced = entry.spec.axis is entry.slot.axis
    axis = -1 if is_stack or entry.slot.is_left is is_reduced else -2
    return compared(x, own, entry.spec, axis, number, explain)


def _matrices(call: Call, slot: Slot, x: Tensor, part: Part | None, *, is_stack: bool) -> Tensor:
    """An operand as the stack of matrices that are multiplied; `is_stack` leaves them as they are laid out."""
    if slot.operand in TILES:
        return x.transpose(1, 2) if slot.product in TRANSPOSED_TILES else x
    if slot.operand is Operand.DO:
        stack = x
    else:
        H = call.sources[Operand.Q].shape[2]
        if x.shape[2] != H:
            x = x.repeat_interleave(H // x.shape[2], dim=2)
        stack = x.permute(1, 2, 0, 3).flatten(0, 1)
    if part is not None:
        stack = stack[:, part.rows] if slot.operand in _OF_ROWS else stack[:, part.keys]
    if is_stack or (slot.operand, slot.product) not in _TRANSPOSED:
        return stack
    return stack.transpose(1, 2)


def tile_finding(
    call: Call, entry: Entry, x: Tensor, source: Tensor, part: Part, explain: Explain
) -> Finding:
    """The result for a tile of P or dS, in the layout in which it is quantised."""
    spec, axis = entry.spec, dim_of(entry.slot.operand, entry.spec)
    if not spec.quantised:
        return compared(x, source, spec, axis, num_unequal(x, source), explain)
    positions = None
    if is_stochastic(spec):
        T, K = (call.sources[each].shape[0] for each in (Operand.Q, Operand.K))
        N, R, own_keys = source.shape
        positions = positions_of(call, entry.slot, (N, T, K), source.device)
        if positions is None:
            place = Place((N, T, K), (0, 0, 0))
            positions = places_of(place, (N, T, K), source.device)
        positions = positions[:, call.tile_start : call.tile_start + R, :own_keys]
    amax = part.amax(entry.slot)
    if amax is None and spec.scaling is Scaling.DELAYED:
        amax = Images(call).amax(entry.slot)
    expected = image(
        source,
        spec,
        axis,
        amax=amax,
        positions=positions,
        **call.moment.randomness(spec, source.device),
    )
    return compared(x, source, spec, axis, num_unequal(x, expected), explain)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An operand in the working precision, if widening it from there was lossless; otherwise unchanged."""
    narrow = x.to(dtype)
    return narrow if torch.equal(narrow.to(x.dtype), x) else x
