"""Parses the file names of collections without a manifest.

    {timestamp}_{counter}_{layer_type}_{layer_idx}_{operation}_{phase}_{component}_{quant_type}_{tensor}.pt

has nine parts. The first scripts wrote no phase and no component (six parts besides the counter), and some wrote no
layer; a folder may mix all three forms. The timestamp, `20250908_095220`, is one part; `tensor` may contain
underscores. Missing parts are None.
"""

from __future__ import annotations

import re
from typing import Any

_NAME = re.compile(
    r"(?P<timestamp>\d{8}_\d{6})_(?P<counter>\d+)_(?P<layer_type>attention|linear)_"
    r"(?:L(?P<layer>\d+)(?:-(?P<module>[^_]+))?_)?"
    r"(?P<operation>forward|backward)_"
    r"(?:(?P<phase>pre|post)_(?P<component>[^_]+)_|(?!pre_|post_))"
    r"(?P<quant_type>[^_]+)_(?P<tensor>\w+)\.pt"
)


def metadata_of(name: str) -> dict[str, Any] | None:
    """The metadata in a file's name; None if it is not the name of a captured tensor."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    parts: dict[str, Any] = match.groupdict()
    parts["counter"] = int(parts["counter"])
    if parts["layer"] is not None:
        parts["layer"] = int(parts["layer"])
    if parts["module"] is None and parts["layer_type"] == "attention":
        parts["module"] = "attention"
    return parts
