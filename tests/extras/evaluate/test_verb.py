"""`quantexp evaluate` on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.cli.main import main
from quantexp.runs.paths import RunDir
from tests.conftest import TINY

Captured = pytest.CaptureFixture[str]
HELD_OUT = ("evaluation.samples=4", "dataset.split='50,50,0'")
#: What a forward pass uses of TINY.
WORDS = [
    word
    for word in TINY
    if word.partition("=")[0] not in ("training.iterations", "training.warmup_iterations")
]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(in_tmp: Path) -> None:
    pass


def test_weights_are_needed(capsys: Captured) -> None:
    assert main(["evaluate", "training=fast"]) == 1
    assert capsys.readouterr().err == (
        "quantexp: quantexp evaluate needs weights: RUN@ITERATION or model.init_from=FOLDER\n"
    )


@pytest.mark.parametrize("word", ["training.lr=1e-3", "+training.iterations=5"])
def test_words_about_training_are_refused(word: str, capsys: Captured) -> None:
    assert main(["evaluate", "training=fast", word]) == 1
    assert capsys.readouterr().err == (
        f"quantexp: {word} has no effect on quantexp evaluate, which trains nothing: drop it\n"
    )


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("capture=tensors", "capture=tensors"),
        ("capture.ring=8", "capture.ring=8"),
        ("checkpoint.at_end=true", "checkpoint.at_end=true"),
        ("checkpoint.every=2", "checkpoint.every=2"),
        ("checkpoint.every_min=2", "checkpoint.every_min=2"),
        ("evaluation.every=2", "evaluation.every=2"),
    ],
)
def test_keys_without_an_effect_are_refused(word: str, named: str, capsys: Captured) -> None:
    assert main(["evaluate", "training=fast", "training.start_from=run@2", word]) == 1
    assert capsys.readouterr().err == (
        f"quantexp: {named} has no effect on quantexp evaluate, which trains nothing: drop it\n"
    )


def test_parts_are_for_evaluations(capsys: Captured) -> None:
    assert main(["training=fast", "evaluate.each_layer=true"]) == 1
    assert capsys.readouterr().err == (
        "quantexp: evaluate.each_layer belongs to quantexp evaluate, and this run trains\n"
    )


def test_dry_run_shows_the_forward_slots_alone(capsys: Captured) -> None:
    words = [*WORDS, *HELD_OUT, "training.start_from=run@2", "quant=FA_linear_mxfp8"]
    assert main(["evaluate", *words, "dry_run=true"]) == 1  # there is no run
    shown = capsys.readouterr().out
    assert "linear.fprop.x" in shown
    assert "of evaluation on this machine" in shown
    assert "grad" not in shown
    assert "capture" not in shown
    assert not (Path.cwd() / "evaluate").exists()


@pytest.mark.slow
def test_sweep_is_evaluated_skipped_and_compared(
    run_tiny: Callable[..., RunDir], cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_tiny("capture=off", "checkpoint.at_end=true")
    words = [*WORDS, *HELD_OUT, f"paths.cache={cache}", "training.start_from=_bf16@2"]
    sweep = ["evaluate", "-m", *words, "quant=bf16,linear_mxfp4"]
    assert main([*sweep, "out=figures"]) == 0
    shown = capfd.readouterr().out
    assert "2 evaluations" in shown
    assert (Path("figures") / "evaluation.png").is_file()
    assert main([*sweep, "--json"]) == 0
    records = json.loads(capfd.readouterr().out)
    assert [one["scheme"] for one in records] == ["bf16", "linear_mxfp4"]
    assert records[0]["evaluation"]["scheme"]["difference"] == 0
    assert Path(records[1]["run"]).name.startswith("llama32-1b_wikipedia_linear_mxfp4_evaluated-")
    assert main(sweep) == 0
    assert "skipped" in capfd.readouterr().out
    short = ["evaluate", "_bf16@2", *HELD_OUT, f"paths.cache={cache}", "quant=linear_mxfp4"]
    assert main(short) == 0
    assert "skipped" in capfd.readouterr().out, "model and data are those of the run"
    assert main(["compare", "runs"]) == 0
    assert "_evaluated-" in (shown := capfd.readouterr().out)
    assert "it evaluates without training; quantexp evaluate and quantexp report show it" in shown
    listing = str(next(Path("runs/sweeps").glob("*.json")))
    assert main(["compare", listing]) == 1
    assert capfd.readouterr().err.endswith(
        f"{listing} holds evaluations without training, which quantexp report compares\n"
    )
    assert main(["report", listing, "out=report.html"]) == 0
    page = Path("report.html").read_text()
    assert "held-out tokens of" in page
    assert ">learning rate<" not in page
    assert "<h2>Numerics by layer</h2>" not in page
    assert "the intervals over documents are in each overview" in page
    assert "Of an evaluation: the mean over all micro-batches so far." in page


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_layouts_evaluate_as_one_process(
    run_tiny: Callable[..., RunDir], cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In fp32, with a scheme whose products are exact there; context=2 leaves blocks of 32 whole in fprop."""
    run_tiny("capture=off", "checkpoint.at_end=true", "training.precision=fp32")
    words = [*WORDS, *HELD_OUT, f"paths.cache={cache}", "training.start_from=_bf16@2"]
    words += ["training.precision=fp32", "training.micro_batch_size=1", "quant=linear_mxfp4"]
    layouts = ("tensor=2", "pipeline=2", "context=2", "tensor=1")

    def evaluated(*layout: str) -> dict[str, float]:
        assert main(["evaluate", *words, *layout, "--json"]) == 0
        (one,) = json.loads(capfd.readouterr().out)
        numbers: dict[str, float] = one["evaluation"]["scheme"]
        return numbers

    alone = evaluated()
    assert alone["divergence"] > 1e-6
    for layout in layouts:
        divided = evaluated("launcher.num_processes=2", f"parallel.{layout}")
        assert (divided["tokens"], divided["documents"]) == (alone["tokens"], alone["documents"])
        for name in ("loss", "bf16_loss"):
            # Sums in another order: some 1e-7 of a logit.
            assert divided[name] == pytest.approx(alone[name], rel=1e-6), (layout, name)
        assert divided["divergence"] == pytest.approx(alone["divergence"], rel=1e-3), layout
