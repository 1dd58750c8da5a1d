"""Tensors that ranks stored in parts, read as whole ones: the oracle is the tensor before it was divided."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from quantexp.capture import open_capture
from quantexp.capture.check.folder import check
from quantexp.capture.reader import Capture, CapturedTensor
from quantexp.capture.report import summary
from quantexp.errors import CaptureError
from quantexp.model.layout import Layout
from quantexp.schema import SampleOf, StoreKind
from tests.capture.layouts import (
    EVERYTHING,
    Whole,
    dense,
    experts,
    of_dense,
    of_experts,
    record,
    with_shared_heads,
)

LAYOUTS = {
    "TP2": Layout(tensor=2),
    "TP2+SP": Layout(tensor=2, sequence=True),
    "PP2": Layout(pipeline=2),
    "CP2": Layout(context=2),
    "TP2+SPxCP2": Layout(tensor=2, sequence=True, context=2),
    "TP2xPP2xCP2": Layout(tensor=2, pipeline=2, context=2),
}
TP2 = LAYOUTS["TP2+SP"]


def by_name(capture: Capture) -> dict[tuple[int, str, str], torch.Tensor]:
    """The values of each tensor that is stored, by layer, module and tensor."""
    values = {}
    for entry in capture.with_values():
        key = entry.metadata["layer"], entry.metadata["module"], entry.metadata["tensor"]
        assert key not in values, f"{key} is there twice"
        values[key] = entry.torch()
    return values


def assert_same(capture: Capture, whole: Whole) -> None:
    read = by_name(capture)
    assert read.keys() == whole.keys()
    for key, x in whole.items():
        assert read[key].dtype == x.dtype
        assert torch.equal(read[key], x), key


def weight_of(capture: Capture) -> CapturedTensor:
    """The weight of fc1 of layer 0, whose rows of gate and of up are divided."""
    return capture.select(layer=0, module="fc1", operation="forward", tensor="weight")[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_parts_of_a_layout_are_the_whole_tensors(tmp_path: Path, name: str) -> None:
    layout, whole = LAYOUTS[name], dense()
    record(tmp_path, layout, of_dense(whole, layout))
    assert_same(open_capture(tmp_path), whole)


def test_gradients_of_shared_key_value_heads_are_summed(tmp_path: Path) -> None:
    layout, whole = Layout(tensor=4, sequence=True), dense()
    record(tmp_path, layout, with_shared_heads(whole, layout))
    capture = open_capture(tmp_path)
    assert_same(capture, whole)
    key, gradient = (capture.select(layer=0, tensor=t)[0] for t in ("key", "grad_key"))
    assert (len(key.parts), len(gradient.parts)) == (2, 4)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=2, expert=2),
        Layout(tensor=2, sequence=True, expert_tensor=2),
        Layout(data=2, tensor=2, sequence=True, expert=2, expert_tensor=2),
        Layout(data=2, tensor=2, sequence=True, expert=4),
    ],
    ids=["EP2", "ETP2", "EP2xETP2", "TP2xEP4"],
)
def test_experts_are_whole_tensors_too(tmp_path: Path, layout: Layout) -> None:
    whole = experts(num_experts=4, rows=10)
    record(tmp_path, layout, of_experts([whole], layout))
    assert_same(open_capture(tmp_path), whole)


def test_groups_of_ranks_with_the_same_experts_keep_their_own_tokens(tmp_path: Path) -> None:
    layout = Layout(data=2, tensor=2, sequence=True, expert_tensor=2)
    wholes = [experts(num_experts=2, rows=10), experts(num_experts=2, rows=7, seed=1)]
    alike = {key: x for key, x in wholes[0].items() if key[2] in ("weight", "main_grad")}
    wholes[1] |= alike
    record(tmp_path, layout, of_experts(wholes, layout))
    capture = open_capture(tmp_path)
    assert_same(capture.select(data_rank=0), wholes[0])
    assert_same(capture.select(data_rank=1), {k: x for k, x in wholes[1].items() if k not in alike})


def test_data_parallel_ranks_keep_their_own_tensors_and_one_stores_the_weights(
    tmp_path: Path,
) -> None:
    layout = Layout(data=2, tensor=2, sequence=True)
    wholes = [dense(), dense(seed=1)]
    alike = {key: x for key, x in wholes[0].items() if key[2] in ("weight", "main_grad")}
    both = [of_dense(whole, layout) for whole in (wholes[0], wholes[1] | alike)]
    record(tmp_path, layout, lambda rank, place: both[place.data](rank, place))
    capture = open_capture(tmp_path)
    assert_same(capture.select(data_rank=0), wholes[0])
    assert_same(capture.select(data_rank=1), {k: x for k, x in wholes[1].items() if k not in alike})


@pytest.mark.parametrize(
    ("of", "count"), [(SampleOf.rows, 3), (SampleOf.blocks, 1), (SampleOf.heads, 3)]
)
@pytest.mark.parametrize("name", ["TP2+SP", "TP2+SPxCP2"])
def test_a_sample_is_that_of_the_whole_tensor(
    tmp_path: Path, name: str, of: SampleOf, count: int
) -> None:
    """In one process a rank holds everything, so nothing about parts takes part in its capture."""
    whole = {key: x for key, x in dense(1).items() if key[1] != "router"}
    sampled = dataclasses.replace(EVERYTHING, sample_count=count, sample_of=of)
    for folder, layout in (("one", Layout()), ("parts", LAYOUTS[name])):
        record(tmp_path / folder, layout, of_dense(whole, layout, 1), capture=sampled)
    one, parts = (open_capture(tmp_path / folder) for folder in ("one", "parts"))
    assert sum("sample" in entry.metadata for entry in one) > 3
    assert_same(parts, by_name(one))
    for entry, expected in zip(parts, sorted_as(one, parts), strict=True):
        assert entry.metadata.get("sample") == expected.metadata.get("sample")
        assert entry.metadata["shape"] == expected.metadata["shape"]


def sorted_as(capture: Capture, order: Capture) -> list[CapturedTensor]:
    """The entries in the order of another capture of the same tensors."""

    def key(entry: CapturedTensor) -> tuple[Any, ...]:
        return tuple(entry.metadata[k] for k in ("layer", "module", "operation", "tensor"))

    by_key = {key(entry): entry for entry in capture}
    return [by_key[key(entry)] for entry in order]


@pytest.mark.parametrize("kind", StoreKind)
def test_a_capture_in_parts_passes_its_check(tmp_path: Path, kind: StoreKind) -> None:
    layout, whole = LAYOUTS["TP2+SPxCP2"], dense(1)
    record(tmp_path, layout, of_dense(whole, layout, 1), kind=kind)
    checked = check(tmp_path, num_ranks=4)
    assert not checked.problems
    capture = open_capture(tmp_path)
    assert all(entry.is_intact() for entry in capture.with_values())
    assert all(torch.equal(e.verified(), e.torch()) for e in capture.with_values())
    counts = summary(capture)
    assert counts["files"] == checked.num_tensors > counts["listed"]
    in_manifest = map(json.loads, (tmp_path / "manifest.jsonl").read_text().splitlines())
    stored = {line.get("key") or line["file"]: line["bytes"] for line in in_manifest}
    assert counts["bytes"] == sum(stored.values())


def test_a_part_is_there_on_request_and_is_mapped_from_its_file(tmp_path: Path) -> None:
    whole = dense(1)
    record(tmp_path, TP2, of_dense(whole, TP2, 1))
    weight = weight_of(open_capture(tmp_path))
    gate, up = whole[0, "fc1", "weight"].chunk(2)
    for rank, part in enumerate(weight.parts):
        assert part.metadata["rank"] == rank
        own = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
        assert torch.equal(part.torch(), own)
    file = weight.parts[1].path
    content = bytearray(file.read_bytes())
    start = weight.parts[1].metadata["offsets"][0]
    view = weight.parts[1].torch()
    content[start : start + 2] = b"\x80\x3f"  # bfloat16 1.0
    with file.open("r+b") as stream:
        stream.write(content)
    assert view[0, 0] == 1


def test_ranks_that_wrote_to_their_own_folders_are_read_together(tmp_path: Path) -> None:
    whole = dense(1)
    for rank in range(2):
        record(tmp_path / f"node{rank}", TP2, of_dense(whole, TP2, 1), ranks=[rank], end=rank == 0)
    capture = open_capture(tmp_path / "node1", tmp_path / "node0")
    assert_same(capture, whole)
    assert [part.metadata["rank"] for part in weight_of(capture).parts] == [0, 1]


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    whole = dense(1)
    record(tmp_path, TP2, of_dense(whole, TP2, 1), ranks=[1])
    weight = weight_of(open_capture(tmp_path))
    assert weight.metadata["shape"] == [24, 8]
    words = (
        f"L0 fc1 forward weight of {tmp_path} cannot be put together: [0:6+12:18, :] is missing; open the folders of "
        "all ranks together"
    )
    for read in (weight.torch, weight.verified, weight.numpy):
        with pytest.raises(CaptureError, match=f"^{re.escape(words)}$"):
            read()
    problems = [str(problem) for problem in check(tmp_path).problems]
    assert "manifest.jsonl: L0 fc1 forward weight: [0:6+12:18, :] is missing" in problems


def test_missing_parts_along_two_axes_are_named(tmp_path: Path) -> None:
    layout, whole = LAYOUTS["TP2+SPxCP2"], dense(1)
    record(tmp_path, layout, of_dense(whole, layout, 1), ranks=[0, 1, 2])
    capture = open_capture(tmp_path)
    query, gradient = (capture.select(tensor=t)[0] for t in ("query", "grad_weight"))
    with pytest.raises(CaptureError, match=re.escape("together: [16:48, :, 2:4, :] is missing; ")):
        query.torch()
    words = "[16:32, :] is the sum of 2 ranks' tensors, and 1 are there; "
    with pytest.raises(CaptureError, match=re.escape(words)):
        gradient.torch()


def test_a_part_that_is_there_twice_is_named(tmp_path: Path) -> None:
    whole = dense(1)
    record(tmp_path, TP2, of_dense(whole, TP2, 1))
    manifest = tmp_path / "manifest.jsonl"
    first = next(line for line in manifest.read_text().splitlines() if '"query"' in line)
    with manifest.open("a") as stream:
        stream.write(first.replace('"rank":0', '"rank":2') + "\n")
    query = open_capture(tmp_path).select(tensor="query")[0]
    words = "cannot be put together: [:, :, 0:2, :] is in several shards; "
    with pytest.raises(CaptureError, match=re.escape(words)):
        query.torch()


def test_a_part_over_the_budget_leaves_the_whole_tensor_out(tmp_path: Path) -> None:
    whole = dense(1)
    small = dataclasses.replace(EVERYTHING, max_gb=1e-9)
    record(tmp_path, TP2, of_dense(whole, TP2, 1), ranks=[0])
    record(tmp_path, TP2, of_dense(whole, TP2, 1), ranks=[1], capture=small)
    weight = weight_of(open_capture(tmp_path))
    with pytest.raises(CaptureError, match=r"has no values: over capture\.max_gb=1e-09"):
        weight.path  # noqa: B018
    assert weight.metadata["statistics"]["count"] == 24 * 8


def test_ranks_that_store_nothing_are_no_damage(tmp_path: Path) -> None:
    """Without sequence parallelism both ranks have all logits, and the second one stores none."""
    logits = {key: x for key, x in dense(1).items() if key[2] == "router_logits"}
    record(tmp_path, LAYOUTS["TP2"], of_dense(logits, LAYOUTS["TP2"], 1))
    checked = check(tmp_path, num_ranks=2)
    assert (checked.num_tensors, checked.problems) == (1, [])


def test_the_documents_of_a_divided_query_are_those_of_all_its_parts(tmp_path: Path) -> None:
    """A rank of context parallelism knows the documents that its own queries lie in."""
    layout = LAYOUTS["CP2"]
    query = {key: x for key, x in dense(1).items() if key[2] == "query"}
    record(tmp_path, layout, of_dense(query, layout, 1))
    manifest = tmp_path / "manifest.jsonl"
    lines = [json.loads(line) for line in manifest.read_text().splitlines()]
    for line, starts in zip(lines, ([[0, 40], [0]], [[0, 20], [0, 9]]), strict=True):
        line["document_starts"] = starts
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (entry,) = open_capture(tmp_path)
    assert entry.metadata["document_starts"] == [[0, 20, 40], [0, 9]]
