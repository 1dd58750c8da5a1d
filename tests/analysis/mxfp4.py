"""MXFP4 (E2M1, blocks of 32, floor) in numpy: an oracle that shares no code with quantexp."""

from __future__ import annotations

import numpy as np

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BLOCK = 32


def scales_of(x: np.ndarray) -> np.ndarray:
    """The exponent of each block along the last axis."""
    blocks = np.abs(x.astype(np.float64)).reshape(-1, BLOCK)
    return np.floor(np.log2(blocks.max(1))) - 2


def quantised(x: np.ndarray) -> np.ndarray:
    """Each value at its block's scale on the grid: to the nearest, halfway to the even code, saturating."""
    scale = 2.0 ** scales_of(x)[:, None]
    scaled = np.abs(x.astype(np.float64)).reshape(-1, BLOCK) / scale
    distance = np.abs(scaled[..., None] - GRID)
    nearest = distance.argmin(-1)
    is_tie = np.isclose(
        np.sort(distance, -1)[..., 0], np.sort(distance, -1)[..., 1], rtol=0, atol=0
    )
    nearest = np.where(is_tie & (nearest % 2 == 1), nearest + 1, nearest)
    return (np.sign(x.reshape(-1, BLOCK)) * GRID[np.minimum(nearest, 7)] * scale).reshape(x.shape)


def sqnr_db(x: np.ndarray) -> float:
    """10 log10 of the energy over that of the error."""
    wide = x.astype(np.float64)
    return float(10 * np.log10((wide**2).sum() / ((quantised(x) - wide) ** 2).sum()))


def shares(x: np.ndarray) -> tuple[float, float]:
    """The shares of non-zero elements that became zero and of elements beyond the largest value at their scale."""
    q = quantised(x)
    limit = 6 * 2.0 ** scales_of(x)[:, None]
    beyond = np.abs(x.astype(np.float64)).reshape(-1, BLOCK) > limit
    return float(((q == 0) & (x != 0)).sum() / (x != 0).sum()), float(beyond.mean())
