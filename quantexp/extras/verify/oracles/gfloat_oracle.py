"""gfloat: rounding of float64 arrays to any IEEE-like element, to nearest even or away, or towards zero.

Its `round_ndarray` returns NaN for NaN, without an error also for elements that have none (0.5.2, whose documentation
names a ValueError; `round_float` and `encode_float` raise it). Overflow without saturation is an error for elements
with neither Inf nor NaN, which are therefore only rounded with saturation. Its functions for blocks are not used.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import gfloat
import gfloat.formats
import numpy as np
from numpy.typing import NDArray

from quantexp.extras.verify.grids import grid
from quantexp.extras.verify.oracles.oracle import Oracle

Array = NDArray[Any]

INFOS = {
    "e4m3": gfloat.formats.format_info_ocp_e4m3,
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
    "e2m3": gfloat.formats.format_info_ocp_e2m3,
    "e3m2": gfloat.formats.format_info_ocp_e3m2,
    "e2m1": gfloat.formats.format_info_ocp_e2m1,
}
_MODES = {
    "even": gfloat.RoundMode.TiesToEven,
    "away": gfloat.RoundMode.TiesToAway,
    "zero": gfloat.RoundMode.TowardZero,
}


def oracle() -> Oracle:
    """The installed version."""
    rounded("e2m1", np.ones(1), True, "even")  # array_api_compat is imported here
    return Oracle("gfloat", version("gfloat"), code_values, can_round, rounded)


def code_values(element: str) -> Array | None:
    """The value of each code, float32."""
    if element not in INFOS:
        return None
    codes = range(2 * grid(element).sign_bit)
    return np.array([gfloat.decode_float(INFOS[element], c).fval for c in codes], dtype=np.float32)


def can_round(element: str, ties: str, saturate: bool) -> bool:
    """Saturating, or to what the element has beyond its largest value."""
    return element in INFOS and ties in _MODES and (saturate or INFOS[element].num_nans > 0)


def rounded(element: str, v: Array, saturate: bool, ties: str) -> Array:
    """Magnitudes (float64) on the grid; NaN stays, and Inf is the largest or what is beyond it."""
    return np.asarray(gfloat.round_ndarray(INFOS[element], v, _MODES[ties], sat=saturate))
