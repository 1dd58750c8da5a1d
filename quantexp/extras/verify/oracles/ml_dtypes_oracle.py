"""ml_dtypes: numpy casts to every element of OCP, to nearest even.

It returns NaN beyond E4M3's range and Inf beyond E5M2's, hence the clipping if a format saturates.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from quantexp.extras.verify.grids import grid
from quantexp.extras.verify.oracles.oracle import Oracle

Array = NDArray[Any]

TYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "bf16": ml_dtypes.bfloat16,
}


def oracle() -> Oracle:
    """The installed version."""
    return Oracle("ml_dtypes", ml_dtypes.__version__, code_values, can_round, rounded)


def code_values(element: str) -> Array | None:
    """The value of each code, float32."""
    if element not in TYPES or element == "bf16":
        return None
    codes = np.arange(2 * grid(element).sign_bit, dtype=np.uint8)
    return np.asarray(codes.view(TYPES[element]).astype(np.float32))


def can_round(element: str, ties: str, saturate: bool) -> bool:
    """To nearest even only; elements of fewer than eight bits always saturate here."""
    return element in TYPES and ties == "even"


def rounded(element: str, v: Array, saturate: bool, ties: str = "even") -> Array:
    """Magnitudes (float64, or float32 values for bf16) on the grid."""
    if saturate and element != "bf16":
        largest = grid(element).magnitudes[-1]
        v = np.clip(v, -largest, largest)
    with np.errstate(over="ignore", invalid="ignore"):
        return v.astype(TYPES[element]).astype(np.float64)
