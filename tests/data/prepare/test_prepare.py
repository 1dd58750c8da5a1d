from __future__ import annotations

import codecs
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from quantexp.data.binary import pair_paths
from quantexp.data.prepare import job, make, shards
from quantexp.data.prepare.outputs import make_output
from quantexp.data.prepare.partial import partial_folder
from quantexp.data.prepare.work import PARTS
from quantexp.data.prepared import read_card
from quantexp.errors import DataError
from tests.data.pairs import text_of

from .made import config, content_of, dump, lines, prepared, rows, texts, write_forms, zstd

BOM = codecs.BOM_UTF8


def read(prefix: Path) -> list[str]:
    """The texts of a pair, as Megatron reads it."""
    pair = IndexedDataset(str(prefix))
    return [text_of(pair[i].tolist()) for i in range(len(pair))]


def part(text: str, bounds: tuple[float, float] = (0.95, 1.0)) -> int:
    """The part of a text, computed independently of the package."""
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    place = int(digest[:16], 16) / 2**64
    return sum(place >= bound for bound in bounds)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 2000)
    monkeypatch.setattr(shards, "SHARD_ROWS", 7)


def test_every_form_of_the_same_texts_gives_the_same_tokens(
    tmp_path: Path, small_shards: None
) -> None:
    contents = texts(150)
    expected = sorted(contents, key=part)  # stable: by part, then as they came
    bins = set()
    for name, path in write_forms(tmp_path / "raw", contents).items():
        result = prepared(path, tmp_path / "out" / name)
        assert read(result.prefix) == expected, name
        bins.add(pair_paths(result.prefix)[0].read_bytes())
        left_out = {"other namespace": 1, "redirect": 1} if ".xml" in name else {}
        assert result.card.report["left_out"] == left_out
        assert not Path(f"{result.prefix}.partial").exists()
    assert len(bins) == 1


def test_the_pair_is_byte_for_byte_what_megatrons_builder_writes(tmp_path: Path) -> None:
    contents = texts(300)
    (tmp_path / "a.jsonl").write_bytes(lines(rows(contents)))
    prepared(tmp_path / "a.jsonl", tmp_path / "own", split="8,1,1")
    builder = IndexedDatasetBuilder(str(tmp_path / "megatron.bin"), DType.optimal_dtype(257))
    for text in sorted(contents, key=lambda t: part(t, (0.8, 0.9))):
        ids = [*text.encode(), 256]
        builder.add_document(ids, [len(ids)])
    builder.finalize(str(tmp_path / "megatron.idx"))
    for own, megatrons in zip(
        pair_paths(tmp_path / "own"), pair_paths(tmp_path / "megatron"), strict=True
    ):
        assert own.read_bytes() == megatrons.read_bytes()


def test_the_card_counts_each_part_and_the_report_everything(tmp_path: Path) -> None:
    contents = texts(300)
    (tmp_path / "a.jsonl").write_bytes(lines(rows(contents)))
    card = prepared(tmp_path / "a.jsonl", tmp_path / "own", split="8,1,1").card
    own = [[t for t in contents if part(t, (0.8, 0.9)) == i] for i in range(3)]
    assert card.num_documents == tuple(map(len, own))
    assert min(card.num_documents) > 10
    assert card.num_tokens == tuple(sum(len(t.encode()) + 1 for t in p) for p in own)
    report = card.report
    assert report["num_chars"] == sum(map(len, contents))
    assert report["num_text_bytes"] == sum(len(t.encode()) for t in contents)
    assert report["num_input_bytes"] == (tmp_path / "a.jsonl").stat().st_size
    assert report["sources"] == {"web": [300, sum(card.num_tokens)]}
    bounds = [
        1 << max(0, len(t.encode())).bit_length() for t in contents
    ]  # n + 1 tokens, at most 2^k
    assert {int(k): v for k, v in report["lengths"].items() if v} == {
        bound: bounds.count(bound) for bound in sorted(set(bounds))
    }


@pytest.mark.parametrize(
    "content",
    [
        BOM + lines(rows(texts(8))),
        BOM + b"\r\n" + lines(rows(texts(8))),
        BOM + lines(rows(texts(8)[:4])) + BOM + lines(rows(texts(8))[4:]),
        BOM + dump(texts(8)),
    ],
    ids=["lines", "empty line", "joined files", "XML"],
)
@pytest.mark.parametrize("pack", [bytes, zstd])
def test_a_byte_order_mark_costs_no_record(
    tmp_path: Path, content: bytes, pack: Callable[[bytes], bytes]
) -> None:
    (tmp_path / "a").write_bytes(pack(content))
    result = prepared(tmp_path / "a", tmp_path / "own", split="1", max_rejected=0)
    assert read(result.prefix) == texts(8)


