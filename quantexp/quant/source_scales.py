"""One scale a tensor where an expert's tokens come from several micro-batches: one scale for each source.

The micro-batches of a run are scaled each by its own amax. Under expert parallelism (`quantexp.quant.rows`) an expert's
rows are those of several micro-batches, so each source's rows have the scale of their own amax, over all ranks that
hold parts of them. A source without rows has no amax, and a delayed scale with a history is one for all sources.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.formats import QuantSpec
from quantexp.quant.multiply import clipped, quantise_operand
from quantexp.quant.precision import ModuleId, ModulePrecision
from quantexp.quant.rows import Rows
from quantexp.quant.sites import Slot, dim_of
from quantexp.quant.whole_amax import follows_own_amax, own_amax, reduced


def has_source_scales(rows: Rows | None, spec: QuantSpec) -> bool:
    """Whether an operand of these rows currently has several scales."""
    return rows is not None and rows.num_sources > 1 and follows_own_amax(spec)


def quantise_by_source(
    precision: ModulePrecision, slot: Slot, x: Tensor, rows: Rows | None
) -> Tensor | None:
    """x, rows [n, width] or their layout [L, B, width], quantised source by source; None if x has one scale."""
    spec = precision.spec(slot)
    if rows is None or not has_source_scales(rows, spec):
        return None
    axis = dim_of(slot.operand, spec)
    result = torch.empty_like(x)
    for (tokens, part), amax in zip(
        _parts(x, rows), _amaxes(precision.module, x, spec, axis, rows), strict=True
    ):
        _put(result, tokens, quantise_operand(part, spec, axis, amax), rows)
    return result


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
        tokens = rows.of_source(source, len(flat), is_laid_out=is_laid_out)
        part = flat[tokens]
        sequences = rows.num_sequences // rows.num_sources
        parts.append((tokens, part.view(-1, sequences, x.shape[-1]) if is_laid_out else part))
    return parts


def _put(x: Tensor, tokens: Tensor, part: Tensor, rows: Rows) -> None:
    x.view(-1, x.shape[-1])[tokens] = part.reshape(-1, x.shape[-1])


def _amaxes(module: ModuleId, x: Tensor, spec: QuantSpec, axis: int, rows: Rows) -> list[Tensor]:
    """The amax of each source over all ranks, 0 without rows; reduced together, unless there is no row at all."""
    amaxes = torch.stack([own_amax(part, spec, axis) for _, part in _parts(x, rows)])
    return list((reduced(module, amaxes) if x.numel() else amaxes).unbind())
