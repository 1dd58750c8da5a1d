"""The cases of each format: its options crossed with the tensors of `cases`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantexp.extras.verify import cases
from quantexp.extras.verify.exact import BLOCKS, KINDS, Case
from quantexp.extras.verify.grids import grid
from quantexp.extras.verify.rational import SCALE_RULES

Array = NDArray[Any]
Options = dict[str, Any]

DTYPES = ("float32", "bfloat16", "float16")
DRAW: Options = {"rounding": "stochastic", "seed": 12345678901234567890, "offset": 42}
ROUNDINGS: tuple[Options, ...] = (
    *({"rounding": "even"}, {"rounding": "away"}, {"rounding": "zero"}),
    DRAW,
)
#: NVFP4's tensor scales for hard blocks: powers of two, for which all is exact, and others.
TENSOR_SCALES = (1.0, 2.0**-100, 2.0**90, 0.37, 3.1e-20)
#: Number of elements beyond which kernels may split a tensor, and use several threads.
SEVERAL_CHUNKS = 9216


def cases_of(fmt: str) -> Iterator[Case]:
    """Every case of a format."""
    kind = KINDS[fmt][0]
    yield from {"mx": _mx, "nv": _nv, "flat": _flat, "bf16": _bf16}[kind](fmt)
    yield from _shapes(fmt)


def _mx(fmt: str) -> Iterator[Case]:
    for rule in SCALE_RULES:
        hard = cases.hard_blocks(fmt, rule)
        for rounding in ROUNDINGS:
            options = {"scale_rule": rule, **rounding}
            for quarters in _quarters(fmt):
                yield Case(fmt, hard, options={**options, **quarters})
                yield from _sixteen_bits(fmt, 32, {**options, **quarters})
                yield from _random(fmt, 32, {**options, **quarters})
            if rounding is not DRAW:
                alone = cases.every_value("bfloat16").reshape(-1, 1)
                yield Case(fmt, alone, "bfloat16", options={**options, "block": 1})
    yield Case(fmt, _beside_largest(fmt), options=DRAW)


def _nv(fmt: str) -> Iterator[Case]:
    for rounding in ROUNDINGS:
        for quarters in _quarters(fmt):
            options = {**rounding, **quarters}
            for t in TENSOR_SCALES:
                hard = cases.hard_nv_blocks(t)
                for scaling in ("current", "exact", "delayed"):
                    amax = {"scaling": scaling, "amax": float(np.float32(2688 * t))}
                    yield Case(fmt, hard, options={**options, **amax})
            for scaling in ("none", "current", "exact"):
                yield from _sixteen_bits(fmt, 16, {**options, "scaling": scaling})
                yield from _random(fmt, 16, {**options, "scaling": scaling})
    for dtype in ("bfloat16", "float16"):  # each with its own tensor scale
        for neighbours in cases.by_magnitude(dtype, 512)[::4]:
            for scaling in ("current", "exact"):
                yield Case(fmt, neighbours.reshape(-1, 16), dtype, options={"scaling": scaling})
    yield Case(fmt, _beside_largest(fmt), options={"scaling": "none", **DRAW})


def _flat(fmt: str) -> Iterator[Case]:
    element = KINDS[fmt][1]
    hard = [cases.hard_values(element), cases.hard_fractions(element)]
    near = cases.random_blocks(512, 64)
    near = near[np.isfinite(near)]
    for rounding in ROUNDINGS:
        for saturate in (True, False) if rounding["rounding"] != "zero" else (True,):
            options = {**rounding, "saturate": saturate}
            for x in (*hard, cases.random_bits(1 << 17)):
                yield Case(fmt, x, options={**options, "scaling": "none"})
            for dtype in ("bfloat16", "float16"):
                x = cases.every_value(dtype)
                yield Case(fmt, x, dtype, options={**options, "scaling": "none"})
            for scaling in ("current", "exact"):
                for dtype in DTYPES:
                    x = cases.as_dtype(near, dtype)
                    yield Case(fmt, x, dtype, options={**options, "scaling": scaling})
                for amax in (2.0**-149, 1e-30, 0.37, 6.0, 1e30):
                    scale = {"scaling": scaling, "amax": float(np.float32(amax))}
                    yield Case(fmt, cases.random_bits(1 << 14), options={**options, **scale})
    for target in (15.0, 224.0, 1.0, 0.3):
        for scaling in ("current", "exact"):
            yield Case(fmt, near, options={"scaling": scaling, "amax_target": target})
    delayed = {"scaling": "delayed", "amax": 5.0}
    yield Case(fmt, near, options=delayed)


def _bf16(fmt: str) -> Iterator[Case]:
    yield Case(fmt, cases.random_bits(1 << 20))
    subnormal = np.arange(-(1 << 17), 1 << 17, dtype=np.int32).view(np.float32)
    yield Case(fmt, subnormal)
    for dtype in ("bfloat16", "float16"):
        yield Case(fmt, cases.every_value(dtype), dtype)


def _quarters(fmt: str) -> list[Options]:
    """Without the factor of 3/4 and, for the four-bit formats, also with it."""
    return [{}, {"pre_scale": True}] if KINDS[fmt][1] == "e2m1" else [{}]


def _sixteen_bits(fmt: str, width: int, options: Options) -> Iterator[Case]:
    for dtype in ("bfloat16", "float16"):
        yield Case(fmt, cases.by_magnitude(dtype, width), dtype, options=options)
    yield Case(fmt, cases.shuffled("bfloat16", width), "bfloat16", options=options)


def _random(fmt: str, width: int, options: Options) -> Iterator[Case]:
    for dtype in DTYPES:
        rows = 2048 if dtype == "float32" else 256
        yield Case(fmt, cases.random_blocks(rows, width, dtype), dtype, options=options)


def _beside_largest(fmt: str) -> Array:
    """Points at many fractions of every step, in blocks that contain the largest value, so that the scale is 1."""
    kind, element = KINDS[fmt]
    points = cases.hard_fractions(element)
    width = BLOCKS[kind] - 1
    x = np.resize(points, (-(-len(points) // width), width))
    largest = np.full_like(x[:, :1], grid(element).magnitudes[-1])
    return np.concatenate([x, largest], axis=1)


def _shapes(fmt: str) -> Iterator[Case]:
    """All axes, blocks of other sizes, a short last one, strides, packed codes, and a tensor of several chunks."""
    x = cases.solid()
    plain: list[Options] = [{}] if fmt == "bf16" else [{}, DRAW]
    blocks: list[Options] = [{}]
    if KINDS[fmt][0] in BLOCKS:
        blocks += [{"block": block} for block in (1, 2, 8, 64, 256)]
    for axis in (0, 1, 2, -1, -2):
        for options in plain:
            for block in blocks:
                yield Case(fmt, x, axis=axis, options={**options, **block})
            for dtype in DTYPES:
                yield Case(fmt, cases.as_dtype(x, dtype), dtype, axis, options, strided=True)
            if KINDS[fmt][1] == "e2m1":
                yield Case(fmt, x, axis=axis, options=options, packed=True)
                yield Case(fmt, x[:, :2, :7], axis=axis, options=options, packed=True)
    for options in plain:
        for axis in (0, 1):
            yield Case(fmt, cases.random_blocks(SEVERAL_CHUNKS, 32), axis=axis, options=options)