@pytest.mark.parametrize("magic", [0x184D2A50, 0x184D2A5F])
def test_frames_of_zstandard_that_are_to_skip_are_skipped(tmp_path: Path, magic: int) -> None:
    """pzstd begins with one that has the size of the next frame (RFC 8878, 3.1.2)."""
    skipped = struct.pack("<II", magic, 70_000) + bytes(70_000)
    content = zstd(lines(rows(texts(8))))
    (tmp_path / "a").write_bytes(skipped + skipped + content + skipped)
    assert read(prepared(tmp_path / "a", tmp_path / "own", split="1").prefix) == texts(8)
    (tmp_path / "a").write_bytes(skipped + content[:-3])
    with pytest.raises(DataError, match="cut short: its zstd data has no end"):
        prepared(tmp_path / "a", tmp_path / "cut", split="1")


def test_a_folder_and_a_pattern_are_read_in_order_without_other_files(tmp_path: Path) -> None:
    contents = texts(40)
    raw = tmp_path / "raw"
    (raw / "b").mkdir(parents=True)
    (raw / "b" / "2.jsonl").write_bytes(lines(rows(contents[20:])))
    (raw / "a.jsonl").write_bytes(lines(rows(contents[:20])))
    (raw / "a.jsonl.md5").write_text("0")
    (raw / ".hidden").write_text("x")
    (raw / "README.md").write_text("x")
    folder = prepared(raw, tmp_path / "folder").prefix
    pattern = prepared(f"{raw}/**/*.jsonl", tmp_path / "pattern").prefix
    listed = prepared([raw / "a.jsonl", raw / "b"], tmp_path / "list").prefix
    assert read(folder) == read(pattern) == read(listed) == sorted(contents, key=part)


@pytest.mark.parametrize("form", ["pages-articles.xml.bz2", "shard.json.gz", "train-00000.parquet"])
def test_the_bytes_do_not_depend_on_the_number_of_workers(
    tmp_path: Path, small_shards: None, form: str
) -> None:
    path = write_forms(tmp_path / "raw", texts(150))[form]
    one, three = (
        prepared(path, tmp_path / str(n) / "x", num_workers=n, deduplicate=True).prefix
        for n in (1, 3)
    )
    assert content_of(one) == content_of(three)


@pytest.mark.parametrize("deduplicate", [False, True])
@pytest.mark.parametrize(
    "form", ["pages-articles.xml", "wiki_00.bz2", "shard.jsonl.zst", "train-00000.parquet"]
)
def test_repeated_interruptions_change_no_byte(
    tmp_path: Path,
    small_shards: None,
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    deduplicate: bool,
) -> None:
    contents = [*texts(150), *texts(20)]
    path = write_forms(tmp_path / "raw", contents)[form]
    result = prepared(path, tmp_path / "whole" / "x", deduplicate=deduplicate)
    savez, count = np.savez, 0

    def interrupted(stream: IO[bytes], **arrays: np.ndarray) -> None:
        nonlocal count
        count += 1
        if count % 3 == 0:  # in the middle: some of the output is written, the rest is not
            stream.write(b"half an output")
            raise KeyboardInterrupt
        savez(stream, **arrays)  # type: ignore[arg-type]

    monkeypatch.setattr(np, "savez", interrupted)
    prefix = tmp_path / "again" / "x"
    rounds = 0
    while read_card(prefix) is None:
        rounds += 1
        assert rounds < 100
        try:
            prepared(path, prefix, deduplicate=deduplicate)
        except KeyboardInterrupt:
            assert not any(p.exists() for p in pair_paths(prefix))
    assert rounds > 3
    assert content_of(prefix) == content_of(result.prefix)


