"""What a dossier, the metrics or the user makes the search look for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from quantexp.errors import RunError, UnreadableError
from quantexp.extras.bisect.measures import Measure, Observation, loss_margin, trouble_of
from quantexp.extras.bisect.trouble import Step
from quantexp.runs.paths import RunDir
from quantexp.runs.status import now

Make = Callable[..., RunDir]


def dossier(run: RunDir, name: str, **content: Any) -> None:
    folder = run.dossiers / name
    folder.mkdir(parents=True)
    (folder / "dossier.json").write_text(json.dumps(content))


def test_the_first_dossier_of_a_trouble_decides(make_run: Make) -> None:
    run = make_run(iteration=4)
    dossier(run, "iteration_00000002", iteration=2, trigger="request", words="asked", time=now())
    dossier(run, "iteration_00000003", iteration=3, trigger="saturated", words="fc1 x", time=now())
    trouble = trouble_of(run, None, None, None)
    assert (trouble.measure, trouble.iteration) == ("gradient", 3)
    assert trouble.words == "the dossier says: fc1 x"
    chosen = trouble_of(run, "loss", None, None)
    assert (chosen.measure, chosen.iteration) == ("loss", 3)
    assert chosen.words == "what --measure loss says, at iteration 3"


def test_a_damaged_dossier_is_refused(make_run: Make) -> None:
    run = make_run()
    dossier(run, "iteration_00000003", iteration="three", trigger="loss", words="", time=now())
    with pytest.raises(UnreadableError, match=r"dossier\.json"):
        trouble_of(run, None, None, None)


def test_without_losses_the_user_says_what_is_replayed(make_run: Make) -> None:
    run = make_run()
    with pytest.raises(
        RunError, match="too few iterations to look for trouble in; give --from and"
    ):
        trouble_of(run, None, 4, None)
    trouble = trouble_of(run, None, 4, 3)
    assert (trouble.measure, trouble.iteration) == ("nonfinite", 7)
    assert trouble_of(run, "gradient", 4, None).iteration == 5


def test_no_margin_without_losses() -> None:
    with pytest.raises(
        RunError, match="no finite loss to derive a margin from; give --margin NATS"
    ):
        loss_margin([], 4)
    assert loss_margin([Step(1, 5.0), Step(2, 1.0)], 0) == pytest.approx(0.5)


def steps(*losses: float) -> Observation:
    return Observation(tuple(Step(i, loss) for i, loss in enumerate(losses, 9)))


def test_a_loss_is_judged_beside_bf16_and_bf16_beside_its_level() -> None:
    history = tuple(Step(i, 2.0) for i in range(1, 9))
    measure = Measure("loss", 0.5, history)
    assert measure.is_trouble(steps(2, 3), steps(2, 2.4))
    assert not measure.is_trouble(steps(2, 3), steps(2, 2.6))
    assert measure.is_trouble(steps(2, math.nan), steps(2, 2))
    assert not measure.is_bf16_troubled(steps(2, 2.4))
    assert measure.is_bf16_troubled(steps(2, 2.6))
    assert measure.words(steps(2, 3), steps(2, 2)) == "loss 3.0000, at most +1.0000 to bf16"
    assert measure.words(steps(2, math.inf), steps(2, 2)) == "iteration 10 loss not finite"
    assert "more than 0.5 above" in measure.about


def norms(*values: float) -> Observation:
    return Observation(tuple(Step(i, 2.0, grad_norm=norm) for i, norm in enumerate(values, 21)))


def test_a_gradient_norm_is_judged_as_a_trigger_judges_it() -> None:
    history = tuple(Step(i, 2.0, grad_norm=1.0 + 0.1 * (i % 3)) for i in range(1, 21))
    measure = Measure("grad_norm", 10.0, history)
    # The median of the past is 1.1, its MAD 0.1: ten deviations above it lie at 1.1 + 10 x 0.14826 = 2.58.
    assert measure.is_trouble(norms(1.1, 2.7), norms(1.0, 1.0))
    assert not measure.is_trouble(norms(1.1, 2.5), norms(1.0, 1.0))
    assert measure.is_bf16_troubled(norms(2.7))
    assert not measure.is_bf16_troubled(norms(2.5))
    assert measure.words(norms(1.0, 2.7), norms()) == "gradient norm at most 2.7, +10.8 deviations"
    assert "more than 10 robust deviations" in measure.about.replace("standard ", "")
    assert not Measure("grad_norm", 10.0, history[:9]).is_trouble(norms(9.0), norms(1.0))


def test_the_dossier_of_a_gradient_norm_is_looked_for_as_such(make_run: Make) -> None:
    run = make_run(iteration=4)
    dossier(run, "iteration_00000003", iteration=3, trigger="grad_norm", words="9", time=now())
    assert trouble_of(run, None, None, None).measure == "grad_norm"


def test_a_gradient_is_judged_by_its_distance() -> None:
    measure = Measure("gradient", 0.1)
    none = Observation()
    assert measure.is_trouble(Observation(distance=0.2), none)
    assert not measure.is_trouble(Observation(distance=0.1), none)
    assert not measure.is_bf16_troubled(none)
    assert measure.is_bf16_troubled(Observation(distance=math.inf))
    assert measure.words(Observation(distance=0.2), none) == "distance 0.2000"
    assert "further than 0.1" in measure.about


def test_a_step_left_out_is_not_finite() -> None:
    measure = Measure("nonfinite", 0.0)
    left_out = Observation((Step(3, 2.0, is_left_out=True),))
    assert measure.is_trouble(left_out, steps(2))
    assert not measure.is_trouble(steps(9), steps(2))
    assert measure.is_bf16_troubled(left_out)
    assert measure.words(left_out, steps(2)) == "iteration 3 left out"
    assert measure.about == "a step is left out, or a loss is not finite"
