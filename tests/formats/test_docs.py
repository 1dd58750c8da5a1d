"""Every format has its page and its picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.formats import FORMATS
from quantexp.formats.definitions.files import shipped_formats

DOCS = Path(__file__).parents[2] / "docs" / "formats"


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_page_with_its_picture(name: str) -> None:
    page = (DOCS / f"{name.partition('_')[0]}.md").read_text()
    assert f"{name}.png" in page
    assert f"`{name}`" in page or f'"{name}"' in page
    assert (DOCS / f"{name}.png").stat().st_size > 0


def test_the_overview_names_every_page() -> None:
    overview = (DOCS / "README.md").read_text()
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    of_families = {f"{name.partition('_')[0]}.md" for name in FORMATS}
    assert pages == of_families | {"your_own.md", "mxint8.md", "fp8_block.md"} | {
        "fp4_int4.md",
        "sixteen_bits.md",
    }
    assert all(f"]({page})" in overview for page in pages)


@pytest.mark.parametrize("name", shipped_formats())
def test_every_declared_format_is_on_a_page_with_its_source(name: str) -> None:
    (page,) = [
        text
        for path in DOCS.glob("*.md")
        if path.name not in ("README.md", "your_own.md")
        and f"`{name}`" in (text := path.read_text())
    ] or [(DOCS / f"{name}.md").read_text()]
    assert "arXiv" in page or "OCP" in page
