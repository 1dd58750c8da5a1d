"""Hidden characters of names, reasons, configurations, logs and messages never reach a terminal as they are."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import random
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from attacks import attack  # type: ignore[import-not-found]
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.markup import escape

from quantexp.cli.completion import candidate_lines
from quantexp.cli.main import main
from quantexp.cli.verbs import all_verbs
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status, write_status
from quantexp.terminal import console as consoles
from quantexp.terminal.console import SafeConsole, plain
from quantexp.terminal.escaping import printable, printable_line
from quantexp.terminal.facts import Facts
from quantexp.terminal.fitted_table import Column, Shrink, fitted_table
from tests.hostile.roots import Result, add_run, add_sweep, run

#: Sequences that a terminal obeys, and characters that a reader does not see or is misled by.
HOSTILE = (
    "\x1b[2J",
    "\x1b[31m",
    "\x1b]0;title\x07",
    "\x1b]52;c;cm0gLXJmIH4=\x07",
    "\x1b]8;;http://evil.example\x1b\\",
    "\x1bP1$r\x1b\\",
    "\x9b31m",
    "\x9d52;c;aGk=\x9c",
    "\x07",
    "\x08\x08",
    "\r",
    "\x0b\x0c",
    "\x7f",
    "\x85",
    "\u202e",
    "\u2066\u2069",
    "\u200b",
    "\u200d",
    "\ufeff",
    "\u2028",
    "\U000e0041",
    "\ud83d",
    "\udcff",
    "[bold red]",
    "[/]",
    "[link=http://evil.example]",
    ":warning:",
    "\\",
)
#: What quantexp itself sends to a terminal: colours, the cursor's moves of a live display.
_OWN = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")

texts = st.lists(st.text(max_size=5) | st.sampled_from(HOSTILE), max_size=12).map("".join)


def require_shown(text: str) -> None:
    """Every character is a visible one, or a line feed or a tab."""
    hidden = {c for c in text if not c.isprintable() and unicodedata.category(c) != "Zs"}
    assert hidden <= {"\n", "\t"}, ascii(text)


@attack  # type: ignore[untyped-decorator]
@given(texts)
def test_hidden_characters_become_visible_and_the_others_stay(text: str) -> None:
    shown = printable(text)
    require_shown(shown)
    require_shown(line := printable_line(text))
    assert not {"\n", "\t"} & set(line)
    assert printable(shown) == shown
    if text.isprintable():
        assert shown == text
    shown.encode()


@attack  # type: ignore[untyped-decorator]
@given(texts, texts, st.sampled_from(list(Shrink)), st.integers(20, 200))
def test_no_console_sends_what_it_is_given(
    name: str, reason: str, shrink: Shrink, width: int
) -> None:
    """Markup, plain text, tables and facts; the terminal's own colours are all that is left."""
    stream = io.StringIO()
    console = SafeConsole(file=stream, force_terminal=True, width=width)
    console.print(f"[red]{escape(name)}[/]: {escape(reason)}", soft_wrap=True)
    console.print(reason, markup=False)
    console.print(plain(reason, "bold"))
    columns = [Column("run", shrink=shrink), Column("reason", worth=1, shrink=Shrink.WRAP)]
    console.print(fitted_table(columns, [[escape(name), plain(reason)]], width, "title").table)
    facts = Facts(console)
    facts.add_row("run", escape(name))
    facts.add_line("folder", reason)
    facts.print()
    out = stream.getvalue()
    require_shown(_OWN.sub("", out))
    assert "\x1b]" not in out
    out.encode()


def hostile_name(rng: random.Random) -> str:
    """The name of a run's folder with hostile parts; a slash and a null character cannot be in it."""
    parts = [rng.choice(HOSTILE) for _ in range(rng.randint(1, 4))]
    text = (
        "x".join(parts)
        .replace("/", "")
        .encode("utf-8", "surrogateescape" if "\udcff" in parts else "replace")
    )
    return f"m_d_{text.decode('utf-8', 'surrogateescape')[:60]}-{rng.randrange(1 << 32):08x}"


