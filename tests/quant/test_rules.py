"""Rules that follow the run's metrics, or shares of the training; their runs equal those with the same iterations."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from quantexp.config.compose import compose
from quantexp.errors import ConfigError
from quantexp.quant.precision import declared_maps, precision_map
from quantexp.quant.rules import Conditions, as_switched
from quantexp.runs.metrics import Metrics, read_metrics
from quantexp.runs.paths import RunDir
from quantexp.runs.provenance import read_provenance
from quantexp.schema import Measure, QuantConfig, Rule, When
from quantexp.training.megatron import trainer
from quantexp.training.observer import RunObserver
from tests.conftest import run_here

Tiny = Callable[..., Any]


def scheme(**when: Any) -> QuantConfig:
    return QuantConfig(rules=[Rule(format="bf16", when=When(**when))])


def met_at(quant: QuantConfig, values: list[float | None], measure: str = "loss") -> int | None:
    """The iteration whose metrics meet the first rule's condition."""
    conditions = Conditions(quant)
    for number, value in enumerate(values):
        if conditions.see({"iteration": number + 1, measure: value}):
            return number + 1
    return None


@pytest.mark.parametrize(
    ("when", "values", "expected"),
    [
        ({"below": 2.0}, [3.0, 2.0, 1.9, 5.0], 3),
        ({"above": 2.0}, [1.0, 2.0, 2.5], 3),
        # The mean of three: 3, 2.33.
        ({"below": 2.5, "over": 3}, [4.0, 3.0, 2.0, 2.0], 4),
        ({"below": 2.0, "after": 3}, [1.0, 1.0, 1.5], 3),
        # What is missing or not finite does not count, nor does it meet a condition.
        ({"above": 2.0}, [math.inf, math.nan, None, 1.0], None),
        ({"below": 2.0, "over": 2}, [1.0, math.nan, 1.0], 3),
        # A window that began before `after` counts.
        ({"below": 2.0, "over": 2, "after": 2}, [1.0, 1.0], 2),
        ({"below": -1.0}, [0.0], None),
    ],
)
def test_conditions_are_met_by_the_mean_of_the_latest_values(
    when: dict[str, Any], values: list[float | None], expected: int | None
) -> None:
    assert met_at(scheme(**when), values) == expected


def test_a_met_condition_gives_the_rule_its_iterations_once() -> None:
    quant = scheme(measure=Measure.grad_norm, below=1.0)
    conditions = Conditions(quant)
    lines = [{"iteration": i, "loss": 0.0, "grad_norm": 2.0 / i} for i in range(1, 6)]
    assert [conditions.see(line) for line in lines] == [[], [], [0], [], []]
    assert quant.rules[0].iterations == [4, None]
    switched = as_switched(scheme(measure=Measure.grad_norm, below=1.0), lines)
    assert switched.rules == [Rule(format="bf16", iterations=[4, None])]
    assert as_switched(scheme(below=-1.0), lines).rules == [], "it was in force in no iteration"


def test_maps_that_conditions_may_lead_to_are_known_before(tiny: Tiny) -> None:
    conditions = [
        "{products: [fprop], format: bf16, when: {below: 1}}",
        "{modules: [fc1], format: bf16, when: {measure: grad_norm, above: 1}}",
    ]
    experiment = tiny("quant=linear_mxfp8", f"quant.rules=[{', '.join(conditions)}]")
    maps = declared_maps(experiment.model, experiment.quant)
    assert maps[0] == precision_map(experiment.model, tiny("quant=linear_mxfp8").quant)
    assert len(maps) == 4, "none, each, both"
    assert [maps.index(each) for each in maps] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{format: bf16, when: {}}", r"quant.rules\[0\].when needs one finite bound"),
        ("{format: bf16, when: {below: 1, above: 2}}", "when needs one finite bound"),
        ("{format: bf16, when: {below: inf}}", "when needs one finite bound"),
        (
            "{format: bf16, iterations: [1, 2], when: {below: 1}}",
            "when is in place of iterations and share",
        ),
        (
            "{format: bf16, when: {measure: validation_loss, below: 1}}",
            "measure=validation_loss needs evaluation.every=N",
        ),
        ("{format: bf16, when: {measure: los, below: 1}}", "did you mean loss"),
        ("{format: bf16, when: {below: 1, ovr: 2}}", "unknown key .*did you mean over"),
        ("{format: bf16, when: {below: 1, over: 0}}", "over must be .*1"),
        ("{format: bf16, when: 3}", "when must be keys with values, in braces"),
        ("{format: bf16, share: [0.5, 0.2]}", "share must be .first, last."),
        ("{format: bf16, share: [0.5, 0.51]}", "less than half an iteration"),
        ("{format: bf16, share: [0, 1], iterations: [2, 3]}", "iterations or share, not both"),
        # The map under the condition is checked, too.
        ("{format: mxfp8, scaling: delayed, when: {below: 1}}", "scaling"),
    ],
)
def test_what_no_run_can_meet_is_refused(rule: str, message: str, tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny("quant=linear_mxfp8", f"quant.rules=[{rule}]")


def test_more_conditions_than_can_be_planned_for_and_evaluations_are_refused(
    tiny: Tiny,
) -> None:
    rule = "{format: bf16, when: {below: 1}}"
    with pytest.raises(ConfigError, match="at most 4 rules with a condition"):
        tiny("quant=linear_mxfp8", f"quant.rules=[{', '.join([rule] * 5)}]")
    words = ["evaluate.only=true", "training.start_from=run@1", "capture=off"]
    with pytest.raises(ConfigError, match="looks at the metrics of a training"):
        tiny("quant=linear_mxfp8", f"quant.rules=[{rule}]", *words)


@pytest.mark.parametrize(
    ("share", "iterations", "expected"),
    [
        ("[0.9, 1]", 100, [91, None]),
        ("[0, 0.29]", 100, [1, 29]),  # 0.29 * 100 is 28.999999999999996
        ("[0.5, 1.0]", 8, [5, None]),
        ("[0.25, 0.75]", 10, [3, 8]),  # 2.5 and 7.5 are rounded to even
    ],
)
def test_shares_of_the_training_become_iterations(
    share: str, iterations: int, expected: list[int | None]
) -> None:
    rule = f"quant.rules=[{{format: bf16, products: [fprop], share: {share}}}]"
    words = ["model=tiny", "quant=linear_mxfp8", rule, f"training.iterations={iterations}"]
    experiment = compose([*words, "training.warmup_iterations=1"])
    assert experiment.quant.rules[0].iterations == expected
    other = compose([*words[:3], "training.iterations=1000", "training.warmup_iterations=1"])
    assert experiment.quant.name == other.quant.name, "the scheme is the same"


HERE = ["tracking.tensorboard=false", "capture=off", "training.iterations=6"]
RULE = "{products: [fprop], format: bf16, %s}"


@pytest.fixture(scope="module")
def losses(run_tiny_once: Callable[..., RunDir]) -> list[float]:
    """Those of a run without a rule."""
    run = run_tiny_once("quant=linear_mxfp4", *HERE)
    return [line["loss"] for line in read_metrics(run)]


def conditional(losses: list[float]) -> str:
    """A condition that iteration 3 meets first."""
    bound = (losses[1] + losses[2]) / 2
    assert losses[2] < bound < min(losses[:2])
    return RULE % f"when: {{measure: loss, below: {bound!r}}}"


def outcomes(run: RunDir) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_metrics(run)]


