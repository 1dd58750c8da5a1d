"""Codes and scales are those of the code of the formats' authors, whose digests `benchmarks/authors.py` printed.

fouroversix of 21 April 2026 (commit dadfad6, its reference in torch) and Quartet-II of 20 February 2026 (8776a90), on a
CPU with torch 2.13. Random draws are those of quantexp. Of other normal numbers some blocks in 10,000 differ, where the
errors of two scales or grids are equal up to float32's last bits.
"""

from __future__ import annotations

import pytest

from .authors import CASES, codes, digest

DIGESTS = {
    "nvfp4": "4d26ac6ce5d10fef",
    "four over six, mse": "b0a8ba82f2d7c08b",
    "four over six, mae": "80b6d2e3c55400e9",
    "four over six, max": "8071bb24ba8cf81d",
    "four over six of tiles": "fe3cb8c41d22b984",
    "if4, mse": "c756a56d062acbf3",
    "if4, mae": "d0161927efd29ff1",
    "if4, max": "73b720e2c7c9f9bd",
    "if4, 16/17": "9a593e2861ad5c7a",
    "nvfp4, drawn": "1080336fee7cc40d",
    "ms-eden": "f80fc9a6d75973fe",
}


@pytest.mark.parametrize("name", CASES)
def test_codes_and_scales_are_those_of_the_authors_code(name: str) -> None:
    assert digest(*codes(CASES[name])) == DIGESTS[name]
