"""Which records are taken: duplicates, shares of sources, lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.data.prepare import shards
from quantexp.data.prepare.inputs import Kind
from quantexp.data.prepare.work import Filters, left_out
from quantexp.data.sources import Document

from .made import lines, prepared, rows, texts
from .test_prepare import part, read


def test_exact_duplicates_are_dropped_and_the_first_stays(tmp_path: Path) -> None:
    once = texts(60)
    contents = [*once[:40], *once[10:30], *once[40:], *once[:5]]
    (tmp_path / "a.jsonl").write_bytes(lines(rows(contents)))
    card = prepared(tmp_path / "a.jsonl", tmp_path / "own", deduplicate=True).card
    assert read(tmp_path / "own") == sorted(once, key=part)
    assert card.report["left_out"]["duplicate"] == 25
    assert sum(card.num_documents) == 60
    assert sum(card.report["lengths"].values()) == 60
    assert len(read(prepared(tmp_path / "a.jsonl", tmp_path / "all").prefix)) == 85


def test_sources_are_chosen_and_sampled_by_share(tmp_path: Path) -> None:
    names = ("web", "books", "code")
    records = [r for name in names for r in rows([f"{name} {t}" for t in texts(400)], name)]
    (tmp_path / "a.jsonl").write_bytes(lines(records))
    shares = {"web": 1, "books": 0.25}
    report = prepared(tmp_path / "a.jsonl", tmp_path / "own", sources=shares).card.report
    assert report["left_out"]["source not chosen"] == 400
    assert report["sources"]["web"][0] == 400
    # 400 draws with probability 1/4: the standard deviation is 8.7.
    assert abs(report["sources"]["books"][0] - 100) < 4 * 8.7
    more = prepared(tmp_path / "a.jsonl", tmp_path / "more", sources={"books": 0.5})
    quarter = {text for text in read(tmp_path / "own") if text.startswith("books")}
    assert quarter <= set(read(more.prefix))  # a larger share has all of a smaller one
    assert abs(more.card.report["sources"]["books"][0] - 200) < 4 * 10


IDS: list[dict[str, object]] = [{}, {"id": None}, {"id": ""}, {"id": "again"}, {"id": 0}]


@pytest.mark.parametrize("text", ["text {}", "the same text"])
@pytest.mark.parametrize("identity", IDS)
@pytest.mark.parametrize("num_files", [1, 400])
def test_a_share_holds_for_records_whose_ids_are_missing_null_or_repeated(
    num_files: int, identity: dict[str, object], text: str
) -> None:
    records = [{"text": text.format(i), **identity} for i in range(400)]

    def kept(share: float) -> set[tuple[str, int]]:
        """The positions of the documents in the sample."""
        filters, positions = Filters("web", (1.0, 1.0), {"web": share}), set[tuple[str, int]]()
        for start in range(0, 400, 400 // num_files):
            content = lines(records[start : start + 400 // num_files])
            shard = shards.Shard("", Kind.LINES, content, 0, len(content), 1, 0, f"raw/{start}")
            seen = set[bytes]()
            for document in shards.records(shard, "web"):
                assert isinstance(document, Document)
                if left_out(document, filters, shard.label, seen) is None:
                    positions.add((shard.label, document.place))
        return positions

    if identity.get("id") in ("again", 0) and text == "the same text" and num_files > 1:
        assert len(kept(0.5)) in (0, 400)  # copies of one document
        return
    # 400 draws with probability 1/2: the standard deviation is 10.
    assert abs(len(kept(0.5)) - 200) < 4 * 10
    assert kept(0.5) < kept(0.75)


def test_files_of_one_name_are_drawn_by_their_folder_wherever_that_lies(tmp_path: Path) -> None:
    for index in range(200):
        folder = tmp_path / "raw" / str(index)
        folder.mkdir(parents=True)
        (folder / "part.jsonl").write_bytes(lines([{"text": "the same text", "source": "web"}]))

    def num_kept(source: Path | list[str]) -> int:
        report = prepared(source, tmp_path / "own", sources={"web": 0.5}, force=True).card.report
        return report["sources"]["web"][0]

    kept = num_kept(tmp_path / "raw")
    # 200 draws with probability 1/2: the standard deviation is 7.1.
    assert abs(kept - 100) < 4 * 7.1
    assert num_kept([str(folder) for folder in sorted((tmp_path / "raw").iterdir())]) == kept
    (tmp_path / "raw").rename(tmp_path / "moved")
    assert num_kept(tmp_path / "moved") == kept


def test_texts_too_short_or_long_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(rows(["a", "ab", "abc", "abcd", " "])))
    card = prepared(
        tmp_path / "a.jsonl", tmp_path / "own", min_chars=2, max_chars=3, split="1"
    ).card
    assert read(tmp_path / "own") == ["ab", "abc"]
    assert card.report["left_out"] == {
        "empty": 1,
        "longer than max_chars": 1,
        "shorter than min_chars": 1,
    }
