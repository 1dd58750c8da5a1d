"""Attacks on tokenizers: files with any value in any place, and bytes changed."""

from __future__ import annotations

import base64
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantexp.data.tokenizers.load import load_tokenizer
from quantexp.errors import DataError

VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        3,
        2**31,
        2**32 - 1,
        2**64,
        1e300,
        "",
        "a",
        "</s>",
        "x" * 10_000,
        [],
        {},
        [[]],
        [1],
    ),
    *(
        {"a": 0},
        {"Regex": "(a+)+$"},
        {"Regex": "(?:a|aa)*b"},
        {"Regex": ""},
        {"Regex": "("},
        "BPE",
        "WordPiece",
    ),
    *("os.system", {"AutoTokenizer": ["evil.py", None]}, "{{ cycler.__init__.__globals__ }}"),
)
TEXTS = ["an owl", "a" * 40 + "c", "</s>", "\0\u3000\u00e9", ""]


def tokenizer_json() -> dict[str, Any]:
    split = {
        "type": "Split",
        "pattern": {"Regex": "\\w+|\\W"},
        "behavior": "Isolated",
        "invert": False,
    }
    bytes_ = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "use_regex": False,
        "trim_offsets": True,
    }
    end = {"id": 4, "content": "</s>", "single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "added_tokens": [end | {"normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, bytes_]},
        "model": {
            "type": "BPE",
            "vocab": {"a": 0, "b": 1, "ab": 2, "c": 3},
            "merges": [["a", "b"]],
        },
    }


def places(content: Any) -> list[tuple[Any, Any]]:
    """Each container of a document with each of its keys."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    own = [(content, key) for key, _ in items]
    inner = content.values() if isinstance(content, dict) else content
    return own + [
        place for each in inner if isinstance(each, dict | list) for place in places(each)
    ]


def use(kind: str, path: Path, **options: str) -> str:
    """The message that refuses a tokenizer or a text; empty if it serves."""
    try:
        tokenizer = load_tokenizer(kind, str(path), **options)
        ids = tokenizer.tokenize_all(TEXTS)
    except DataError as error:
        return str(error)
    assert all(0 <= number < tokenizer.vocab_size for each in ids for number in each)
    assert 0 <= tokenizer.eod < tokenizer.vocab_size <= 1 << 24
    return ""


def check(message: str, folder: Path) -> None:
    assert message == "" or (str(folder) in message and "\n" not in message)


def test_any_value_in_any_place_of_a_tokenizer_json_is_refused_in_one_line_or_serves(
    tmp_path: Path, cases: Iterator[random.Random]
) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('this code must not run')")
    for chance in cases:
        content, config = tokenizer_json(), {"eos_token": "</s>", "auto_map": VALUES[-2]}
        for document in chance.choices((content, config), (4, 1), k=chance.randint(1, 3)):
            container, key = chance.choice(places(document))
            container[key] = json.loads(json.dumps(chance.choice(VALUES)))
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        check(use("huggingface", tmp_path), tmp_path)
    assert "evil" not in sys.modules


def test_any_change_of_a_file_of_ranks_is_refused_in_one_line_or_serves(
    tmp_path: Path, cases: Iterator[random.Random]
) -> None:
    tokens = [bytes([i]) for i in range(256)]
    good = b"".join(base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(tokens))
    for chance in cases:
        content = bytearray(good)
        place = chance.randrange(len(content))
        match chance.randrange(4):
            case 0:
                content[place] = chance.randrange(256)
            case 1:
                del content[place:]
            case 2:
                content[place:place] = chance.choice((b"-", b"9" * 9, b"9" * 5000, b"\n", b"\0"))
            case 3:
                content += content[place:]
        (tmp_path / "own.tiktoken").write_bytes(content)
        pattern = chance.choice((r"\w+|\W", "(a|b|ab)*(?=c)x", "(a+)+$", "", "("))
        check(use("tiktoken", tmp_path / "own.tiktoken", pattern=pattern), tmp_path)
