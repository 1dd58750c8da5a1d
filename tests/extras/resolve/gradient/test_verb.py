"""`quantexp gradient` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantexp.cli.main import main
from quantexp.config.compose import compose
from tests.conftest import run_here
from tests.recorded import json_lines

Captured = pytest.CaptureFixture[str]
WORDS = ("capture=off", "training.iterations=4", "checkpoint.every=2", "checkpoint.optimizer=true")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(in_tmp: Path) -> None:
    pass


@pytest.fixture(scope="module")
def trained(tiny_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two runs, which differ in the seed."""
    root = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        run_here(compose([*tiny_words, f"paths.root={root}", *WORDS, f"training.seed={seed}"]))
    return root


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batches", "1"], "--batches must be at least 2, whose errors tell bias from variance"),
        (["--draws", "0"], "--draws must be at least 1, got 0"),
        (["--margin", "0"], "--margin must be greater than 0, got 0.0"),
        (["--by", "slots"], "--by must be among "),
        (["training.lr=1"], "training.lr=1 has no effect on quantexp gradient, in which all but"),
        (["--batches", "9"], "no checkpoint with a training state that all 2 runs have is 9 itera"),
        (
            ["--batches", "2", "quant=more/linear_fp8_delayed"],
            "linear_fp8_delayed scales by amaxes of earlier iterations, and a checkpoint of a run",
        ),
    ],
)
def test_a_design_that_cannot_be_is_one_line(
    words: list[str], message: str, trained: Path, capsys: Captured
) -> None:
    scheme = [] if any(word.startswith("quant=") for word in words) else ["quant=linear_mxfp8"]
    assert main(["gradient", str(trained), *scheme, *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"quantexp: {message}")
    assert error.count("\n") == 1


def test_a_dry_run_says_what_would_run_and_writes_nothing(trained: Path, capsys: Captured) -> None:
    words = ["gradient", str(trained), "quant=linear_mxfp8,linear_mxfp4", "--batches", "2"]
    words += ["dry_run=true"]
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["arms"] == ["bf16", "linear_mxfp8", "linear_mxfp4"]
    assert (plan["seeds"], plan["checkpoints"], plan["missing"]) == ([1, 2], [2], 6)
    assert plan["passes"] == 2 * 2 * (1 + 1 + 4 + 4)
    assert plan["cpu_s"] > 0
    assert main(words) == 0
    assert "not known" in capsys.readouterr().out
    assert not list(Path.cwd().iterdir())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gradients_are_computed_once_judged_and_go_on(
    trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["gradient", str(trained), "quant=linear_mxfp4", "--batches", "2", "--by", "none"]
    assert main([*words, "--json"]) == 0
    captured = capfd.readouterr()
    content = json.loads(captured.out)
    assert "4 of 4 arms" in captured.err
    lines = json_lines(Path("gradient/results.jsonl"))
    assert sorted((x["seed"], x["scheme"]) for x in lines) == [
        (seed, name) for seed in (1, 2) for name in ("bf16", "linear_mxfp4")
    ]
    (one,) = content["verdicts"]["raw"]["error"]
    assert (one["verdict"], one["more_seeds"]) == ("cannot be told", 4)
    assert one["difference"] > 1, "an error of 4 bits is more than e times that of bf16"
    # The same command computes nothing again; a line that is lost is computed alone.
    assert main(words) == 0
    shown = capfd.readouterr()
    assert "arms, about" not in shown.err
    assert "figure  gradient/gradient.png gradient/gradient.pdf" in shown.out
    before = Path("gradient/results.jsonl").read_text().splitlines(keepends=True)
    Path("gradient/results.jsonl").write_text("".join(before[:-1]))
    assert main(words) == 0
    assert "1 of 1 arms" in capfd.readouterr().err
    again = json_lines(Path("gradient/results.jsonl"))
    assert again[-1]["parts"] == lines[-1]["parts"], "passes repeat their bits"


@pytest.mark.slow
def test_a_failed_proof_is_told_and_counts_as_no_unit(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The seeds' processes read this folder's sitecustomize, in which nothing is quantised."""
    Path("sitecustomize.py").write_text(
        "import sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'quantexp.extras.resolve.gradient.errors':\n"
        "            from quantexp.quant.precision import unquantised\n"
        "            from quantexp.training.megatron.step import Stepper\n"
        "            given = Stepper.set_precision\n"
        "            Stepper.set_precision = lambda self, declared: given(self, unquantised(declared))\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()), prepend=":")
    words = ["gradient", str(trained), "quant=linear_mxfp4", "--batches", "2", "--by", "none"]
    assert main(words) == 1
    captured = capfd.readouterr()
    assert "which counts as no unit" in captured.err
    assert "linear.fprop.x" in captured.err
    assert "no unit" in captured.out
