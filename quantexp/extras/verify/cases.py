"""Test tensors: every 16-bit value, ties and their neighbours, blocks at every scale.

All are numpy arrays from fixed seeds: float32 values that the requested dtype represents.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantexp.extras.verify.exact import KINDS, scale_exponents
from quantexp.extras.verify.grids import grid, nearest
from quantexp.extras.verify.rational import MX_ELEMENTS

Array = NDArray[Any]

_SPECIALS = (0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, -(2.0**-149), 2.0**-126, 3.4e38)


@cache
def every_value(dtype: str) -> Array:
    """All 65,536 values of bfloat16 or float16 by their bits, NaN and Inf included."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    if dtype == "bfloat16":
        return (bits << np.uint32(16)).view(np.float32)
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


@cache
def by_magnitude(dtype: str, width: int) -> Array:
    """All 16-bit values sorted by magnitude, so that the values of a block are neighbours; NaN in the last blocks."""
    values = every_value(dtype)
    return values[np.argsort(np.abs(values), kind="stable")].reshape(-1, width)


@cache
def shuffled(dtype: str, width: int) -> Array:
    """All 16-bit values shuffled: most blocks have one large value and tiny others, some a NaN or an Inf."""
    values = every_value(dtype)
    return np.random.default_rng(1).permutation(values).reshape(-1, width)


@cache
def random_blocks(rows: int, width: int, dtype: str = "float32") -> Array:
    """Normal values in blocks of many magnitudes, with scattered zeros, signed zeros, NaN and Inf."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((rows, width)) * np.exp(9 * rng.standard_normal((rows, 1)))
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    x[rng.random(x.shape) < 0.02] = -0.0
    x[:: rows // 16] = 0.0
    for start, special in enumerate((np.nan, np.inf, -np.inf)):
        x[start + 3 :: rows // 8, (7 * start) % width] = special
    return as_dtype(x, dtype)


@cache
def random_bits(count: int) -> Array:
    """Float32 values from random bits, half of them near 1; the first are special values."""
    rng = np.random.default_rng(3)
    wide = rng.integers(0, 1 << 32, count // 2, dtype=np.uint32).view(np.float32)
    near = np.exp2(5 * rng.standard_normal(count - count // 2)).astype(np.float32)
    x = np.concatenate([wide, near])
    x[: len(_SPECIALS)] = _SPECIALS
    return x


def as_dtype(x: Array, dtype: str) -> Array:
    """Values near x that the dtype represents; those of bfloat16 by truncation."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(x), np.float32(np.nan), bits.view(np.float32))
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)
    return x


def around(centres: Array) -> Array:
    """Float32 values and the two neighbours of each, if finite."""
    with np.errstate(over="ignore"):
        centres = np.asarray(centres).astype(np.float32)
        beside = [np.nextafter(centres, np.float32(to)) for to in (0, np.inf)]
    values = np.stack([beside[0], centres, beside[1]], axis=-1).reshape(-1)
    finite: Array = values[np.isfinite(values)]
    return finite


def middles(element: str) -> Array:
    """The ties of an element, float64."""
    points = grid(element).magnitudes
    middle: Array = (points[:-1] + points[1:]) / 2
    return middle


@cache
def hard_amaxes(name: str) -> Array:
    """One ulp around every power of two and every threshold of an MX scale rule, ascending."""
    _, mantissa_bits, _, largest = MX_ELEMENTS[name]
    mantissa, _ = np.frexp(float(largest))
    turns = (1.0, 2 * mantissa, 2 - 2.0 ** -(mantissa_bits + 1))
    exponents = np.arange(-149, 128)
    centres = np.ldexp(np.array(turns)[None], exponents[:, None])
    amaxes = around(centres[centres >= 2.0**-149])
    return np.unique(amaxes[amaxes > 0])


@cache
def hard_blocks(name: str, rule: str) -> Array:
    """One block of 32 per amax, with ties and one ulp to either side, spread over the grid at the block's scale."""
    amaxes = hard_amaxes(name)
    ties = middles(KINDS[name][1])
    number = np.arange(len(amaxes))[:, None]
    chosen = ties[(5 * number + 13 * np.arange(9)) % len(ties)]
    chosen = np.concatenate([np.full((len(amaxes), 1), ties[0]), chosen], axis=1)
    scale = scale_exponents(amaxes.astype(np.float64), name, rule)[:, None]
    return _with_probes(amaxes, np.ldexp(chosen, scale), 32)


