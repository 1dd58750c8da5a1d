"""Collections without a manifest: what the names of their files say.

    nine parts  {timestamp}_{counter}_{layer_type}_{layer_idx}_{operation}_{phase}_{component}_{quant_type}_{tensor}.pt
    six parts   {timestamp}_{counter}_{layer_type}_{operation}_{quant_type}_{tensor}.pt

The timestamp, `20250908_095220`, is one part; `tensor` may hold underscores. What a name does not say is None.
"""

from __future__ import annotations

import re
from typing import Any

_START = r"(?P<timestamp>\d{8}_\d{6})_(?P<counter>\d+)_(?P<layer_type>attention|linear)_"
_OPERATION = r"(?P<operation>forward|backward)_"
_END = r"(?P<quant_type>[^_]+)_(?P<tensor>\w+)\.pt"
_NINE = re.compile(
    _START
    + r"L(?P<layer>\d+)(?:-(?P<module>[^_]+))?_"
    + _OPERATION
    + r"(?P<phase>pre|post)_(?P<component>[^_]+)_"
    + _END
)
_SIX = re.compile(_START + _OPERATION + _END)


def metadata_of(name: str) -> dict[str, Any] | None:
    """The metadata that a file's name holds; None where it is no name of a captured tensor."""
    found = _NINE.fullmatch(name) or _SIX.fullmatch(name)
    if found is None:
        return None
    parts: dict[str, Any] = {
        **dict.fromkeys(("layer", "module", "phase", "component")),
        **found.groupdict(),
    }
    parts["counter"] = int(parts["counter"])
    if parts["layer"] is not None:
        parts["layer"] = int(parts["layer"])
    if parts["module"] is None and parts["layer_type"] == "attention":
        parts["module"] = "attention"
    return parts
