"""The colour, marker and line of each tensor and operand, the same in every figure.

An operand has the colour of the tensor that it is; gradients of a tensor have its colour and an open marker; the
line says the product: solid forward, dashed dgrad, dotted wgrad.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantexp.analysis.scheme_style import Dash
from quantexp.analysis.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
)
from quantexp.analysis.tensors.operands import tensor_called
from quantexp.capture.operands import SCALE, source_of


@dataclass(frozen=True)
class Mark:
    """The style of a line or a dot."""

    colour: str
    marker: str = "o"
    #: A matplotlib marker.
    line: str | tuple[float, Dash] = "-"
    #: Whether the marker is filled.
    filled: bool = True


_TENSORS = {
    "input": Mark(SKY, "o"),
    "weight": Mark(ORANGE, "s"),
    "output": Mark(PURPLE, "d"),
    "grad_output": Mark(BLACK, "^"),
    "query": Mark(BLUE, "v"),
    "key": Mark(GREEN, "D"),
    "value": Mark(PURPLE, "X"),
    "attn_weights": Mark(VERMILLION, "P"),
    "grad_scores": Mark(YELLOW, "*"),
    "main_grad": Mark(VERMILLION, "s", "--", filled=False),
    "resid_pre": Mark(SKY, "o"),
    "resid_mid": Mark(GREEN, "D"),
    "resid_post": Mark(BLUE, "v"),
}
_LINES = {"fprop": "-", "dgrad": "--", "wgrad": ":"}


def mark_of(series: str) -> Mark:
    """The mark of a slot (`fprop.x`) or of a tensor; ink for an unknown one."""
    product, _, operand = series.rpartition(".")
    tensor = source_of(tensor_called(operand) if product else series).removesuffix(SCALE)
    if tensor in _TENSORS:
        known = _TENSORS[tensor]
        line = _LINES.get(product.split("_")[0], known.line)
        return Mark(known.colour, known.marker, line, known.filled)
    of = tensor.removeprefix("grad_")
    if of in _TENSORS:
        return Mark(_TENSORS[of].colour, _TENSORS[of].marker, "--", filled=False)
    return Mark(GREY if tensor.startswith("grad") else INK)
