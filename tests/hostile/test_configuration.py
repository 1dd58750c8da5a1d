"""YAML files that nobody means, in a `--config-dir` and in `sweep.points`: one clean line or a plan, without a hang."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantexp.folders import conf_dir
from tests.hostile.answers import Tally, answer, check
from tests.hostile.overrides import BASE, FRAGMENTS, KEYS, NUMBERS, TEXTS

Cases = Iterator[random.Random]

BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{letter}: &{letter} [{','.join([f'*{chr(ord(letter) - 1)}'] * 9)}]\n"
    for letter in "bcdefghij"
)
#: A file of the group quant, own.yaml -> what the message has.
FILES = {
    "defaults: [own]\n": "lead back to themselves",
    "defaults:\n  - /quant@_here_: own\n": "lead back to themselves",
    "defaults:\n  - /quant@x: own\n": "lead back to themselves",
    "defaults: [self]\n": "Could not load 'quant/self'",
    "defaults: null\n": "defaults must be a list",
    "defaults: 3\n": "defaults must be a list",
    "defaults: [3]\n": "Unsupported type in defaults",
    "defaults: [{linear: {a: 1}}]\n": "Unsupported item value in defaults",
    "defaults: [[a]]\n": "Unsupported type in defaults",
    "linear: &a {x: *a}\n": "*a contains itself",
    "rules: &a [*a]\n": "*a contains itself",
    BOMB: "must have at most 100,000 values",
    f"a: {'[' * 3000}{']' * 3000}\n": "",
    f"a: {'{a: ' * 900}1{'}' * 900}\n": "nested at most 30 deep",
    "3\n": "cannot be read",
    "[1, 2]\n": "own.yaml",
    f"linear: {{block: {'9' * 5000}}}\n": "a number must have at most 300 digits",
    "linear: {block: 010}\n": "010 is the number 8 in YAML",
    "linear: {block: 1:30}\n": "1:30 is the number 90 in YAML",
    "name: 1.50\n": "quant.name must be text, got 1.5; put the text in quotes",
    "name: yes\n": "quant.name must be text, got true",
    'linear: {format: "a\\0b"}\n': "must hold no control characters",
    'linear: {window: "???"}\n': "quant.linear.window has no value",
    "# @package\nname: x\n": "cannot be read",
    "null: 2\n": "",
    "name: !!python/object/apply:os.system [id]\n": "could not determine a constructor",
    "name: a\nname: b\n": "duplicate key",
}
RAW = {
    "utf-16": "is not UTF-8; save it as UTF-8",
    "utf-32": "is not UTF-8; save it as UTF-8",
    "latin-1": "is not UTF-8; save it as UTF-8",
}


@pytest.fixture
def own(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own file of the group quant, in the folder `mine`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_tmp / ".cache"))
    (in_tmp / "mine" / "quant").mkdir(parents=True)
    return in_tmp / "mine" / "quant" / "own.yaml"


def plan_with(own: Path, *words: str) -> str:
    """The message of a plan that uses the file."""
    answered = answer(["plan", "-cd", str(own.parents[1]), *BASE, "quant=own", *words])
    check(answered, ends=[1])
    return answered.err


@pytest.mark.parametrize(("text", "words"), FILES.items(), ids=lambda text: text[:30])
def test_file_that_is_no_scheme_is_refused_in_one_line(own: Path, text: str, words: str) -> None:
    own.write_text(text)
    assert words in plan_with(own)


@pytest.mark.parametrize(("encoding", "words"), RAW.items())
def test_file_of_another_encoding_is_refused(own: Path, encoding: str, words: str) -> None:
    own.write_bytes("name: größe\n".encode(encoding))
    assert words in plan_with(own)


def test_files_whose_defaults_form_a_cycle_are_named(own: Path) -> None:
    own.write_text("defaults: [other]\n")
    (own.parent / "other.yaml").write_text("defaults: [own]\n")
    assert "quant/other, quant/own lead back to themselves" in plan_with(own)


@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "large"])
def test_what_is_no_plain_file_is_refused_and_the_list_goes_on(own: Path, kind: str) -> None:
    if kind == "folder":
        own.mkdir()
    elif kind == "fifo":
        os.mkfifo(own)
    elif kind == "loop":
        own.symlink_to(own.name)
    else:
        own.write_text("#" * 2_000_000)
    assert "own" in plan_with(own)
    listed = answer(["-cd", str(own.parents[1]), "list", "schemes"])
    assert listed.code == 0
    assert "FA_linear_mxfp8" in listed.out


def _damaged(source: random.Random, content: bytes) -> bytes:
    """Bytes flipped, cut, repeated or inserted."""
    at, damaged = source.randrange(len(content)), bytearray(content)
    kind = source.randrange(4)
    if kind == 0:
        damaged[at] ^= 1 << source.randrange(8)
    elif kind == 1:
        del damaged[at:]
    elif kind == 2:
        damaged[at:at] = source.choice([*FRAGMENTS, *TEXTS]).encode()
    else:
        damaged[at:at] = damaged[:at] * source.randint(1, 3)
    return bytes(damaged)


def _written(source: random.Random) -> bytes:
    """A file of one key with a hostile value."""
    *parents, name = source.choice(KEYS).split(".")[1:] or ["name"]
    indented = "".join(f"{'  ' * depth}{key}:\n" for depth, key in enumerate(parents))
    value = source.choice(
        [*NUMBERS, *TEXTS, "010", "1:30", "2020-01-01", "!!set {a}", "&a [*a]", "~"]
    )
    return f"{indented}{'  ' * len(parents)}{name}: {value}\n".encode(errors="replace")


def test_no_file_of_the_user_ends_in_a_traceback_or_a_hang(own: Path, cases: Cases) -> None:
    shipped = [file for file in conf_dir().rglob("*.yaml") if file.parent != conf_dir()]
    tally = Tally()
    for source in cases:
        file = source.choice(shipped)
        group = file.relative_to(conf_dir()).parts[0]
        makes = source.choice(["damaged", "written"])
        content = _damaged(source, file.read_bytes()) if makes == "damaged" else _written(source)
        shutil.rmtree(own.parents[1])
        target = own.parents[1] / group / "hostile.yaml"
        target.parent.mkdir(parents=True)
        target.write_bytes(content)
        plus, words = ("+", ["-m"]) if group == "experiment" else ("", [])
        base = [word for word in BASE if not word.startswith(f"{group}=")]
        with tally.case(f"{makes} {group}", content):
            answered = answer(
                ["plan", *words, "-cd", str(own.parents[1]), *base, f"{plus}{group}=hostile"]
            )
            check(answered)
            tally.accepted += answered.code == 0
    tally.report()


def test_no_file_of_points_ends_in_a_traceback_or_a_hang(own: Path, cases: Cases) -> None:
    valid = b"- {quant: FA_mxfp8, training.lr: 1.0e-4}\n- {quant: bf16, training.seed: 3}\n"
    tally, file = Tally(), own.parent / "points.yaml"
    for source in cases:
        key, value = source.choice(KEYS), source.choice([*NUMBERS, *TEXTS])
        kinds = {
            "damaged": _damaged(source, valid),
            "hostile value": f"- {{{key}: {value}}}\n".encode(errors="replace"),
            "hostile key": f"- {{{source.choice([*TEXTS, *NUMBERS])}: 1}}\n".encode(
                errors="replace"
            ),
            "known": source.choice([*FILES]).encode(),
        }
        kind = source.choice([*kinds])
        file.write_bytes(kinds[kind])
        with tally.case(kind, kinds[kind]):
            answered = answer(["plan", "-m", *BASE, f"sweep.points='{file}'"])
            check(answered)
            tally.accepted += answered.code == 0
    tally.report()
