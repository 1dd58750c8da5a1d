"""Traversal of a tensor of any shape: in memory order, block by block, in chunks that fit in the cache.

Legend: O all axes before the blocked one, N the blocked axis, I all axes after it, B blocks, K elements of a block.
A tensor is viewed as x_ONI, a chunk of it as x_OBKI. The last block of an axis may be short; such blocks form separate
chunks with a smaller K.

Blocks of several rows lie in a matrix: R rows (all axes but the blocked one, flattened in order), N the blocked axis, m
rows and n elements of a block. The last blocks of either axis may be short; they are filled with zeros, which change no
scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor

from quantexp.formats.types import Format

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Elements of a chunk per CPU thread: three float32 temporaries of that size fit in a core's L2 cache.
_CPU_CHUNK = 1 << 17
#: On other devices a chunk only limits the memory of the temporaries.
_DEVICE_CHUNK = 1 << 26


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor x_ONI that contains whole blocks, all of the same extent."""

    o: slice
    n: slice
    i: slice
    #: The blocks of this chunk, as a slice of the axis of blocks.
    b: slice
    #: Elements of each block.
    k: int

    def elements(self, x_ONI: Tensor) -> Tensor:
        """This chunk of x, as x_OBKI."""
        return torch.unflatten(x_ONI[self.o, self.n, self.i], 1, (-1, self.k))

    def scales(self, scale_OBI: Tensor) -> Tensor:
        """The scales of this chunk's blocks, with extent 1 along K for broadcasting."""
        return scale_OBI[self.o, self.b, self.i].unsqueeze(2)


