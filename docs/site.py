"""The site's part of `mkdocs build`: the README is its first page, and the map in the README its navigation.

A group of the map is a bold line, an entry is `- [Title](page): ...`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
#: Pages outside docs/. Their links to pages of docs/ are those of the site without the folder.
OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
ENTRY = re.compile(
    r"^(?:\*\*(?P<group>.+)\*\*|- \[(?P<title>.+?)\]\((?:docs/)?(?P<page>\S+\.md)\):.*)$",
    re.MULTILINE,
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation."""
    nav: list[Any] = [{"Home": "README.md"}]
    text = (ROOT / "README.md").read_text()
    for entry in ENTRY.finditer(text, text.index("\n## Where to go\n")):
        if entry["group"]:
            nav.append({entry["group"]: []})
        else:
            (pages,) = nav[-1].values()
            pages.append({entry["title"]: entry["page"]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs/."""
    for name in OUTSIDE:
        text = (ROOT / name).read_text().replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files
