"""Exact results of quantising a tensor, in numpy: values, codes and scales.

Every float32 times a power of two is a float64, so MX and everything under a power-of-two scale is exact except for the
rounding to a grid, which `grids` implements by looking up midpoints. Where a format is defined by float32 operations
(NVFP4's scales, a scale that is not a power of two), numpy's float32 performs them, with one rounding each. Another
implementation's rounding may replace that of `grids`: this is how oracles that only know elements verify
whole formats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quantexp.extras.verify.draws import random_integers
from quantexp.extras.verify.grids import Rounder, code_values, drawn, encoded, nearest
from quantexp.extras.verify.rational import MX_ELEMENTS, floor_log2

Array = NDArray[Any]

#: Format: family and element.
KINDS = {
    **{name: ("mx", name.partition("_")[2]) for name in MX_ELEMENTS},
    "nvfp4_e2m1": ("nv", "e2m1"),
    "fp8_e4m3": ("flat", "e4m3"),
    "fp8_e5m2": ("flat", "e5m2"),
    "hifp8": ("flat", "hif8"),
    "bf16": ("bf16", "bf16"),
}
#: Defaults of each specification.
BLOCKS = {"mx": 32, "nv": 16}
TARGETS = {"nvfp4_e2m1": 2688.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "hifp8": 15.0}


@dataclass(frozen=True)
class Case:
    """A tensor and the options to quantise it with."""

    fmt: str
    #: float32, values that `dtype` represents.
    x: Array
    dtype: str = "float32"
    axis: int = -1
    #: Of `quantise`, by name: block, scale_rule, rounding, saturate, scaling, amax_target, amax (a number), seed,
    #: offset, pre_scale.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: Two codes per byte.
    packed: bool = False
    #: Pass the tensor with its axes reversed in memory.
    strided: bool = False

    @property
    def rounding(self) -> str:
        """The requested rounding, or the format's default."""
        return str(self.options.get("rounding", "away" if self.fmt == "hifp8" else "even"))

    @property
    def block(self) -> int | None:
        """Elements that share a scale; None without blocks."""
        block: int | None = self.options.get("block")
        return block or BLOCKS.get(KINDS[self.fmt][0])


@dataclass(frozen=True)
class Answer:
    """The result of a correct kernel."""

    #: float32, rounded to the case's dtype.
    values: Array
    #: uint8, x's shape; None for bf16, and if another implementation rounded.
    codes: Array | None = None
    #: uint8, one per block; None without blocks.
    block_scales: Array | None = None
    #: float32; None for MX and bf16.
    tensor_scale: np.float32 | None = None


def answer(case: Case, rounder: Rounder | None = None, scale_rounder: Rounder = nearest) -> Answer:
    """The result of quantising and encoding.

    `rounder` replaces the rounding to the element's grid, and codes are then omitted. `scale_rounder` replaces that of
    NVFP4's block scales, which is to nearest even for every case.
    """
    kind, element = KINDS[case.fmt]
    x = case.x.astype(np.float32)
    if kind == "bf16":
        rounded = to_bf16(x) if rounder is None else rounder("bf16", x, True).astype(np.float32)
        return Answer(to_dtype(rounded, case.dtype))
    if kind == "flat":
        flat = _flat(case, x, element, rounder or _rounder(case, lambda r: r))
        return flat if rounder is None else replace(flat, codes=None)
    blocks = _Blocks(x.shape, case.axis, case.block or 1)
    x_BK, own = blocks.split(x), rounder is None
    rounder = rounder or _rounder(case, blocks.split)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if kind == "mx":
            values, q, scales, t = _mx(case, x_BK, element, rounder)
        else:
            values, q, scales, t = _nv(case, x_BK, element, rounder, scale_rounder)
    good = np.isfinite(x_BK).all(axis=-1, keepdims=True)
    codes = np.where(good, encoded(element, q, np.signbit(x_BK)), 0) if own else None
    return Answer(
        values=to_dtype(blocks.join(np.where(good, values, np.nan)), case.dtype),
        codes=None if codes is None else blocks.join(codes).astype(np.uint8),
        block_scales=np.moveaxis(scales, -1, case.axis).astype(np.uint8),
        tensor_scale=t,
    )


def _rounder(case: Case, arranged: Any) -> Rounder:
    """The gold's own rounding, with a random number per element if it is stochastic."""
    if case.rounding != "stochastic":
        return partial(nearest, ties=case.rounding)
    numbers = random_integers(case.x.size, case.options["seed"], case.options.get("offset", 0))
    return partial(drawn, random=arranged(numbers.reshape(case.x.shape)))