@dataclass(frozen=True)
class Place:
    """The position of a tensor in a larger one: the larger one's shape, and the indices of the first element."""

    whole: tuple[int, ...]
    start: tuple[int, ...]

    def check(self, shape: Sequence[int]) -> None:
        """Refuse a tensor that does not fit.

        Raises:
            ValueError: another number of axes, or the tensor exceeds the larger one.
        """
        fits = len(self.whole) == len(self.start) == len(shape) > 0 and all(
            first >= 0 and first + extent <= most
            for first, extent, most in zip(self.start, shape, self.whole, strict=True)
        )
        if not fits:
            raise ValueError(
                f"a tensor of shape {tuple(shape)} does not lie at {self.start} in one of {self.whole}"
            )

    def row_starts(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """The positions in the larger tensor of the first elements along the last axis of a part of this shape.

        In row-major order, int64 [product of the other extents].

        Raises:
            ValueError: as `check`.
        """
        self.check(shape)
        stride = self.whole[-1]
        first = torch.full((1,), self.start[-1], dtype=torch.int64, device=device)
        for axis in reversed(range(len(shape) - 1)):
            along = torch.arange(shape[axis], device=device) + self.start[axis]
            first = (along[:, None] * stride + first).view(-1)
            stride *= self.whole[axis]
        return first


@dataclass(frozen=True)
class Draw:
    """The random numbers of stochastic rounding (see `philox`)."""

    seed: int
    offset: int
    #: The position of the tensor in a larger one; None means that it is whole.
    place: Place | None = None


@dataclass(frozen=True)
class Transform:
    """A Hadamard transform (see `quantexp.formats.transform`)."""

    #: Elements per block, a power of two of at least 2.
    block: int
    #: 1 or -1 for each element of a block, float32; None means all 1.
    signs: Tensor | None = None
    #: Whether the tensor is the left operand of its product.
    left: bool = True


def check_out(x: Tensor, out: object) -> None:
    """Refuse an `out` that does not match x; None passes.

    Raises:
        TypeError: it is not a dense tensor.
        ValueError: its shape, dtype or device is not x's.
    """
    if out is None:
        return
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a torch.Tensor, got a {type(out).__name__}")
    for name in ("layout", "shape", "dtype", "device"):
        expected, got = getattr(x, name), getattr(out, name)
        if expected != got:
            raise ValueError(f"out must have x's {name} {expected}, got {got}")


def positive_axis(axis: int, ndim: int) -> int:
    """The axis counted from the front; a 0-dim tensor counts as a tensor of one element.

    Raises:
        TypeError: it is not an integer.
        ValueError: there is no such axis.
    """
    ndim = max(ndim, 1)
    try:
        is_axis = -ndim <= index(axis) < ndim
    except TypeError:
        raise TypeError(f"axis must be an integer, got {axis!r}") from None
    if not is_axis:
        raise ValueError(f"axis must lie in [{-ndim}, {ndim - 1}], got {axis}")
    return index(axis) % ndim


def memory_order(x: Tensor) -> list[int]:
    """The permutation of x's axes that makes it contiguous, if there is one."""
    if x.is_contiguous():
        return list(range(x.ndim))
    return sorted(range(x.ndim), key=lambda axis: (-x.stride()[axis], axis))


def in_memory_order(x: Tensor, order: Sequence[int]) -> Tensor:
    """x.permute(order) as a contiguous tensor, without a copy if it is one; `order` is `memory_order(x)`."""
    return x if x.is_contiguous() else x.permute(list(order)).contiguous()


class Target:
    """The destination of a result computed in the memory order of x: `out`, or a new tensor."""

    def __init__(self, x_dense: Tensor, order: Sequence[int], out: Tensor | None) -> None:
        """`x_dense` is x.permute(order), contiguous; `out` has x's shape and dtype."""
        self._order, self._out = order, out
        self._is_permuted = any(axis != position for position, axis in enumerate(order))
        direct = None if out is None else self._direct(out, x_dense)
        self._is_direct = direct is not None
        #: Contiguous, of `x_dense`'s shape: the tensor to write.
        self.dense = torch.empty_like(x_dense) if direct is None else direct

    def _direct(self, out: Tensor, x_dense: Tensor) -> Tensor | None:
        """`out` as the tensor to write, if it can be.

        A kernel may write x's own memory, but not memory that is shifted against it.
        """
        y = out.detach()
        y = y.permute(list(self._order)) if self._is_permuted else y
        if not y.is_contiguous():
            return None
        start, x_start = y.data_ptr(), x_dense.data_ptr()
        is_apart = start >= x_start + x_dense.nbytes or x_start >= start + y.nbytes
        return y if is_apart or start == x_start else None

    def filled(self) -> Tensor:
        """The result, in x's order of axes; `out` itself if there is one."""
        if self._is_direct:
            assert self._out is not None
            # A kernel wrote without autograd noticing. An inference tensor has no version.
            if not self._out.is_inference():
                torch.autograd.graph.increment_version(self._out)
            return self._out
        y = self.dense.permute(inverse(self._order)) if self._is_permuted else self.dense
        if self._out is None:
            return y
        self._out.detach().copy_(y)
        return self._out


def inverse(order: Sequence[int]) -> list[int]:
    """The inverse permutation of `order`."""
    return sorted(range(len(order)), key=lambda position: order[position])


def outer_axis_inner(shape: tuple[int, ...], axis: int) -> tuple[int, int, int]:
    """The extents O, N and I of a shape with blocks along `axis`."""
    if not shape:
        return 1, 1, 1
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def blocked_shape(shape: tuple[int, ...], axis: int, block: int) -> tuple[int, ...]:
    """The shape with the number of blocks instead of `axis`' extent; () for a 0-dim shape."""
    if not shape:
        return ()
    return (*shape[:axis], -(-shape[axis] // block), *shape[axis + 1 :])


def chunk_limit(device: torch.device) -> int:
    """The largest number of elements of a chunk."""
    return _CPU_CHUNK * torch.get_num_threads() if device.type == "cpu" else _DEVICE_CHUNK


def chunks(extents: tuple[int, int, int], block: int, limit: int) -> Iterator[Chunk]:
    """Chunks of at most `limit` elements (or one block, if larger) that cover (O, N, I) once."""
    num_outer, num_along, num_inner = extents
    if num_outer * num_along * num_inner == 0:
        return
    whole = num_along // block * block
    for start, stop, k in ((0, whole, block), (whole, num_along, num_along - whole)):
        if stop > start:
            yield from _chunks_of(num_outer, start, stop, num_inner, k, block, limit)


def _chunks_of(
    num_outer: int, start: int, stop: int, num_inner: int, k: int, block: int, limit: int
) -> Iterator[Chunk]:
    step_i = min(num_inner, max(1, limit // k))
    step_n = min(stop - start, max(1, limit // (k * step_i)) * k)
    step_o = max(1, limit // (step_n * step_i))
    for o in _slices(0, num_outer, step_o):
        for n in _slices(start, stop, step_n):
            b = slice(n.start // block, -(-n.stop // block))
            for i in _slices(0, num_inner, step_i):
                yield Chunk(o, n, i, b, k)


def _slices(start: int, stop: int, step: int) -> Iterator[slice]:
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


class Scratch:
    """Three float32 temporaries, allocated once for all chunks of a tensor."""

    def __init__(self, num_elements: int, device: torch.device) -> None:
        self._buffers = [
            torch.empty(num_elements, dtype=torch.float32, device=device) for _ in range(3)
        ]

    def of_shape(self, shape: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """The temporaries in this shape; their content is undefined."""
        num_elements = math.prod(shape)
        a, b, c = (buffer[:num_elements].view(*shape) for buffer in self._buffers)
        return a, b, c


def to_tiles(x: Tensor, fmt: Format, axis: int) -> Tensor:
    """x in float32 as [blocks, m n], contiguous; blocks in the order of rows, then along the axis."""
    x_RN = _tile_rows(x, axis).to(torch.float32)
    m, n = _tile_extents(x_RN.shape[1], fmt)
    rows, columns = _tile_counts((x_RN.shape[0], x_RN.shape[1]), m, n)
    padded = x_RN.new_zeros(rows * m, columns * n)
    padded[: x_RN.shape[0], : x_RN.shape[1]] = x_RN
    tiles = padded.view(rows, m, columns, n).transpose(1, 2)
    return tiles.reshape(rows * columns, m * n).contiguous()  # else a view, if n is 1


def from_tiles(tiles: Tensor, shape: tuple[int, ...], fmt: Format, axis: int) -> Tensor:
    """The inverse of `to_tiles`, of this shape."""
    if not shape or 0 in shape:
        return tiles[:1, :1].reshape(shape) if not shape else tiles.new_empty(shape)
    order = [dim for dim in range(len(shape)) if dim != axis % len(shape)]
    outer, extent = [shape[dim] for dim in order], shape[axis]
    num_rows = math.prod(outer)
    m, n = _tile_extents(extent, fmt)
    rows, columns = _tile_counts((num_rows, extent), m, n)
    padded = tiles.view(rows, columns, m, n).transpose(1, 2).reshape(rows * m, columns * n)
    return padded[:num_rows, :extent].reshape(*outer, extent).movedim(-1, axis)


def num_tiles(shape: tuple[int, ...], fmt: Format, axis: int) -> tuple[int, int]:
    """The number of blocks across and along the axis; a 0-dim tensor has one, an empty one none."""
    if 0 in shape:
        return 0, 1
    shape, axis = (shape, axis) if shape else ((1,), 0)
    extent = shape[axis]
    num_rows = math.prod(shape) // extent if extent else 0
    return _tile_counts((num_rows, extent), *_tile_extents(extent, fmt))


def _tile_rows(x: Tensor, axis: int) -> Tensor:
    if not x.ndim or not x.numel():
        return x.reshape(-1, 1)
    return x.movedim(axis, -1).reshape(-1, x.shape[axis])


def _tile_extents(extent: int, fmt: Format) -> tuple[int, int]:
    assert fmt.block is not None
    return fmt.across, min(fmt.block, max(extent, 1))


def _tile_counts(shape: tuple[int, int], m: int, n: int) -> tuple[int, int]:
    return -(-shape[0] // m), -(-shape[1] // n)