def hostile_run(root: Path, rng: random.Random) -> RunDir:
    """A run whose name, reasons, configuration, log and provenance are hostile."""
    made = add_run(root, "linear_mxfp8", "m_d_made-00000001")
    words = "".join(rng.choice(HOSTILE) for _ in range(5)).encode("utf-8", "replace").decode()
    status = read_status(made.status)
    assert status is not None
    status.state = rng.choice([State.FAILED, State.COMPLETED, State.PREEMPTED])
    status.reason, status.host, status.launcher = f"loss {words}\nmore", words, None
    status.capture = {"tensors": 1, "num_bytes": 2, "current": words, "stopped": ""}
    write_status(made.status, status)
    for file in (made.provenance, made.precision, made.tensors / "manifest.jsonl"):
        text = file.read_text()
        for old in ("quant=linear_mxfp8", "abc123", "engaged", "fc1", "node2", "not verified"):
            text = text.replace(f'"{old}"', json.dumps(f"{old}{words}"))
        file.write_text(text)
    config = yaml.safe_load(made.config.read_text())
    made.config.write_text(yaml.safe_dump({**config, "model": {**config["model"], "name": words}}))
    made.rank_log(0).write_bytes(words.encode() + b"\xff\xfe\x1b[2J\r\n\tend\n")
    folder = root / hostile_name(rng)
    made.root.rename(folder)
    return RunDir(folder)


def on_terminal(*words: str, monkeypatch: pytest.MonkeyPatch) -> Result:
    """The command with a terminal as its output."""
    out, err = io.StringIO(), io.StringIO()

    def terminal() -> Console:
        return SafeConsole(file=out, force_terminal=True, width=100)

    # A module that is first imported below would keep the replaced function.
    for verb, described in all_verbs().items():
        importlib.import_module(described.module or f"quantexp.cli.{verb}")
    for module in [m for n, m in sys.modules.items() if n.startswith("quantexp.")]:
        if getattr(module, "output_console", None) is not None:
            monkeypatch.setattr(module, "output_console", terminal)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return Result(code, out.getvalue(), err.getvalue())


def test_hostile_runs_are_shown_by_every_verb(
    cases: Iterator[random.Random], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "runs"
    for rng in cases:
        shutil.rmtree(root, ignore_errors=True)
        add_run(root, "bf16", "m_d_bf16-00000000")
        folder = hostile_run(root, rng)
        where = f"paths.root={root}"
        gone = f"gone{rng.choice(HOSTILE)}".replace("/", "").encode("utf-8", "replace").decode()
        sweep = add_sweep(root, [gone])
        verbs = [
            ("list", "runs", where),
            ("status", where),
            ("status", str(sweep)),
            ("cancel", where),
            ("compare", str(root), "--json"),
            ("captures", str(folder.root)),
            ("captures", str(folder.root), "--list"),
            ("logs", str(folder.root)),
            ("logs", "m_d", where),
            ("retry", f"no{rng.choice(HOSTILE)}such".replace("=", ""), where),
            ("captures", str(folder.root), f"tensor={rng.choice(HOSTILE)}"),
        ]
        for words in verbs:
            for result in (run(*words), on_terminal(*words, monkeypatch=monkeypatch)):
                require_shown(_OWN.sub("", result.out) if "--json" not in words else result.out)
                require_shown(result.err)
                assert result.code in (0, 1), words
        names = [row["run"] for row in run("list", "runs", "--json", where).json["runs"]]
        assert folder.root.name in names
        assert "\tend\n" in run("logs", str(folder.root)).out
        completed = candidate_lines(f"quantexp status {where} ")
        require_shown(completed)


def test_misuse_shows_the_words_escaped(cases: Iterator[random.Random]) -> None:
    for rng in cases:
        word = f"a{rng.choice(HOSTILE)}{rng.choice(HOSTILE)}b"
        for words in (["status", f"--{word}"], ["list", word], [word], ["draw", "--jobs", word]):
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                try:
                    code = main(words)
                except SystemExit as end:
                    code = int(str(end.code))
            require_shown(out.getvalue() + err.getvalue())
            assert code in (1, 2), words


def test_json_keeps_the_true_value(capsys: pytest.CaptureFixture[str]) -> None:
    from quantexp.cli.output import print_json

    content = {part: [part] for part in HOSTILE}
    print_json(content)
    out = capsys.readouterr().out
    require_shown(out)
    assert out.isascii()
    assert json.loads(out) == content


def test_only_the_terminal_room_makes_consoles() -> None:
    """A console of rich's own would send what it is given."""
    package = Path(consoles.__file__).parents[1]
    launchers = package.parent / "launchers"
    files = [f for folder in (package, launchers) for f in folder.rglob("*.py")]
    others = [
        file
        for file in files
        if file.parent.name != "terminal"
        and re.search(r"(?<![\w.])Console\((?!quiet)", file.read_text())
    ]
    assert others == []