class _Blocks:
    """A tensor as blocks along its last axis, the last one padded with zeros."""

    def __init__(self, shape: tuple[int, ...], axis: int, block: int) -> None:
        self.axis, self.block, self.extent = axis, block, shape[axis]

    def split(self, x: Array) -> Array:
        moved = np.moveaxis(x, self.axis, -1)
        missing = -self.extent % self.block
        padded = np.pad(moved, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
        return padded.reshape(*padded.shape[:-1], -1, self.block)

    def join(self, blocks: Array) -> Array:
        flat = blocks.reshape(*blocks.shape[:-2], -1)[..., : self.extent]
        return np.moveaxis(flat, -1, self.axis)


def _mx(
    case: Case, x: Array, element: str, rounder: Rounder
) -> tuple[Array, Array, Array, np.float32 | None]:
    x64 = np.where(np.isfinite(x), x, 0.0).astype(np.float64)
    magnitude = np.abs(x64)
    rule = case.options.get("scale_rule", "floor")
    s = scale_exponents(magnitude.max(axis=-1), case.fmt, rule)
    v = np.ldexp(magnitude, -s[..., None])
    if case.options.get("pre_scale"):
        v = (v * 0.75).astype(np.float32).astype(np.float64)
    q = rounder(element, v, True)
    values = np.copysign(np.ldexp(q, s[..., None]).astype(np.float32), x)
    return values, q, np.where(np.isfinite(x).all(axis=-1), s + 127, 0xFF), None


def scale_exponents(amax: Array, name: str, rule: str) -> Array:
    """The exponent of each MX block's scale from its amax (float64, finite), int64 in [-127, 127]."""
    _, mantissa_bits, emax, largest = MX_ELEMENTS[name]
    mantissa, exponent = np.frexp(amax)
    floor = exponent.astype(np.int64) - 1
    if rule == "floor":
        s = floor - emax
    elif rule == "ceil":
        s = floor - emax + (mantissa > 0.5)
    elif rule == "rceil":
        s = floor - emax - 1
        for _ in range(2):
            s = s + (amax > np.ldexp(float(largest), s))
    else:
        steps = 2.0 ** (mantissa_bits + 1)
        s = floor - emax + (np.floor(mantissa * steps + 0.5) >= steps)
    return np.where(amax == 0, -127, np.clip(s, -127, 127))


def _nv(
    case: Case, x: Array, element: str, rounder: Rounder, scale_rounder: Rounder
) -> tuple[Array, Array, Array, np.float32]:
    t = tensor_scale(case)
    x32 = np.where(np.isfinite(x), x, 0).astype(np.float32)
    amax = np.abs(x32).max(axis=-1, keepdims=True)
    ratio = amax / np.float32(6) / t
    b = scale_rounder("e4m3", np.clip(ratio, 2.0**-9, 448.0).astype(np.float64), True)
    d = b.astype(np.float32) * t
    v = np.abs(x32) / d
    if case.options.get("pre_scale"):
        v = v * np.float32(0.75)
    q = rounder(element, np.minimum(v, np.float32(6)).astype(np.float64), True)
    values = np.copysign(q.astype(np.float32) * d, x)
    codes = encoded("e4m3", b, np.zeros(b.shape, bool))
    bad = ~np.isfinite(x).all(axis=-1)
    return values, q, np.where(bad, 0x7F, codes[..., 0]), t


def _flat(case: Case, x: Array, element: str, rounder: Rounder) -> Answer:
    s = tensor_scale(case)
    saturate = bool(case.options.get("saturate", True))
    with np.errstate(over="ignore", invalid="ignore"):
        v = x * s
        q = rounder(element, np.abs(v).astype(np.float64), saturate)
        values = np.copysign(q, v).astype(np.float32) / s
    if element == "hif8":
        values = np.where(q == 0, np.float32(0), values)
    return Answer(to_dtype(values, case.dtype), encoded(element, q, np.signbit(v)), None, s)


def tensor_scale(case: Case) -> np.float32:
    """The scale of a tensor: FP8 and HiF8 multiply the tensor by it, NVFP4 multiplies the codes by it."""
    inverse = KINDS[case.fmt][0] == "nv"
    scaling = case.options.get("scaling", "none" if case.fmt == "hifp8" else "exact")
    finite = np.abs(case.x[np.isfinite(case.x)]).astype(np.float32)
    own = float(finite.max()) if finite.size else 0.0
    amax = float(np.float32(case.options.get("amax", own)))
    if scaling == "none" or not (amax > 0 and math.isfinite(amax)):
        return np.float32(1)
    target = Fraction(float(case.options.get("amax_target", TARGETS[case.fmt])))
    ratio = target / Fraction(amax)
    if scaling == "exact":
        scale = 1 / ratio if inverse else ratio
    else:
        power = Fraction(2) ** floor_log2(ratio)
        scale = 1 / power if inverse else power
    low = Fraction(2) ** (-117 if inverse else -126)
    # Fraction to float64 is correctly rounded; then to float32 differs from a single rounding in 2^-29 of all cases.
    return np.float32(float(min(max(scale, low), Fraction(2) ** 127)))


def decoded(
    fmt: str,
    codes: Array,
    block_scales: Array | None,
    t: np.float32 | None,
    values: Array | None = None,
    scale_values: Array | None = None,
) -> Array:
    """The float32 values of codes under block scales, of a compatible shape, and the tensor scale.

    `values` and `scale_values` replace the gold's values of the element's codes, and of E4M3's.
    """
    kind, element = KINDS[fmt]
    elements = (code_values(element) if values is None else values)[codes]
    with np.errstate(over="ignore", invalid="ignore"):
        if kind == "flat":
            return (elements / t).astype(np.float32)
        assert block_scales is not None
        if kind == "nv":
            scales = code_values("e4m3") if scale_values is None else scale_values
            return (elements * (scales[block_scales] * t)).astype(np.float32)
        powers = np.where(block_scales == 255, np.nan, np.exp2(block_scales.astype(float) - 127))
        return (elements.astype(np.float64) * powers).astype(np.float32)


def to_dtype(values: Array, dtype: str) -> Array:
    """float32 values rounded to nearest even in a dtype, as float32."""
    if dtype == "bfloat16":
        return to_bf16(values)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    return values.astype(np.float32)


def to_bf16(values: Array) -> Array:
    """float32 values rounded to nearest even in bfloat16, by their bits; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) & np.uint64(0xFFFF0000)
    result = rounded.astype(np.uint32).view(np.float32)
    return np.where(np.isnan(values), np.float32(np.nan), result)
