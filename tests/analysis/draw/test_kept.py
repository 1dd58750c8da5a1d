from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from quantexp.analysis.draw.drawn import Drawn
from quantexp.analysis.draw.kept import Kept, KeptPool, PartDrawn
from quantexp.analysis.draw.work import Done
from quantexp.analysis.numerics.drift import drift_from
from quantexp.analysis.numerics.measured import Measured, Request, measure
from quantexp.capture.reader import CapturedTensor
from quantexp.errors import CaptureError

from .conftest import MX8, linear_formats, normal, stored

#: Judged in a format with an exponent of its own for each value, and in one with blocks.
LOOK = partial(measure, request=Request(("hifp8", "mxfp4")))


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    (tmp_path / "kept").mkdir()
    return Kept(tmp_path / "kept")


def refuse(*arguments: object, **more: object) -> object:
    raise AssertionError("it is looked at again")


def odd_tensors(folder: Path) -> list[CapturedTensor]:
    """An ordinary tensor, heads, zeros, a channel beyond a median of 0, Inf, a declared format, nothing."""
    beyond = torch.zeros(64, 32).bfloat16()
    beyond[:, 0] = 1.0
    infinite = normal(64, 32)
    infinite[0, 0] = math.inf
    place = {"layer": 3, "module": "fc1", "operation": "forward", "phase": "pre", "iteration": 2}
    about = {"layer_type": "attention", "tensor": "query", "module": "attention"}
    return [
        stored(folder, normal(64, 32), **place),
        stored(folder, normal(64, 1, 2, 32), **place | about),
        stored(folder, torch.zeros(64, 32).bfloat16(), **place),
        stored(folder, beyond, **place),
        stored(folder, infinite, **place),
        stored(folder, normal(64, 32), **place, formats=linear_formats(MX8)),
        stored(folder, torch.empty(0, 32).bfloat16(), **place),
    ]


def test_measures_are_kept_to_the_last_bit(tmp_path: Path, kept: Kept) -> None:
    """repr, because NaN differs from itself."""
    entries = odd_tensors(tmp_path)
    expected = [repr(LOOK(entry)) for entry in entries]
    assert any("inf" in text for text in expected)
    assert any("nan" in text for text in expected)
    for _ in range(2):
        results = [result for _, result in KeptPool(1, kept).each(LOOK, entries)]
        assert [repr(result) for result in results] == expected


@pytest.mark.parametrize("same", [True, False])
def test_drift_is_kept_and_so_is_its_absence(
    tmp_path: Path, kept: Kept, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    """Zeros in the reference have no drift, NaN; a tensor that the reference lacks has None."""
    monkeypatch.setattr("quantexp.analysis.numerics.drift._index", lambda reference: {})
    if same:
        (tmp_path / "reference").mkdir()
        zeros = stored(tmp_path / "reference", torch.zeros(4, 4))
        monkeypatch.setattr(
            "quantexp.analysis.numerics.drift._index", lambda reference: {KEY: zeros}
        )
        monkeypatch.setattr("quantexp.analysis.numerics.drift.same_tensor", lambda metadata: KEY)
    look, entry = partial(drift_from, reference="reference"), stored(tmp_path, normal(4, 4))
    first = [repr(result) for _, result in KeptPool(1, kept).each(look, [entry])]
    monkeypatch.setattr("quantexp.analysis.numerics.drift.same_tensor", refuse)
    assert [repr(result) for _, result in KeptPool(1, kept).each(look, [entry])] == first
    assert first == ["nan" if same else "None"]


KEY = ("key",)


def values_of(
    pool: KeptPool, look: Callable[[CapturedTensor], object], *entries: CapturedTensor
) -> int:
    """How many of the entries are read while the pool looks at them."""
    read: list[Path] = []
    original = CapturedTensor.torch

    def torch_and_note(entry: CapturedTensor) -> torch.Tensor:
        read.append(entry.path)
        return original(entry)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CapturedTensor, "torch", torch_and_note)
        assert [entry for entry, _ in pool.each(look, entries)] == list(entries)
    return len(read)


def test_a_look_is_repeated_for_another_file_or_request_or_after_damage(
    tmp_path: Path, kept: Kept
) -> None:
    pool, entries = KeptPool(1, kept), odd_tensors(tmp_path)[:3]
    assert values_of(pool, LOOK, *entries) == 3
    assert values_of(pool, LOOK, *entries) == 0
    os.utime(entries[1].path, ns=(1, 1))
    assert values_of(pool, LOOK, *entries) == 1
    assert values_of(pool, partial(measure, request=Request(("mxfp6_e2m3",))), *entries[:1]) == 1
    for file in kept.folder.iterdir():
        file.write_text(file.read_text()[:20])
    assert values_of(pool, LOOK, *entries) == 3


def test_errors_are_not_kept(tmp_path: Path, kept: Kept) -> None:
    entry = stored(tmp_path, normal(4, 4))
    entry.path.write_bytes(b"damaged")
    ((_, result),) = KeptPool(1, kept).each(LOOK, [entry])
    assert isinstance(result, CaptureError)
    assert list(kept.folder.iterdir()) == []


def test_other_looks_are_not_kept(tmp_path: Path, kept: Kept) -> None:
    entry = stored(tmp_path, normal(4, 4))
    ((_, result),) = KeptPool(1, kept).each(label_of, [entry])
    assert result == entry.label
    assert list(kept.folder.iterdir()) == []


def label_of(entry: CapturedTensor) -> str:
    return entry.label


def test_results_come_in_order_whichever_are_kept(tmp_path: Path, kept: Kept) -> None:
    entries = odd_tensors(tmp_path)
    list(KeptPool(1, kept).each(LOOK, entries[1::2]))
    results = list(KeptPool(1, kept).each(LOOK, entries))
    assert [entry for entry, _ in results] == entries
    measures = [result for _, result in results if isinstance(result, Measured)]
    assert [repr(one) for one in measures] == [repr(LOOK(entry)) for entry in entries]


def test_statistics_of_a_task_are_taken_while_key_and_figures_are_the_same(
    tmp_path: Path, kept: Kept
) -> None:
    (tmp_path / "a.png").touch()
    done = Done({"abs_max": 1.5, "quantiles": {"0.5": 0.25}}, "all zero")
    part = PartDrawn(Drawn(tmp_path), kept)
    part.add("a", [1, None], ["a.png"], done)
    line = part.find("a", [1, None], ["a.png"])
    assert line is not None
    assert line.done == done
    assert part.find("a", [2, None], ["a.png"]) is None
    assert part.find("a", [1, None], ["a.png", "a.pdf"]) is None
    (tmp_path / "a.png").unlink()
    assert part.find("a", [1, None], ["a.png"]) is None


def test_statistics_of_an_earlier_draw_are_taken_too(tmp_path: Path, kept: Kept) -> None:
    (tmp_path / "a.png").touch()
    Drawn(tmp_path).add("a", [1], ["a.png"], Done({"abs_max": 1.5}, None))
    assert PartDrawn(Drawn(tmp_path), kept).find("a", [1], ["a.png"]) is not None
    assert PartDrawn(Drawn(tmp_path, force=True), kept).find("a", [1], ["a.png"]) is None
