"""Operands of linear layers are those of the code of recipes' authors: `benchmarks/layer_authors.py` has the digests.

Quartet-II of 20 February 2026 (commit 8776a90: its own recipe, TetraJet-v2, NVIDIA's) and fouroversix of 21 April 2026
(dadfad6), on a CPU with torch 2.13; random signs and draws are those of quantexp.
"""

from __future__ import annotations

import pytest

from .authors import digest, layer

DIGESTS = {
    "linear_nvfp4_recipe": {
        "fprop.x": "802c542d56d18356",
        "dgrad.g": "56cc51075f13b669",
        "wgrad.g": "5326351b7aeedce6",
        "wgrad.x": "7fdfb917cb56c2bc",
    },
    "linear_nvfp4_tetrajet_v2": {
        "fprop.x": "802c542d56d18356",
        "fprop.w": "c03a6b1a5752cf11",
        "dgrad.g": "2e61d6c4d99605be",
        "dgrad.w": "713b8d0c447f9d87",
        "wgrad.g": "877c4c3be2f2d0c8",
        "wgrad.x": "9f8f0cd808f05091",
    },
    "linear_nvfp4_quartet2": {
        "fprop.x": "d445bb2212094cf8",
        "fprop.w": "1d2a28751ef387d9",
        "dgrad.g": "0b2bb5813cea76c2",
        "dgrad.w": "440772a017d506fd",
        "wgrad.g": "0d6226127ba2a313",
        "wgrad.x": "f9e500e29d918e22",
    },
    "linear_nvfp4_four_over_six": {
        "fprop.x": "d445bb2212094cf8",
        "fprop.w": "861f7768371cc7df",
        "dgrad.w": "861f7768371cc7df",
        "wgrad.x": "21b3c953964aa8c7",
    },
}


@pytest.mark.parametrize("recipe", DIGESTS)
def test_operands_are_those_of_the_authors_code(recipe: str) -> None:
    """But for w of the recipe and g of four over six, see "Against the authors' code" in docs/recipes.md."""
    operands, _ = layer(recipe, 0)
    assert {slot: digest(operands[slot]) for slot in DIGESTS[recipe]} == DIGESTS[recipe]
