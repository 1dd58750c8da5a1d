"""A format in Python is judged on the whole tensor, by all that judge a capture; the oracle is torch alone."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from quantexp.analysis.measures.measured import Request, measure
from quantexp.capture.reader import open_capture
from quantexp.capture.statistics.counts import Counts
from quantexp.capture.statistics.fidelity import chosen_for
from quantexp.capture.statistics.summary import statistics
from quantexp.cli.main import main
from tests.analysis.captures import Capture
from tests.extras.requantise.conftest import write_capture

SOURCE = """
class Ternary:
    def quantise(self, x, *, axis, generator):
        scale = x.abs().float().mean(dim=axis, keepdim=True)
        return ((x / scale).round().clamp(-1, 1) * scale).to(x.dtype)
"""


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The format's name, with a module of its own for each test."""
    module = f"ternary_of_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{module}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return f"{module}:Ternary"


def weight(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of many magnitudes; more elements than a sample has."""
    x = torch.randn(2048, 256, generator=torch.Generator().manual_seed(1))
    return (x * torch.linspace(0.1, 4, 2048)[:, None]).to(dtype)


def sqnr_db(x: torch.Tensor, axis: int) -> float:
    scale = x.abs().float().mean(dim=axis, keepdim=True)
    q = ((x / scale).round().clamp(-1, 1) * scale).to(x.dtype).double()
    x = x.double()
    return float(10 * torch.log10((x**2).sum() / ((x - q) ** 2).sum()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_its_statistics_are_those_of_the_tensor(name: str, dtype: torch.dtype) -> None:
    x = weight(dtype)
    fidelity = statistics(x, chosen_for(name, "weight"))["fidelity"]
    # 1e-9 dB: float64 sums in another order.
    assert fidelity["sqnr_db"] == pytest.approx(sqnr_db(x, -1), abs=1e-9)
    assert fidelity["saturated_share"] is None
    assert "scale_exponents" not in fidelity
    empty = statistics(x[:0], chosen_for(name, "weight"))["fidelity"]
    assert empty["sqnr_db"] is None
    assert "scale_exponents" not in empty


def test_its_numerics_are_those_of_the_whole_tensor(name: str, capture: Capture) -> None:
    x = weight()
    capture.add(x, "weight", quant_type="bf16")
    (entry,) = open_capture(capture.dir)
    judged = {one.slot: one for one in measure(entry, Request((name,))).operands}
    for slot, axis in (("fprop.w", -1), ("dgrad.w", 0)):
        assert judged[slot].num_elements == x.numel()
        assert judged[slot].fidelity.sqnr_db == pytest.approx(sqnr_db(x, axis), abs=1e-9)
        assert torch.tensor(judged[slot].fidelity.saturated_share).isnan()
        assert judged[slot].scale_exponents == Counts()


def test_requantise_scores_it_beside_others(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = weight()
    run = write_capture(tmp_path / "run" / "tensors", {("fc1", "weight", 0): x}).parent
    words = ["requantise", str(run), "--formats", f"{name},mxfp4", "--sqnr", "3"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "/-" in out
    assert "scored       1 file, all elements\n" in out
    with (run / "requantise" / "requantise.csv").open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["format"] == name]
    scored = {row["product"]: float(row["sqnr_db"]) for row in rows if not row["hadamard"]}
    assert scored == {
        "fprop": pytest.approx(sqnr_db(x, -1), abs=1e-9),
        "dgrad": pytest.approx(sqnr_db(x, 0), abs=1e-9),
    }
