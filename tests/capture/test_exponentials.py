"""exp(S - m), which attention multiplies in place of P where a scheme divides after the product."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quantexp.analysis.tensors.operands import declared_operands, slots_of_tensor
from quantexp.capture import open_capture
from quantexp.capture.select.choice import expected_tensors
from quantexp.cli.main import main
from quantexp.formats import quantise
from quantexp.quant.attention import tiles
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment

WORDS = (
    "quant=bf16",
    "quant.pv.fprop.P={format: mxfp8, unnormalised: true}",
    "quant.pv.dgrad_v.P.format=mxfp8",
    "capture.attn_weights=true",
    "capture.values=both",
    "training.iterations=1",
    "training.warmup_iterations=0",
    "model.num_layers=1",
)
NAMES = {"exp_scores", "exp_scores_fprop", "exp_scores_fprop_scale", "attn_weights"}


@pytest.mark.parametrize("path", ["plain", "tiled"])
def test_it_is_captured_beside_p_and_is_the_source_of_the_operand(
    run_tiny: Callable[..., RunDir],
    tiny: Callable[..., Experiment],
    monkeypatch: pytest.MonkeyPatch,
    path: str,
) -> None:
    monkeypatch.setattr(tiles, "ROWS", 32)
    words = (*WORDS, f"training.attention={path}")
    run = run_tiny(*words)
    entries = open_capture(run.tensors).select(module="attention")
    by_name = {e.metadata["tensor"]: e for e in entries}
    names = Counter(e.metadata["tensor"] for e in entries if e.metadata["operation"] == "forward")
    assert names.keys() >= NAMES
    assert "attn_weights_fprop" not in by_name
    expected = [e for e in expected_tensors(tiny(*words)) if e.module.name == "attention"]
    assert names == Counter(e.tensor for e in expected if e.operation == "forward")
    E, P, operand = (
        by_name[name].torch() for name in ("exp_scores", "attn_weights", "exp_scores_fprop")
    )
    assert E.amax(-1).eq(1).all()
    assert _far(E / E.float().sum(-1, keepdim=True), P) < 2.0**-8, "a rounding of both"
    assert torch.equal(operand, quantise(E, "mxfp8", axis=-1, scale_rule="rceil"))
    E_line, P_line = by_name["exp_scores"].metadata, by_name["attn_weights"].metadata
    assert [d.slot for d in declared_operands(E_line)] == ["P fprop"]
    assert [d.slot for d in declared_operands(P_line)] == ["P dgrad_v"]
    assert [str(slot) for slot in slots_of_tensor(E_line)] == ["pv.fprop.P"]
    assert [str(slot) for slot in slots_of_tensor(P_line)] == ["pv.dgrad_v.P"]
    assert main(["captures", str(run.root), "--check"]) == 0


def test_requantise_scores_it_as_the_operand_of_the_forward_product(
    run_tiny: Callable[..., RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_tiny(*WORDS)
    assert main(["requantise", str(run.root), "tensor=exp_scores", "--formats", "mxfp8,mxfp4"]) == 0
    assert "pv.fprop.P" in capsys.readouterr().out


def _far(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())
