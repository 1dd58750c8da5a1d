"""gfloat: rounding of float64 arrays to any IEEE-like element, to nearest even or away.

It handles blocks with NaN or Inf differently and cannot represent NaN in elements of fewer than eight bits, so only
its saturating rounding of finite values is used.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import gfloat
import gfloat.formats
import numpy as np
from numpy.typing import NDArray

from quantexp.formats.verify.grids import grid
from quantexp.formats.verify.oracles.oracle import Oracle

Array = NDArray[Any]

INFOS = {
    "e4m3": gfloat.formats.format_info_ocp_e4m3,
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
    "e2m3": gfloat.formats.format_info_ocp_e2m3,
    "e3m2": gfloat.formats.format_info_ocp_e3m2,
    "e2m1": gfloat.formats.format_info_ocp_e2m1,
}
_MODES = {"even": gfloat.RoundMode.TiesToEven, "away": gfloat.RoundMode.TiesToAway}


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
    """To nearest, saturating."""
    return element in INFOS and ties in _MODES and saturate


def rounded(element: str, v: Array, saturate: bool, ties: str) -> Array:
    """Magnitudes (float64) on the grid; NaN stays, and Inf is the largest."""
    finite = np.where(np.isfinite(v), v, 0.0).astype(np.float64)
    q = gfloat.round_ndarray(INFOS[element], finite, _MODES[ties], sat=True)
    largest = grid(element).magnitudes[-1]
    return np.where(np.isnan(v), np.nan, np.where(np.isinf(v), largest, q))
