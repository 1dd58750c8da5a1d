"""Number formats: what they are (no torch needed) and what can be done with them (torch).

`Format`, `FORMATS`, `get_format`, `resolve` and the enums come from modules that import no torch.
The verbs are loaded when they are first asked for, so that the command line can list formats
without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from quantexp.formats.options import Options, resolve
from quantexp.formats.table import FORMATS, get_format
from quantexp.formats.types import Element, Family, Format, Rounding, ScaleRule, Scaling

if TYPE_CHECKING:
    from quantexp.formats.decoding import decode
    from quantexp.formats.encoding import encode
    from quantexp.formats.grid import lies_on_grid, local_step
    from quantexp.formats.quantising import quantise
    from quantexp.formats.tensor_scale import finite_amax

__all__ = [
    "FORMATS",
    "Element",
    "Family",
    "Format",
    "Options",
    "Rounding",
    "ScaleRule",
    "Scaling",
    "decode",
    "encode",
    "finite_amax",
    "get_format",
    "lies_on_grid",
    "local_step",
    "quantise",
    "resolve",
]

_NEEDS_TORCH = {
    "decode": "decoding",
    "encode": "encoding",
    "finite_amax": "tensor_scale",
    "lies_on_grid": "grid",
    "local_step": "grid",
    "quantise": "quantising",
}


def __getattr__(name: str) -> object:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)
