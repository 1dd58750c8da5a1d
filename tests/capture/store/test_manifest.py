"""The lists of several ranks become one, even after an interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from quantexp.capture.check.folder import check
from quantexp.capture.lines import samples_of
from quantexp.capture.store.kept import cut_back
from quantexp.capture.store.manifest import (
    MANIFEST,
    STATISTICS,
    TOKENS,
    TokenList,
    join_parts,
    lines_of,
    part_of,
)
from quantexp.errors import CaptureError
from quantexp.runs.paths import RunDir


def test_each_rank_has_a_list_of_its_own(tmp_path: Path) -> None:
    assert part_of(tmp_path / MANIFEST, 0) == tmp_path / "manifest.jsonl"
    assert part_of(tmp_path / MANIFEST, 2) == tmp_path / "manifest.rank2.jsonl"


def test_lines_are_joined_in_the_order_of_ranks(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        part_of(tmp_path / MANIFEST, rank).write_text(f'{{"rank": {rank}}}\n')
    part_of(tmp_path / STATISTICS, 1).write_text("{}\n")
    join_parts(tmp_path)
    assert (tmp_path / MANIFEST).read_text() == '{"rank": 0}\n{"rank": 2}\n{"rank": 10}\n'
    assert {file.name for file in tmp_path.iterdir()} == {MANIFEST, STATISTICS}


def test_line_that_a_killed_rank_left_unfinished_is_left_out(tmp_path: Path) -> None:
    part_of(tmp_path / MANIFEST, 1).write_text('{"rank": 1}\n{"ran')
    join_parts(tmp_path)
    assert (tmp_path / MANIFEST).read_text() == '{"rank": 1}\n'


def test_join_interrupted_before_it_deleted_the_parts_gives_the_same_list(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"rank": 0}\n{"rank": 1}\n')
    part_of(tmp_path / MANIFEST, 1).write_text('{"rank": 1}\n')
    join_parts(tmp_path)
    assert (tmp_path / MANIFEST).read_text() == '{"rank": 0}\n{"rank": 1}\n'


def test_one_ranks_lists_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("{")
    join_parts(tmp_path)
    join_parts(tmp_path / "none")
    assert (tmp_path / MANIFEST).read_text() == "{"


def test_letters_beyond_ascii_are_read_back_unchanged(tmp_path: Path) -> None:
    """U+2028 and U+0085 end a line of text, but no line of JSON."""
    lines = [{"quant_type": "größer\u2028\u0085"}, {"quant_type": "日本"}]
    part_of(tmp_path / MANIFEST, 1).write_bytes(
        b"".join(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in lines)
    )
    join_parts(tmp_path)
    assert list(lines_of(tmp_path / MANIFEST)) == lines


RunTiny = Callable[..., RunDir]


def test_ranks_lists_are_joined_and_read(tmp_path: Path) -> None:
    for rank in (0, 1):
        TokenList(tmp_path, rank, lambda token: f"<{token}>").add(
            2, 0, rank, [4 + rank], [[7, rank, 7]]
        )
    assert len(list(tmp_path.iterdir())) == 2
    before = samples_of(tmp_path)
    join_parts(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [TOKENS]
    assert samples_of(tmp_path) == before
    (sample,) = before[2, 0, 1]
    assert (sample.index, sample.ids) == (5, [7, 1, 7])
    assert [sample.text(position) for position in range(3)] == ["<7>", "<1>", "<7>"]


def test_lines_after_a_checkpoint_are_dropped(tmp_path: Path) -> None:
    tokens = TokenList(tmp_path, 0, str)
    for iteration in (1, 2, 3):
        tokens.add(iteration, 0, 0, [iteration], [[1]])
    cut_back(tmp_path, 2)
    assert [key[0] for key in samples_of(tmp_path)] == [1, 2]


def test_a_list_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tokens = TokenList(tmp_path / "gone", 0, str)
    with pytest.raises(CaptureError, match=r"tokens\.jsonl cannot be written: No such file"):
        tokens.add(1, 0, 0, [0], [[1]])


def test_a_folder_without_a_list_has_no_samples(tmp_path: Path) -> None:
    assert samples_of(tmp_path) == {}


def test_a_run_lists_its_captured_micro_batches_in_the_order_of_its_samples(
    run_tiny: RunTiny,
) -> None:
    run = run_tiny(
        "capture=tensors",
        "capture.iterations=[2]",
        "capture.collect_micro_batches=0",
        "training.iterations=2",
        "training.warmup_iterations=0",
        "training.micro_batch_size=1",
        "training.global_batch_size=2",
        "capture.stop_after_capture=false",
    )
    samples = samples_of(run.tensors)
    assert [(key, [one.index for one in each]) for key, each in samples.items()] == [
        ((2, 0, 0), [2]),
        ((2, 1, 0), [3]),
    ]
    (first,) = samples[2, 0, 0]
    assert all(0 <= token <= 256 for token in first.ids)
    text = "".join(first.text(position) for position in range(len(first.ids)))
    assert text.isprintable() or "\n" in text
    assert not check(run.tensors).problems
    hashes = json.loads((run.tensors / "hashes.json").read_text())
    assert TOKENS in hashes
