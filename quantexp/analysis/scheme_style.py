"""The style of a scheme or a format in every figure: colour, dash and marker. Needs no matplotlib.

    colour   the number format                              mxfp8 blue, mxfp4 vermillion, hifp8 green, bf16 grey, ...
    dash     the sites that are quantised                   FA_linear solid, linear dashed, FA dotted, FA_full dash-dot
    shade    what else tells schemes of one page apart      linear_mxfp4 as above, linear_mxfp4_hadamard darker

Schemes of the optimizer (adam) have sparse dots, those of Transformer Engine (te) the longest dashes. A scheme without
a variant looks the same on every page. The colours are those of Okabe and Ito (2008), which people with any colour
vision can tell apart; shades of one colour differ in lightness.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

FORMAT_COLOURS = {
    "mxfp8": "#0072B2",
    "mxfp4": "#D55E00",
    "hifp8": "#009E73",
    "bf16": "#808080",
    "mxfp6": "#56B4E9",
    "nvfp4": "#E69F00",
    "fp8": "#CC79A7",
}
#: The colour of a scheme whose name contains no format.
OTHER = "#7A5195"
BASELINE = "bf16"

Dash = tuple[float, ...]
#: Lengths of dash and gap in units of the line's width; empty means a solid line.
SOLID: Dash = ()
DASHED: Dash = (5.0, 2.0)
DOTTED: Dash = (1.2, 1.6)
DASH_DOT: Dash = (5.0, 1.6, 1.2, 1.6)
SPARSE: Dash = (1.2, 3.6)
LONGEST: Dash = (14.0, 2.5)
#: Markers, used when the shades of one colour and dash are exhausted.
_MORE_DASHES: tuple[Dash, ...] = (
    (9.0, 2.5),
    (5.0, 1.6, 1.2, 1.6, 1.2, 1.6),
    (9.0, 1.8, 2.6, 1.8),
    (2.6, 1.6),
)
#: The fraction of black (below 0) or of white (above 0) in each shade.
_SHADES = (0.0, -0.5, 0.45)
_SITES = {
    "FA_linear": (SOLID, "o"),
    "linear": (DASHED, "s"),
    "FA": (DOTTED, "^"),
    "FA_full": (DASH_DOT, "v"),
    "adam": (SPARSE, "P"),
    "te": (LONGEST, "h"),
}
_BASELINE_MARKER, _OTHER_MARKER = "D", "X"


@dataclass(frozen=True)
class SchemeStyle:
    """The style of one scheme."""

    #: #rrggbb.
    colour: str
    dash: Dash
    #: A matplotlib marker.
    marker: str

    @property
    def linestyle(self) -> str | tuple[float, Dash]:
        """The dash as a matplotlib line style."""
        return (0, self.dash) if self.dash else "solid"


def format_colour(name: str) -> str | None:
    """The colour of the first format in a name such as `mxfp8_e4m3 rceil` or `linear_mxfp8`; None without a format."""
    words = re.split(r"[_/ ]", name)
    return next((FORMAT_COLOURS[word] for word in words if word in FORMAT_COLOURS), None)


def scheme_style(scheme: str) -> SchemeStyle:
    """The style of a scheme or format if no other with the same format and sites is in the figure."""
    colour = format_colour(scheme)
    if scheme == BASELINE:
        return SchemeStyle(FORMAT_COLOURS[BASELINE], SOLID, _BASELINE_MARKER)
    if colour in (None, FORMAT_COLOURS[BASELINE]):  # another attention in bf16 is no baseline
        colour = OTHER
    words = re.split(r"[_/ ]", scheme)
    sites = "_".join(word for word in words[:2] if word in ("FA", "linear", "full", "adam"))
    sites = "te" if words[0] == "te" else sites
    dash, marker = _SITES.get(sites, (SOLID, _OTHER_MARKER))
    return SchemeStyle(colour, dash, marker)


def scheme_styles(schemes: Sequence[str]) -> list[SchemeStyle]:
    """A distinct style for each line of a figure, in order, also for lines with equal names.

    Of those that share format and sites the shortest name has the style of `scheme_style`, the next ones shades of
    its colour, and after these other dashes; from the sixteenth on styles repeat.
    """
    order = sorted(range(len(schemes)), key=lambda i: (len(schemes[i]), i))
    taken: Counter[SchemeStyle] = Counter()
    styles: dict[int, SchemeStyle] = {}
    for i in order:
        usual = scheme_style(schemes[i])
        styles[i] = _variant(usual, taken[usual])
        taken[usual] += 1
    return [styles[i] for i in range(len(schemes))]


def _variant(usual: SchemeStyle, number: int) -> SchemeStyle:
    dash_number, shade = divmod(number, len(_SHADES))
    dashes = (usual.dash, *_MORE_DASHES)
    dash = dashes[dash_number % len(dashes)]
    return SchemeStyle(shaded(usual.colour, _SHADES[shade]), dash, usual.marker)


def shaded(colour: str, share: float) -> str:
    """A colour mixed with this fraction of white, or of black if it is negative."""
    end = 255 if share > 0 else 0
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(p + (end - p) * abs(share)):02X}" for p in parts)
