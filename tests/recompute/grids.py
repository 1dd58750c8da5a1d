"""An operand as its slot declares it, in numpy: the casts are ml_dtypes' and en_dtypes', the scales frexp's.

    MX     one power of two 2^s for each block along the slot's axis, s from the block's amax:
           rceil ceil(log2(amax / max)), floor floor(log2 amax) - emax; the last block may be short
    hifp8  one power of two for the tensor, the largest that keeps amax within `amax_target`

float64 holds every scaled and every quantised value exactly. An option that no shipped scheme declares is a KeyError or
an AssertionError here, never a guess.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from en_dtypes import hifloat8

from .captured import Array, Slot

_MX_ELEMENTS = {
    "mxfp8_e4m3": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp4_e2m1": ml_dtypes.float4_e2m1fn,
}
_HIF8_MAX = 32768.0

#: Bits of the significand and the exponent of the smallest normal number, of each working dtype.
_WORKING = {"bfloat16": (8, -126)}


def held(x: Array, slot: Slot, dims: tuple[str, ...], dtype: str) -> Array:
    """`x` on the slot's grid. `dims` names x's dimensions, in the words that `axis` takes.

    The result is rounded to the working dtype too, which changes it only below that dtype's normal range.
    """
    if slot["format"] == "bf16":
        return x
    if slot["format"] == "hifp8":
        return rounded(_hifp8(x, slot), dtype)
    return rounded(_mx(x, slot, dims.index(slot["axis"])), dtype)


def rounded(x: Array, dtype: str) -> Array:
    """`x` to the nearest value of a dtype, ties to even, in one step from float64."""
    bits, min_exponent = _WORKING[dtype]
    _, exponent = np.frexp(x)  # |x| in [2^(exponent - 1), 2^exponent)
    quantum = np.maximum(exponent - 1, min_exponent) - (bits - 1)
    result: Array = np.ldexp(np.rint(np.ldexp(x, -quantum)), quantum)
    return result


def _mx(x: Array, slot: Slot, axis: int) -> Array:
    assert slot["rounding"] == "even"
    element, block = _MX_ELEMENTS[slot["format"]], slot["block"]
    moved = np.moveaxis(x, axis, -1)
    extent = moved.shape[-1]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -extent % block)]
    blocks = np.pad(moved, padding).reshape(*moved.shape[:-1], -1, block)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    s = _scale_exponent(amax, element, slot["scale_rule"])
    largest = float(ml_dtypes.finfo(element).max)
    codes = np.clip(np.ldexp(blocks, -s), -largest, largest).astype(np.float32).astype(element)
    result = np.ldexp(codes.astype(np.float64), s).reshape(*moved.shape[:-1], -1)[..., :extent]
    return np.moveaxis(result, -1, axis)


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


def _hifp8(x: Array, slot: Slot) -> Array:
    assert (slot["rounding"], slot["scaling"], slot["saturate"]) == ("away", "current", True)
    m, e = np.frexp(np.abs(x).max())
    target_m, target_e = np.frexp(slot["amax_target"])
    s = np.clip(target_e - e - (m > target_m), -126, 127)
    codes = np.clip(np.ldexp(x, s), -_HIF8_MAX, _HIF8_MAX).astype(np.float32).astype(hifloat8)
    result: Array = np.ldexp(codes.astype(np.float64), -s)
    return result
