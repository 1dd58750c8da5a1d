"""The Walsh-Hadamard transform in blocks along an axis: spreads outliers over their block.

With H_1 = [1] and H_2n = [[H_n, H_n], [H_n, -H_n]] (Sylvester's construction), which is symmetric and satisfies
H_n H_n = n, a block x of n = 2^k elements becomes

    y = c H_n (signs x)        c = 2^-ceil(k/2) for a product's left operand, 2^-floor(k/2) for its right

Together c c' n = 1, so the product of two tensors transformed alike along the axis that it reduces equals the product
of the original tensors. For an even k both c are 1 / sqrt(n), and the transform is orthonormal. For an odd k that would
not be a power of two, so one c is 1 / sqrt(n) times sqrt(2) and the other divided by it: multiplying by c never rounds,
and power-of-two scales absorb it.

The fast algorithm applies H_n in float32, with each addition rounded once, in this order: for h = 1, 2, 4, .. n / 2 the
elements i and i + h (with bit h of i clear) become their sum and difference. Every device therefore gives the same
bits. A short last block is split into powers of two, the largest first, each transformed separately. NaN or Inf makes
its whole block NaN or Inf, and so does a sum beyond float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantexp.formats.kernels import exact_in_pool
from quantexp.formats.layout import (
    Transform,
    chunk_limit,
    chunks,
    outer_axis_inner,
    positive_axis,
)
from quantexp.formats.operators import operator
from quantexp.formats.philox import random_integers
from quantexp.formats.rounding import RANDOM_BITS
from quantexp.formats.torch_internals import (
    check_constant,
    check_dense,
    check_input,
    is_plain,
)


def hadamard(
    x: Tensor,
    *,
    axis: int = -1,
    block: int = 32,
    signs: Tensor | None = None,
    left: bool = True,
    inverse: bool = False,
) -> Tensor:
    """The transform of x in its shape, always float32.

    Args:
        x: bfloat16, float16 or float32, of any shape and strides.
        axis: the axis that blocks lie along.
        block: elements per block, a power of two of at least 2.
        signs: float32 of shape (block,), each 1 or -1; None means all 1.
        left: whether x is the left operand of its product, which determines c.
        inverse: whether to undo the transform, up to rounding.

    Raises:
        TypeError: x or the signs are no dense tensor, or of a dtype that is not allowed.
        ValueError: an axis, block or shape of signs that is not allowed.
        RuntimeError: a derivative is needed: it is not implemented.
    """
    check_input(x)
    check_constant(x, "x")
    axis = positive_axis(axis, x.ndim)
    check_hadamard_block(block)
    _check_signs(signs, block)
    if is_plain(x, signs):
        return _transformed(x.detach(), axis, block, signs, left, inverse)
    y: Tensor = _operator(x, axis, block, signs, left, inverse)
    return y


def check_transform(transform: Transform) -> None:
    """Refuse an invalid block or invalid signs.

    Raises:
        TypeError: the signs are no dense tensor of float32.
        ValueError: the block is no power of two of at least 2, or there is not one sign for each of its elements.
        RuntimeError: a derivative of the signs is needed.
    """
    check_hadamard_block(transform.block)
    _check_signs(transform.signs, transform.block)


def _check_signs(signs: Tensor | None, block: int) -> None:
    if signs is None:
        return
    check_dense(signs, "signs")
    if signs.shape != (block,):
        raise ValueError(
            f"signs must have one entry for each of a block's {block}, got shape {tuple(signs.shape)}"
        )
    if signs.dtype != torch.float32:
        raise TypeError(f"signs must be torch.float32, got {signs.dtype}: pass signs.float()")
    check_constant(signs, "signs")


@exact_in_pool
def _transformed(
    x: Tensor, axis: int, block: int, signs: Tensor | None, left: bool, inverse: bool
) -> Tensor:
    y = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    y_ONI = y.view(outer_axis_inner(y.shape, axis))
    signs_N = None if signs is None else _repeated(signs, y_ONI.shape[1])
    if signs_N is not None and not inverse:
        y_ONI.mul_(signs_N)
    for start, stop, size in pieces(y_ONI.shape[1], block):
        _transform(y_ONI[:, start:stop], size, left is not inverse)
    if signs_N is not None and inverse:
        y_ONI.mul_(signs_N)
    return y


def _shape_of_operator(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


_operator = operator(
    "hadamard",
    "(Tensor x, int axis, int block, Tensor? signs, bool left, bool inverse) -> Tensor",
    _transformed,
    _shape_of_operator,
)


def check_hadamard_block(block: int) -> None:
    """Refuse an invalid block of the transform.

    Raises:
        ValueError: unless it is a power of two of at least 2.
    """
    if not isinstance(block, int) or isinstance(block, bool) or block < 2 or block & (block - 1):
        raise ValueError(f"a Hadamard block must be a power of two of at least 2, got {block!r}")


def random_signs(block: int, seed: int, offset: int, device: torch.device) -> Tensor:
    """1 or -1 for each element of a block, float32; -1 if its random number has the highest bit set."""
    numbers = random_integers(block, seed, offset, device)
    return torch.where(numbers < 2.0 ** (RANDOM_BITS - 1), 1.0, -1.0)


def _repeated(signs: Tensor, extent: int) -> Tensor:
    """The signs of all blocks along an axis, the last of which may be short, as a factor of x_ONI."""
    return signs.repeat(-(-extent // signs.numel()))[:extent, None]


def pieces(extent: int, block: int) -> list[tuple[int, int, int]]:
    """Start, stop and size of the transforms along an axis: whole blocks, then the powers of two of the rest."""
    whole = extent // block * block
    spans = [(0, whole, block)] if whole else []
    size, start = block // 2, whole
    while start < extent:
        if size <= extent - start:
            spans.append((start, start + size, size))
            start += size
        size //= 2
    return spans


def _transform(x_ONI: Tensor, size: int, left: bool) -> None:
    """Transform blocks of one size in place; N is a multiple of the size."""
    if size == 1:
        return
    k = size.bit_length() - 1
    factor = 2.0 ** -((k + 1) // 2 if left else k // 2)
    o, n, i = x_ONI.shape
    for chunk in chunks((o, n, i), size, chunk_limit(x_ONI.device)):
        x_OBKI = chunk.elements(x_ONI)
        x_KOBI = x_OBKI.permute(2, 0, 1, 3)
        copy = torch.empty(x_KOBI.shape, dtype=torch.float32, device=x_ONI.device).copy_(x_KOBI)
        y_KM = _butterflies(copy.view(size, -1)).mul_(factor)
        x_OBKI.copy_(y_KM.view(x_KOBI.shape).permute(1, 2, 0, 3))


def _butterflies(x_KM: Tensor) -> Tensor:
    """H x for the columns of x, which are overwritten."""
    size = x_KM.shape[0]
    other = torch.empty_like(x_KM)
    h = 1
    while h < size:
        pairs, out = (t.view(size // (2 * h), 2, -1) for t in (x_KM, other))
        torch.add(pairs[:, 0], pairs[:, 1], out=out[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=out[:, 1])
        x_KM, other = other, x_KM
        h *= 2
    return x_KM
