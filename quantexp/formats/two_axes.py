"""Quantises a tensor along two axes: one operand's copies for two matrix products of a training step."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from quantexp.formats.families import tensor_scale
from quantexp.formats.kernels import exact, kernel_for_both
from quantexp.formats.layout import (
    Target,
    check_out,
    in_memory_order,
    memory_order,
    positive_axis,
)
from quantexp.formats.quantising import quantise
from quantexp.formats.spec import (
    AnySpec,
    QuantSpec,
    check_amax,
    check_draw,
    constant_for_dynamo,
    resolve,
)
from quantexp.formats.torch_internals import (
    check_amax_tensor,
    check_derivative,
    check_input,
    constant,
    is_plain,
)


def quantise_both(
    x: Tensor,
    fmt: AnySpec,
    *,
    axes: tuple[int, int],
    out: tuple[Tensor, Tensor] | None = None,
    amax: Tensor | None = None,
    seed: int | None = None,
    offset: int | None = None,
    straight_through: bool = False,
) -> tuple[Tensor, Tensor]:
    """`quantise(x, fmt, axis=axes[0])` and the same along `axes[1]`, from one read of x if a kernel supports it.

    A kernel supports it if one of the axes is the last in memory: rounding to nearest, blocks of one row (see
    docs/backends.md). For a format without blocks, for square blocks of a matrix, or if both axes are equal, the
    result is one tensor, returned twice and computed once.

    Args:
        x: as in `quantise`.
        fmt: a name, a format or a `QuantSpec`.
        axes: the axes that blocks of the first and of the second copy run along.
        out: where to write the copies, of x's shape and dtype; neither may be x or the other.
        amax: as in `quantise`.
        seed: as in `quantise`.
        offset: as in `quantise`.
        straight_through: as in `quantise`, for both copies.

    Raises:
        TypeError: as for `quantise`.
        ValueError: as for `quantise`; or the copies share memory with x or with each other.
        RuntimeError: as for `quantise`.
    """
    check_input(x)
    if not isinstance(axes, tuple | list) or len(axes) != 2:
        raise TypeError(f"axes must be a pair of integers, got {axes!r}")
    first, second = positive_axis(axes[0], x.ndim), positive_axis(axes[1], x.ndim)
    targets = _checked_targets(x, out)
    check_amax_tensor(amax)
    needs_derivative = check_derivative(x, straight_through, out)
    if not needs_derivative and is_plain(x, amax, *targets):
        spec = resolve(fmt)
        check_amax(spec, amax is not None)
        check_draw(spec, seed, offset)
        both = _from_one_read(constant(x), spec, (first, second), amax, targets)
        if both is not None:
            return both
    elif out is not None:
        targets = None, None  # written at the end: their memory cannot be compared with x's

    def copy(axis: int, target: Tensor | None) -> Tensor:
        return quantise(
            x,
            fmt,
            axis=axis,
            amax=amax,
            seed=seed,
            offset=offset,
            out=target,
            straight_through=straight_through,
        )

    y = copy(first, targets[0])
    z = copy(second, targets[1]) if first != second and _has_axis(fmt, x.ndim) else y
    if out is None:
        return y, z
    return y if y is out[0] else out[0].copy_(y), z if z is out[1] else out[1].copy_(z)


@constant_for_dynamo
def _has_axis(fmt: AnySpec, ndim: int) -> bool:
    """Whether the result depends on the axis. Rows of square blocks are other elements along each of three axes."""
    spec = resolve(fmt)
    return spec.depends_on_axis or (spec.fmt.across > 1 and ndim > 2)


def _checked_targets(
    x: Tensor, out: tuple[Tensor, Tensor] | None
) -> tuple[Tensor | None, Tensor | None]:
    """Validated destinations."""
    if out is None:
        return None, None
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise TypeError(f"out must be a pair of tensors, got {type(out).__name__}")
    for target in out:
        check_out(x, target)
    if out[0] is out[1]:
        raise ValueError("out must not share memory with x, nor the copies with each other")
    return out[0], out[1]


def _check_apart(*tensors: Tensor | None) -> None:
    """Refuse tensors that share memory: the spans from the first to the last element of two overlap."""
    spans = sorted([_span(x) for x in tensors if x is not None])
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        raise ValueError("out must not share memory with x, nor the copies with each other")


def _span(x: Tensor) -> tuple[int, int]:
    start = x.data_ptr()
    if x.is_contiguous() or not x.numel():
        return start, start + x.nbytes
    last = sum((extent - 1) * stride for extent, stride in zip(x.shape, x.stride(), strict=True))
    return start, start + (last + 1) * x.element_size()


@exact
def _from_one_read(
    x: Tensor,
    spec: QuantSpec,
    axes: tuple[int, int],
    amax: Tensor | None,
    targets: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor] | None:
    """Both copies; None if no kernel writes them from one read."""
    _check_apart(x, *targets)
    if axes[0] == axes[1] or not spec.depends_on_axis:
        return None
    order = memory_order(x)
    place = {order.index(axis): index for index, axis in enumerate(axes)}
    last = x.ndim - 1
    kernel = kernel_for_both(x, spec) if last in place else None
    if kernel is None:
        return None
    dense = in_memory_order(x, order)
    results = [Target(dense, order, target) for target in targets]
    (axis,) = place.keys() - {last}
    columns, rows = results[place[axis]], results[place[last]]
    scale = tensor_scale(dense, spec, amax)
    kernel.quantise_both(dense, columns.dense, rows.dense, spec, axis, scale)
    return results[0].filled(), results[1].filled()
