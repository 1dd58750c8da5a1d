"""en_dtypes: numpy casts to HiFloat8, ties away from zero; values that are too large become infinite."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import en_dtypes
import numpy as np
from numpy.typing import NDArray

from quantexp.extras.verify.grids import grid
from quantexp.extras.verify.oracles.oracle import Oracle

Array = NDArray[Any]


def oracle() -> Oracle:
    """The installed version."""
    return Oracle("en_dtypes", version("en_dtypes"), code_values, can_round, rounded)


def code_values(element: str) -> Array | None:
    """The value of each code, float32."""
    if element != "hif8":
        return None
    codes = np.arange(256, dtype=np.uint8)
    return np.asarray(codes.view(en_dtypes.hifloat8).astype(np.float32))


def can_round(element: str, ties: str, saturate: bool) -> bool:
    """HiFloat8, away."""
    return element == "hif8" and ties == "away"


def rounded(element: str, v: Array, saturate: bool, ties: str = "away") -> Array:
    """Magnitudes (float32 values) on the grid."""
    with np.errstate(over="ignore", invalid="ignore"):
        q = v.astype(np.float32).astype(en_dtypes.hifloat8).astype(np.float64)
    return np.minimum(q, grid("hif8").magnitudes[-1]) if saturate else q
