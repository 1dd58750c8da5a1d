"""Pages of the documentation: their blocks, and the commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache as cached
from pathlib import Path

from quantexp.cli.verbs import all_verbs

DOCS = Path(__file__).parent.parent / "docs"


README = DOCS.parent / "README.md"


PAGES = sorted([README, *DOCS.rglob("*.md")])


FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


INDENTED = re.compile(r"(?<=\n\n)(?P<text>(?: {4}quantexp .*\n)(?: {4}.*\n)*)")


COMMENT = re.compile(r"<!-- (?P<text>[^>]*) -->\n\Z")


NOT_RUN = "not run: "


#: Blocks of the README that `.ci/run` executes.
CI_BLOCKS = ("main", "tests")


INLINE = re.compile(r"`(?P<text>quantexp [^`]*)`")


#: A section of commands.md.
OLD_SCRIPTS = "From the old scripts"


COMPOSED = ("train", "plan", "prepare")


ABOUT_RUNS = (
    *("status", "watch", "logs", "capture", "cancel", "resume", "retry"),
    *("captures", "draw", "compare", "report", "export", "requantise"),
)


@dataclass(frozen=True)
class Block:
    """A block of code on a page."""

    page: Path
    language: str
    text: str
    #: The comment before it, without the brackets.
    comment: str

    @property
    def name(self) -> str:
        """The file that a YAML block stands for, or the name that `.ci/run` knows it by."""
        return "" if self.comment.startswith(NOT_RUN) else self.comment

    @property
    def is_run(self) -> bool:
        return not self.comment.startswith(NOT_RUN) and self.name not in CI_BLOCKS

    @property
    def needs_runs(self) -> bool:
        return "runs/" in self.text


@dataclass(frozen=True)
class Command:
    """One command line: its words, without `quantexp` and the verb."""

    verb: str
    words: tuple[str, ...]
    #: The number of points that the page states.
    points: int | None = None

    @property
    def needs_runs(self) -> bool:
        return self.verb in ABOUT_RUNS or any("runs/" in word for word in self.words)


def section(page: Path, title: str) -> str:
    """A section of a page with all its subsections."""
    return page.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@cached
def blocks(page: Path) -> list[Block]:
    return blocks_of(page.read_text(), page)


def blocks_of(text: str, page: Path) -> list[Block]:
    parsed = []
    for match in (*FENCE.finditer(text), *INDENTED.finditer(FENCE.sub("", text))):
        comment = COMMENT.search(match.string, 0, match.start())
        language = match.groupdict().get("language") or ("bash" if match.re is INDENTED else "")
        parsed.append(Block(page, language, match["text"], comment["text"] if comment else ""))
    return parsed


def lines(block: Block) -> list[str]:
    """The command lines of a block: all of bash, those after a `$` of text."""
    joined = block.text.replace("\\\n", " ").splitlines()
    if block.language == "text":
        return [line[2:] for line in joined if line.startswith("$ ")]
    return [line.strip() for line in joined if line.strip() and not line.startswith("#")]


def commands(page: Path) -> list[Command]:
    """Every command of a page that is run, in order."""
    texts = command_lines(blocks(page))
    texts += [inline["text"] for inline in INLINE.finditer(section(page, OLD_SCRIPTS))]
    return [command_of(text) for text in texts]


def command_lines(some: list[Block]) -> list[str]:
    """Every command line of blocks that are run, in order."""
    run = [block for block in some if block.is_run and block.language in ("bash", "text")]
    return [line for block in run for line in lines(block)]


def command_of(text: str) -> Command:
    program, *words = [word for word in shlex.split(text, comments=True) if word != "..."]
    assert program == "quantexp", f"{text!r} is not run: say why in a comment before the block"
    verb = words.pop(0) if words and words[0] in all_verbs() else "train"
    points = re.search(r"# (\d+) points$", text)
    return Command(verb, tuple(words), int(points[1]) if points else None)


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS.parent))
