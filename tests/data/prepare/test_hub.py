"""Datasets of the Hugging Face hub, by a stand-in for its library, and libraries that are missing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quantexp.data.binary import pair_paths
from quantexp.data.prepare import make, shards
from quantexp.data.prepare.outputs import make_output
from quantexp.data.prepared import read_card
from quantexp.errors import DataError

from .made import (
    lines,
    prepared,
    rows,
    texts,
    zstd,
)
from .test_bad_input import GOOD


@pytest.mark.parametrize(
    ("library", "name", "content"),
    [("zstandard", "a.jsonl.zst", zstd(GOOD)), ("pyarrow", "a.parquet", b"PAR1")],
)
def test_a_missing_library_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        DataError, match=rf"needs the {library} library: pip install 'quantexp\[data\]"
    ):
        prepared(tmp_path / name, tmp_path / "own")


def test_a_dataset_of_the_hub_needs_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    words = r"source=hf:wikimedia/wikipedia needs the datasets library: .*quantexp\[huggingface\].*or download"
    with pytest.raises(DataError, match=words):
        prepared("hf:wikimedia/wikipedia", tmp_path / "own")


def test_a_dataset_of_the_hub_is_streamed_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    def load_dataset(name: str, configuration: str | None, **options: object) -> Any:
        calls.append((name, configuration, options))
        return [{**row, "added": 5} for row in rows(texts(30))]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(shards, "SHARD_ROWS", 8)
    (tmp_path / "a.jsonl").write_bytes(lines(rows(texts(30))))
    local = prepared(tmp_path / "a.jsonl", tmp_path / "local").prefix
    count = 0

    def once(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        summary = make_output(*arguments)
        if count == 2:
            raise KeyboardInterrupt
        return summary

    monkeypatch.setattr(make, "make_output", once)
    with pytest.raises(KeyboardInterrupt):
        prepared("hf:wikimedia/wikipedia:20231101.en", tmp_path / "own")
    prepared("hf:wikimedia/wikipedia:20231101.en", tmp_path / "own")
    assert calls[0] == ("wikimedia/wikipedia", "20231101.en", {"split": "train", "streaming": True})
    assert pair_paths(tmp_path / "own")[0].read_bytes() == pair_paths(local)[0].read_bytes()
    assert read_card(tmp_path / "own") is not None


def test_an_error_of_the_hub_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*arguments: object, **options: object) -> None:
        raise ConnectionError("Couldn't reach it\nmore")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(
        DataError, match=r"hf:x: the Hub does not give it \(Couldn't reach it\); check"
    ):
        prepared("hf:x", tmp_path / "own")