def test_only_the_shards_without_an_output_are_processed_again(
    tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(rows(texts(100))))
    whole = prepared(tmp_path / "a.jsonl", tmp_path / "whole" / "x").prefix
    spans = list[tuple[int, int]]()

    def recorded(shard: shards.Shard, *arguments: Any) -> Any:
        spans.append((shard.start, shard.end))
        if len(spans) == stop:
            raise KeyboardInterrupt
        return make_output(shard, *arguments)

    monkeypatch.setattr(make, "make_output", recorded)
    prefix, stop = tmp_path / "own" / "x", 6
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / "a.jsonl", prefix)
    outputs = sorted(Path(f"{prefix}.partial").glob("*/*.npz"))
    assert [path.stem for path in outputs] == [f"00000-{a:013}-{b:013}" for a, b in spans[:5]]
    outputs[1].unlink()
    os.truncate(outputs[3], outputs[3].stat().st_size // 2)
    stop = 0
    spans.clear()
    prepared(tmp_path / "a.jsonl", prefix)
    assert [f"{start:013}" for start, _ in spans[:2]] == [
        outputs[i].stem.split("-")[1] for i in (1, 3)
    ]
    assert spans[2][0] == int(outputs[4].stem.split("-")[2])
    assert spans[-1][1] == (tmp_path / "a.jsonl").stat().st_size
    assert content_of(prefix) == content_of(whole)


@pytest.mark.parametrize("deduplicate", [False, True])
def test_the_end_can_be_interrupted_at_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deduplicate: bool
) -> None:
    """Each rename and removal of the last phase is once the first that no longer happens."""
    (tmp_path / "a.jsonl").write_bytes(b"{\n" + lines(rows([*texts(50), *texts(20)])))
    fixed: dict[str, Any] = {"deduplicate": deduplicate, "split": "8,1,1", "max_rejected": 5}
    whole = content_of(prepared(tmp_path / "a.jsonl", tmp_path / "w" / "x", **fixed).prefix)
    replace, rmtree = Path.replace, shutil.rmtree
    steps, stop = 0, 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == stop:
            raise KeyboardInterrupt

    def counted(self: Path, target: Path) -> Path:
        step()
        return replace(self, target)

    def removed(*arguments: object, **named: object) -> None:
        step()
        rmtree(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "replace", counted)
    monkeypatch.setattr(shutil, "rmtree", removed)
    for stop in range(1, 100):
        prefix, steps = tmp_path / f"n{stop}" / "x", 0
        try:
            prepared(tmp_path / "a.jsonl", prefix, **fixed)
            break
        except KeyboardInterrupt:
            whole_there = read_card(prefix) is not None
            if whole_there:
                assert {k: v for k, v in content_of(prefix).items() if k in whole} == whole
            prepared(tmp_path / "a.jsonl", prefix, **fixed)
            assert content_of(prefix) == whole
            assert not Path(f"{prefix}.partial").exists()
    assert stop > 6
    assert content_of(prefix) == whole


def test_a_second_call_reuses_the_pair(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(rows(texts(5))))
    first = prepared(tmp_path / "a.jsonl", tmp_path / "own")
    before = {p: p.stat().st_mtime_ns for p in pair_paths(first.prefix)}
    again = prepared(tmp_path / "a.jsonl", tmp_path / "own")
    assert again.existed
    assert again.card == first.card
    assert {p: p.stat().st_mtime_ns for p in pair_paths(first.prefix)} == before


def test_another_dataset_is_replaced_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(rows(["old"])))
    prepared(tmp_path / "a.jsonl", tmp_path / "own", split="1")
    (tmp_path / "a.jsonl").write_bytes(lines(rows(["newer"])))
    with pytest.raises(
        DataError, match=r"own has another preparation .*give another dataset\.path"
    ):
        prepared(tmp_path / "a.jsonl", tmp_path / "own", split="1")
    assert read(tmp_path / "own") == ["old"]
    prepared(tmp_path / "a.jsonl", tmp_path / "own", split="1", force=True)
    assert read(tmp_path / "own") == ["newer"]
    (tmp_path / "own.json").unlink()
    with pytest.raises(DataError, match=r"own has a pair that was not prepared here .*force=true"):
        prepared(tmp_path / "a.jsonl", tmp_path / "own", split="1")


def test_another_job_does_not_continue_an_unfinished_one(
    tmp_path: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(rows(texts(100))))

    def once(*arguments: Any) -> None:
        make_output(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(make, "make_output", once)
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / "a.jsonl", tmp_path / "own", min_chars=5)
    monkeypatch.undo()
    card = prepared(tmp_path / "a.jsonl", tmp_path / "own").card
    assert sum(card.num_documents) == 100


def test_two_at_once_in_one_place_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(rows(texts(3))))
    with (
        partial_folder(job.make_job(config(tmp_path / "a.jsonl", tmp_path / "own"))).alone(),
        pytest.raises(
            DataError, match=r"own\.partial: another process prepares there; wait for it"
        ),
    ):
        prepared(tmp_path / "a.jsonl", tmp_path / "own")


def test_many_sources_are_counted_together_beyond_a_hundred(tmp_path: Path) -> None:
    records = [r for i in range(130) for r in rows(["a text"], f"s{i}")]
    (tmp_path / "a.jsonl").write_bytes(lines(records))
    sources = prepared(tmp_path / "a.jsonl", tmp_path / "own", split="1").card.report["sources"]
    assert len(sources) == 101
    assert sources["(others)"][0] == 30


def test_the_defaults_follow_the_machine_and_the_input(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(rows(texts(3))))
    plan = job.make_job(config(tmp_path / "a.jsonl", tmp_path / "x", num_workers=None))
    assert plan.num_workers == 1  # too small for more
    assert plan.split == "95,5,0"
    assert plan.filters.bounds == (0.95, 1.0)
    plan = job.make_job(config(tmp_path / "a.jsonl", tmp_path / "x", split="3"))
    assert plan.filters.bounds == (1.0, 1.0)
    assert np.allclose(
        job.make_job(config(tmp_path / "a.jsonl", tmp_path / "x", split="8,1,1")).filters.bounds,
        (0.8, 0.9),
    )
    assert len(PARTS) == 3
    assert json.loads((tmp_path / "a.jsonl").read_bytes().splitlines()[0])["id"] == "web-0"
