"""Held-out samples: when they are evaluated, what their loss is, and that nothing else changes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantexp.config.evaluation import is_evaluated, num_evaluations, num_samples
from quantexp.errors import ConfigError
from quantexp.launch.attempt import open_run
from quantexp.runs.paths import RunDir
from quantexp.schema import Experiment
from tests.conftest import run_here

Tiny = Callable[..., Experiment]
RunTiny = Callable[..., RunDir]
EVALUATED = ("training.iterations=5", "evaluation.every=2", "evaluation.samples=4")


def lines(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def captured(run: RunDir) -> set[str]:
    manifest = (run.tensors / "manifest.jsonl").read_text().splitlines()
    return {str(json.loads(line)["hash"]) for line in manifest}


@pytest.mark.slow
def test_loss_of_held_out_samples_is_logged_when_due_and_training_is_unchanged(
    run_tiny: RunTiny,
) -> None:
    words = ("quant=FA_linear_mxfp8", "capture.control_iter=0", "training.iterations=5")
    plain = lines(run_tiny(*words))
    evaluated = lines(run_tiny(*words, *EVALUATED, "force=true"))
    for one, other in zip(plain, evaluated, strict=True):
        assert [one[key] for key in ("loss", "grad_norm", "lr")] == [
            other[key] for key in ("loss", "grad_norm", "lr")
        ]
    assert [line["iteration"] for line in evaluated if line["validation_loss"]] == [2, 4, 5]
    for line in evaluated:
        if line["validation_loss"]:
            assert line["perplexity"] == pytest.approx(math.exp(line["validation_loss"]))
            assert line["validation_loss"] == pytest.approx(math.log(257), abs=1.0)
    assert all(line["validation_loss"] is None for line in plain)


@pytest.mark.slow
def test_evaluation_is_not_captured(run_tiny: RunTiny) -> None:
    words = ("capture.control_iter=0", "training.iterations=2")
    plain = run_tiny(*words)
    hashes = captured(plain)
    again = run_tiny(*words, "evaluation.every=1", "evaluation.samples=4", "force=true")
    assert again.root == plain.root, "an evaluation changes no identity"
    assert captured(again) == hashes


def test_loss_is_that_of_training_on_the_same_samples(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With constant weights and each step's training samples as held-out samples, both means are equal."""
    from quantexp.training.megatron import data_loader
    from quantexp.training.worker import Worker

    build = data_loader.build_datasets

    def same(*args: Any, **kwargs: Any) -> data_loader.Datasets:
        datasets = build(*args, **{**kwargs, "num_samples_valid": 0})
        return data_loader.Datasets(datasets.train, datasets.train)

    monkeypatch.setattr(data_loader, "build_datasets", same)
    experiment = tiny(
        "training.lr=1e-30",
        "training.min_lr=0",
        "training.precision=fp32",
        "training.iterations=2",
        "evaluation.every=1",
        "evaluation.samples=2",
        "capture=off",
    )
    with open_run(experiment, "cpu", ["test"]) as (folder, _):
        assert Worker(folder.run, experiment).run() == 0
    first, second = lines(folder.run)
    assert first["validation_loss"] == pytest.approx(first["loss"], rel=1e-6)
    assert second["validation_loss"] == pytest.approx(first["loss"], rel=1e-6)


UNQUANTISED = [
    *("quant=linear_mxfp4", "training.iterations=3", "capture=off", "training.precision=fp32"),
    *("evaluation.every=1", "evaluation.samples=4", "evaluation.unquantised=true"),
]


@pytest.mark.slow
def test_the_unquantised_loss_is_that_of_a_bf16_run_with_the_same_weights(
    run_tiny: RunTiny,
) -> None:
    still = ["training.lr=1e-30", "training.min_lr=0"]
    run, bf16 = run_tiny(*UNQUANTISED, *still), run_tiny(*UNQUANTISED, *still, "quant=bf16")
    for own, reference in zip(lines(run), lines(bf16), strict=True):
        assert own["unquantised_loss"] == reference["validation_loss"]
        assert reference["unquantised_loss"] == reference["validation_loss"]
        assert abs(own["validation_loss"] - own["unquantised_loss"]) > 1e-5


@pytest.mark.slow
def test_an_unquantised_evaluation_changes_no_training(run_tiny: RunTiny) -> None:
    stochastic = "quant.linear.wgrad.g.rounding=stochastic"
    both = lines(run_tiny(*UNQUANTISED, stochastic))
    alone = lines(run_tiny(*UNQUANTISED, stochastic, "evaluation.unquantised=false", "force=true"))
    for name in ("loss", "grad_norm", "validation_loss"):
        assert [line[name] for line in both] == [line[name] for line in alone]
    assert alone[-1]["unquantised_loss"] is None


