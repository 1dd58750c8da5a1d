"""Quantises a tensor along two axes: one operand's copies for two matrix products of a training step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantexp.formats.kernels.choice import kernel_for_both
from quantexp.formats.layout import Target, check_input, check_out, memory_order, positive_axis
from quantexp.formats.quantising import quantise
from quantexp.formats.spec import AnySpec, check_amax, check_draw, resolve
from quantexp.formats.types import Family

_WITH_AXIS = (Family.MX, Family.NV)


@torch.no_grad()
def quantise_both(
    x: Tensor,
    fmt: AnySpec,
    *,
    axes: tuple[int, int],
    out: tuple[Tensor, Tensor] | None = None,
    amax: Tensor | None = None,
    seed: int | None = None,
    offset: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantise(x, fmt, axis=axes[0])` and the same along `axes[1]`, from one read of x if a kernel supports it.

    A kernel supports it if one of the axes is the last in memory: MX, rounding to nearest, blocks of at most 64 (see
    docs/kernels.md). For a format without blocks, or if both axes are equal, the result is one tensor, returned twice
    and computed once.

    Args:
        x: as in `quantise`.
        fmt: a name, a format or a `QuantSpec`.
        axes: the axes that blocks of the first and of the second copy run along.
        out: where to write the copies, of x's shape and dtype; neither may be x or the other.
        amax: as in `quantise`.
        seed: as in `quantise`.
        offset: as in `quantise`.

    Raises:
        ValueError: as for `quantise`.
    """
    spec = resolve(fmt)
    check_amax(spec, amax is not None)
    check_draw(spec, seed, offset)
    check_input(x)
    first, second = (positive_axis(axis, x.ndim) for axis in axes)
    targets = out or (None, None)
    of_call: dict[str, Any] = {"amax": amax, "seed": seed, "offset": offset}
    for target in targets:
        check_out(x, target)
    if first == second or spec.fmt.family not in _WITH_AXIS:
        y = quantise(x, spec, axis=first, out=targets[0], **of_call)
        return y, y if targets[1] is None else targets[1].copy_(y)
    x = x.detach()
    order = memory_order(x)
    place = {order.index(first): 0, order.index(second): 1}
    last = x.ndim - 1
    kernel = kernel_for_both(x, spec) if last in place else None
    if kernel is None:
        return (
            quantise(x, spec, axis=first, out=targets[0], **of_call),
            quantise(x, spec, axis=second, out=targets[1], **of_call),
        )
    dense = x.permute(order).contiguous()
    results = [Target(dense, order, target) for target in targets]
    (axis,) = place.keys() - {last}
    columns, rows = results[place[axis]], results[place[last]]
    kernel.quantise_both(dense, columns.dense, rows.dense, spec, axis)
    return results[0].filled(), results[1].filled()
