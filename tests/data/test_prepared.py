from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantexp.data.prepared import card_path, read_card
from quantexp.errors import DataError

from .prepare.made import lines, prepared, rows, texts


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("card")
    (folder / "a.jsonl").write_bytes(lines(rows(texts(3))))
    prefix = prepared(folder / "a.jsonl", folder / "own", split="1").prefix
    return json.loads(card_path(prefix).read_bytes())


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "\0", '{"version": 1' + "1" * 5000 + "}"])
def test_a_card_that_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    card_path(tmp_path / "own").write_text(text)
    with pytest.raises(DataError, match=r"own\.json, line 1: .*; prepare the dataset"):
        read_card(tmp_path / "own")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"num_documents": [1, 2]}, r"num_documents must be 3 sizes, got \(1, 2\)"),
        ({"num_documents": [0, 0, 0]}, "contradict each other"),
        ({"num_documents": [2, 0, 0]}, "contradict each other"),
        ({"num_tokens": [2, 0, 0]}, "contradict each other"),
        ({"num_bytes": [0, 102]}, "contradict each other"),
        ({"num_bytes": ["1", 2]}, "num_bytes must be 2 sizes"),
        ({"num_tokens": [-1, 0, 0]}, "num_tokens must be 3 sizes"),
        ({"num_tokens": [True, 0, 0]}, "num_tokens must be 3 sizes"),
        ({"hashes": ["a"]}, "not enough values"),
        ({"hashes": 3}, "cannot unpack"),
        ({"hashes": None}, "cannot unpack"),
        ({"split": None}, "a text is of another type"),
        ({"more": 1}, "unexpected keyword"),
        ({"tokenizer": {}}, "missing 5 required"),
    ],
)
def test_a_card_with_other_content_is_refused(
    tmp_path: Path, content: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    card_path(tmp_path / "own").write_text(json.dumps(content | changes))
    with pytest.raises(DataError, match=rf"own\.json: no card of this .*{words}.*; prepare the"):
        read_card(tmp_path / "own")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("file", "../../other.json", r"tokenizer\.file must be the name of a file, got \.\./\.\./other"),
        ("kind", "pickle", "'pickle' is not a valid TokenizerKind"),
        ("vocab_size", "9", "tokenizer must be 2 sizes"),
        ("eod_name", 3, "a text is of another type"),
    ],
)  # fmt: skip
def test_a_card_with_another_tokenizer_is_refused(
    tmp_path: Path, content: dict[str, Any], key: str, value: object, words: str
) -> None:
    tokenizer = content["tokenizer"] | {key: value}
    card_path(tmp_path / "own").write_text(json.dumps(content | {"tokenizer": tokenizer}))
    with pytest.raises(DataError, match=words):
        read_card(tmp_path / "own")
