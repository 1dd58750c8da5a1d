"""The place of a part in its whole tensor, and lines that name impossible places."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantexp.capture import open_capture
from quantexp.capture.check.folder import check
from quantexp.capture.parts import Part
from quantexp.errors import CaptureError
from quantexp.model.layout import Layout
from quantexp.model.shards import Shard
from quantexp.schema import StoreKind
from tests.capture.layouts import dense, of_dense, record

TP2 = Layout(tensor=2, sequence=True)


def test_a_sample_of_a_part_is_its_share_of_the_wholes_sample() -> None:
    indices = [1, 5, 6, 13]
    sample = {"axis": 0, "indices": indices}
    parts = [Part((16, 2), (Shard(0, ranges),)) for ranges in (((0, 4), (12, 16)), ((4, 12),))]
    x = torch.arange(32).view(16, 2)
    for part in parts:
        own = torch.cat([x[start:stop] for start, stop in part.ranges(0)])
        kept = own[part.positions(0, indices)]
        sampled = part.sampled(sample)
        assert sampled.shape == tuple(kept.shape)
        assert torch.equal(torch.cat([x[indices][a:b] for a, b in sampled.ranges(0)]), kept)
    assert parts[1].sampled({"axis": 0, "indices": [1, 2]}).shape == (0, 2)


@pytest.mark.parametrize(
    ("ranges", "blocks", "extent"),
    [
        ([((0, 64),), ((64, 100),)], [((0, 2),), ((2, 4),)], 4),
        ([((0, 32), (96, 128)), ((32, 96),)], [((0, 1), (3, 4)), ((1, 3),)], 4),
        ([((0, 48),), ((48, 96),)], [((0, 2),), ((2, 4),)], 4),
        ([((0, 16), (48, 64)), ((16, 32), (32, 48))], [((0, 1),), ((1, 2),)], 2),
    ],
    ids=["short last block", "context", "unaligned", "unaligned context"],
)
def test_blocks_of_parts_are_those_of_the_whole_or_else_each_parts_own(
    ranges: list[Any], blocks: list[Any], extent: int
) -> None:
    end = max(stop for each in ranges for _, stop in each)
    for own, expected in zip(ranges, blocks, strict=True):
        part = Part((3, end), (Shard(1, own),)).in_blocks(1, 32)
        assert (part.whole, part.ranges(1)) == ((3, extent), expected)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Input and output of fc1 from two ranks."""
    few = {k: x for k, x in dense(1).items() if k[1:] in (("fc1", "output"), ("fc1", "input"))}
    record(tmp_path, TP2, of_dense(few, TP2, 1), kind=StoreKind.pt)
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the line of rank 1, which has the second half of fc1's output [64, 2, 24] of gate and of up."""
    file = folder / "manifest.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        if line["rank"] == 1:
            change(line)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def cuts(*values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda line: line["shard"].update(cuts=list(values))


def cut(axis: int, *ranges: Any) -> dict[str, Any]:
    return {"axis": axis, "ranges": [list(each) for each in ranges]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            cuts(cut(2, (6, 12), (18, 25))),
            "shard.cuts must have ascending ranges within 0 to 24 along axis 2, got [[6, 12], [18, 25]]",
        ),
        (
            cuts(cut(2, (18, 24), (6, 12))),
            "shard.cuts must have ascending ranges within 0 to 24 along axis 2, got [[18, 24], [6, 12]]",
        ),
        (
            cuts(cut(2, (6, 6), (12, 24))),
            "shard.cuts must have ascending ranges within 0 to 24 along axis 2, got [[6, 6], [12, 24]]",
        ),
        (cuts(cut(2, (6, 12, 18))), "shard.cuts must have ranges [start, stop], got [[6, 12, 18]]"),
        (
            cuts(cut(3, (6, 12))),
            "shard.cuts must name ascending axes of the whole [64, 2, 24], got [3]",
        ),
        (
            cuts(cut(2, (0, 12)), cut(0, (0, 64))),
            "shard.cuts must name ascending axes of the whole [64, 2, 24], got [2, 0]",
        ),
        (
            cuts(cut(2, (0, 24))),
            "shard must fit the shape [64, 2, 12], and its ranges have [64, 2, 24]",
        ),
        (
            lambda line: line.update(shape=[64, 2, 13]),
            "shard must fit the shape [64, 2, 13], and its ranges have [64, 2, 12]",
        ),
    ],
    ids=["outside", "order", "empty", "three", "axis", "axes", "size", "shape"],
)
def test_an_impossible_place_is_left_out_with_one_line_and_is_a_problem(
    folder: Path, caplog: pytest.LogCaptureFixture, change: Callable[[Any], None], words: str
) -> None:
    rewrite(folder, change)
    capture = open_capture(folder)
    line = f"L0 fc1 forward output of {folder}: {words}"
    assert capture.damage == (line,)
    assert [record.getMessage() for record in caplog.records] == [f"{line}; it is left out"]
    with pytest.raises(CaptureError, match=re.escape("[:, :, 6:12+18:24] is missing")):
        capture.select(tensor="output")[0].torch()
    problems = [str(problem) for problem in check(folder).problems]
    assert f"manifest.jsonl, line 3: its {words}" in problems


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        (5, "shard must be keys with values, got 5"),
        ({"whole": [64]}, "shard.cuts is missing"),
        ({"whole": [-1], "cuts": []}, "shard.whole[0] must be a whole number from 0, got -1"),
        ({"whole": [1], "cuts": [{"axis": 0}]}, "shard.cuts[0].ranges is missing"),
        (
            {"whole": [1], "cuts": [], "partial": 1},
            "shard.partial must be a whole number from 2, got 1",
        ),
    ],
    ids=["number", "no cuts", "negative", "no ranges", "one summand"],
)
def test_a_shard_of_another_form_is_an_unreadable_line(
    folder: Path, shard: Any, words: str
) -> None:
    rewrite(folder, lambda line: line.update(shard=shard))
    (damage,) = open_capture(folder).damage
    assert damage.endswith(f"line 3: {words}")


