"""Every format has its page and its picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.formats import FORMATS

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
    assert pages == {f"{name.partition('_')[0]}.md" for name in FORMATS}
    assert all(f"]({page})" in overview for page in pages)
