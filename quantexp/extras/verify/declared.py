"""Verifies a declared format against `gold`: every value of its element, ties and their neighbours, at scales
from the smallest to the largest, and tensors of many magnitudes; for each rounding, dtype, axis and kernel.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantexp.extras.verify import cases
from quantexp.extras.verify.draws import random_integers
from quantexp.extras.verify.exact import to_dtype
from quantexp.extras.verify.gold import Gold, gold_of, quantised
from quantexp.extras.verify.gold_check import GOLD
from quantexp.extras.verify.kernels import Placed, to_numpy, to_torch
from quantexp.extras.verify.tally import Tally
from quantexp.formats import Format, resolve
from quantexp.formats.kernels import gpu
from quantexp.formats.table import is_compiled
from quantexp.processes.threads import threads

Array = NDArray[Any]

SEED, OFFSET = 12345678901234567890, 42
ROUNDINGS: tuple[dict[str, Any], ...] = (
    {"rounding": "even"},
    {"rounding": "away"},
    {"rounding": "zero"},
    {"rounding": "stochastic", "seed": SEED, "offset": OFFSET},
)
DTYPES = ("float32", "bfloat16", "float16")
#: Elements of a case, about: the exact arithmetic takes some 20 microseconds for each.
_MOST = 1 << 13
_MOST_WIDTH = 512


@dataclass(frozen=True)
class _Case:
    """A tensor with its dtype, blocked axis, and rounding."""

    name: str
    x: Array
    dtype: str
    axis: int
    options: dict[str, Any]

    def describe(self) -> str:
        words = [self.name, self.dtype, "x".join(map(str, self.x.shape)), f"axis={self.axis}"]
        return " ".join([*words, str(self.options["rounding"])])


def verify_declared(
    fmt: Format, placed: list[Placed], tally: Tally, tell: Callable[[str, Tally], None]
) -> None:
    """Compare a declared format on every kernel with the exact arithmetic of its definition."""
    gold = gold_of(json.loads(fmt.definition))
    targets = [p for p in placed if p.kernel.name == "reference" or _is_claimed(p, fmt)]
    for case in _cases(gold):
        expected = _expected(gold, case)
        for target in targets:
            if not target.rounds(str(case.options["rounding"])):
                continue
            got = _quantised(target, fmt, case)
            where = (fmt.name, target.label, GOLD)
            tally.add(where, "quantise", expected, got, description=case.describe())
        tell(fmt.name, tally)


def _is_claimed(target: Placed, fmt: Format) -> bool:
    """Whether a kernel may take the format."""
    if target.kernel.name == "compiled":
        return is_compiled(fmt)
    return gpu.claims_spec(resolve(fmt))


def _expected(gold: Gold, case: _Case) -> Array:
    random = None
    if case.options["rounding"] == "stochastic":
        random = random_integers(case.x.size, SEED, OFFSET).reshape(case.x.shape)
    x = np.moveaxis(case.x, case.axis, -1)
    draws = None if random is None else np.ascontiguousarray(np.moveaxis(random, case.axis, -1))
    rows = np.ascontiguousarray(x)
    y = quantised(
        gold,
        rows.reshape(-1, rows.shape[-1]),
        str(case.options["rounding"]),
        None if draws is None else draws.reshape(-1, rows.shape[-1]),
    ).reshape(rows.shape)
    return to_dtype(np.ascontiguousarray(np.moveaxis(y, -1, case.axis)), case.dtype)


def _quantised(target: Placed, fmt: Format, case: _Case) -> Array:
    with threads(1):
        x = to_torch(case.x, case.dtype, target.device)
        return to_numpy(target.kernel.quantise(x, fmt, axis=case.axis, **case.options))


def _cases(gold: Gold) -> Iterator[_Case]:
    width = _width(gold)
    for options in ROUNDINGS:
        for name, x in _tensors(gold, width):
            yield _Case(name, x, "float32", -1, options)
        for dtype in DTYPES:
            yield from _mixed(gold, width, dtype, options)
    for values in (cases.shuffled("bfloat16", 1), cases.by_magnitude("bfloat16", 1)):
        every = values[:: values.size // _MOST][: _MOST // width * width].reshape(-1, width)
        yield _Case("16-bit values", every, "bfloat16", -1, ROUNDINGS[0])


def _width(gold: Gold) -> int:
    """Elements of a row: some blocks, at most."""
    extent = 64 if gold.block is None or gold.block[1] is None else gold.block[1]
    return max(1, min(extent, _MOST_WIDTH))


def _tensors(gold: Gold, width: int) -> Iterator[tuple[str, Array]]:
    """Every value of the element, and every tie with its neighbours, in blocks whose largest gives the scale."""
    values = np.array([float(value) for value in gold.element.values])
    middles = (values[:-1] + values[1:]) / 2
    for scale in _scale_values(gold) if gold.block is not None else [1.0, 2.0**-70, 0.37]:
        yield f"values at {scale:.3g}", _in_blocks(gold, _some(values), scale, width)
        beside = cases.around(np.abs(_some(middles, 3)))
        signs = np.where(np.arange(beside.size) % 2, -1, 1)
        yield f"ties at {scale:.3g}", _in_blocks(gold, beside * signs, scale, width)


def _scale_values(gold: Gold) -> list[float]:
    """Some block scales: the smallest, the largest, and those between."""
    if gold.scale == "e8m0":
        return [2.0**e for e in (-127, -126, -60, -9, 0, 1, 40, 126, 127)]
    if gold.scale == "fp32":
        return [2.0**-126, 1e-30, 0.37, 1.0, 3.0, 1e30]
    scales = gold.scales
    return [float(scales[i * (len(scales) - 1) // 8]) for i in range(9)]


def _some(values: Array, times: int = 1) -> Array:
    """At most so many values, with both ends."""
    most = _MOST // (8 * times)
    if values.size <= most:
        return values
    chosen: Array = values[np.unique(np.linspace(0, values.size - 1, most).astype(int))]
    return chosen


def _in_blocks(gold: Gold, values: Array, scale: float, width: int) -> Array:
    """The values times a scale in rows, each of which also holds the largest value."""
    if width > 1:
        inner = width - 1
        rows = -(-values.size // inner)
        x = np.zeros((rows, width))
        x[:, 1:] = np.resize(values, (rows, inner))
        x[:, 0] = float(gold.element.largest)
    else:
        x = values.reshape(-1, 1)
    with np.errstate(over="ignore", under="ignore"):
        scaled = (x * scale).astype(np.float32)
    scaled[~np.isfinite(scaled)] = 0
    return scaled


def _mixed(gold: Gold, width: int, dtype: str, options: dict[str, Any]) -> Iterator[_Case]:
    """Many magnitudes, zeros, NaN and Inf, in whole and short blocks along both axes."""
    rows = max(16, _MOST // 4 // width)
    x = cases.random_blocks(rows - rows % 16, width, dtype)
    yield _Case("many magnitudes", x, dtype, -1, options)
    rows = (1 if gold.block is None else gold.block[0]) + 3
    short = cases.random_blocks(16 * -(-rows // 16), width + width // 2 + 1, dtype)
    for axis in (0, 1):
        yield _Case("short blocks", short[:rows], dtype, axis, options)
    solid = cases.as_dtype(cases.solid()[:2, :20, :30], dtype)
    for axis in (0, 1, 2):
        yield _Case("three axes", np.ascontiguousarray(solid), dtype, axis, options)
