"""What the documentation tells users to type is typed here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from quantexp.sweep.points import compose_points

DOCS = Path(__file__).parent.parent / "docs"
SWEEPS = (DOCS / "sweeps.md").read_text()
COMMAND = re.compile(r"^quantexp -m (?P<words>.*?) +# (?P<number>\d+) points$", re.MULTILINE)
FILE = re.compile(r"^<!-- (?P<name>\S+) -->\n```yaml\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)


PAGES = sorted([DOCS.parent / "README.md", *DOCS.rglob("*.md")])
LINK = re.compile(r"\]\((?!https?://)(?P<file>[^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS.parent)))
def test_every_link_to_a_file_leads_there(page: Path) -> None:
    broken = [
        link["file"]
        for link in LINK.finditer(page.read_text())
        if not (page.parent / link["file"]).exists()
    ]
    assert broken == []


def test_every_command_of_the_sweeps_page_is_found() -> None:
    assert len(COMMAND.findall(SWEEPS)) == SWEEPS.count("\nquantexp -m ") > 10


@pytest.mark.parametrize("command", [*COMMAND.finditer(SWEEPS)], ids=lambda c: c["words"])
def test_sweep_of_the_page_has_the_points_it_says(command: re.Match[str], in_tmp: Path) -> None:
    for file in FILE.finditer(SWEEPS):
        Path(file["name"]).parent.mkdir(parents=True, exist_ok=True)
        Path(file["name"]).write_text(file["text"])
    words = shlex.split(command["words"])
    config_dir = None
    if words[0] == "--config-dir":
        config_dir, words = Path(words[1]), words[2:]
    assert len(compose_points(words, config_dir, {})) == int(command["number"])
