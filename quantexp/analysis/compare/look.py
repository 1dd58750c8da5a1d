"""How a scheme is drawn, everywhere: its format is the colour, its sites the dash of its lines.

Colours are those of Okabe and Ito (2008) that `quantexp.analysis.style` gives the formats, so that a scheme looks the
same in every figure; nothing here needs matplotlib.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

#: As in `quantexp.analysis.style`, and more formats; a test holds the two together.
FORMAT_COLOURS = {
    "mxfp8": "#0072B2",
    "mxfp4": "#D55E00",
    "hifp8": "#009E73",
    "bf16": "#999999",
    "mxfp6": "#56B4E9",
    "nvfp4": "#E69F00",
    "fp8": "#CC79A7",
}
OTHER = "#7A5195"
#: Lengths of line and gap in units of the line's width; empty is a solid line.
SOLID, DASHED, DOTTED = (), (5.0, 2.0), (1.2, 1.6)


@dataclass(frozen=True)
class Look:
    """Colour (#rrggbb) and dash of a scheme's lines."""

    colour: str
    dash: tuple[float, ...]


def look_of(scheme: str) -> Look:
    """FA_x dotted, linear_x dashed, FA_linear_x and everything else solid."""
    words = re.split(r"[_/ ]", scheme)
    colour = next((FORMAT_COLOURS[word] for word in words if word in FORMAT_COLOURS), OTHER)
    if words[0] == "FA" and "linear" not in words:
        return Look(colour, DOTTED)
    return Look(colour, DASHED if words[0] == "linear" else SOLID)
