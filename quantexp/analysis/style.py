"""The common style of figures: colours of the kinds of tensor, sizes, axes; `scheme_style` has that of schemes.

Colours are those of Okabe and Ito (2008), distinguishable with any colour vision. Nothing here
touches matplotlib's global state: figures are made by `new_figure` and carry their own canvas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from quantexp.analysis.scheme_style import SchemeStyle, format_colour
from quantexp.analysis.tensors.place import Kind
from quantexp.terminal.escaping import printable

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#999999"
LIGHT_GREY = "#CCCCCC"
INK = "#333333"

KIND_COLOURS = {
    Kind.ACTIVATION: SKY,
    Kind.WEIGHT: ORANGE,
    Kind.ATTENTION: PURPLE,
    Kind.GRADIENT: BLACK,
    Kind.PROBABILITY: YELLOW,
    Kind.SCALE: LIGHT_GREY,
}

#: Options of `savefig` for each format; the last few percent of PNG compression cost half of the time.
_SAVING: dict[str, dict[str, Any]] = {
    "png": {"pil_kwargs": {"compress_level": 3}},
    "pdf": {"metadata": {"CreationDate": None}},
    "svg": {"metadata": {"Date": None}},
}
#: Fonts of a PDF: TrueType, which publishers require, or Type 3, which takes a fifth of the time.
_TRUETYPE, _TYPE3 = 42, 3
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

DPI = 130
TITLE_PT = 11
LABEL_PT = 9
TICK_PT = 8
NOTE_PT = 7


def quant_colour(name: str) -> str:
    """The colour of a quantisation type or format; black for any other name."""
    return format_colour(name) or BLACK


def new_figure(width_inch: float, height_inch: float) -> Figure:
    """An empty white figure with its own Agg canvas."""
    figure = Figure(figsize=(width_inch, height_inch), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


@dataclass(frozen=True)
class Page:
    """A figure whose positions are in inches from its lower left corner."""

    figure: Figure

    @property
    def height(self) -> float:
        """In inches."""
        return float(self.figure.get_figheight())

    def axes(self, left: float, bottom: float, width: float, height: float) -> Axes:
        """Add axes at this position."""
        x, y = self.figure.get_figwidth(), self.height
        return self.figure.add_axes((left / x, bottom / y, width / x, height / y))

    def write(
        self, left: float, top: float, words: str, size_pt: float, *, bold: bool = False
    ) -> None:
        """Add text below this height."""
        x, y = left / self.figure.get_figwidth(), top / self.height
        weight = "bold" if bold else "normal"
        text = self.figure.text(
            x, y, words, fontsize=size_pt, fontweight=weight, color=INK, va="top"
        )
        text.set_parse_math(False)


def dress(
    ax: Axes, title: str, x_label: str, y_label: str, grid: str = "y", title_pad_pt: float = 6
) -> None:
    """Set title, labels with units, and a light grid along x, y or both."""
    ax.set_title(
        title, fontsize=TITLE_PT, loc="left", color=INK, fontweight="bold", pad=title_pad_pt
    )
    ax.set_xlabel(x_label, fontsize=LABEL_PT, color=INK)
    ax.set_ylabel(y_label, fontsize=LABEL_PT, color=INK)
    ax.tick_params(labelsize=TICK_PT, colors=INK)
    ax.grid(visible=True, axis=grid, color="#E4E4E4", linewidth=0.7)  # type: ignore[arg-type]
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def say_instead(ax: Axes, words: str) -> None:
    """Write a message into a panel without data."""
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_xlabel("")
    ax.set_ylabel("")
    ax.grid(visible=False)
    ax.text(
        0.5, 0.5, words, transform=ax.transAxes, ha="center", va="center", fontsize=10, color=INK
    )


def name_lines(ax: Axes, ends: Sequence[tuple[float, float, str, SchemeStyle]]) -> None:
    """Write each line's name at its right end (x, y, name, style), beside a piece of the line; names move apart.

    Limits of the axes and the places of the subplots must be final.
    """
    if not ends:
        return
    figure = ax.get_figure(root=True)
    assert figure is not None
    height_pt = 72 * figure.get_figheight() * ax.get_position().height
    low, high = ax.get_ylim()
    wanted = [(y - low) / (high - low) * height_pt for _, y, _, _ in ends]
    places = _moved_apart(wanted, 1.3 * TICK_PT, height_pt)
    for (_, _, name, style), wish, place in zip(ends, wanted, places, strict=True):
        y, is_at = place / height_pt, wish / height_pt
        beside: dict[str, Any] = {
            "transform": ax.transAxes,
            "clip_on": False,
            "scalex": False,
            "scaley": False,
        }
        ax.plot([1.0, 1.015], [is_at, y], color=style.colour, lw=0.7, **beside)
        ax.plot(
            [1.015, 1.055], [y, y], color=style.colour, linestyle=style.linestyle, lw=1.6, **beside
        )
        ax.text(
            1.065, y, name, transform=ax.transAxes, fontsize=TICK_PT, color=INK, va="center"
        ).set_parse_math(False)


def _moved_apart(wanted: Sequence[float], least: float, height: float) -> list[float]:
    """Positions at least `least` apart, as near as possible to the wishes, in order; centred if they do not fit."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    groups: list[
        tuple[float, list[int]]
    ] = []  # the middle of neighbours that touch, and who they are
    for i in order:
        middle, members = wanted[i], [i]
        while groups and middle - groups[-1][0] < least * (len(members) + len(groups[-1][1])) / 2:
            _, before = groups.pop()
            members = before + members
            middle = sum(wanted[j] for j in members) / len(members)
            reach = least * (len(members) - 1) / 2
            middle = min(max(middle, reach), max(height - reach, height / 2))
        groups.append((middle, members))
    places = [0.0] * len(wanted)
    for middle, members in groups:
        for rank, i in enumerate(members):
            places[i] = middle + least * (rank - (len(members) - 1) / 2)
    return places


def power_of_two(exponent: int) -> str:
    """`2⁻³` in Unicode characters of our fonts, because mathtext takes a hundred times as long."""
    return "2" + str(exponent).translate(_SUPERSCRIPTS)


def save_figure(
    figure: Figure, stem: Path, formats: Sequence[str], *, one_of_many: bool = False
) -> list[Path]:
    """Write `stem.png` and so on, each beside its place, then renamed; folders are made.

    The same figure gives the same bytes. A PDF has TrueType fonts, unless it is `one_of_many`.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    fonts = _TYPE3 if one_of_many else _TRUETYPE
    with rc_context({"pdf.fonttype": fonts, "svg.hashsalt": "quantexp"}):
        return [_save(figure, stem.with_name(f"{stem.name}.{kind}"), kind) for kind in formats]


def save_png(figure: Figure, path: Path) -> Path:
    """Write a file atomically; creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return _save(figure, path, "png")


def _save(figure: Figure, path: Path, kind: str) -> Path:
    for text in figure.findobj(Text):
        if not (words := text.get_text()).isprintable():
            text.set_text(printable(words))
    beside = path.with_name(f".{path.name}.part")
    figure.savefig(beside, format=kind, dpi=DPI, **_SAVING[kind])
    return beside.replace(path)