@pytest.mark.slow
def test_a_run_with_a_condition_is_that_with_the_iterations(
    run_tiny: Callable[..., RunDir], losses: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quant=linear_mxfp4", *HERE]
    fixed = run_tiny(*words, f"quant.rules=[{RULE % 'iterations: [4, null]'}]")
    run = run_tiny(*words, f"quant.rules=[{conditional(losses)}]")
    assert outcomes(run) == outcomes(fixed)
    assert outcomes(run)[3][0] != losses[3]
    assert [line["switched"] for line in read_metrics(run)] == [None, None, [0], None, None, None]
    assert (
        "quant.rules[0] is in force from iteration 4 on: loss is below " in capsys.readouterr().err
    )
    proofs = [json.loads(each.precision.read_text()) for each in (run, fixed)]
    first, second = ([p["iteration"], p["entries"], p["proved"]] for p in proofs)
    assert first == second
    assert first[0] == 4
    identity = read_provenance(run.provenance)["identity"]
    ((condition, maps),) = identity["conditions"]
    assert condition["measure"] == "loss"
    assert maps[0][1] != identity["scheme"][0][1]


class KilledError(BaseException):
    """Stands in for a kill: nothing handles it."""


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [2, 3, 5])
def test_a_run_that_goes_on_meets_its_condition_where_it_would_have(
    killed_at: int, tiny: Tiny, losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its window began before the checkpoint; after 3 the condition is met already."""
    bound = (losses[1] + losses[2]) / 2
    rule = RULE % f"when: {{measure: loss, below: {bound + 1e-3!r}, over: 2}}"
    words = ["quant=linear_mxfp4", *HERE, f"quant.rules=[{rule}]"]
    words += ["checkpoint.every=1", "checkpoint.optimizer=true"]
    experiment = tiny(*words)
    original = RunObserver.iteration

    def killed(observer: RunObserver, metrics: Metrics) -> bool:
        goes_on = original(observer, metrics)
        if metrics.iteration == killed_at:
            raise KilledError
        return goes_on

    with monkeypatch.context() as patch:
        patch.setattr(RunObserver, "iteration", killed)
        with pytest.raises(KilledError):
            run_here(experiment)
    run = run_here(tiny(*words))
    undisturbed = run_here(tiny(*words, "training.restart=true"))
    assert outcomes(run) == outcomes(undisturbed)
    assert [line["switched"] for line in read_metrics(run)] == [
        line["switched"] for line in read_metrics(undisturbed)
    ]


@pytest.mark.parametrize(
    "fault", [pytest.param(n, marks=pytest.mark.slow) for n in ("early", "never")] + ["late"]
)
def test_a_condition_that_is_followed_at_another_iteration_ends_the_run(
    fault: str, tiny: Tiny, losses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof looks at the metrics by itself."""

    class Faulty(Conditions):
        def see(self, line: Any) -> list[int]:
            if fault == "never" or (fault == "late" and line["iteration"] < 5):
                return []
            if fault == "early":
                line = {**line, "loss": losses[5]}
            return super().see(line)

    monkeypatch.setattr(trainer, "Conditions", Faulty)
    run = run_here(tiny("quant=linear_mxfp4", *HERE, f"quant.rules=[{conditional(losses)}]"), 1)
    status = json.loads(run.status.read_text())
    assert status["reason"].startswith("what ran is not what was declared")
    begins = {"early": 2, "late": 4, "never": 4}[fault]
    assert f"in iteration {begins}: " in status["reason"]


def test_a_share_that_became_other_iterations_ends_the_run(tiny: Tiny) -> None:
    """The proof derives the iterations of a share by itself."""
    experiment = tiny("quant=linear_mxfp4", *HERE, f"quant.rules=[{RULE % 'share: [0.5, 1]'}]")
    assert experiment.quant.rules[0].iterations == [4, None]
    experiment.quant.rules[0].iterations = [5, None]
    run = run_here(experiment, 1)
    reason = json.loads(run.status.read_text())["reason"]
    assert "what ran is not what was declared, in iteration 4: " in reason
