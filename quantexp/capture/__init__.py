"""Capture: selects tensors, computes their cost, names, stores and reads them.

    from quantexp.capture import open_capture
    capture = open_capture("runs/.../tensors")
    for entry in capture.select(layer=0, tensor="grad_*"):
        x = entry.torch()

`open_capture` is loaded on first use, because `plan` needs this package without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantexp.capture.reader import open_capture

__all__ = ["open_capture"]


def __getattr__(name: str) -> object:
    if name != "open_capture":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quantexp.capture.reader import open_capture

    return open_capture
