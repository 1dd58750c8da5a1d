"""The colour, marker and line of each tensor and operand, the same in every figure.

An operand has the colour of the tensor that it is; gradients of a tensor have its colour and an open marker; the
line says the product: solid forward, dashed dgrad, dotted wgrad.
"""

from __future__ import annotations

from dataclasses import dataclass

from quantexp.analysis.operands import tensor_called
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
    quant_colour,
)
from quantexp.capture.operands import SCALE, source_of


@dataclass(frozen=True)
class Mark:
    """How a line or a dot looks."""

    colour: str
    marker: str = "o"
    line: str = "-"
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


#: Of a scheme: what it quantises says the marker, its format the colour.
_SITES = {"FA_linear": "o", "linear": "s", "FA": "^"}


def scheme_mark(scheme: str) -> Mark:
    """The mark of a scheme (`FA_linear_mxfp8`) or of a format (`mxfp8_e4m3 rceil`, a cross)."""
    sites, _, name = scheme.rpartition("_")
    if sites in _SITES:
        return Mark(quant_colour(name), _SITES[sites])
    return Mark(quant_colour(scheme), "D" if scheme == "bf16" else "X")


def mark_of(series: str) -> Mark:
    """The mark of a slot (`fprop.x`) or of a tensor; ink for what is not known."""
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
