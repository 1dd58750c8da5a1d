"""Quantises an operand according to its slot, in numpy: casts by ml_dtypes and en_dtypes, scales by frexp.

    MX     one power of two 2^s for each block along the slot's axis, s from the block's amax:
           rceil ceil(log2(amax / max)), floor floor(log2 amax) - emax; the last block may be short
    nvfp4  t = amax / 2688 of the tensor; for each block b = e4m3(its amax / 6 / t) and d = b t, in float32
    fp8    one scale for the tensor, `amax_target` / amax in float32, or a power of two
    hifp8  one power of two for the tensor, the largest that keeps amax within `amax_target`

A declared format is computed from its definition, as `quantexp verify` does.

The slot contains all that determines its random numbers and signs: `transform` has the Hadamard transform and the
generator. float64 holds every scaled and every quantised value exactly where float32 is not named. An option that no
shipped scheme declares is a KeyError or an AssertionError here, never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import ml_dtypes
import numpy as np
from en_dtypes import hifloat8

from quantexp.extras.verify.gold import gold_of, quantised

from .captured import Array, Slot
from .transform import hadamard, random_integers

_ELEMENTS = {
    "mxfp8_e4m3": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp4_e2m1": ml_dtypes.float4_e2m1fn,
    "nvfp4_e2m1": ml_dtypes.float4_e2m1fn,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "hifp8": hifloat8,
}
_HIF8_MAX = 32768.0

#: Bits of the significand and the exponent of the smallest normal number, of each working dtype.
_WORKING = {"bfloat16": (8, -126), "float32": (24, -126)}

#: Magnitudes rounded to an element's, given those of all blocks in the order of the tensor.
Rounding = Callable[[Array], Array]


def quantise(
    x: Array, slot: Slot, dims: tuple[str, ...], dtype: str, left: bool, counted: tuple[int, ...]
) -> Array:
    """`x` on the slot's grid. `dims` names x's dimensions, in the words that `axis` takes.

    `counted` is the order of x's dimensions in which random numbers are counted. The result is rounded to the working
    dtype too, which changes only values below that dtype's normal range and under scales that are no power of
    two.
    """
    if slot["format"] == "bf16":
        return x
    axis = dims.index(slot["axis"])
    if "hadamard" in slot:
        signs = slot.get("signs", [1] * slot["hadamard_block"])
        assert (slot["hadamard"] == "random") == ("signs" in slot)
        x = hadamard(x, axis, slot["hadamard_block"], np.array(signs), left)
    random = _random(x, slot, counted)
    if slot["format"] == "hifp8":
        return rounded(_hifp8(x, slot, random), dtype)
    if slot["format"].startswith("fp8"):
        return rounded(_fp8(x, slot, random), dtype)
    moved = np.moveaxis(x, axis, -1)
    random = None if random is None else np.moveaxis(random, axis, -1)
    if "definition" in slot:
        return rounded(np.moveaxis(_declared(moved, slot, random), -1, axis), dtype)
    on_grid = (_nvfp4 if slot["format"] == "nvfp4_e2m1" else _mx)(moved, slot, random)
    return rounded(np.moveaxis(on_grid, -1, axis), dtype)


def rounded(x: Array, dtype: str) -> Array:
    """`x` to the nearest value of a dtype, ties to even, in one step from float64."""
    bits, min_exponent = _WORKING[dtype]
    _, exponent = np.frexp(x)  # |x| in [2^(exponent - 1), 2^exponent)
    quantum = np.maximum(exponent - 1, min_exponent) - (bits - 1)
    result: Array = np.ldexp(np.rint(np.ldexp(x, -quantum)), quantum)
    return result


def _random(x: Array, slot: Slot, counted: tuple[int, ...]) -> Array | None:
    """A number in [0, 2^24) for each element; None where rounding is to nearest."""
    if slot["rounding"] != "stochastic":
        return None
    numbers = random_integers(x.size, slot["seed"], slot["offset"])
    back = np.argsort(counted)
    return numbers.reshape([x.shape[d] for d in counted]).transpose(back)


def _to_element(v: Array, slot: Slot, random: Array | None) -> Array:
    """Scaled values to the element's, saturating; float64."""
    element = _ELEMENTS[slot["format"]]
    grid = _magnitudes(element)
    clipped = np.clip(v, -grid[-1], grid[-1])
    if random is None:
        assert slot["rounding"] == ("away" if element is hifloat8 else "even")
        result: Array = clipped.astype(np.float32).astype(element).astype(np.float64)
        return result
    magnitude = np.abs(clipped)
    below = np.minimum(np.searchsorted(grid, magnitude, side="right") - 1, len(grid) - 2)
    low, high = grid[below], grid[below + 1]
    share = np.floor((magnitude - low) / (high - low) * 2.0**24)
    up = (random < share) | (magnitude == high)
    return np.copysign(np.where(up, high, low), clipped)


