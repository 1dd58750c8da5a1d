from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from quantexp.analysis.draw.asked import FORMATS
from quantexp.analysis.inventory import Kind
from quantexp.analysis.style import (
    DPI,
    KIND_COLOURS,
    QUANT_COLOURS,
    new_figure,
    quant_colour,
    save_figure,
    save_png,
)


def test_every_kind_and_quantisation_type_has_a_colour_of_its_own() -> None:
    assert set(KIND_COLOURS) == set(Kind)
    colours = [*KIND_COLOURS.values(), *QUANT_COLOURS.values()]
    assert len(set(colours)) == len(colours)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e4m3", "mxfp8_e5m2"])
def test_a_format_has_the_colour_of_its_type(name: str) -> None:
    assert quant_colour(name) == QUANT_COLOURS["mxfp8"]


def test_a_figure_is_written_whole_into_a_new_folder(tmp_path: Path) -> None:
    path = save_png(new_figure(2, 1), tmp_path / "a" / "b.png")
    assert imread(path).shape[:2] == (DPI, 2 * DPI)
    assert [p.name for p in path.parent.iterdir()] == ["b.png"]


def labelled() -> Figure:
    figure = new_figure(2, 1)
    figure.text(0.1, 0.5, "share, 2⁻³")
    figure.add_subplot().plot([1, 2])
    return figure


@pytest.mark.parametrize("kind", FORMATS)
def test_the_same_figure_gives_the_same_bytes(tmp_path: Path, kind: str) -> None:
    first, second = (
        save_figure(labelled(), tmp_path / name, (kind,))[0].read_bytes() for name in "ab"
    )
    assert first == second


@pytest.mark.parametrize("many", [False, True])
def test_fonts_of_a_pdf_are_truetype_unless_there_are_many(tmp_path: Path, many: bool) -> None:
    (path,) = save_figure(labelled(), tmp_path / "a", ("pdf",), one_of_many=many)
    content = path.read_bytes()
    assert [name in content for name in (b"/FontFile2", b"/Type3")] == [not many, many]
