from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from quantexp.analysis.draw.arguments import FORMATS
from quantexp.analysis.scheme_style import FORMAT_COLOURS, scheme_style
from quantexp.analysis.style import (
    DPI,
    KIND_COLOURS,
    name_lines,
    new_figure,
    quant_colour,
    save_figure,
    save_png,
)
from quantexp.analysis.tensors.place import Kind


def test_every_kind_and_quantisation_type_has_a_colour_of_its_own() -> None:
    assert set(KIND_COLOURS) == set(Kind)
    types = [FORMAT_COLOURS[name] for name in ("mxfp8", "mxfp4", "hifp8", "bf16")]
    colours = [*KIND_COLOURS.values(), *types]
    assert len(set(colours)) == len(colours)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e4m3", "mxfp8_e5m2"])
def test_a_format_has_the_colour_of_its_type(name: str) -> None:
    assert quant_colour(name) == FORMAT_COLOURS["mxfp8"]


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


def test_names_of_lines_that_end_close_together_do_not_overlap() -> None:
    figure = new_figure(6, 3)
    ax = figure.add_subplot()
    ax.set_xlim(0, 10)
    ax.set_ylim(0, 1)
    ends = [(10.0, y, f"line {y}", scheme_style("bf16")) for y in (0.99, 0.5, 0.505, 0.51, 0.0)]
    name_lines(ax, ends)
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    boxes = {t.get_text(): t.get_window_extent(renderer) for t in ax.texts}
    order = ["line 0.0", "line 0.5", "line 0.505", "line 0.51", "line 0.99"]
    for below, above in itertools.pairwise(order):
        assert boxes[below].y1 <= boxes[above].y0 + 0.5
