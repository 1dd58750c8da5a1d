"""How Triton kernels are launched; of `triton_panels`, the tiles, and the number format as the compiler knows it."""

from __future__ import annotations

import struct
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from quantexp.formats.kernels import cpu
from quantexp.formats.layout import Draw, Transform, outer_axis_inner
from quantexp.formats.spec import QuantSpec

#: Elements of a tile, if blocks allow it.
_TILE = 2048


@dataclass(frozen=True)
class Tiles:
    """A tensor as [outer, rows, middle, columns], and the tile of a program, with blocks of m x n."""

    outer: int
    rows: int
    middle: int
    columns: int
    tall: int
    wide: int
    block: tuple[int, int]
    #: Whether blocks and transforms run down the rows.
    is_down: bool

    @property
    def number(self) -> int:
        """The number of programs."""
        return self.outer * -(-self.rows // self.tall) * self.middle * -(-self.columns // self.wide)

    @property
    def constants(self) -> dict[str, int]:
        """Compile-time constants, and the warps of a program."""
        num_warps = min(16, max(4, self.tall * self.wide // 1024))
        return {"TALL": self.tall, "WIDE": self.wide, "num_warps": num_warps}


def tiles_of(
    x: Tensor, axis: int, block: tuple[int, int], hadamard: int = 1, last: int | None = None
) -> Tiles:
    """The tiles of x, not empty, in blocks of so many elements across the axis and along it.

    `last`: the second copy has blocks along the last axis, of this extent.
    """
    outer, along, inner = outer_axis_inner(tuple(x.shape), axis)
    across, length = block
    is_down = inner > 1 or last is not None
    if is_down:
        middle = 1 if last is None or last % length == 0 else inner // last
        least = length if last is not None else across
        tall, wide = max(length, hadamard), least
        tall, wide = _grown(tall, wide, along, inner // middle, first="wide")
        return Tiles(outer, along, middle, inner // middle, tall, wide, (length, across), True)
    grain = max(length, hadamard)
    rows, columns = outer, along
    if across == 1 and ((block == (1, 1) and hadamard == 1) or columns % grain == 0):
        columns = min(x.numel(), grain if grain > 1 else _TILE)
        rows = -(-x.numel() // columns)
        if x.numel() % columns:
            rows, columns = 1, x.numel()
    tall, wide = _grown(across, grain, rows, columns, first="wide" if grain == 1 else "tall")
    return Tiles(1, rows, 1, columns, tall, wide, (across, length), False)


def _grown(tall: int, wide: int, rows: int, columns: int, first: str) -> tuple[int, int]:
    """A tile of at least such sides, enlarged to the usual number of elements, but not far beyond the tensor."""
    for side in (first, "wide" if first == "tall" else "tall"):
        if side == "wide":
            wide = max(wide, min(_TILE // tall, power_of_two_from(columns)))
        else:
            tall = max(tall, min(_TILE // wide, power_of_two_from(rows)))
    return tall, wide


def quantise_panels(
    x: Tensor,
    y: Tensor,
    second: Tensor | None,
    spec: QuantSpec,
    axis: int,
    scale: Tensor | None,
    draw: Draw | None,
    transform: Transform | None,
) -> None:
    """Write x, not empty, to y and in blocks along its last axis to `second`, if there is one; as `gpu.quantise`."""
    from quantexp.formats.kernels.triton_panels import panels

    block = (1, 1) if spec.fmt.block is None else (spec.fmt.across, spec.block)
    last = None if second is None else x.shape[-1]
    hadamard = 1 if transform is None else transform.block
    tiles = tiles_of(x, axis, block, hadamard, last)
    place = None if draw is None else draw.place
    starts = None if place is None else place.row_starts(x.shape, x.device)
    seed, offset = (0, 0) if draw is None else (draw.seed, draw.offset)
    in_fours = starts is None and tiles.columns % 4 == 0 and tiles.wide % 4 == 0
    with on(x):
        panels[(tiles.number,)](
            *(_singles(x), _singles(y), None if second is None else _singles(second), scale),
            *(_signs_of(transform), starts),
            *(tiles.rows, tiles.columns, tiles.middle, x.shape[-1] if x.ndim else 1),
            *_words_of(seed),
            *_words_of(offset),
            M=tiles.block[0],
            N=tiles.block[1],
            HAS_SCALE=scale is not None,
            HAS_SECOND=second is not None,
            HAS_STARTS=starts is not None,
            IN_FOURS=in_fours,
            G=grid_of(spec),
            enable_fp_fusion=False,
            **tiles.constants,
            **transform_constants(transform, tiles),
        )


def _signs_of(transform: Transform | None) -> Tensor | None:
    """The signs of a transform, contiguous, if it has any."""
    if transform is None or transform.signs is None:
        return None
    return transform.signs.contiguous()


def transform_constants(transform: Transform | None, tiles: Tiles) -> dict[str, object]:
    """Compile-time constants."""
    if transform is None:
        return {"HADAMARD": 0, "IS_DOWN": False, "IS_LEFT": False, "HAS_SIGNS": False}
    return {
        "HADAMARD": transform.block,
        "IS_DOWN": tiles.is_down,
        "IS_LEFT": transform.left,
        "HAS_SIGNS": transform.signs is not None,
    }


def _singles(x: Tensor) -> Tensor:
    """The elements as the kernels read them one by one (see `triton_words`)."""
    flat = x.view(-1)
    return flat.view(torch.int16) if x.dtype == torch.bfloat16 else flat


def _words_of(number: int) -> tuple[int, int]:
    """The lower and upper half of a number in [0, 2^64), as int32."""
    low, high = number & 0xFFFFFFFF, number >> 32
    return low - ((low >> 31) << 32), high - ((high >> 31) << 32)


@dataclass(frozen=True)
class Grid:
    """A number format as a compile-time constant of `triton_panels`: `cpu.Grid`, with the bits of bounds of scales."""

    mantissa_bits: int
    emin: int
    emax: int
    max: float
    lowest: float
    away: int
    has_negative_zero: int
    family: int
    beyond: int
    pre_scale: float
    kind: int
    rule: int
    offset: int
    scale_mantissa_bits: int
    scale_emin: int
    tensor_first: int
    is_random: int
    scale_min_bits: int
    scale_max_bits: int


@lru_cache(maxsize=256)
def grid_of(spec: QuantSpec) -> Grid:
    """The number format of a specification."""
    grid = cpu.grid_of(spec, 1.0)
    bits = {
        f"{name}_bits": struct.unpack("<i", struct.pack("<f", getattr(grid, name)))[0]
        for name in ("scale_min", "scale_max")
    }
    own = {each.name: getattr(grid, each.name) for each in fields(Grid) if each.name not in bits}
    return Grid(**own, **bits)


def raise_to_amax_of_transform(
    x: Tensor, amax_bits: Tensor, axis: int, transform: Transform
) -> None:
    """Raise the int32 `amax_bits` to the bits of the finite amax of the transform of x, not empty."""
    from quantexp.formats.kernels.triton_panels import amax_panels

    tiles = tiles_of(x, axis, (1, 1), transform.block)
    with on(x):
        amax_panels[(tiles.number,)](
            *(_singles(x), amax_bits, _signs_of(transform), tiles.rows, tiles.columns),
            enable_fp_fusion=False,
            **tiles.constants,
            **transform_constants(transform, tiles),
        )


def on(x: Tensor) -> Any:
    """Make x's device the current one, on which Triton launches."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def power_of_two_from(n: int) -> int:
    """The least power of two of at least n >= 1."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Launch:
    """The launch parameters of one program."""

    #: Blocks of 32 elements; for `mx_tile`, blocks per row, of which a program has 32.
    blocks: int
    num_warps: int


#: By kernel, and by whether it processes pairs of bfloat16 or single elements.
LAUNCHES: dict[tuple[str, bool], Launch] = {
    ("mx_flat", True): Launch(32, 4),
    ("mx_flat", False): Launch(32, 4),
    ("mx_tile", True): Launch(4, 2),
    ("mx_tile", False): Launch(4, 4),
    ("hif8_flat", True): Launch(64, 4),
    ("hif8_flat", False): Launch(64, 4),
    ("amax_flat", True): Launch(256, 8),
    ("amax_flat", False): Launch(128, 4),
}

#: Launches to measure for each kernel.
CANDIDATES: dict[str, tuple[Launch, ...]] = {
    "mx_flat": (Launch(32, 4), Launch(64, 4), Launch(128, 4), Launch(128, 8), Launch(256, 8)),
    "mx_tile": tuple(Launch(*each) for each in ((2, 1), (4, 2), (4, 4), (8, 4), (8, 8), (16, 8))),
    "hif8_flat": (Launch(32, 4), Launch(64, 4), Launch(128, 4), Launch(128, 8), Launch(256, 8)),
    "amax_flat": (
        *(Launch(64, 4), Launch(128, 4), Launch(256, 4), Launch(256, 8), Launch(512, 8)),
        *(Launch(512, 16), Launch(1024, 16)),
    ),
}
