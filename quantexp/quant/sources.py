"""An expert's operands where its tokens come from several micro-batches: each source is quantised as if it were alone.

In one process an expert multiplies one micro-batch at a time, with its own scales, random numbers, random signs and
blocks of a transform. Under expert parallelism (`quantexp.quant.rows`) its rows are those of several micro-batches:

    x, g    each source's rows have the scale of their own amax, over all ranks that hold parts of them, the random
            numbers of their micro-batch and of their positions among the source's rows, and a transform within them
    w       one copy for all sources, unless every micro-batch draws another one: then one product for each source

A source without rows has no amax, and a delayed scale with a history is one for all sources.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from torch import Tensor

from quantexp.formats import QuantSpec
from quantexp.quant.hooks import is_operand_hooked
from quantexp.quant.multiply import (
    Factor,
    clipped,
    make_operand,
    multiply_operands,
    quantise_operand,
    quantised_operand,
    source_of,
)
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.rows import Rows
from quantexp.quant.sites import Slot, dim_of
from quantexp.quant.step_state import current_state
from quantexp.quant.whole_amax import follows_own_amax, own_amax, reduced


def differs_by_source(rows: Rows | None, spec: QuantSpec) -> bool:
    """Whether an operand of these rows currently has scales, random numbers or transforms for each source."""
    if rows is None or rows.num_sources == 1:
        return False
    return spec.draws or spec.is_transformed or follows_own_amax(spec)


def as_source(rows: Rows, source: int) -> contextlib.AbstractContextManager[None]:
    """Draw inside for the micro-batch of a source."""
    later = rows.micro_batches[source]
    return current_state().later(later) if later else contextlib.nullcontext()


def quantise_by_source(
    precision: ModulePrecision, slot: Slot, x: Tensor, rows: Rows | None
) -> Tensor | None:
    """x, rows [n, width] or their layout [L, B, width], quantised source by source; None if one call does all."""
    return _quantised_by_source(precision, slot, precision.spec(slot), x, rows)


def source_of_rows(precision: ModulePrecision, slot: Slot, x: Tensor, rows: Rows | None) -> Tensor:
    """What a slot quantises of x, the rows of its forward product (`source_of`)."""
    chain = precision.spec(slot).chain[:-1]
    if not any(differs_by_source(rows, copy) for copy in chain):
        return source_of(precision, slot, x)
    for copy in chain:
        own = _quantised_by_source(precision, slot, copy, x, rows)
        axis = dim_of(slot.operand, copy)
        x = make_operand(precision.module, x, copy, axis) if own is None else own
    return x


def _quantised_by_source(
    precision: ModulePrecision, slot: Slot, spec: QuantSpec, x: Tensor, rows: Rows | None
) -> Tensor | None:
    if rows is None or not differs_by_source(rows, spec):
        return None
    axis = dim_of(slot.operand, spec)
    result = torch.zeros_like(x)
    parts, amaxes = _parts(x, rows), _amaxes(precision.module, x, spec, axis, rows)
    for source, ((tokens, part), amax) in enumerate(zip(parts, amaxes, strict=True)):
        with as_source(rows, source):
            _put(result, tokens, quantise_operand(part, spec, axis, amax))
    return result


def multiply_rows(
    precision: ModulePrecision, x: Factor, w: Factor, rows: Rows | None = None
) -> Tensor:
    """The product of a layer's tokens and its weight in high precision; `rows` are an expert's.

    If every micro-batch draws another copy of the weight, each source is multiplied with its own; the hooks receive
    that of this rank's micro-batch, which is the factor's copy if it has one.
    """
    first = w
    if w.copy is None or is_operand_hooked(precision, w.slot):
        w = replace(w, x=source_of(precision, w.slot, w.x))
    drawn = [spec for spec in precision.spec(w.slot).chain if spec.needs_step_state]
    is_one = rows is None or rows.num_sources == 1
    if rows is None or is_one or not any(map(current_state().draws_again, drawn)):
        return multiply_operands(precision, x, w)
    x, w = (replace(f, copy=quantised_operand(precision, f.slot, f.x, copy=f.copy)) for f in (x, w))
    assert x.copy is not None
    products, order = [], []
    for source, later in enumerate(rows.micro_batches):
        tokens = rows.of_source(source)
        own_x = replace(x, x=x.x[tokens], copy=x.copy[tokens])
        with as_source(rows, source):
            own_w = w
            if later:
                own_w = replace(w, x=source_of(precision, w.slot, first.x), copy=None)
            products.append(
                multiply_operands(precision, own_x, own_w, source=source, is_shown=False)
            )
        order.append(tokens)
    joined = torch.cat(products)
    return torch.empty_like(joined).index_copy_(0, torch.cat(order), joined)


def clipped_by_source(
    precision: ModulePrecision, slot: Slot, gradient: Tensor, x: Tensor, rows: Rows
) -> Tensor:
    """The gradient of rows x [n, width], zero where x saturated under the scale of its source."""
    spec = precision.spec(slot)
    axis = dim_of(slot.operand, spec)
    result = torch.empty_like(gradient)
    amaxes = _amaxes(precision.module, x, spec, axis, rows)
    for (tokens, part), amax in zip(_parts(x, rows), amaxes, strict=True):
        result[tokens] = clipped(gradient[tokens], part, spec, axis, amax)
    return result


def _parts(x: Tensor, rows: Rows) -> list[tuple[Tensor, Tensor]]:
    """Each source's token indices and tokens, in the form of x."""
    is_laid_out = x.dim() == 3
    flat = x.reshape(-1, x.shape[-1])
    parts = []
    for source in range(rows.num_sources):
        tokens = rows.of_source(source, is_laid_out=is_laid_out)
        part = flat[tokens]
        sequences = rows.num_sequences // rows.num_sources
        parts.append((tokens, part.view(-1, sequences, x.shape[-1]) if is_laid_out else part))
    return parts


def _put(x: Tensor, tokens: Tensor, part: Tensor) -> None:
    x.view(-1, x.shape[-1])[tokens] = part.reshape(-1, x.shape[-1])


def _amaxes(
    module: ModuleId, x: Tensor, spec: QuantSpec, axis: int, rows: Rows
) -> list[Tensor] | list[None]:
    """The amax of each source over all ranks, 0 without rows; None if no scale follows from it.

    They are reduced together, unless there is no row at all.
    """
    if not follows_own_amax(spec):
        return [None] * rows.num_sources
    own = []
    for source, (_, part) in enumerate(_parts(x, rows)):
        with as_source(rows, source):
            own.append(own_amax(part, spec, axis))
    amaxes = torch.stack(own)
    return list((reduced(module, amaxes) if x.numel() else amaxes).unbind())
