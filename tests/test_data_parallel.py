"""Two processes that share a batch: the same training as one process, every rank proved and captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantexp_launchers.local.execute import execute
from rich.console import Console

from quantexp.capture import open_capture
from quantexp.capture.check.folder import check
from quantexp.capture.select.budget import price
from quantexp.config.compose import compose
from quantexp.launch.outcome import Outcome
from quantexp.runs.dossiers import Trigger, folder_of, read_dossiers
from quantexp.runs.status import State
from quantexp.schema import Experiment
from tests.recorded import json_lines

pytestmark = pytest.mark.slow

QUIET = Console(quiet=True)
SHARED = [
    "quant=FA_linear_mxfp8",
    "training.micro_batch_size=1",
    "training.iterations=3",
    "training.global_batch_size=2",
    "capture.collect_micro_batches=0",
    "capture.weight_grads=true",
    "capture.values=both",
    "capture.residual=true",
    "launcher.num_threads=1",
    "checkpoint.at_end=true",
]


@pytest.fixture(scope="module")
def experiments(
    tiny_words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> list[Experiment]:
    """The same experiment with one process and with two."""
    words = [*tiny_words, *SHARED, f"paths.root={tmp_path_factory.mktemp('runs')}"]
    words += ["tracking.statistics=[amax,sqnr,underflow,histogram]"]
    return [compose([*words, f"launcher.num_processes={n}"]) for n in (1, 2)]


@pytest.fixture(scope="module")
def outcomes(experiments: list[Experiment]) -> list[Outcome]:
    return [execute(experiment, QUIET) for experiment in experiments]


def test_two_processes_train_exactly_as_one(outcomes: list[Outcome]) -> None:
    """The results are bit-identical, which holds for two micro-batches in total.

    One process adds a/2 + b/2 in its fp32 main gradient; each of two has a or b there, which DistributedDataParallel
    halves and adds. Halving is exact in binary floating point wherever on the way it happens (gradients here are far
    from underflow, and the scales of MX blocks are powers of two themselves), and a sum of two terms has one order.
    The same goes for the mean of the two losses. Of more micro-batches the sums would differ in their last bits.
    """
    assert [outcome.state for outcome in outcomes] == [State.COMPLETED] * 2
    one, two = (json_lines(outcome.run.metrics) for outcome in outcomes)
    assert len(one) == len(two) == 3
    for name in ("iteration", "loss", "grad_norm", "lr", "tokens"):
        assert [line[name] for line in one] == [line[name] for line in two]


def test_two_processes_send_the_statistics_of_one(outcomes: list[Outcome]) -> None:
    """Each process has one of the two micro-batches; a weight gradient of one is half of it there."""
    one, two = (json_lines(outcome.run.curves) for outcome in outcomes)
    assert [line["iteration"] for line in one] == [line["iteration"] for line in two] == [1]
    for key in ("scalars", "histograms"):
        assert one[0][key].keys() == two[0][key].keys()
        of_each = [
            {t: v for t, v in line[0][key].items() if "grad" not in t} for line in (one, two)
        ]
        assert of_each[0] == of_each[1]
        assert len(of_each[0]) > 20
    assert "sqnr_db/L0-qkv/grad_output" in two[0]["scalars"]


def test_two_processes_save_the_model_of_one(outcomes: list[Outcome]) -> None:
    """Bit for bit, since they train exactly as one."""
    one, two = (outcome.run.checkpoints / "iteration_00000003" for outcome in outcomes)
    names = {file.name for file in one.iterdir()}
    assert {file.name for file in two.iterdir()} == names > {"model.safetensors"}
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)


def test_random_numbers_do_not_depend_on_how_many_processes_share_a_batch(
    tiny_words: list[str], tmp_path: Path
) -> None:
    """The same two sums as above, of operands rounded stochastically after a random transform."""
    metrics = []
    for processes in (1, 2):
        words = [*tiny_words, *SHARED, "quant=more/linear_mxfp4_sr_rht", "capture=off"]
        words += [f"paths.root={tmp_path / 'runs'}", f"launcher.num_processes={processes}"]
        outcome = execute(compose(words), QUIET)
        assert outcome.state is State.COMPLETED
        metrics.append([(m["loss"], m["grad_norm"]) for m in json_lines(outcome.run.metrics)])
    assert metrics[0] == metrics[1]


def test_experts_train_as_in_one_process_too(
    tiny_words: list[str], tiny_models: dict[str, list[str]], tmp_path: Path
) -> None:
    """The same two sums as above. The reported balancing loss is multiplied by its factor before or after its sum."""
    metrics = []
    for processes in (1, 2):
        words = [*tiny_words, *tiny_models["deepseek2_lite"], *SHARED, "capture=off"]
        words += [f"paths.root={tmp_path / 'runs'}", f"launcher.num_processes={processes}"]
        outcome = execute(compose(words), QUIET)
        assert outcome.state is State.COMPLETED
        assert outcome.precision is not None
        assert outcome.precision["router_calls"] == {"layer 1 router": 6}
        metrics.append(json_lines(outcome.run.metrics))
    for one, two in zip(*metrics, strict=True):
        assert (one["loss"], one["grad_norm"]) == (two["loss"], two["grad_norm"])
        assert one["aux_loss"] == pytest.approx(two["aux_loss"], rel=2.0**-22)


def test_reduced_gradients_are_those_of_one_process(outcomes: list[Outcome]) -> None:
    one, two = (
        {
            (line["layer"], line["module"]): line["hash"]
            for line in json_lines(outcome.run.tensors / "manifest.jsonl")
            if line["tensor"] == "main_grad"
        }
        for outcome in outcomes
    )
    assert one == two
    assert len(one) == 8


def test_every_rank_is_proved(outcomes: list[Outcome]) -> None:
    one, two = (outcome.precision for outcome in outcomes)
    assert one is not None
    assert two is not None
    assert two["proved"]
    assert [e["calls"] for e in one["entries"]] == [e["calls"] for e in two["entries"]]
    assert {e["calls"] for e in two["entries"]} == {2}, "one micro-batch on each rank"


def test_captures_of_all_ranks_are_one_capture(
    outcomes: list[Outcome], experiments: list[Experiment]
) -> None:
    one, two = (json_lines(outcome.run.tensors / "manifest.jsonl") for outcome in outcomes)
    assert {line["rank"] for line in two} == {0, 1}

    def what(line: dict[str, Any]) -> tuple[object, ...]:
        return line["layer"], line["module"], line["operation"], line["tensor"]

    assert Counter(map(what, one)) == Counter(map(what, two))
    assert outcomes[1].tensors == outcomes[0].tensors == len({line["file"] for line in two})
    assert outcomes[1].num_bytes == sum(
        line["bytes"] for line in {line["file"]: line for line in two}.values()
    )
    assert price(experiments[1]).num_bytes == outcomes[1].num_bytes
    assert not list(outcomes[1].run.tensors.glob("*.rank*"))
    assert len(json_lines(outcomes[1].run.tensors / "statistics.jsonl")) == len(
        json_lines(outcomes[0].run.tensors / "statistics.jsonl")
    )


def test_counters_are_unique_over_all_ranks(outcomes: list[Outcome]) -> None:
    files = sorted(file.name for file in outcomes[1].run.tensors.rglob("*.pt"))
    assert len({file.split("_")[2] for file in files}) == len(files)
    assert len({file[:15] for file in files}) == 1, "all begin with the run's start"


def test_weights_are_rank_0s_alone(outcomes: list[Outcome]) -> None:
    folder = outcomes[1].run.tensors
    alike = [
        line
        for line in json_lines(folder / "manifest.jsonl")
        if line["tensor"] in ("weight", "main_grad")
    ]
    assert {line["rank"] for line in alike} == {0}
    for line in json_lines(folder / "manifest.jsonl"):
        content = torch.load(folder / line["file"], weights_only=True)
        assert content["metadata"]["rank"] == line["rank"]


def test_shards_of_two_processes_contain_the_same_tensors(
    outcomes: list[Outcome], tiny_words: list[str], tmp_path: Path
) -> None:
    words = [*tiny_words, *SHARED, f"paths.root={tmp_path}", "launcher.num_processes=2"]
    more = ["capture.store=safetensors", "capture.stop_after_capture=true"]
    outcome = execute(compose([*words, *more]), QUIET)
    assert outcome.state is State.COMPLETED

    def tensors_of(folder: Path) -> list[tuple[object, ...]]:
        keys = (
            "rank",
            "layer",
            "module",
            "operation",
            "tensor",
            "iteration",
            "micro_batch",
            "hash",
        )
        return sorted(
            tuple(map(str, (line[k] for k in keys)))
            for line in json_lines(folder / "manifest.jsonl")
        )

    assert tensors_of(outcome.run.tensors) == tensors_of(outcomes[1].run.tensors)
    shards = sorted(file.name for file in (outcome.run.tensors / "shards").iterdir())
    assert shards == ["rank0-00001.safetensors", "rank1-00001.safetensors"]
    capture = open_capture(outcome.run.tensors)
    assert len(capture) == len(tensors_of(outcome.run.tensors))
    assert all(entry.is_intact() for entry in capture)


def test_each_rank_has_its_own_log_and_record(outcomes: list[Outcome]) -> None:
    names = {file.name for file in outcomes[1].run.logs.iterdir()}
    of_ranks = {f"{name}.{kind}" for name in ("rank0", "rank1") for kind in ("log", "json")}
    assert names == {*of_ranks, "libraries0.log", "libraries1.log", "torchrun.log"}
    assert not outcomes[1].run.rendezvous.exists()


def test_one_rank_reports_to_the_trackers(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        (events,) = outcome.run.tensorboard.iterdir()
        assert events.stat().st_size > 0
        assert outcome.tracking["tensorboard"]["iteration"] == 3
        assert outcome.tracking["tensorboard"]["ended"]


DEFECTIVE = """\
import os, sys
import torch
import quantexp.quant.linear as linear
import quantexp.quant.weight_cache.weights as weights
from quantexp.training.worker import main
if os.environ["RANK"] == "{rank}":
    {defect}
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def defect(
    tiny: Callable[..., Experiment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Outcome]:
    """Run two processes, one with a defect, by default the second."""

    def run(statement: str, *words: str, rank: int = 1) -> Outcome:
        script = tmp_path / "defective.py"
        script.write_text(DEFECTIVE.format(defect=statement, rank=rank))
        experiment = tiny(
            "quant=linear_mxfp8",
            "training.micro_batch_size=1",
            "launcher.num_processes=2",
            "launcher.num_threads=1",
            "launcher.timeout_min=1",
            *words,
        )
        # Imported only here: Hydra looks for plugins when it composes the first experiment, and reloads the module.
        from quantexp_launchers.local import processes

        command = processes.command

        def defective(run_dir: Path, num_processes: int) -> list[str]:
            return [*command(run_dir, num_processes)[:-3], str(script), str(run_dir)]

        monkeypatch.setattr(processes, "command", defective)
        return execute(experiment, QUIET)

    return run


def test_rank_that_does_not_quantise_fails_the_run_and_is_named(
    defect: Callable[..., Outcome],
) -> None:
    result = defect(
        "linear.quantise_operand = weights.quantise_operand = lambda x, *_, **__: x; "
        "linear.quantise_pair = weights.quantise_pair = lambda x, *_, **__: (x, x)"
    )
    assert result.state is State.FAILED
    assert "what ran is not what was declared, in iteration 1: rank 1: " in result.reason
    assert result.precision is not None
    assert not result.precision["proved"]
    assert not result.run.metrics.exists(), "no step was taken"


def test_error_of_one_rank_is_the_reason_not_its_consequences_in_the_others(
    defect: Callable[..., Outcome],
) -> None:
    result = defect(
        "torch.save = lambda *_: (_ for _ in ()).throw(OSError(28, 'No space left on device'))"
    )
    assert result.state is State.FAILED
    assert result.reason.startswith("rank 1: captured tensors cannot be written to ")
    assert "No space left on device" in result.reason


def test_checkpoint_that_cannot_be_written_is_the_reason_on_every_rank(
    defect: Callable[..., Outcome],
) -> None:
    result = defect(
        "import quantexp.model.checkpoint_writer as writer; writer.record_hashes = "
        "lambda *_: (_ for _ in ()).throw(OSError(28, 'No space left on device'))",
        "checkpoint.at_end=true",
        rank=0,
    )
    assert result.state is State.FAILED
    folder = result.run.checkpoints / "iteration_00000002"
    assert result.reason.startswith(f"{folder} cannot be written (No space left on device: ")
    assert "\n" not in result.reason, "both ranks give the same reason"
    assert not list(result.run.checkpoints.iterdir())


def test_part_that_a_rank_cannot_write_is_the_reason_on_rank_0_too(
    defect: Callable[..., Outcome],
) -> None:
    result = defect(
        "import quantexp.model.checkpoint_writer as writer; writer.write_hashed = "
        "lambda *_: (_ for _ in ()).throw(OSError(28, 'No space left on device'))",
        *("checkpoint.at_end=true", "checkpoint.optimizer=true"),
        "training.distributed_optimizer=true",
    )
    assert result.state is State.FAILED
    words = "/state/rank00001.safetensors cannot be written (No space left on device: "
    assert words in result.reason
    assert "\n" not in result.reason, "both ranks give the same reason"
    assert not list(result.run.checkpoints.iterdir())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("parts", [[], ["parallel.tensor=2"], ["parallel.pipeline=2"]])
def test_ranks_leave_one_dossier(tiny_words: list[str], parts: list[str], tmp_path: Path) -> None:
    """A slot that rounds to zero fires on the ranks that hold it; all lists are joined, and no file is missing."""
    rule = "{iterations: [12, 100], layers: [1], modules: [fc1], format: mxfp4}"
    words = [*tiny_words, *SHARED, f"quant.rules=[{rule}]", "training.iterations=14"]
    words += ["capture=off", "capture.ring=8", "capture.trigger.share=0.05"]
    words += ["checkpoint.at_end=false"]
    words += [f"paths.root={tmp_path / 'runs'}", "launcher.num_processes=2", *parts]
    outcome = execute(compose(words), QUIET)
    assert outcome.state is State.COMPLETED, outcome.reason
    (dossier,) = read_dossiers(outcome.run)
    assert (dossier.iteration, dossier.trigger) == (12, Trigger.UNDERFLOW)
    assert dossier.ring == [5, 12]
    folder = folder_of(outcome.run, dossier.iteration)
    assert not list(folder.glob("*.rank1.jsonl"))
    held = json_lines(folder / "statistics.jsonl")
    by_rank = Counter((line["iteration"], line["rank"]) for line in held)
    # Rank 1 holds what its own micro-batch has: no weights, which rank 0 stores.
    assert {rank for _, rank in by_rank} == {0, 1}
    assert {i for i, _ in by_rank} == {*range(5, 14)}
    assert check(folder, {}).problems == []
    assert len(json_lines(folder / "manifest.jsonl")) >= dossier.tensors > 56
    tokens = json_lines(folder / "tokens.jsonl")
    batch = [
        n for line in tokens if line["iteration"] == dossier.iteration for n in line["samples"]
    ]
    first = 2 * (dossier.iteration - 1)
    assert sorted(batch) == [first, first + 1]