def _magnitudes(element: type) -> Array:
    """Every finite magnitude of an element, ascending."""
    codes = np.arange(1 << (8 if element is hifloat8 else ml_dtypes.finfo(element).bits))
    values = codes.astype(np.uint8).view(element).astype(np.float64)
    return np.unique(np.abs(values[np.isfinite(values)]))


def _mx(moved: Array, slot: Slot, random: Array | None) -> Array:
    element = _ELEMENTS[slot["format"]]
    blocks, random_blocks = (_blocks(a, slot["block"]) for a in (moved, random))
    assert blocks is not None
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    s = _scale_exponent(amax, element, slot["scale_rule"])
    v = _pre_scaled(np.ldexp(blocks, -s), slot)
    return _whole(np.ldexp(_to_element(v, slot, random_blocks), s), moved)


def _nvfp4(moved: Array, slot: Slot, random: Array | None) -> Array:
    assert slot["scaling"] == "exact"
    blocks, random_blocks = (_blocks(a, slot["block"]) for a in (moved, random))
    assert blocks is not None
    t = np.float32(np.abs(moved).max() / 2688.0)
    ratio = np.abs(blocks).max(axis=-1, keepdims=True).astype(np.float32) / np.float32(6) / t
    b = np.clip(ratio, np.float32(2.0**-9), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
    d = b.astype(np.float32) * t
    v = _pre_scaled(blocks.astype(np.float32) / d, slot)
    q = _to_element(v.astype(np.float64), slot, random_blocks).astype(np.float32)
    return _whole((q * d).astype(np.float64), moved)


def _declared(moved: Array, slot: Slot, random: Array | None) -> Array:
    """A declared format, by exact arithmetic from its definition."""
    rows = np.ascontiguousarray(moved, np.float32).reshape(-1, moved.shape[-1])
    draws = None if random is None else random.reshape(rows.shape)
    gold = gold_of(json.loads(slot["definition"]))
    y: Array = (
        quantised(gold, rows, slot["rounding"], draws).reshape(moved.shape).astype(np.float64)
    )
    return y


def _pre_scaled(v: Array, slot: Slot) -> Array:
    part = factor_of(slot)
    return v if part == 1 else v.astype(np.float32) * np.float32(part)  # type: ignore[return-value]


def factor_of(slot: Slot) -> float:
    """The part of an operand that is rounded: 1 without `pre_scale`, 3/4 where it is true."""
    part = slot.get("pre_scale") or 1.0
    return 0.75 if part is True else float(part)


def _blocks(moved: Array | None, block: int) -> Array | None:
    """Blocks of the last axis, the last one filled up with zeros."""
    if moved is None:
        return None
    padding = [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % block)]
    return np.pad(moved, padding).reshape(*moved.shape[:-1], -1, block)


def _whole(blocks: Array, moved: Array) -> Array:
    flat: Array = blocks.reshape(*moved.shape[:-1], -1)[..., : moved.shape[-1]]
    return flat


def _scale_exponent(amax: Array, element: type, rule: str) -> np.ndarray:
    """s of each block, from amax = m 2^e with m in [1/2, 1)."""
    m, e = np.frexp(amax)
    max_m, max_e = np.frexp(float(ml_dtypes.finfo(element).max))
    if rule == "rceil":  # amax / max = (m / max_m) 2^(e - max_e), and m / max_m lies in (1/2, 2)
        s = e - max_e + (m > max_m)
    else:
        assert rule == "floor"
        s = (e - 1) - (max_e - 1)
    return np.where(amax == 0, -127, np.clip(s, -127, 127))


def _amax(x: Array, slot: Slot) -> float:
    """The amax that decides the scale: the tensor's own, or that of the iterations before."""
    if slot["scaling"] == "delayed" and slot["amax"] is not None:
        return float(slot["amax"])
    return float(np.abs(x).max())


def _fp8(x: Array, slot: Slot, random: Array | None) -> Array:
    assert slot["saturate"] is True
    if slot["scaling"] == "delayed":
        s = np.float32(2.0 ** _power_of_two_scale(_amax(x, slot), slot))
    else:
        assert slot["scaling"] == "exact"
        s = np.float32(slot["amax_target"] / _amax(x, slot))
    v = (x.astype(np.float32) * s).astype(np.float64)
    return (_to_element(v, slot, random).astype(np.float32) / s).astype(np.float64)


def _hifp8(x: Array, slot: Slot, random: Array | None) -> Array:
    assert slot["scaling"] in ("current", "delayed")
    assert slot["saturate"] is True
    s = _power_of_two_scale(_amax(x, slot), slot)
    assert _magnitudes(hifloat8)[-1] == _HIF8_MAX
    result: Array = np.ldexp(_to_element(np.ldexp(x, s), slot, random), -s)
    return result


def _power_of_two_scale(amax: float, slot: Slot) -> int:
    m, e = np.frexp(amax)
    target_m, target_e = np.frexp(slot["amax_target"])
    return int(np.clip(target_e - e - (m > target_m), -126, 127))
