"""`quantexp bisect` names planted troubles of different kinds, and clears the quantisation of one that bf16 has too."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantexp.cli.main import main
from quantexp.config.compose import compose
from quantexp.extras.bisect import rounds
from quantexp.launch.attempt import open_run
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, read_json, write_json, write_status
from quantexp.schema import Experiment
from tests.conftest import run_here
from tests.extras.bisect import bisections

Captured = pytest.CaptureFixture[str]
KEEPS = ("capture=off", "checkpoint.optimizer=true")
#: Layer 1's inputs under the amax of the iteration before, and NaN where they exceed it.
OVERFLOW = (
    "quant=linear_mxfp8",
    "quant.rules=[{layers: [1], sites: [linear], products: [fprop], operands: [x], format: fp8_e4m3, "
    "scaling: delayed, window: 1, saturate: false}]",
)
#: A format without a scale whose largest value is below most weights.
CLIPPED = (
    "quant=linear_mxfp8",
    "+quant.formats.clipped={element: {values: [-0.0078125, 0, 0.0078125]}, block: tensor, scale: none}",
    "quant.rules=[{sites: [linear], products: [dgrad], operands: [w], format: clipped}]",
)


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch, in_tmp: Path) -> None:
    monkeypatch.setattr("quantexp.extras.bisect.rounds.run_all", bisections.run_here)
    monkeypatch.setattr("quantexp.extras.bisect.culprit.run_all", bisections.run_here)


def bisected(capsys: Captured, *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["bisect", "--json", *words, "out=found"]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_layer_that_overflows_is_named_and_its_rule_trains(
    run_tiny: Callable[..., RunDir], tiny_words: list[str], tmp_path: Path, capsys: Captured
) -> None:
    words = ("training.iterations=6", *KEEPS, "checkpoint.every=1")
    run = run_tiny(*words, *OVERFLOW)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    first = next(line["iteration"] for line in lines if line["skipped"])
    by_layer = bisected(capsys, run.root.name, "--by", "layer")
    assert by_layer["measure"] == "nonfinite"
    assert (by_layer["start"], by_layer["last"]) == (first - 1, first)
    assert (
        by_layer["control"] == "the replay with nothing changed has the run's 1 losses, bit for bit"
    )
    assert by_layer["enough"] == [["layer 1"]]
    assert not by_layer["chance"]["likely"]
    assert [each["trouble"] for each in by_layer["chance"]["scheme"]] == [True, True]
    assert [each["trouble"] for each in by_layer["chance"]["bf16"]] == [False, False]
    by_slot = bisected(capsys, run.root.name, "--by", "slot", "--chance", "0")
    assert by_slot["keep_in_bf16"] == ["linear.fprop.x"]
    for name in ("bisect.json", "bisect.png", "bisect.pdf", "quant/bisected.yaml"):
        assert (Path("found") / name).is_file()
    kept = compose(
        [*tiny_words, *words, "quant=bisected", f"paths.root={tmp_path / 'kept'}"], Path("found")
    )
    trained = run_here(kept)
    lines = [json.loads(line) for line in trained.metrics.read_text().splitlines()]
    assert len(lines) == 6
    assert not any(line["skipped"] for line in lines)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_scale_that_saturates_one_slot_is_named_by_its_gradient(
    run_tiny: Callable[..., RunDir], capsys: Captured
) -> None:
    run = run_tiny("training.iterations=3", *KEEPS, "checkpoint.every=1", *CLIPPED)
    words = ("--measure", "gradient", "--from", "1")
    result = bisected(capsys, run.root.name, *words)
    assert result["enough"] == [["linear.dgrad.w"]]
    assert result["keep_in_bf16"] == ["linear.dgrad.w"]
    assert result["bound"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_divergence_that_bf16_has_too_is_not_the_quantisation(
    run_tiny: Callable[..., RunDir], capsys: Captured
) -> None:
    rates = ("training.lr=0.3", "training.min_lr=0.3", "training.clip_grad=0")
    run = run_tiny(
        "training.iterations=8", *KEEPS, "checkpoint.at_end=true", "quant=linear_mxfp8", *rates
    )
    result = bisected(capsys, run.root.name, "--from", "0", code=1)
    assert result["verdict"] == "not the quantisation"
    assert result["words"].startswith("not the quantisation: ")
    assert len(result["replays"]) == 2
    assert result["control"].endswith("losses, bit for bit")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_healthy_run_is_not_reproduced(run_tiny: Callable[..., RunDir], capsys: Captured) -> None:
    run = run_tiny("training.iterations=3", "capture=off", "quant=linear_mxfp8")
    assert (
        main(["bisect", run.root.name, "--from", "0", "--measure", "nonfinite", "out=found"]) == 1
    )
    shown = capsys.readouterr().out
    assert "not reproduced: the replay with nothing changed does not show the trouble" in shown
    assert not Path("found/quant").exists()


@pytest.mark.slow
def test_gradients_are_listed_and_drawn(run_tiny: Callable[..., RunDir], capsys: Captured) -> None:
    run = run_tiny("capture=off", "quant=linear_mxfp4")
    words = ["bisect", run.root.name, "--gradient", "--from", "0", "--by", "site", "out=found"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "gradient of iteration 1 against bf16" in shown
    assert "linear" in shown
    assert (Path("found") / "gradients.png").is_file()
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["by"] == ["site"]


GRADIENTS = {
    "iteration": 7,
    "by": ["layer"],
    "bf16_loss": 2.5,
    "bf16_norm": 1.0,
    "groups": ["layer 0"],
    "bf16_norms": [1.0],
    "passes": [
        {
            "kind": "scheme",
            "unit": None,
            "loss": 2.5,
            "whole": {"cosine": 0.9, "distance": 0.25},
            "groups": [{"cosine": 0.9, "distance": 0.25}],
        }
    ],
}


def test_gradients_of_megatron_lms_loop_are_shown_where_it_compared_them(
    in_tmp: Path, capsys: Captured
) -> None:
    run = RunDir(in_tmp / "runs" / "theirs")
    run.root.mkdir(parents=True)
    run.config.write_text("quant: {name: FA_mxfp8}\n")
    write_status(run.status, Status(state=State.COMPLETED))
    identity = {"loop": {"name": "Megatron-LM", "version": "0.16.1"}}
    run.provenance.write_text(json.dumps({"identity": identity}))
    assert main(["bisect", str(run.root), "--gradient", "--by", "layer"]) == 1
    assert capsys.readouterr().err == (
        "quantexp: theirs was trained by Megatron-LM, which alone can repeat its data: start its script once more with "
        "QUANTEXP_GRADIENT=layer, which compares the gradients of the first iteration after its checkpoint and ends; "
        "then: quantexp bisect FOLDER --gradient\n"
    )
    run.gradients.write_text(json.dumps(GRADIENTS))
    assert main(["bisect", str(run.root), "--gradient"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("gradient of iteration 7 against bf16\n")
    assert "FA_mxfp8" in printed
    assert (run.root / "gradients.png").is_file()
    for words in (["--from", "3"], ["launcher.max_parallel=2"]):
        assert main(["bisect", str(run.root), "--gradient", *words]) == 1
        refused = (
            f"quantexp: {' '.join(words)} has no effect: Megatron-LM has compared these gradients\n"
        )
        assert capsys.readouterr().err == refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--gradient", "--steps", "3"),
            "--steps has no effect beside --gradient: drop one of them",
        ),
        (
            ("--gradient", "--margin", "3"),
            "--margin has no effect beside --gradient: drop one of them",
        ),
        (
            ("--gradient", "--chance", "3"),
            "--chance has no effect beside --gradient: drop one of them",
        ),
        (("--chance", "-1"), "--chance must be at least 0, got -1"),
        (("--steps", "0"), "--steps must be at least 1, got 0"),
        (("--by", "head"), "--by must be among slot, product, site, module, layer, got 'head'"),
    ],
)
def test_flags_without_an_effect_are_refused(
    words: tuple[str, ...], message: str, make_run: Callable[..., RunDir], capsys: Captured
) -> None:
    make_run()
    assert main(["bisect", "m_d_bf16-00000001", *words]) == 1
    assert capsys.readouterr().err == f"quantexp: {message}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--measure", "loss", "--threshold", "1"),
            "--threshold is for --measure gradient, and the trouble is looked for by loss",
        ),
        (("--measure", "loss", "--margin", "-1"), "--margin must be greater than 0, got -1.0"),
        (
            ("--measure", "gradient", "--chance", "1"),
            "--chance has no effect on the gradient, which is of one iteration",
        ),
    ],
)
def test_bounds_are_those_of_the_measure(
    words: tuple[str, ...], message: str, make_run: Callable[..., RunDir], capsys: Captured
) -> None:
    make_run(iteration=4)
    assert main(["bisect", "m_d_bf16-00000001", *words]) == 1
    assert capsys.readouterr().err == f"quantexp: {message}\n"


def test_a_replay_of_other_code_is_repeated(tiny: Callable[..., Experiment]) -> None:
    experiment = tiny()
    with open_run(experiment, "cpu", []) as (folder, _):
        run = folder.run
    for state in (State.COMPLETED, State.FAILED):
        write_status(run.status, Status(state, created="2026-01-01"))
        run.metrics.write_text(f'{{"iteration": {experiment.training.last_iteration}}}\n')
        provenance = read_json(run.provenance)
        assert rounds._has_run(run, experiment)
        write_json(run.provenance, {**provenance, "code": "0123456789abcdef"})
        assert not rounds._has_run(run, experiment)
        write_json(run.provenance, provenance)


def test_one_run_is_taken(capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        main(["bisect", "a", "b"])
    assert "bisect takes one RUN, got a b" in capsys.readouterr().err


def test_a_run_without_metrics_needs_from_and_steps(
    make_run: Callable[..., RunDir], capsys: Captured
) -> None:
    make_run()
    assert main(["bisect", "m_d_bf16-00000001"]) == 1
    assert capsys.readouterr().err == (
        "quantexp: m_d_bf16-00000001 has too few iterations to look for trouble in; give --from and --steps\n"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_loss_that_jumps_is_traced_to_the_slot_that_changed(
    run_tiny: Callable[..., RunDir], capsys: Captured
) -> None:
    rule = (
        "{sites: [linear], products: [fprop], operands: [w], format: signs, iterations: [4, null]}"
    )
    run = run_tiny(
        *("training.iterations=5", *KEEPS, "checkpoint.every=3", "training.lr=1e-2"),
        "quant=linear_mxfp8",
        "+quant.formats.signs={element: {values: [-1, 1]}, block: tensor, scale: none}",
        f"quant.rules=[{rule}]",
    )
    words = ("--measure", "loss", "--from", "3", "--steps", "1", "--margin", "0.01")
    result = bisected(capsys, run.root.name, *words)
    assert result["enough"] == [["linear.fprop.w"]]
    assert result["keep_in_bf16"] == ["linear.fprop.w"]
    assert result["control"].endswith("1 losses, bit for bit")
    assert result["replays"][0]["trouble"]
    assert not result["replays"][1]["trouble"]
