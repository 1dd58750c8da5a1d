"""A branch is the run that it begins from, bit for bit, and is proved; measuring it changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quantexp.config.load import from_plain, plain, save
from quantexp.errors import DataError
from quantexp.extras.resolve.branch import HeldOut, Measured, run_branch
from quantexp.launch.replays import origin_of, replayed, trained_experiment
from quantexp.quant.precision import unquantised
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State
from quantexp.schema import Experiment
from quantexp.training.megatron.step import Stepper
from tests.conftest import run_here
from tests.recorded import failure, json_lines, status_of

#: The held-out text is half of the sample, so that units can have some each.
WORDS = ("capture=off", "training.iterations=6", "dataset.split='50,50,0'")
#: Four sequences of twelve.
TEXT = HeldOut(0, 4, 12)
Branch = Callable[..., tuple[RunDir, Measured]]


@pytest.fixture(scope="module")
def trained(run_tiny_once: Callable[..., RunDir]) -> RunDir:
    return run_tiny_once(*WORDS, "checkpoint.every=2", "checkpoint.optimizer=true")


@pytest.fixture
def branch(trained: RunDir, tiny: Callable[..., Experiment], tmp_path: Path) -> Branch:
    def run(
        quant: str = "quant=bf16",
        steps: tuple[int, ...] = (1, 3),
        held_out: HeldOut = TEXT,
        held: int = 0,
        **settings: Any,
    ) -> tuple[RunDir, Measured]:
        origin = origin_of(trained, trained_experiment(trained), 2, None)
        experiment = replayed(origin, 2 + held + max(steps), tmp_path, **settings)
        experiment.training.held_iterations = held
        experiment.quant = tiny(quant).quant
        folder = RunDir(tmp_path / "branch")
        folder.root.mkdir(exist_ok=True)
        save(from_plain(plain(experiment)), folder.config)
        folder.metrics.unlink(missing_ok=True)
        return folder, run_branch(folder, steps, held_out)

    return run


def test_a_branch_without_a_change_is_the_run(trained: RunDir, branch: Branch) -> None:
    run, measured = branch()
    names = ("iteration", "loss", "grad_norm", "lr")
    own, again = (
        [[line[name] for name in names] for line in json_lines(each.metrics)]
        for each in (trained, run)
    )
    assert again == own[2:5]
    assert len(measured.working_loss) == 2
    assert measured.working_loss == measured.scheme_loss
    assert (measured.failure, measured.skipped) == (None, 0)
    assert measured.cpu_s > 0
    assert status_of(run).state is State.COMPLETED


def test_a_scheme_is_proved_and_measured_in_both_arithmetics(branch: Branch) -> None:
    run, measured = branch("quant=linear_mxfp4")
    precision = json.loads(run.precision.read_text())
    assert precision["proved"]
    assert {entry["status"] for entry in precision["entries"]} == {"engaged"}
    assert precision["drawn"]["evaluations"] == 4, "two horizons, each measured twice"
    pairs = zip(measured.working_loss, measured.scheme_loss, strict=True)
    assert all(one != other for one, other in pairs)
    # Fewer horizons leave the same branch: measuring changes neither weights nor draws.
    _, later = branch("quant=linear_mxfp4", (3,))
    assert later.working_loss == measured.working_loss[1:]
    assert later.scheme_loss == measured.scheme_loss[1:]


def test_steps_count_after_the_warm_up(trained: RunDir, branch: Branch) -> None:
    """Two iterations leave the weights, and the third takes the run's rate of that iteration."""
    run, measured = branch("quant=linear_mxfp4", steps=(1,), held=2)
    own, again = (json_lines(each.metrics) for each in (trained, run))
    assert [line["iteration"] for line in again] == [3, 4, 5]
    assert [line["lr"] for line in again] == [0, 0, own[4]["lr"]]
    assert len(measured.working_loss) == 1
    _, at_once = branch("quant=linear_mxfp4", steps=(1,))
    assert measured.working_loss != at_once.working_loss


def test_text_and_last_bits_decide_the_loss(branch: Branch) -> None:
    _, own = branch(steps=(1,))
    _, other_text = branch(steps=(1,), held_out=HeldOut(4, 4, 12))
    _, moved = branch(steps=(1,), chaos=1)
    (one,), (two,), (three,) = (each.working_loss for each in (own, other_text, moved))
    assert one is not None
    assert two is not None
    assert three is not None
    assert abs(one - two) > 1e-4
    assert 0 < abs(one - three) < 1e-2


def test_text_that_is_too_short_is_refused(branch: Branch) -> None:
    with pytest.raises(DataError, match=r"the design takes 4,000 held-out sequences, 4 for each"):
        branch(held_out=HeldOut(0, 4, 4000))


def test_a_branch_that_does_not_quantise_has_no_loss(
    branch: Branch, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Stepper.set_precision
    monkeypatch.setattr(
        Stepper, "set_precision", lambda self, declared: given(self, unquantised(declared))
    )
    run, measured = branch("quant=linear_mxfp4")
    assert measured.working_loss == measured.scheme_loss == []
    assert measured.failure is not None
    assert "linear.fprop.x" in measured.failure
    assert failure(run) == measured.failure
    assert not json.loads(run.precision.read_text())["proved"]


def test_the_held_out_loss_is_that_of_an_evaluation_of_the_same_weights(
    trained: RunDir,
    branch: Branch,
    tiny: Callable[..., Experiment],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that evaluates the checkpoint of iteration 4 takes its own order of the text; give the branch that one."""
    seed = trained_experiment(trained).training.seed
    monkeypatch.setattr("quantexp.extras.resolve.branch._ORDER_SEED", seed)
    _, measured = branch(steps=(2,))
    words = ["evaluate.only=true", "evaluation.samples=4", "quant=linear_mxfp4"]
    start = f"training.start_from={trained.root}@4"
    evaluated = run_here(tiny("capture=off", WORDS[2], *words, start))
    content = json.loads((evaluated.root / "evaluation.json").read_text())
    # The same tokens, summed in another order.
    assert measured.working_loss == [pytest.approx(content["scheme"]["bf16_loss"], rel=1e-6)]
