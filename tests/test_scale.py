"""The page about large runs: its tables are those of the benchmark, and its small cases those of a real run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from quantexp.model.layout import Layout
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("scale")
    del sys.modules["scale"]


def test_tables_of_the_page_are_those_of_the_formulas(scale: ModuleType) -> None:
    text = scale.PAGE.read_text().partition(scale.BEGIN)[2].partition(scale.END)[0]
    assert text == scale.tables()


def test_capture_of_a_divided_model_has_the_bytes_of_whole_ones(
    scale: ModuleType, tiny: Callable[..., Experiment]
) -> None:
    words = ("capture=tensors", "capture.iterations=[1]", "training.global_batch_size=8")
    whole = tiny(*words, "launcher.num_processes=2")
    divided = tiny(*words, "launcher.num_processes=4", "parallel.tensor=2")
    assert Layout.of(divided).data == 2
    assert scale.captured(divided) == scale.captured(whole)
    assert scale.captured(divided).num_bytes > scale.captured(tiny(*words)).num_bytes


@pytest.mark.slow
def test_lines_and_records_are_as_long_as_those_of_a_run(
    scale: ModuleType, run_tiny: Callable[..., RunDir], tiny: Callable[..., Experiment]
) -> None:
    """Within a fifth: lines differ by the names of modules, the digits of numbers and the paths of the machine."""
    words = ("capture=tensors", "capture.iterations=[1]", "quant=FA_linear_mxfp8")
    run = run_tiny(*words)
    manifest, statistics = (run.tensors / f"{name}.jsonl" for name in ("manifest", "statistics"))
    for file, line in (
        (manifest, scale.MANIFEST_LINE),
        (statistics, scale.STATISTICS_LINE),
        (run.metrics, scale.METRICS_LINE),
    ):
        lines = file.read_text().splitlines(keepends=True)
        assert sum(map(len, lines)) / len(lines) == pytest.approx(line, rel=0.2), file.name
    files = (run.precision, run.provenance, run.config, run.status)
    measured = sum(file.stat().st_size for file in files)
    assert scale._record_bytes(tiny(*words)) == pytest.approx(measured, rel=0.2)
    experiment = tiny(*words)
    values = sum(file.stat().st_size for file in run.tensors.rglob("*.pt"))
    framing = 6_000 * len(list(run.tensors.rglob("*.pt")))  # a zip file's headers and the metadata
    size = scale.captured(experiment)
    assert size.tensors == len(list(run.tensors.rglob("*.pt")))
    assert size.num_bytes < values < size.num_bytes + framing
