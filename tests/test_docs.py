"""What the documentation tells users to type is typed here."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from quantexp.compose import compose
from quantexp.sweep.points import compose_points

DOCS = Path(__file__).parent.parent / "docs"
SWEEPS = (DOCS / "sweeps.md").read_text()
COMMAND = re.compile(r"^quantexp -m (?P<words>.*?) +# (?P<number>\d+) points$", re.MULTILINE)
FILE = re.compile(r"^<!-- (?P<name>\S+) -->\n```yaml\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)


OLD = (DOCS / "migration.md").read_text()
#: In backticks, with at least one group=choice or key=value, and nothing to be put in by the reader.
RUNS = re.compile(r"`quantexp (?P<words>(?:-m |plan )?(?:'?[a-z][\w./]*=[^`\s]+ ?)+)`")


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


def test_every_run_of_the_migration_page_is_found() -> None:
    assert len(RUNS.findall(OLD)) > 20


@pytest.mark.parametrize("run", [*RUNS.finditer(OLD)], ids=lambda run: run["words"])
def test_run_of_the_migration_page_is_one(run: re.Match[str], in_tmp: Path) -> None:
    words = shlex.split(run["words"])
    if words[0] == "-m":
        assert len(compose_points(words[1:], None, {})) == 10
    else:
        compose(words[words[0] == "plan" :], None, {})