@pytest.mark.parametrize("fault", ["map", pytest.param("modules", marks=pytest.mark.slow)])
def test_an_unquantised_evaluation_that_quantises_ends_the_run(
    fault: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quantexp.training.megatron import trainer
    from quantexp.training.megatron.step import Stepper

    def set_only_quantised(self: Stepper, declared: Any) -> None:
        if any(module.is_quantised for module in declared.values()):
            original(self, declared)

    original = Stepper.set_precision
    if fault == "map":
        monkeypatch.setattr(trainer, "unquantised", lambda declared: declared)
    else:
        monkeypatch.setattr(Stepper, "set_precision", set_only_quantised)
    run = run_here(tiny(*UNQUANTISED), expect=1)
    reason = json.loads(run.status.read_text())["reason"]
    assert "what ran is not what was declared, in the evaluation after iteration 1: " in reason


@pytest.mark.slow
def test_completed_run_without_the_requested_evaluation_runs_again(
    run_tiny: RunTiny, tiny: Tiny
) -> None:
    run_tiny("capture=off")
    with open_run(tiny("capture=off"), "cpu", ["test"]) as (folder, _):
        assert not folder.ready
    with open_run(
        tiny("capture=off", "evaluation.every=2", "evaluation.samples=4"), "cpu", ["test"]
    ) as (
        folder,
        _,
    ):
        assert folder.ready


def test_iterations_and_samples(tiny: Tiny) -> None:
    experiment = tiny(*EVALUATED)
    assert [i for i in range(1, 6) if is_evaluated(experiment, i)] == [2, 4, 5]
    assert num_samples(experiment) == 4
    assert num_samples(tiny()) == 0
    assert not any(is_evaluated(tiny(), i) for i in range(1, 6))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluation.every=0"], "evaluation.every must be at least 1, got 0"),
        (["evaluation.every=1", "evaluation.samples=0"], "evaluation.samples must be at least 1"),
        (["evaluation.unquantised=true"], "evaluation.unquantised needs evaluation.every=N"),
        (
            ["evaluation.every=1", "evaluation.samples=3"],
            r"evaluation.samples must be a multiple of 2 \(training.micro_batch_size x launcher.num_",
        ),
    ],
)
def test_impossible_evaluation_is_refused(tiny: Tiny, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(*words)


def test_warm_up_stable_decay_is_its_closed_form(run_tiny: RunTiny) -> None:
    words = ("training.lr=1e-3", "training.min_lr=1e-4", "training.warmup_iterations=2")
    more = ("training.lr_schedule=wsd", "training.decay_iterations=3", "training.iterations=8")
    run = run_tiny(*words, *more, "capture=off")
    down = [1e-3 - (1e-3 - 1e-4) * step / 3 for step in (1, 2, 3)]
    expected = [0.5e-3, 1e-3, 1e-3, 1e-3, 1e-3, *down]
    assert [line["lr"] for line in lines(run)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.lr_schedule=wsd"], "training.decay_iterations must lie between 1 and"),
        (
            ["training.lr_schedule=wsd", "training.decay_iterations=99"],
            r"must lie between 1 and \d \(all but the warm-up\) with training.lr_schedule=wsd, got 99",
        ),
        (["training.decay_iterations=2"], "is for training.lr_schedule=wsd, got 2 with cosine"),
    ],
)
def test_impossible_decay_is_refused(tiny: Tiny, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(*words)


def test_evaluation_of_a_run_is_shown_at_its_end(tmp_path: Path) -> None:
    from rich.console import Console

    from quantexp.config.compose import compose
    from quantexp.launch.outcome import Outcome
    from quantexp.launch.summary import print_outcome
    from quantexp.runs.status import State

    experiment = compose(["training=fast"], None, {})
    metrics = {
        "iteration": 8,
        "loss": 3.0,
        "tokens_per_s": 100.0,
        "memory_gb": 1.0,
        "validation_loss": 3.5,
        "perplexity": 33.115,
        "unquantised_loss": 3.4,
    }
    console = Console(record=True, width=120)
    outcome = Outcome(experiment, RunDir(tmp_path), State.COMPLETED, metrics=metrics)
    print_outcome(outcome, console)
    shown = "held out  loss 3.5000, perplexity 33.12; unquantised 3.4000 (+0.1000)"
    assert shown in console.export_text()


@pytest.mark.parametrize("every", [1, 2, 3, 7, 8, 9, None])
def test_evaluations_are_counted_as_they_come(tiny: Tiny, every: int | None) -> None:
    experiment = tiny("training.iterations=8")
    experiment.evaluation.every = every
    for first in range(1, 10):
        each = [is_evaluated(experiment, iteration) for iteration in range(first, 9)]
        assert num_evaluations(experiment, first) == sum(each)