@cache
def hard_nv_blocks(t: float) -> Array:
    """One block of 16 with ties for each threshold of NVFP4's block scale under the tensor scale t.

    The thresholds are one ulp around all midpoints of E4M3, its values, and both ends.
    """
    points = grid("e4m3").magnitudes
    turns = np.concatenate([middles("e4m3"), points[1:], [900.0, 1e6, 2.0**-13]]) * 6 * t
    amaxes = around(turns)
    amaxes = amaxes[amaxes > 0]
    with np.errstate(over="ignore"):
        ratio = np.clip(amaxes / np.float32(6) / np.float32(t), 2.0**-9, 448.0)
    d = nearest("e4m3", ratio.astype(np.float64), True).astype(np.float32) * np.float32(t)
    ties = middles("e2m1")
    number = np.arange(len(amaxes))[:, None]
    chosen = ties[(number + 3 * np.arange(4)) % len(ties)]
    return _with_probes(amaxes, chosen.astype(np.float32) * d[:, None], 16)


def _with_probes(amaxes: Array, centres: Array, width: int) -> Array:
    """Blocks with each amax, the smallest subnormal, a zero, and the probes around centres up to the amax."""
    with np.errstate(over="ignore"):
        centres = centres.astype(np.float32)
        below, above = (np.nextafter(centres, np.float32(to)) for to in (0, np.inf))
    probes = np.stack([below, centres, above], axis=-1).reshape(len(amaxes), -1)
    probes = np.where(probes <= amaxes[:, None], probes, 0)[:, : width - 3]
    x = np.zeros((len(amaxes), width), np.float32)
    x[:, 0], x[:, 1], x[:, 2] = amaxes, np.minimum(np.float32(2.0**-149), amaxes), 0.0
    x[:, 3 : 3 + probes.shape[1]] = probes
    x[:, 1::2] *= -1
    x[:, 2] = -0.0
    return x


@cache
def hard_values(element: str) -> Array:
    """Every value and every tie of an element with neighbours, values beyond the largest, and special values."""
    points = np.append(grid(element).magnitudes, grid(element).beyond)
    centres = np.concatenate([points, (points[:-1] + points[1:]) / 2, points[-3:] * 1.01])
    x = around(centres)
    return np.concatenate([x, -x, np.array(_SPECIALS, np.float32)])


@cache
def hard_fractions(element: str) -> Array:
    """Points at many fractions of every step of an element, one ulp beside, and tiny ones, for stochastic rounding."""
    points = grid(element).magnitudes
    shares = [0.0, 2.0**-24, 2.0**-25, 2.0**-23, 1 / 3, 0.5, 0.75, 1 - 2.0**-20]
    at = [low + np.array(shares) * (high - low) for low, high in itertools.pairwise(points)]
    tiny = np.array([2.0**-149, 2.0**-126])
    x: Array = np.append(around(np.concatenate(at)), tiny).astype(np.float32)
    x = np.minimum(x, np.float32(points[-1]))
    x[1::2] *= -1
    return x


@cache
def solid() -> Array:
    """A tensor of three axes, none a multiple of 32, with special values."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((5, 70, 33)).astype(np.float32)
    x *= np.exp2(rng.integers(-20, 20, x.shape)).astype(np.float32)
    x[1, 3, 5], x[2, 60, 8], x[3, 33, 32] = np.nan, np.inf, -np.inf
    x[0, :, 7] = -0.0
    return x


def hard_tensors(width: int) -> Iterator[tuple[str, Array, str]]:
    """Every bfloat16 value, and blocks of 32 around every threshold of MXFP8's scales: name, [rows, width], dtype.

    The rows are multiples of the width.
    """
    yield "every bfloat16 value by magnitude", by_magnitude("bfloat16", width), "bfloat16"
    yield "every bfloat16 value, shuffled", shuffled("bfloat16", width), "bfloat16"
    for name in ("mxfp8_e4m3", "mxfp8_e5m2"):
        hard = hard_blocks(name, "rceil").reshape(-1)
        rows = hard.size // width // width * width
        yield f"ties and thresholds of {name}", hard[: rows * width].reshape(rows, width), "float32"
