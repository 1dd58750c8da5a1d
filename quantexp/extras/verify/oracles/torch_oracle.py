"""torch's own casts on the CPU, to nearest even: E4M3, E5M2 and bfloat16.

E4M3's cast saturates in some versions and returns NaN in others, so it is only used if the format saturates, on clipped
values; E5M2's overflows to Inf.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quantexp.extras.verify.grids import grid
from quantexp.extras.verify.oracles.oracle import Oracle

Array = NDArray[Any]

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}


def oracle() -> Oracle:
    """The running version."""
    return Oracle("torch", torch.__version__, code_values, can_round, rounded)


def code_values(element: str) -> Array | None:
    """The value of each code, float32."""
    if element not in ("e4m3", "e5m2"):
        return None
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return np.asarray(codes.view(TYPES[element]).float().numpy())


def can_round(element: str, ties: str, saturate: bool) -> bool:
    """To nearest even; E4M3 only where it saturates."""
    return element in TYPES and ties == "even" and (saturate or element != "e4m3")


def rounded(element: str, v: Array, saturate: bool, ties: str = "even") -> Array:
    """Magnitudes on the grid; products with powers of two below float32's range are zeros here."""
    if saturate and element != "bf16":
        v = np.minimum(v, grid(element).magnitudes[-1])
    q = torch.from_numpy(v.astype(np.float32)).to(TYPES[element])
    return np.asarray(q.double().numpy())
