"""Whatever a run folder holds, report.html has the elements and attributes of an ordinary page."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from quantexp.analysis.style import new_figure, save_png
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status, write_status
from tests.hostile.roots import add_run, run
from tests.hostile.test_terminal import HOSTILE, require_shown

#: Texts that would leave the place that they are written to.
PAYLOADS = (
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    '" onmouseover="alert(1)',
    "' autofocus onfocus='alert(1)",
    "javascript:alert(1)",
    "<!-- ",
    "--><b>",
    "]]>",
    "</title></style></pre></td></table>",
    "&lt;script&gt;",
    "&#60;script&#62;",
    "{{ 7919 * 7907 }}",
    "{% for x in y %}",
    "\\u003cscript\\u003e",
    "<base href=//evil.example>",
    "<meta http-equiv=refresh content=0>",
    "`${alert(1)}`",
    "\u2028alert(1)",
    "$\\frac{$",
    "$x^$",
)


class Page(HTMLParser):
    """The elements of a page with their attributes, its texts, and its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        #: Names of attributes, with the value of those that can run or load something.
        self.attributes: Counter[str] = Counter()
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._in: str = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in = tag
        self.elements[tag] += 1
        for name, value in attrs:
            acts = name in ("src", "href", "http-equiv", "content", "style", "type", "action")
            shown = str(value)[:30] if acts else ""
            self.attributes[f"{tag} {name} {re.sub(r'[0-9]+', '0', shown)}"] += 1

    def handle_data(self, data: str) -> None:
        (self.scripts if self._in == "script" else self.words).append(data)

    def handle_endtag(self, tag: str) -> None:
        self._in = ""


def planted(folder: Path, rng: random.Random, mark: str | None) -> RunDir:
    """A run whose texts end in a payload, or in a harmless mark."""
    made = add_run(folder, "linear_mxfp8", "m_d_made-00000001", proved=False)

    def word(text: str) -> str:
        parts = rng.sample([*PAYLOADS, *HOSTILE], 3)
        harmful = "".join(parts).encode("utf-8", "replace").decode()
        return f"{text}{mark or harmful}"

    status = read_status(made.status)
    assert status is not None
    status.state, status.reason = State.FAILED, word("loss")
    write_status(made.status, status)
    config = yaml.safe_load(made.config.read_text())
    for group, key in (("model", "name"), ("dataset", "label"), ("quant", "name")):
        config[group][key] = word(str(config[group][key]))
    config["training"]["precision"] = word("bf16")
    config["launcher"][f"k{word('ey')}"] = word("value")
    made.config.write_text(yaml.safe_dump(config, allow_unicode=True))
    _plant(made.provenance, word, {"quantexp", "host", "device", "state", "words", "snapshot"})
    _plant(made.precision, word, {"module", "product", "operand", "reason", "status"})
    content = json.loads(made.provenance.read_text())
    content[word("key")] = {word("key"): word("value")}
    content["command"] = ["quantexp", word("quant=")]
    content["source"]["diff"] = word("-old\n+new")
    made.provenance.write_text(json.dumps(content))
    for name in ("manifest.jsonl", "statistics.jsonl"):
        lines = (made.tensors / name).read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        for row in rows:
            row |= {"module": word("fc1"), "tensor": word("input"), "dtype": row["dtype"]}
        (made.tensors / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = made.root.parent / f"m_d_{word('x').replace('/', '')[:80]}-00000001"
    made.root.rename(folder)
    figures = folder / "figures"
    save_png(new_figure(1, 1), figures / f"{word('p').replace('/', '')[:80]}.png")
    return RunDir(folder)


def _plant(file: Path, word: Any, keys: set[str]) -> None:
    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {
                key: word(value) if key in keys and isinstance(value, str) else walk(value)
                for key, value in node.items()
            }
        return [walk(each) for each in node] if isinstance(node, list) else node

    file.write_text(json.dumps(walk(json.loads(file.read_text()))))


def page_of(root: Path, out: Path) -> Page:
    result = run("report", str(root), f"out={out}")
    assert result.code == 0, result.err
    text = out.read_text()
    assert text.isascii()
    require_shown(text)
    return Page(text)


def test_a_page_has_no_element_or_attribute_of_a_run(
    cases: Iterator[random.Random], tmp_path: Path
) -> None:
    root = tmp_path / "runs"

    def page(rng: random.Random, runs: int, mark: str | None) -> Page:
        shutil.rmtree(root, ignore_errors=True)
        planted(root, rng, mark)
        if runs == 2:
            add_run(root, "bf16", "m_d_bf16-00000000")
        return page_of(root, tmp_path / "page.html")

    ordinary_pages = {runs: page(random.Random(0), runs, "harmless") for runs in (1, 2)}
    for rng in cases:
        runs = rng.choice((1, 2))
        ordinary, hostile = ordinary_pages[runs], page(rng, runs, None)
        # One text may become several, such as a row for each; no other kind may be among them.
        assert set(hostile.elements) <= set(ordinary.elements)
        assert set(hostile.attributes) <= set(ordinary.attributes)
        assert len(hostile.scripts) == len(ordinary.scripts)
        assert hostile.scripts[-1] == ordinary.scripts[-1]
        data = json.loads(hostile.scripts[0])
        assert data.keys() == {"series", "numerics"}
        require_shown("".join(hostile.words))
        assert str(7919 * 7907) not in "".join(hostile.words)


def test_a_picture_is_drawn_of_any_text(cases: Iterator[random.Random], tmp_path: Path) -> None:
    for rng in islice(cases, 100):
        words = "".join(rng.choice([*PAYLOADS, *HOSTILE]) for _ in range(4))
        figure = new_figure(3, 1)
        text = figure.text(0.1, 0.5, words.encode("utf-8", "replace").decode(), parse_math=False)
        save_png(figure, tmp_path / "a.png")
        require_shown(text.get_text())
