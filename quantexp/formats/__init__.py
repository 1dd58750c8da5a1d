"""Number formats: their definitions (no torch needed) and the operations on tensors (torch).

`Format`, `FORMATS`, `get_format`, `QuantSpec`, `resolve` and the enums come from modules that import no torch. The
operations are loaded on first use, so that the command line can list formats without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from quantexp.formats.spec import QuantSpec, get_format, resolve
from quantexp.formats.table import FORMATS
from quantexp.formats.types import (
    Axis,
    Element,
    Family,
    Format,
    Hadamard,
    Rounding,
    ScaleRule,
    Scaling,
)

if TYPE_CHECKING:
    from quantexp.formats.decoding import decode
    from quantexp.formats.encoding import Scales, TwoLevelScales, encode
    from quantexp.formats.families import finite_amax
    from quantexp.formats.grid import lies_on_grid
    from quantexp.formats.history import AmaxHistory
    from quantexp.formats.layout import Place, Transform
    from quantexp.formats.quantising import quantise, quantise_transformed
    from quantexp.formats.saturating import saturated
    from quantexp.formats.scaling import scales_of
    from quantexp.formats.transform import hadamard, random_signs
    from quantexp.formats.two_axes import quantise_both

__all__ = [
    "FORMATS",
    "AmaxHistory",
    "Axis",
    "Element",
    "Family",
    "Format",
    "Hadamard",
    "Place",
    "QuantSpec",
    "Rounding",
    "ScaleRule",
    "Scales",
    "Scaling",
    "Transform",
    "TwoLevelScales",
    "decode",
    "encode",
    "finite_amax",
    "get_format",
    "hadamard",
    "lies_on_grid",
    "quantise",
    "quantise_both",
    "quantise_transformed",
    "random_signs",
    "resolve",
    "saturated",
    "scales_of",
]

_NEEDS_TORCH = {
    "AmaxHistory": "history",
    "Place": "layout",
    "Scales": "encoding",
    "Transform": "layout",
    "TwoLevelScales": "encoding",
    "decode": "decoding",
    "encode": "encoding",
    "finite_amax": "families",
    "hadamard": "transform",
    "lies_on_grid": "grid",
    "quantise": "quantising",
    "quantise_both": "two_axes",
    "quantise_transformed": "quantising",
    "random_signs": "transform",
    "saturated": "saturating",
    "scales_of": "scaling",
}


def __getattr__(name: str) -> object:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)
