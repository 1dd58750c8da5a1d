"""The output layer in everything that a person reads of a run: it has a name where decoder layers have numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.console import Console

from quantexp.analysis.numerics.heat import draw_heat
from quantexp.analysis.numerics.lines import draw_lines
from quantexp.analysis.numerics.series import SQNR, Member
from quantexp.analysis.quick.fidelity_panel import Cell, grid_of
from quantexp.analysis.report.cells import numerics
from quantexp.analysis.report.judged import Deadline
from quantexp.analysis.report.proof import proof
from quantexp.analysis.tensors.operands import slots_of_tensor
from quantexp.analysis.tensors.place import Place
from quantexp.capture import open_capture
from quantexp.capture.report import summary
from quantexp.capture.table import print_list
from quantexp.runs.paths import RunDir
from quantexp.runs.status import read_json

MEMBERS = [
    Member(Place(module=module, layer=layer), "fprop.x", 30.0)
    for module, layer in (("fc1", 0), ("fc1", 1), ("output", 2))
]


@pytest.fixture(scope="module")
def run(run_tiny_once: Callable[..., RunDir]) -> RunDir:
    """A run of two layers whose output layer is quantised, with an embedding tied to it."""
    words = ("training.iterations=1", "training.warmup_iterations=0", "capture=tensors")
    return run_tiny_once("quant=bf16", "quant/output=mxfp8", *words)


def test_report_names_it(run: RunDir) -> None:
    table = numerics(run, None, 10_000, Deadline(None))
    assert table.layers == [0, 1, "output"]
    of_output = {cell[2] for cell in table.cells if table.rows[cell[1]].module == "output"}
    assert of_output == {2}
    proved = proof(read_json(run.precision), [], "bf16")
    rows = {(row.layers, row.module) for row in proved.rows if row.site == "output"}
    assert rows == {("output", "output"), ("output", "embedding")}


def test_captures_name_it(run: RunDir) -> None:
    capture = open_capture(run.tensors)
    assert list(summary(capture)["by_layer"]) == ["0", "1", "output"]
    entries = capture.select(module="output")
    assert entries[0].label == "output forward input"
    assert {entry.metadata["layer"] for entry in entries} == {2}
    assert all("L2-output" in entry.name for entry in entries.with_values())
    console = Console(width=200)
    with console.capture() as text:
        print_list(entries, console)
    assert "layer output, module output" in text.get()


def test_figures_name_it() -> None:
    heat = draw_heat("", "", {SQNR: MEMBERS})
    assert [label.get_text() for label in heat.axes[0].get_xticklabels()] == ["0", "1", "output"]
    lines = draw_lines("", "", {SQNR: MEMBERS}, lambda member: member.place.layer, "layer")
    formatter = lines.axes[0].xaxis.get_major_formatter()
    assert [formatter(layer, 0) for layer in (0, 1, 2)] == ["0", "1", "output"]
    cells = [Cell(m.module, "x fprop", m.place.layer, m.value, "") for m in MEMBERS]
    assert grid_of(cells, min, 40, 3.0).layers == ("0", "1", "output")


def test_requantisation_scores_its_own_site() -> None:
    line = {"layer_type": "linear", "module": "output", "tensor": "input"}
    assert [str(slot) for slot in slots_of_tensor(line)] == ["output.fprop.x", "output.wgrad.x"]
