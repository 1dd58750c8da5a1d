"""The summary of one run and the table of a sweep."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from quantexp.config.compose import compose
from quantexp.launch.outcome import Outcome
from quantexp.launch.progress import proof_line
from quantexp.launch.summary import (
    print_how_to_go_on,
    print_how_to_go_on_with_sweep,
    print_outcome,
    print_sweep,
)
from quantexp.model.checkpoints import folder_of
from quantexp.runs.metrics import Speed
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, Status, write_status
from quantexp.schema import Experiment, Precision, Rule

METRICS = {"iteration": 8, "loss": 5.0, "memory_gb": 1.5}
SPEED = Speed(tokens_per_s=1234.0)


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return compose(["training=fast"], None, {})


@pytest.fixture
def ended(experiment: Experiment, tmp_path: Path) -> Callable[..., Outcome]:
    """An outcome of a scheme, by default completed."""

    def make(scheme: str = "bf16", loss: float = 5.0, **values: object) -> Outcome:
        own = copy.deepcopy(experiment)
        own.quant.name = scheme
        run = RunDir(tmp_path / f"run_of_{scheme}")
        outcome = Outcome(own, run, State.COMPLETED, metrics={**METRICS, "loss": loss}, speed=SPEED)
        return replace(outcome, **values)  # type: ignore[arg-type]

    return make


def printed(show: Callable[[Console], None], width: int = 160) -> str:
    out = io.StringIO()
    show(Console(file=out, width=width))
    return out.getvalue()


def test_summary_has_data_loss_speed_and_capture(ended: Callable[..., Outcome]) -> None:
    outcome = ended(tensors=64, num_bytes=2_400_000)
    text = printed(lambda console: print_outcome(outcome, console))
    assert "wikipedia (built-in sample)" in text
    assert "iteration 8, loss 5.0000, 1,234 tokens/s, 1.5 GB" in text
    assert "64 tensors, 2.4 MB" in text
    assert "completed" in text
    assert "numerics" not in text


def test_summary_has_the_state_of_the_verification(ended: Callable[..., Outcome]) -> None:
    outcome = ended(verified="not verified: run quantexp verify")
    text = printed(lambda console: print_outcome(outcome, console))
    assert re.search(r"^numerics +not verified: run quantexp verify", text, re.MULTILINE)


def test_summary_has_the_trackers_addresses_and_problems(
    ended: Callable[..., Outcome],
) -> None:
    well = {"where": "https://there/[theirs]", "iteration": 8, "ended": True, "trouble": ""}
    tracking = {
        "tensorboard": {**well, "where": "tensorboard"},
        "wandb": well,
        "mlflow": {**well, "iteration": 3, "trouble": "MlflowException: away"},
    }
    text = printed(lambda console: print_outcome(ended(tracking=tracking), console))
    assert re.search(r"wandb +https://there/\[theirs\]\s", text)
    assert re.search(r"mlflow +received iterations up to 3: MlflowException: away\s", text)
    assert "tensorboard" not in text, "it is in the run folder"
    never = {**well, "iteration": 0, "trouble": "OSError: full"}
    text = printed(lambda console: print_outcome(ended(tracking={"tensorboard": never}), console))
    assert re.search(r"tensorboard +received nothing: OSError: full\s", text)


def test_skipped_run_has_its_reason(ended: Callable[..., Outcome]) -> None:
    outcome = ended(skipped=True, reason="already [completed]")
    text = printed(lambda console: print_outcome(outcome, console))
    assert "skipped" in text
    assert "already [completed]" in text


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "nothing (capture=tensors)"),
        ({"tensors": 64}, "statistics of 64 tensors"),
    ],
)
def test_capture_is_described_by_what_it_saved(
    ended: Callable[..., Outcome], values: dict[str, int], expected: str
) -> None:
    outcome = ended(**values)
    assert expected in printed(lambda console: print_outcome(outcome, console))


def test_picture_is_named_if_it_was_drawn(ended: Callable[..., Outcome]) -> None:
    outcome = ended()
    outcome.run.figures.mkdir(parents=True)
    (outcome.run.figures / "quick_analysis.png").write_bytes(b"")
    text = printed(lambda console: print_outcome(outcome, console), 400)
    assert "quick_analysis.png" in text
    assert "figures  " not in text
    (outcome.run.figures / "tensor_stats.txt").write_bytes(b"")
    assert "figures  " in printed(lambda console: print_outcome(outcome, console), 400)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_summary_breaks_no_word_and_no_path(ended: Callable[..., Outcome], width: int) -> None:
    outcome = ended(tensors=64, num_bytes=2_400_000)
    outcome.run.figures.mkdir(parents=True)
    picture = outcome.run.figures / "quick_analysis.png"
    picture.write_bytes(b"")
    lines = printed(lambda console: print_outcome(outcome, console), width).splitlines()
    assert any(line.endswith(str(picture)) for line in lines)
    label = "llama32-1b cut to 2 of 16 layers, vocabulary 257 of 128,256: 122M parameters"
    assert label in " ".join(" ".join(lines).split())
    paths = str(outcome.run.root)
    assert all(len(line.rstrip()) <= width for line in lines if paths not in line)


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_table_of_a_sweep_fits_and_keeps_loss_gap_and_state(
    ended: Callable[..., Outcome], width: int
) -> None:
    outcomes = [ended("bf16", 5.0), ended("FA_linear_mxfp8", 5.25)]
    lines = printed(lambda console: print_sweep(outcomes, [], console), width).splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    assert lines[3].split()[:3] == ["FA_linear_mxfp8", "5.2500", "+0.2500"]
    assert lines[3].split()[-1] == "completed"
    assert ("captured" in lines[1]) == (width >= 80)


def test_scheme_of_a_run_in_fp32_names_its_precision(ended: Callable[..., Outcome]) -> None:
    outcome = ended()
    outcome.experiment.training.precision = Precision.fp32
    text = printed(lambda console: print_outcome(outcome, console))
    assert "bf16 (nothing quantised, computed in fp32)" in text
    line = "scheme bf16 quantises nothing; the working precision of these runs is fp32"
    assert line in printed(lambda console: print_sweep([outcome, outcome], [], console))
    bf16 = printed(lambda console: print_sweep([ended(), ended("FA_mxfp8")], [], console))
    assert "working precision" not in bf16


def test_rules_that_were_never_in_force_are_named(ended: Callable[..., Outcome]) -> None:
    outcome = ended("linear_mxfp8")
    last = outcome.experiment.training.last_iteration
    outcome.experiment.quant.rules = [
        Rule(iterations=[last, None], format="mxfp4"),
        Rule(iterations=[last + 1, None], format="mxfp4"),
    ]
    text = printed(lambda console: print_outcome(outcome, console))
    assert f"never in force in iterations 1 to {last}: quant.rules[1]" in " ".join(text.split())


def test_one_run_is_singular(ended: Callable[..., Outcome]) -> None:
    text = printed(lambda console: print_sweep([ended()], [], console))
    assert text.splitlines()[0].strip() == "1 run"


def test_statistics_without_values_are_labelled_so(ended: Callable[..., Outcome]) -> None:
    outcomes = [ended(tensors=28), ended("FA_mxfp8", tensors=28)]
    text = printed(lambda console: print_sweep(outcomes, [], console))
    assert "28  statistics  completed" in text
    assert "0 B" not in text


def test_proof_counts_engaged_and_inconclusive_slots() -> None:
    statuses = [
        ("hifp8", "engaged"),
        ("hifp8", "inconclusive"),
        ("bf16", "engaged"),
        ("bf16", "inconclusive"),
    ]
    entries = [{"format": name, "status": status} for name, status in statuses]
    assert proof_line({"entries": entries, "quantised_calls": 9}, Precision.bf16) == (
        "1 of 2 quantised slots engaged, 2 slots high (bf16), 9 quantised operands "
        "seen; 2 inconclusive"
    )
    assert proof_line(None, Precision.bf16) == "none"


def test_table_has_the_gap_to_bf16_and_the_failures(ended: Callable[..., Outcome]) -> None:
    failed = ended("FA_hifp8", state=State.FAILED, metrics=None, reason="loss nan")
    outcomes = [ended("FA_mxfp8", 5.25), failed, ended("bf16", 5.0)]
    never = copy.deepcopy(outcomes[-1].experiment)
    never.dataset.name = "dolma"
    starting = [(never, "no [data]")]
    text = printed(lambda console: print_sweep(outcomes, starting, console))
    assert "4 runs" in text
    assert "+0.2500" in text
    assert "+0.0000" in text
    assert "run_of_FA_hifp8: loss nan" in text
    assert "llama32-1b dolma bf16: no [data]" in text
    assert text.count("failed") == 2
    assert "dataset" in text
    assert "model " not in text


def test_gap_needs_a_baseline_that_differs_in_nothing_else(ended: Callable[..., Outcome]) -> None:
    other = ended("bf16", 4.0)
    other.experiment.training.seed = 2
    short = ended("bf16", 4.0)
    assert short.metrics is not None
    short.metrics["iteration"] = 4
    for baseline in (other, short):
        outcomes = [ended("FA_mxfp8", 5.25), baseline]
        text = printed(lambda console, o=outcomes: print_sweep(o, [], console))  # type: ignore[misc]
        assert "+1.2500" not in text


def test_a_perturbed_run_is_held_against_the_one_that_is_not(
    ended: Callable[..., Outcome],
) -> None:
    perturbed = ended("bf16", 5.01)
    perturbed.experiment.training.chaos = 1
    outcomes = [perturbed, ended("bf16", 5.0), ended("FA_mxfp8", 5.25)]
    text = printed(lambda console: print_sweep(outcomes, [], console))
    for gap in ("+0.0100", "+0.0000", "+0.2500"):
        assert gap in text


def test_table_has_the_seeds_and_the_noise_of_the_gap(
    ended: Callable[..., Outcome],
) -> None:
    outcomes = [ended("bf16", 5.0), ended("FA_mxfp8", 5.25)]
    text = printed(lambda console: print_sweep(outcomes, [], console))
    assert "gap: one seed each, so it cannot be told from noise" in text
    assert "seed=" not in text
    again = [ended("bf16", 4.0), ended("FA_mxfp8", 4.5)]
    for outcome in again:
        outcome.experiment.training.seed += 1
    never = copy.deepcopy(again[0].experiment)
    never.training.seed += 1
    starting = [(never, "no data")]
    text = printed(lambda console: print_sweep(outcomes + again, starting, console))
    assert re.search(r"FA_mxfp8 +seed=1235 +4\.5000 +\+0\.5000", text), text
    assert "how it varies over the 3 seeds is the noise" in text
    assert "bf16 seed=1236: no data" in text


def test_no_name_is_cut_on_a_narrow_terminal(ended: Callable[..., Outcome]) -> None:
    outcomes = [ended("FA_linear_mxfp8", tensors=64, num_bytes=2_400_000)]
    text = printed(lambda console: print_sweep(outcomes, [], console), 100)
    assert "…" not in text


@pytest.mark.parametrize(
    ("name", "quoted"), [("a", "{}a{}"), ("a é", "'{}a é{}'"), ("a\nb", "$'{}a\\x0ab{}'")]
)
def test_interrupted_run_is_followed_by_how_to_continue_it(
    name: str, quoted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "runs" / name)
    run.root.mkdir(parents=True)
    write_status(run.status, Status(State.CANCELLED, "interrupted", iteration=5, iterations=40))

    def advice() -> list[str]:
        out = io.StringIO()
        print_how_to_go_on(run, Console(file=out, width=80))
        return out.getvalue().splitlines()

    assert " ".join(advice()) == (
        "5 of 40 iterations were complete, and no checkpoint was saved. To begin again at the first:   quantexp resume "
        f"{quoted.format('runs/', '')}"
    )
    assert max(map(len, advice())) <= 80
    for iteration in (2, 4):
        folder_of(run, iteration).mkdir(parents=True)
    assert advice() == [
        "5 of 40 iterations were complete. To begin again at the first:",
        f"  quantexp resume {quoted.format('runs/', '')}",
        "To begin another run with its last checkpoint:",
        f"  quantexp ... {quoted.format('training.start_from=runs/', '@4')}",
    ]


@pytest.mark.parametrize(
    ("left", "failed", "advice"),
    [
        (
            2,
            0,
            [
                "2 of 3 runs are left. To run them, each from its last checkpoint:",
                "  quantexp resume runs/sweeps/1.json",
            ],
        ),
        (0, 1, ["1 failed. To run them again:", "  quantexp retry runs/sweeps/1.json"]),
        (0, 0, []),
    ],
)
def test_interrupted_sweep_is_followed_by_resume_for_the_rest_and_retry_for_failures(
    left: int, failed: int, advice: list[str]
) -> None:
    out = io.StringIO()
    listing = Path("runs/sweeps/1.json").absolute()
    print_how_to_go_on_with_sweep(listing, left, failed, 3, Console(file=out, width=80))
    assert out.getvalue().splitlines() == advice