def test_parts_of_another_whole_tensor_do_not_complete_it(folder: Path) -> None:
    rewrite(folder, lambda line: line["shard"].update(whole=[64, 2, 1 << 60]))
    for entry in open_capture(folder).select(tensor="output"):
        with pytest.raises(CaptureError, match=r"cannot be put together: .* is missing; "):
            entry.torch()


def test_too_many_ranges_are_refused_before_they_fill_the_memory(folder: Path) -> None:
    whole = [1 << 13] * 3
    evens = [[i, i + 1] for i in range(0, 1 << 12, 2)]
    half = len(evens)
    shard = {"whole": whole, "cuts": [{"axis": axis, "ranges": evens} for axis in range(3)]}
    rewrite(folder, lambda line: line.update(shape=[half] * 3, shard=shard))
    (entry,) = (e for e in open_capture(folder) if e.metadata["shape"] == whole)
    words = "the ranges of its 1 shards divide it into too many pieces"
    with pytest.raises(CaptureError, match=words):
        entry.torch()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (torch.zeros(64, 2, 12), "its shards have different dtypes: torch.bfloat16, torch.float32"),
        (torch.zeros(64, 2).bfloat16(), "a shard of it has the shape [64, 2], not [64, 2, 12]"),
    ],
    ids=["dtype", "shape"],
)
def test_a_file_with_other_values_than_its_line_says_is_named(
    folder: Path, values: torch.Tensor, words: str
) -> None:
    output = open_capture(folder).select(tensor="output")[0]
    torch.save({"tensor": values, "metadata": {}}, output.parts[1].path)
    with pytest.raises(
        CaptureError, match=re.escape(f"L0 fc1 forward output of {folder}: {words}")
    ):
        output.torch()
