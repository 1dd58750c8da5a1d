"""A tensor quantised along two axes: the copies that two matrix products of a training step take of one operand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quantexp.formats.kernels.choice import kernel_for_both
from quantexp.formats.layout import Target, check_input, check_out, memory_order, positive_axis
from quantexp.formats.options import resolve
from quantexp.formats.quantising import quantise
from quantexp.formats.types import Family, Format

_WITH_AXIS = (Family.MX, Family.NV)


@torch.no_grad()
def quantise_both(
    x: Tensor,
    fmt: str | Format,
    *,
    axes: tuple[int, int],
    out: tuple[Tensor, Tensor] | None = None,
    amax: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`quantise(x, fmt, axis=axes[0], ...)` and the same along `axes[1]`, from one read of x where a kernel can.

    A kernel can where one of the axes is the last in memory: MX, rounding to nearest, blocks of at most 64 (see
    docs/kernels.md). Formats without blocks have no axis: what is returned is one tensor, twice, computed once; it is
    so with blocks, too, where both axes are the same.

    Args:
        x: as `quantise` takes it.
        fmt: a name or a format.
        axes: the axis that blocks of the first and of the second copy run along.
        out: where to write the two, of x's shape and dtype, neither of them x or the other.
        amax: as `quantise` takes it.
        **options: what else `quantise` takes.

    Raises:
        ValueError: as `quantise`.
        TypeError: for an option that `quantise` does not have.
    """
    asked = resolve(fmt, has_amax=amax is not None, **options)
    check_input(x)
    first, second = (positive_axis(axis, x.ndim) for axis in axes)
    targets = out or (None, None)
    for target in targets:
        check_out(x, target)
    given = {"amax": amax, **options}
    if first == second or asked.fmt.family not in _WITH_AXIS:
        y = quantise(x, fmt, axis=first, out=targets[0], **given)
        return y, y if targets[1] is None else targets[1].copy_(y)
    x = x.detach()
    order = memory_order(x)
    place = {order.index(first): 0, order.index(second): 1}
    last = x.ndim - 1
    kernel = kernel_for_both(x, asked) if last in place else None
    if kernel is None:
        return (
            quantise(x, fmt, axis=first, out=targets[0], **given),
            quantise(x, fmt, axis=second, out=targets[1], **given),
        )
    dense = x.permute(order).contiguous()
    results = [Target(dense, order, target) for target in targets]
    (axis,) = place.keys() - {last}
    columns, rows = results[place[axis]], results[place[last]]
    kernel.quantise_both(dense, columns.dense, rows.dense, asked, axis)
    return results[0].filled(), results[1].filled()
