"""Starting from another run's checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.config.start_point import start_point
from quantexp.errors import ConfigError, DataError
from quantexp.launch.identity import hash8, identity
from quantexp.launch.recorded import with_absolute_paths
from quantexp.model.checkpoints import folder_of
from quantexp.runs.paths import RunDir
from quantexp.runs.status import read_status
from quantexp.schema import Experiment
from tests.recorded import json_lines

Tiny = Callable[..., Experiment]
RunTiny = Callable[..., RunDir]
FOUR = ["training.iterations=4", "capture=off"]


def numbers_of(run: RunDir) -> list[tuple[object, ...]]:
    keys = ("iteration", "loss", "grad_norm", "lr", "loss_scale")
    return [tuple(line[key] for key in keys) for line in json_lines(run.metrics)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["training.precision=fp32", "quant=FA_linear_mxfp4"],
        ["training.precision=fp16", f"training.initial_loss_scale={2.0**30}"],
        ["quant=more/linear_hifp8_delayed", "training.global_batch_size=4"],
    ],
    ids=["fp32", "fp16", "delayed"],
)
def test_run_started_with_the_optimizer_continues_bit_for_bit(
    run_tiny: RunTiny, words: list[str]
) -> None:
    """Weights, padding, moments, loss scale, schedule, amax histories and the position in the data are all restored."""
    whole = run_tiny(*FOUR, *words, "checkpoint.every=2", "checkpoint.optimizer=true")
    start = [f"training.start_from={whole.root}@2", "training.start_optimizer=true"]
    again = run_tiny(*FOUR, *words, *start)
    assert again.root != whole.root
    assert numbers_of(again) == numbers_of(whole)[2:]


@pytest.mark.slow
def test_without_the_optimizer_weights_schedule_and_position_are_restored(
    run_tiny: RunTiny,
) -> None:
    words = [*FOUR, "training.precision=fp32", "training.lr=1e-2"]
    whole = run_tiny(*words, "checkpoint.every=2")
    again = run_tiny(*words, f"training.start_from={whole.root.name}@2")
    ours, theirs = json_lines(again.metrics), json_lines(whole.metrics)
    assert [line["iteration"] for line in ours] == [3, 4]
    assert [line["lr"] for line in ours] == [line["lr"] for line in theirs[2:]]
    assert ours[0]["loss"] == theirs[2]["loss"]
    assert ours[0]["grad_norm"] == theirs[2]["grad_norm"]
    assert ours[1]["loss"] != theirs[3]["loss"], "the optimizer began anew"


@pytest.mark.slow
def test_checkpoint_in_shards_starts_a_run_as_a_published_one_does(
    run_tiny: RunTiny, tiny: Tiny
) -> None:
    """Padding rows included, which take part in the loss; and no other model."""
    words = [*FOUR, "checkpoint.every=2", "checkpoint.optimizer=true", "force=true"]
    whole = run_tiny(*words)
    start = f"training.start_from={whole.root}@2"
    numbers = numbers_of(run_tiny(*FOUR, start))
    run_tiny(*words, "checkpoint.publish=false")
    left = {path.name for path in folder_of(whole, 2).iterdir()}
    assert left == {"state", "config.json", "hashes.json"}
    assert numbers_of(run_tiny(*FOUR, start)) == numbers
    with pytest.raises(
        DataError,
        match=r"training\.start_from=.*@2 does not hold the weights of this .*: model\.ffn_hidden_size is 96 and its",
    ):
        identity(tiny(*FOUR, "model.ffn_hidden_size=96", start), "cpu")
    initial = tiny(*FOUR)
    initial.model.init_from = str(folder_of(whole, 2))
    with pytest.raises(
        DataError, match=r"model\.init_from=.* is a checkpoint without published we"
    ):
        identity(initial, "cpu")
    file = folder_of(whole, 2) / "state" / "rank00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    run = run_tiny(*FOUR, start, "force=true", expect=1)
    status = read_status(run.status)
    assert status is not None
    assert "rank00000.safetensors is damaged: its content is not what was saved" in status.reason


@pytest.mark.slow
def test_another_scheme_is_proved_and_captured_from_its_first_iteration(
    run_tiny: RunTiny,
) -> None:
    whole = run_tiny(*FOUR, "checkpoint.every=2")
    start = f"training.start_from={whole.root}@2"
    again = run_tiny("training.iterations=4", "quant=FA_linear_mxfp8", "capture=stats", start)
    assert json.loads(again.precision.read_text())["iteration"] == 3
    statistics = (again.tensors / "statistics.jsonl").read_text().splitlines()
    assert {json.loads(line)["iteration"] for line in statistics} == {3}


@pytest.fixture
def started(run_tiny: RunTiny) -> RunDir:
    return run_tiny(*FOUR, "checkpoint.every=2")


@pytest.mark.slow
def test_identity_has_the_checkpoints_content_and_not_its_path(
    started: RunDir, tiny: Tiny, tmp_path: Path
) -> None:
    def digest(*words: str) -> str:
        return hash8(identity(tiny(*FOUR, *words), "cpu"))

    moved = tmp_path / "elsewhere" / started.root.name
    shutil.copytree(started.root, moved)
    here = digest(f"training.start_from={started.root}@2")
    assert digest(f"training.start_from={moved}@2") == here
    shutil.rmtree(folder_of(RunDir(moved), 2))
    shutil.copytree(folder_of(started, 4), folder_of(RunDir(moved), 2))
    assert digest(f"training.start_from={moved}@2") != here
    assert digest() != here
    assert "start" not in identity(tiny(*FOUR), "cpu")["training"]


def test_part_of_a_name_means_the_run_that_has_the_checkpoint(tiny: Tiny, in_tmp: Path) -> None:
    """The run that starts there often has the same part in its name; two with that checkpoint are ambiguous."""
    runs = in_tmp / "runs"
    for name in ("llama32-1b_wikipedia_bf16-1", "llama32-1b_wikipedia_bf16_evaluated-2"):
        (runs / name).mkdir(parents=True)
        (runs / name / "config.yaml").write_text("")
    checkpoint = runs / "llama32-1b_wikipedia_bf16-1" / "checkpoints" / "iteration_00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_text("")
    words = ("training.start_from=bf16@2", "evaluate.only=true", "capture=off")
    point = start_point(tiny(*words))
    assert point is not None
    assert point.run.root.name == "llama32-1b_wikipedia_bf16-1"
    shutil.copytree(
        checkpoint.parent, runs / "llama32-1b_wikipedia_bf16_evaluated-2" / "checkpoints"
    )
    with pytest.raises(
        DataError, match="RUN must be a part of one run's name, got 'bf16', which fits"
    ):
        start_point(tiny(*words))


def test_path_of_the_run_does_not_depend_on_the_working_directory(tiny: Tiny, in_tmp: Path) -> None:
    (in_tmp / "run").mkdir()
    experiment = with_absolute_paths(tiny(*FOUR, "training.start_from=run@2"))
    assert experiment.training.start_from == f"{in_tmp / 'run'}@2"
    assert (
        with_absolute_paths(tiny(*FOUR, "training.start_from=name@2")).training.start_from
        == "name@2"
    )
    assert experiment.first_iteration == 3
    assert experiment.capture.first_iteration == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.start_from=run"], "training.start_from must be RUN@ITERATION, got 'run'"),
        (
            ["training.start_from=run@last"],
            "training.start_from must be RUN@ITERATION, got 'run@last'",
        ),
        (["training.start_from=run@4"], r"begins with iteration 5, and training\.iterations is 4"),
        (
            ["training.start_from=run@2", "model.init_from=w", "dataset.path=x"],
            "both give the first weights; drop",
        ),
        (
            ["training.start_optimizer=true"],
            r"start_optimizer needs training\.start_from=RUN@ITERATION",
        ),
        (
            ["checkpoint.optimizer=true"],
            r"optimizer needs checkpoints to be kept in: checkpoint\.every=N, checkpoint",
        ),
    ],
)
def test_contradictory_words_are_refused(tiny: Tiny, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(*FOUR, *words)


@pytest.mark.slow
def test_damaged_checkpoint_fails_the_run_that_starts_from_it(
    started: RunDir, run_tiny: RunTiny
) -> None:
    weights = folder_of(started, 2) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    run = run_tiny(*FOUR, f"training.start_from={started.root}@2", expect=1)
    assert not run.metrics.exists()
    status = read_status(run.status)
    assert status is not None
    assert f"{weights} is damaged: its content is not what was saved (first in " in status.reason
    assert status.reason.endswith("there is none before it")


@pytest.mark.slow
def test_impossible_start_is_refused_before_the_run(started: RunDir, tiny: Tiny) -> None:
    name = str(started.root)
    for words, message in [
        ([f"training.start_from={name}@3"], r"no checkpoint of iteration 3; .* has 2, 4"),
        ([f"training.start_from={name}-x@3"], r"training\.start_from=.*-x@3: "),
        (
            [f"training.start_from={name}@2", "training.start_optimizer=true"],
            r"the checkpoint holds no optimizer; its run needs checkpoint\.optimizer=true",
        ),
        (
            [
                f"training.start_from={name}@2",
                "training.start_optimizer=true",
                "training.optimizer=muon",
            ],
            r"has the state of training\.optimizer=adam, which muon cannot take",
        ),
        (
            [f"training.start_from={name}@2", "training.seed=7"],
            r"has its place in the data by training\.seed=1234; here it is 7, so give it that",
        ),
        (
            [f"training.start_from={name}@2", "dataset.name=dolma"],
            r"has its place in other data than dataset=dolma",
        ),
        (
            [f"training.start_from={name}@2", "model.norm_epsilon=1e-3"],
            r"training\.start_from=.*@2 does not hold the weights of this .*: model\.norm_epsilon is 0\.001",
        ),
    ]:
        with pytest.raises(DataError, match=message):
            identity(tiny(*FOUR, *words), "cpu")
    shutil.copytree(started.root, started.root.parent / f"{started.root.name[:-8]}00000000")
    with pytest.raises(DataError, match="must name one run, and names 2"):
        identity(tiny(*FOUR, f"training.start_from={started.root.parent}@2"), "cpu")
    shutil.rmtree(started.checkpoints)
    with pytest.raises(DataError, match=r"has none \(checkpoint\.every=N saves them\)"):
        identity(tiny(*FOUR, f"training.start_from={name}@2"), "cpu")
    folder_of(started, 2).mkdir(parents=True)
    started.provenance.write_text("{}")
    with pytest.raises(DataError, match=r"provenance\.json does not say what data the run had"):
        identity(tiny(*FOUR, f"training.start_from={name}@2"), "cpu")
