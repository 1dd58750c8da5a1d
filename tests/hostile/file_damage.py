"""Damages a file of a run folder, in every way that a hostile or unlucky hand would."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Damage = Callable[[Path, random.Random], None]

#: Texts in the place of a value.
VALUES = (
    '"abc"',
    "[]",
    "{}",
    "null",
    "true",
    "-1",
    "1.5",
    "1e999",
    "1e308",
    "NaN",
    "-Infinity",
    "9" * 30,
    "9" * 5000,
    "0." + "1" * 5000,
    '"\\ud800"',
    '"\\u0000"',
    '"\\u001b]52;c;aGk=\\u0007"',
    '"/etc/passwd"',
    '"../../../outside"',
    '"~nobody-of-this-name/x"',
    "[" * 200_000,
    "[" * 200 + "]" * 200,
    '{"a":' * 500 + "1" + "}" * 500,
    '["' + "x" * 100_000 + '"]',
)


def content(file: Path, text: bytes) -> None:
    """Replace the file's content."""
    file.unlink()
    file.write_bytes(text)


def replace_value(file: Path, rng: random.Random) -> None:
    """Another value in the place of one, of a line or of the file."""
    lines = file.read_bytes().decode().splitlines()
    is_lines = file.suffix == ".jsonl"
    index = rng.randrange(len(lines)) if is_lines else 0
    value = json.loads(lines[index] if is_lines else "\n".join(lines))
    text = _replaced(value, rng)
    lines[index : index + 1 if is_lines else None] = [text]
    content(file, ("\n".join(lines) + "\n").encode())


def _replaced(value: Any, rng: random.Random) -> str:
    """The JSON of a value in which one value, at any depth, is another."""
    mark = "the-value-that-is-replaced"

    def walk(node: Any) -> Any:
        if isinstance(node, dict) and node and rng.random() < 0.9:
            key = rng.choice(sorted(node))
            return {**node, key: walk(node[key])}
        if isinstance(node, list) and node and rng.random() < 0.9:
            i = rng.randrange(len(node))
            return [*node[:i], walk(node[i]), *node[i + 1 :]]
        return mark

    return json.dumps(walk(value)).replace(f'"{mark}"', rng.choice(VALUES))


def replace_yaml_value(file: Path, rng: random.Random) -> None:
    """Another value in the place of one of config.yaml."""
    lines = file.read_text().splitlines()
    i = rng.choice([i for i, line in enumerate(lines) if ": " in line])
    key = lines[i].partition(": ")[0]
    values = (*VALUES, "!!python/object/apply:os.system [x]", "*a", ".inf", "2024-99-99", "@", "&a")
    lines[i] = f"{key}: {rng.choice(values)}"
    content(file, ("\n".join(lines) + "\n").encode())


def alias_bomb(file: Path, rng: random.Random) -> None:
    """Lines whose aliases make a value of 10^12 elements."""
    lines = ["a: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"b{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    content(file, (file.read_text() + "\n".join(lines) + "\n").encode())


def mutate(file: Path, rng: random.Random) -> None:
    """Change, remove, repeat or insert some bytes."""
    data = bytearray(file.read_bytes())
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        length = rng.choice((1, 1, 1, 3, 50))
        kind = rng.randrange(4)
        if kind == 0:
            data[at : at + length] = rng.randbytes(length)
        elif kind == 1:
            del data[at : at + length]
        elif kind == 2:
            data[at:at] = data[at : at + length] * rng.choice((1, 3))
        else:
            data[at:at] = rng.choice((b"\0", b'"', b"{", b"]", b"\n", b",", b"\xff", b"-", b"e9"))
    content(file, bytes(data))


def truncate(file: Path, rng: random.Random) -> None:
    """Remove the end, as a killed process or a full disk does."""
    data = file.read_bytes()
    content(file, data[: rng.randrange(len(data))])


def _with(text: bytes) -> Damage:
    return lambda file, rng: content(file, text)


def _before(text: bytes) -> Damage:
    return lambda file, rng: content(file, text + file.read_bytes())


def _fifo(file: Path, rng: random.Random) -> None:
    file.unlink()
    os.mkfifo(file)


def _folder(file: Path, rng: random.Random) -> None:
    file.unlink()
    file.mkdir()


def _link(target: str) -> Damage:
    def damage(file: Path, rng: random.Random) -> None:
        file.unlink()
        file.symlink_to(target)

    return damage


def _socket(file: Path, rng: random.Random) -> None:
    file.unlink()
    here = Path.cwd()
    os.chdir(file.parent)  # the name of a socket has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(file.name)
    finally:
        os.chdir(here)


def _sparse(file: Path, rng: random.Random) -> None:
    with file.open("ab") as stream:
        stream.truncate(1 << rng.choice((31, 40)))


#: Damages of any file that nobody can read past.
BROKEN: dict[str, Damage] = {
    "200,000 brackets": _with(b"[" * 200_000 + b"\n"),
    "300 levels": _with(b'{"a":' * 300 + b"1" + b"}" * 300 + b"\n"),
    "5,000 digits": _with(b"9" * 5000 + b"\n"),
    "null characters": _with(bytes(5000) + b"\n"),
    "no UTF-8": _before(b"\xff\xfe{\n"),
    "a byte order mark in UTF-16": lambda file, rng: content(
        file, file.read_text().encode("utf-16")
    ),
    "a FIFO": _fifo,
    "a folder": _folder,
    "a link to itself": lambda file, rng: _link(file.name)(file, rng),
    "an endless device": _link("/dev/zero"),
    "a terminal": _link("/dev/tty"),
    "a socket": _socket,
    "a sparse file": _sparse,
    "20 million values": _with(b"[" + b"[]," * 20_000_000 + b"[]]\n"),
}
#: Damages that a reader may also survive.
WORN: dict[str, Damage] = {
    "mutated bytes": mutate,
    "no end": truncate,
    "a link to nowhere": _link("nowhere"),
    "no content": _with(b""),
    "random bytes": lambda file, rng: content(file, rng.randbytes(rng.randrange(1, 400))),
    "floats": lambda file, rng: content(file, struct.pack("<100d", *map(float, range(100)))),
}


def damages_of(file: Path) -> dict[str, Damage]:
    """Every damage that a file of this kind can have."""
    own: dict[str, Damage] = {}
    if file.suffix in (".json", ".jsonl"):
        own = {"another value": replace_value}
    if file.suffix == ".yaml":
        own = {"another value": replace_yaml_value, "an alias bomb": alias_bomb}
    return {**BROKEN, **WORN, **own}
