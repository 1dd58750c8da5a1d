"""Every format has its section on the page of formats, its picture and its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.formats import FORMATS
from quantexp.formats.definitions.files import shipped_formats

DOCS = Path(__file__).parents[2] / "docs"
#: The sections of the page, by their headings. The first ones hold for all formats.
SECTIONS = {
    text.partition("\n")[0]: text for text in (DOCS / "formats.md").read_text().split("\n## ")
}
SHARED = (
    *("# Number formats", "Common rules", "In models of your own"),
    *("Block scales", "Noise", "Elements"),
)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_section_with_its_picture(name: str) -> None:
    section = SECTIONS[name.partition("_")[0]]
    assert f"(formats/{name}.png)" in section
    assert f"`{name}`" in section or f'"{name}"' in section
    assert (DOCS / "formats" / f"{name}.png").stat().st_size > 0


def test_the_overview_names_every_section() -> None:
    overview = SECTIONS["# Number formats"]
    assert set(SHARED) < SECTIONS.keys()
    assert all(f"](#{_anchor(title)})" in overview for title in SECTIONS.keys() - set(SHARED))


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


@pytest.mark.parametrize("name", shipped_formats())
def test_every_declared_format_is_in_a_section_with_its_source(name: str) -> None:
    (section,) = [
        text
        for title, text in SECTIONS.items()
        if title not in SHARED and (f"`{name}`" in text or f'"{name}"' in text)
    ] or [SECTIONS[name]]
    assert "arXiv" in section or "OCP" in section
