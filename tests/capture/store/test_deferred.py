"""Statistics counted in the background: those of the unchanged tensor, or none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantexp.capture.statistics import native
from quantexp.capture.statistics.fidelity import chosen_for
from quantexp.capture.statistics.summary import Summary, statistics, summarise
from quantexp.capture.store.deferred import Deferred, count_all, deferred
from quantexp.capture.store.folder import CaptureStore
from quantexp.capture.store.metadata import About
from tests.capture.stalling import stalled

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(64, 3, 96), (), (0, 4), (5, 33), (128, 64)]
    return [
        torch.randn(shape, generator=generator).to(dtype) for shape in shapes for dtype in DTYPES
    ]


@pytest.mark.parametrize("format_name", [None, "mxfp8", "mxfp4", "hifp8"])
def test_many_tensors_in_a_call_give_what_each_gives_alone(format_name: str | None) -> None:
    chosen = chosen_for(format_name, "input") if format_name else None
    many = [deferred(x, chosen) for x in tensors()]
    assert all(isinstance(one, Deferred) for one in many), "these tests need a C compiler"
    count_all(one for one in many if isinstance(one, Deferred))
    for one, x in zip(many, tensors(), strict=True):
        assert isinstance(one, Deferred)
        assert one.take() is None
        assert one.num_bytes == 0
        assert one.record() == statistics(x, chosen)


def test_blocks_at_the_ends_of_the_range_are_judged_by_torch_among_others() -> None:
    small = torch.full((4, 64), 2.0**-125, dtype=torch.bfloat16)
    usual = torch.ones(4, 64, dtype=torch.bfloat16)
    chosen = chosen_for("mxfp8", "input")
    many = [Deferred(x, chosen) for x in (usual, small, usual)]
    count_all(many)
    assert [one.record() for one in many] == [statistics(x, chosen) for x in (usual, small, usual)]


def test_without_a_compiler_they_are_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "kernels", lambda: None)
    assert isinstance(deferred(torch.ones(3)), Summary)


def test_a_tensor_is_released_once_it_is_counted() -> None:
    x = torch.ones(10, 10)
    pending = Deferred(x)
    assert pending.num_bytes == 400
    assert pending.is_of(x)
    assert not pending.is_of(x[0])
    pending.record()
    assert pending.num_bytes == 0
    assert not pending.is_of(x)


def test_a_tensor_that_was_changed_has_no_statistics() -> None:
    x = torch.ones(8)
    pending = Deferred(x)
    x.view(2, 4).mul_(2.0)
    assert pending.record() == {}
    assert pending.changed


def metadata(pending: Deferred, **more: Any) -> dict[str, Any]:
    return {"module": "fc1", "tensor": "input", "statistics": pending, **more}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_changed_tensor_is_listed_as_left_out_and_the_others_are_kept(tmp_path: Path) -> None:
    store = CaptureStore(tmp_path)
    tensors = [torch.full((4,), float(i)) for i in range(3)]
    for i, x in enumerate(tensors):
        store.add_statistics(About.of(metadata(Deferred(x), index=i)))
    tensors[1].zero_()
    store.flush()
    store.close()
    counted = lines(tmp_path / "statistics.jsonl")
    assert [(line["index"], line["statistics"]["mean"]) for line in counted] == [(0, 0.0), (2, 2.0)]
    (left_out,) = lines(tmp_path / "manifest.jsonl")
    assert left_out["index"] == 1
    assert left_out["file"] is None
    assert left_out["left_out"] == "it was changed in place before it was counted"


def test_stored_values_are_counted_in_their_copy(tmp_path: Path) -> None:
    store = CaptureStore(tmp_path)
    gate, x = stalled(store), torch.ones(64, 1024)
    pending = Deferred(x)
    store.add("bf16/x.pt", x, About.of(metadata(pending)))
    store.add_statistics(About.of(metadata(pending)))
    x.zero_()
    gate.set()
    store.flush()
    store.close()
    (listed,) = lines(tmp_path / "manifest.jsonl")
    (described,) = lines(tmp_path / "statistics.jsonl")
    assert listed["statistics"]["mean"] == described["statistics"]["mean"] == 1.0


def test_settle_computes_what_the_background_has_not(tmp_path: Path) -> None:
    store = CaptureStore(tmp_path)
    gate, x = stalled(store), torch.ones(16)
    pending = Deferred(x)
    store.add_statistics(About.of(metadata(pending)))
    store.send()
    store.settle([pending])
    assert pending.take() is None
    x.zero_()
    gate.set()
    store.flush()
    store.close()
    assert lines(tmp_path / "statistics.jsonl")[0]["statistics"]["mean"] == 1.0


def test_settle_leaves_a_tensor_whose_copy_is_counted_to_the_background(tmp_path: Path) -> None:
    store = CaptureStore(tmp_path)
    gate, x = stalled(store), torch.ones(64, 1024)
    pending = Deferred(x)
    store.add("bf16/x.pt", x, About.of(metadata(pending)))
    store.settle([pending])
    assert pending.take() is not None
    gate.set()
    store.flush()
    store.close()
    assert pending.take() is None


def test_pending_tensors_count_in_the_queue_and_are_sent_before_it_is_full(tmp_path: Path) -> None:
    store = CaptureStore(tmp_path, queue_bytes=8000)
    gate = stalled(store)
    for _ in range(4):
        store.add_statistics(About.of(metadata(Deferred(torch.ones(100)))))
    assert store.queue.num_bytes == 1600, "counted from when they are added"
    assert len(store._batch) == 1, "three make an eighth of the queue"
    gate.set()
    store.flush()
    store.close()
    assert len(lines(tmp_path / "statistics.jsonl")) == 4


def test_statistics_that_two_threads_compute_are_the_first_ones() -> None:
    x = torch.ones(8)
    pending = Deferred(x)
    count_all([pending])
    x.zero_()
    pending.end(summarise(x))
    assert (pending.changed, pending.record()["mean"]) == (False, 1.0)
