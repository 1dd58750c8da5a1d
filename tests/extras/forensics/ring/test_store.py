"""A ring scores each tensor in the format that its slot declares, and sees a slot that saturates."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quantexp.capture.lines import lists_of
from quantexp.capture.store.manifest import STATISTICS, lines_of
from quantexp.extras.forensics.ring.triggers import Fired, Triggers
from quantexp.runs.dossiers import Trigger, folder_of, read_dossiers
from quantexp.runs.metrics import Metrics
from quantexp.runs.paths import RunDir

RunTiny = Callable[..., RunDir]


def scored(run: RunDir, iteration: int) -> dict[tuple[str, str], str | None]:
    """Layer 1's tensors, and the formats that their statistics score."""
    return {
        (line["module"], line["tensor"]): line["statistics"].get("fidelity", {}).get("format")
        for file in lists_of(folder_of(run, iteration), STATISTICS)
        for line in lines_of(file)
        if line["layer"] == 1
    }


def test_slot_that_rounds_to_zero_from_an_iteration_on_fires_with_its_name(
    run_tiny: RunTiny,
) -> None:
    rule = "{iterations: [12, 100], layers: [1], modules: [fc1], products: [fprop], operands: [x], format: mxfp4}"
    run = run_tiny(
        "quant=linear_mxfp8",
        f"quant.rules=[{rule}]",
        "capture=off",
        "capture.ring=8",
        "capture.trigger.deviations=null",
        "capture.trigger.share=0.05",
        "training.iterations=14",
    )
    (dossier,) = read_dossiers(run)
    assert (dossier.iteration, dossier.trigger) == (12, Trigger.UNDERFLOW)
    assert "L1-fc1 input" in dossier.words
    formats = scored(run, 12)
    assert formats["fc1", "input"] == "mxfp4_e2m1"
    assert formats["fc2", "input"] == "mxfp8_e4m3"
    assert formats["fc1", "output"] is None


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("more/linear_mxfp4_sr_rht", {"format": "mxfp4_e2m1", "scale_rule": "floor"}),
        ("more/linear_hifp8_delayed", {"format": "hifp8", "scaling": "current"}),
    ],
)
def test_score_leaves_out_what_depends_on_the_step(
    run_tiny: RunTiny, monkeypatch: pytest.MonkeyPatch, scheme: str, options: dict[str, str]
) -> None:
    monkeypatch.setattr(Triggers, "of_metrics", fires_at(8))
    run = run_tiny(f"quant={scheme}", "capture=off", "capture.ring=8", "training.iterations=8")
    line = next(
        line
        for file in lists_of(folder_of(run, 8), STATISTICS)
        for line in lines_of(file)
        if line["tensor"] == "grad_output" and line["module"] == "fc1"
    )
    fidelity = line["statistics"]["fidelity"]
    assert {key: fidelity[key] for key in options} == options
    assert fidelity["sqnr_db"] > 10


def fires_at(iteration: int) -> Callable[..., Fired | None]:
    def of_metrics(self: Triggers, metrics: Metrics) -> Fired | None:
        return Fired(Trigger.LOSS, "planted") if metrics.iteration == iteration else None

    return of_metrics
