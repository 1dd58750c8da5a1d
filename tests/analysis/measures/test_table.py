from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quantexp.analysis.measures.measured import Request, measure
from quantexp.analysis.measures.row import TensorRow, Wanted, read_row
from quantexp.analysis.measures.table import CODE, NAME, MeasuresTable, key_of
from quantexp.capture.reader import CapturedTensor
from tests.analysis.captures import BF16, MX8, linear_formats
from tests.analysis.draw.conftest import normal, stored

ROW = TensorRow({"abs_max": 1.0})
#: Judged in a format with an exponent of its own for each value, and in one with blocks.
ALL = Request(("hifp8", "mxfp4"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    for name in ("a.png", "a.pdf", "b.json"):
        (tmp_path / name).touch()
    return tmp_path


def odd_tensors(folder: Path) -> list[CapturedTensor]:
    """An ordinary tensor, heads, zeros, a channel beyond a median of 0, Inf, declared formats, a sample, nothing."""
    beyond = torch.zeros(64, 32).bfloat16()
    beyond[:, 0] = 1.0
    infinite = normal(64, 32)
    infinite[0, 0] = math.inf
    place = {"layer": 3, "module": "fc1", "operation": "forward", "phase": "pre", "iteration": 2}
    about = {"layer_type": "attention", "tensor": "query", "module": "attention"}
    rows = {"of": "tokens", "axis": 0, "shape": [256, 32], "indices": list(range(0, 256, 4))}
    return [
        stored(folder, normal(64, 32), **place),
        stored(folder, normal(64, 1, 2, 32), **place | about),
        stored(folder, torch.zeros(64, 32).bfloat16(), **place),
        stored(folder, beyond, **place),
        stored(folder, infinite, **place),
        stored(folder, normal(64, 32), **place, formats=linear_formats(MX8)),
        stored(folder, normal(64, 32), **place, formats=linear_formats(BF16), sample=rows),
        stored(folder, torch.empty(0, 32).bfloat16(), **place),
    ]


def test_a_row_comes_back_to_the_last_bit(tmp_path: Path) -> None:
    """repr, because NaN differs from itself."""
    entries, written = odd_tensors(tmp_path), []
    for entry in entries:
        row, _ = read_row(entry, Wanted(record=True, request=ALL))
        MeasuresTable(tmp_path / "out").add(entry.name, key_of(entry), row)
        written.append(repr(row))
    assert any("inf" in text for text in written)
    assert any("nan" in text for text in written)
    table = MeasuresTable(tmp_path / "out")
    lines = [table.find(entry.name, key_of(entry)) for entry in entries]
    assert [repr(line.row) for line in lines if line is not None] == written


@pytest.mark.parametrize(
    "request_", [replace(ALL, operands_only=True), Request(("mxfp4",), operands_only=True)]
)
def test_a_request_for_less_gets_from_the_table_what_it_alone_would_measure(
    tmp_path: Path, request_: Request
) -> None:
    table = MeasuresTable(tmp_path / "out")
    for entry in odd_tensors(tmp_path):
        table.add(entry.name, key_of(entry), read_row(entry, Wanted(request=ALL))[0])
        assert repr(table.measured(entry, request_)) == repr(measure(entry, request_))
        assert table.measured(entry, Request(("mxfp8",))) is None


def test_measures_of_unchanged_inputs_stay_when_others_are_added(out: Path) -> None:
    (entry, *_) = odd_tensors(out)
    key = key_of(entry)
    MeasuresTable(out).add("a", key, read_row(entry, Wanted(record=True))[0], ["a.png"])
    row = MeasuresTable(out).add("a", key, read_row(entry, Wanted(request=ALL))[0])
    assert row.has(Wanted(record=True, request=ALL))
    assert MeasuresTable(out).has_files("a", key, ["a.png"])
    assert MeasuresTable(out).add("a", "other", ROW) == ROW


def test_a_tensor_is_read_once_for_all_of_its_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[CapturedTensor] = []
    load = CapturedTensor.torch

    def torch_and_note(entry: CapturedTensor) -> torch.Tensor:
        read.append(entry)
        return load(entry)

    monkeypatch.setattr(CapturedTensor, "torch", torch_and_note)
    entries = odd_tensors(tmp_path)
    for entry in entries:
        read_row(entry, Wanted(record=True, request=ALL))
    assert read == entries


def test_the_key_follows_the_file_and_its_line(tmp_path: Path) -> None:
    entry = stored(tmp_path, normal(4, 4))
    before = key_of(entry)
    assert key_of(entry) == before
    declared = CapturedTensor.of(tmp_path, {**entry.metadata, "formats": linear_formats(MX8)})
    assert key_of(declared) != before
    os.utime(entry.path, (1, 1))
    assert key_of(entry) != before


@pytest.mark.parametrize("measured", [{}, {"operands": 3}, {"iteration": []}])
def test_damaged_measures_are_not_taken(tmp_path: Path, measured: dict[str, object]) -> None:
    entry = stored(tmp_path, normal(4, 4))
    line = {"name": entry.name, "key": key_of(entry), "files": [], "request": {"formats": []}}
    (tmp_path / NAME).write_text(json.dumps({**line, "measured": measured}) + "\n")
    assert MeasuresTable(tmp_path).measured(entry, Request()) is None


def test_finished_work_is_recognised_while_its_inputs_and_files_are_the_same(out: Path) -> None:
    MeasuresTable(out).add("a", "1", ROW, ["a.png"])
    table = MeasuresTable(out)
    line = table.find("a", "1")
    assert line is not None
    assert line.row == ROW
    assert table.find("a", "2") is None
    assert table.has_files("a", "1", ["a.png"])
    assert not table.has_files("a", "1", ["a.pdf"]), "it was not drawn in this format"
    (out / "a.png").unlink()
    assert not table.has_files("a", "1", ["a.png"])


def test_formats_of_an_earlier_draw_stay_on_record(out: Path) -> None:
    for kind in ("png", "pdf"):
        MeasuresTable(out).add("a", "1", ROW, [f"a.{kind}"])
    assert MeasuresTable(out).has_files("a", "1", ["a.png", "a.pdf"])
    MeasuresTable(out).add("a", "2", ROW, ["a.pdf"])
    assert not MeasuresTable(out).has_files("a", "2", ["a.png"]), "it is of other values"


def test_a_torn_line_is_skipped_and_later_removed(out: Path) -> None:
    MeasuresTable(out).add("a", "1", ROW, ["a.png"])
    whole = (out / NAME).read_text()
    (out / NAME).write_text(whole + '{"name": "b", "key": "1", "fi')
    table = MeasuresTable(out)
    assert table.find("b", "1") is None
    table.add("a", "1", ROW, ["a.pdf"])
    assert MeasuresTable(out).has_files("a", "1", ["a.png", "a.pdf"])
    assert (out / NAME).read_text().startswith(whole)


def test_a_chapter_is_drawn_once_and_its_earlier_files_are_no_longer_its_own(out: Path) -> None:
    calls: list[str] = []

    def draw(*names: str) -> list[Path]:
        calls.append(names[0])
        return [out / name for name in names]

    assert MeasuresTable(out).once("a", 1, lambda: draw("a.png", "a.pdf")) == 2
    assert MeasuresTable(out).once("a", 1, lambda: draw("a.png", "a.pdf")) == 2
    assert MeasuresTable(out).once("a", 2, lambda: draw("b.json")) == 1
    assert MeasuresTable(out).once("a", 2, lambda: draw("b.json")) == 1
    assert calls == ["a.png", "b.json"]
    (out / "b.json").unlink()
    MeasuresTable(out).once("a", 2, lambda: draw("b.json"), is_complete=lambda: False)
    (out / "b.json").touch()
    MeasuresTable(out).once("a", 3, lambda: draw("a.pdf"), is_complete=lambda: False)
    MeasuresTable(out).once("a", 3, lambda: draw("a.pdf"))
    assert calls[2:] == ["b.json", "a.pdf", "a.pdf"]


def test_force_repeats_the_requested_work_and_keeps_the_record_of_the_rest(out: Path) -> None:
    MeasuresTable(out).add("a", "1", ROW, ["a.png"])
    MeasuresTable(out).once("b", 1, lambda: [out / "b.json"])
    forced = MeasuresTable(out, force=True)
    assert forced.find("a", "1") is None
    forced.add("a", "1", ROW, ["a.png"])
    assert forced.find("a", "1") is not None
    assert MeasuresTable(out).once("b", 1, lambda: pytest.fail("it was drawn before")) == 1


#: Rooms that hold no number of a tensor.
_WITHOUT_NUMBERS = ("errors", "folders", "reading", "runs", "schema", "terminal")


def test_every_module_that_measures_is_in_the_digest_of_the_code() -> None:
    code = (
        "import sys\nimport quantexp.analysis.measures.row\n"
        "print(*(m for m in sys.modules if m.startswith('quantexp.')))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    parts = {f"quantexp.{part.removesuffix('.py')}" for part in (*CODE, *_WITHOUT_NUMBERS)}
    outside = {
        module
        for module in shown.stdout.split()
        if not any(f"{module}.".startswith(f"{part}.") for part in parts)
    }
    assert outside == set()
