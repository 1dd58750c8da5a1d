"""A replay with nothing changed is the run, bit for bit, from any checkpoint and from the beginning."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from quantexp.errors import RunError
from quantexp.extras.bisect import rounds
from quantexp.extras.bisect.replays import declared_of, gradient_of, origin_of, replay
from quantexp.launch.attempt import run_folder
from quantexp.runs.device import device_class
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, write_status
from quantexp.schema import Experiment, Rule
from tests.conftest import run_here
from tests.recorded import json_lines

#: Draws, histories of amaxes, a random transform, a schedule, perturbed weights: all that a replay must take up.
SCHEME = (
    "quant=more/linear_mxfp4_sr_rht",
    "quant.rules=[{layers: [1], sites: [linear], products: [fprop], operands: [x], format: fp8_e4m3, "
    "scaling: delayed, window: 2, hadamard: none}, {layers: [1], products: [fprop], operands: [w], hadamard: none}]",
)
WORDS = ("capture=off", "training.iterations=4", "training.chaos=1", "checkpoint.optimizer=true")


def numbers(all_lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(line[k] for k in ("iteration", "loss", "grad_norm", "lr")) for line in all_lines]


@pytest.fixture(scope="module")
def trained(run_tiny_once: Callable[..., RunDir]) -> RunDir:
    return run_tiny_once(*SCHEME, *WORDS, "checkpoint.every=2")


@pytest.mark.parametrize("start", [0, 2])
def test_nothing_changed_gives_the_same_bits(trained: RunDir, start: int) -> None:
    again = run_here(replay(origin_of(trained, start, None), 3))
    assert again.root.parent == trained.root.parent / "bisect" / trained.root.name
    assert numbers(json_lines(again.metrics)) == numbers(json_lines(trained.metrics)[start:3])
    assert json.loads(again.status.read_text())["iterations"] == 3


@pytest.mark.parametrize("start", [0, 2])
def test_moved_weights_give_other_losses_on_the_same_data(trained: RunDir, start: int) -> None:
    """In the first iteration by little: 1% of the weights move by one unit in the last place, 2^-8 of them in bf16."""
    one, two = (
        json_lines(
            run_here(replay(origin_of(trained, start, None), start + 1, chaos=chaos)).metrics
        )[0]
        for chaos in (1, 2)
    )
    own = json_lines(trained.metrics)[start]
    losses = {own["loss"], one["loss"], two["loss"]}
    assert len(losses) == 3
    assert max(losses) - min(losses) < 0.01 * own["loss"]
    assert one["lr"] == own["lr"]


def test_rules_come_after_the_runs_own_and_rename_the_scheme(trained: RunDir) -> None:
    origin = origin_of(trained, 2, None)
    changed = replay(origin, 3, [Rule(layers=[0], format="bf16")])
    assert changed.quant.rules[:-1] == origin.experiment.quant.rules
    assert changed.quant.name != origin.experiment.quant.name
    assert "~" in str(changed.quant.name)


def test_the_newest_checkpoint_before_the_trouble_is_taken(trained: RunDir) -> None:
    assert origin_of(trained, None, 4).start == 2
    assert origin_of(trained, None, 3).first == 3
    assert len(declared_of(origin_of(trained, 0, None), 4)) == 1


def test_gradients_are_of_the_first_replayed_iteration(trained: RunDir) -> None:
    experiment = gradient_of(origin_of(trained, 2, None), ["layer"])
    assert experiment.gradient.only
    assert experiment.training.last_iteration == 3


def test_launchers_may_be_changed(trained: RunDir) -> None:
    origin = origin_of(trained, 2, None, ["launcher.max_parallel=2"])
    assert replay(origin, 3).launcher.max_parallel == 2


@pytest.mark.parametrize(
    ("start", "before", "message"),
    [
        (
            None,
            2,
            "has no checkpoint with a training state before iteration 2 (checkpoint.every=N checkpoint.optimizer=true "
            "saves them); --from 0 begins as the run did",
        ),
        (3, None, "has no checkpoint of that iteration; there is --from 0, 2, 4"),
        (4, None, "nothing follows that could be replayed"),
    ],
)
def test_there_must_be_a_checkpoint(
    trained: RunDir, start: int | None, before: int | None, message: str
) -> None:
    with pytest.raises(RunError) as raised:
        origin_of(trained, start, before)
    assert str(raised.value).endswith(message)


def test_a_checkpoint_needs_its_training_state(run_tiny: Callable[..., RunDir]) -> None:
    run = run_tiny("capture=off", "quant=linear_mxfp4", "checkpoint.every=1")
    with pytest.raises(RunError) as raised:
        origin_of(run, 1, None)
    assert str(raised.value) == (
        "--from 1: the checkpoint has no training state (checkpoint.optimizer=true saves it); there is --from 0"
    )


def test_bf16_and_what_does_not_train_cannot_be_bisected(
    trained: RunDir, run_tiny: Callable[..., RunDir], tmp_path: Path
) -> None:
    run = run_tiny("capture=off", "quant=bf16")
    with pytest.raises(RunError, match="RUN must quantise slots of matrix products"):
        origin_of(run, 0, None)
    gradient = run_here(gradient_of(origin_of(trained, 0, None), []))
    with pytest.raises(RunError, match="RUN must be a run that trains"):
        origin_of(gradient, 0, None)


def test_a_run_of_another_loop_is_refused(trained: RunDir, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "theirs")
    run.root.mkdir()
    shutil.copy(trained.config, run.config)
    provenance = json.loads(trained.provenance.read_text())
    provenance["identity"]["loop"] = {"name": "Megatron-LM", "version": "0.16.1"}
    run.provenance.write_text(json.dumps(provenance))
    with pytest.raises(RunError, match=r"theirs was trained by Megatron-LM, whose data and checkp"):
        origin_of(run, 0, None)


def test_a_replay_that_another_version_of_the_code_completed_is_named_so(
    tiny: Callable[..., Experiment], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = tiny()
    run = run_folder(experiment, device_class(experiment.launcher))
    run.root.mkdir(parents=True)
    write_status(run.status, Status(state=State.COMPLETED))
    idle = SimpleNamespace(submit=lambda *_, **__: None)
    monkeypatch.setattr(rounds, "launcher_of", lambda _: idle)
    monkeypatch.setattr(rounds, "require_startable", lambda _: None)
    monkeypatch.setattr(rounds, "other_code_or_versions", lambda _: "other code")
    words = r"did not complete \(completed: its code or a package has changed since it began\)"
    with pytest.raises(RunError, match=words):
        rounds.run_all([experiment], Console())
