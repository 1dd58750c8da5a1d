"""`quantexp branch` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quantexp.cli.main import main
from quantexp.config.compose import compose
from quantexp.errors import ConfigError
from quantexp.extras.resolve.looks import looks_of
from quantexp.runs.paths import RunDir
from tests.conftest import run_here
from tests.recorded import json_lines

Captured = pytest.CaptureFixture[str]
WORDS = ("capture=off", "training.iterations=4", "dataset.split='50,50,0'")
SAVES = ("checkpoint.every=2", "checkpoint.optimizer=true")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(in_tmp: Path) -> None:
    pass


@pytest.fixture(scope="module")
def trained(tiny_words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two runs, which differ in the seed."""
    root = tmp_path_factory.mktemp("runs")
    for seed in (1, 2):
        words = [*tiny_words, f"paths.root={root}", *WORDS, *SAVES, f"training.seed={seed}"]
        run_here(compose(words))
    return root


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["--margin", "0"], "--margin must be greater than 0, got 0.0"),
        (["--steps", "5,x"], "--steps must be whole numbers of at least 1, as 10,50, got 5,x"),
        (["--steps", "1", "--control", "last"], "--control must be among chaos, noise, none, got"),
        (["--steps", "1", "--control", "none,chaos"], "--control none stands alone, got none,ch"),
        (["--steps", "1", "training.lr=1"], "training.lr=1 has no effect on quantexp branch, in"),
        (["--steps", "1", "against=mine"], "against=mine: no scheme of the words has this name;"),
        (["--steps", "1", "dry_run=maybe"], "dry_run must be true or false, got maybe"),
        (["--warm-up", "-1"], "--warm-up must be at least 0, got -1"),
        (["--steps", "1", "--warm-up", "8"], "no checkpoint with a training state that all 2 run"),
        (["--steps", "1", "--looks", "4,8"], "--looks must be numbers of seeds from 6 on, got 4,"),
        (["--steps", "9"], "no checkpoint with a training state that all 2 runs have is 9 itera"),
        (["--steps", "1", "--from", "3"], "--from 3 must be a checkpoint with a training state "),
    ],
)
def test_a_design_that_cannot_be_is_one_line(
    words: list[str], message: str, trained: Path, capsys: Captured
) -> None:
    assert main(["branch", str(trained), "quant=linear_mxfp8", *words]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"quantexp: {message}")
    assert error.count("\n") == 1


def test_a_scheme_and_a_run_are_needed(trained: Path, capsys: Captured) -> None:
    assert main(["branch", str(trained), "quant=bf16", "--steps", "1"]) == 1
    assert capsys.readouterr().err == (
        "quantexp: there is no scheme besides bf16: give quant=NAME\n"
    )
    with pytest.raises(SystemExit):
        main(["branch", "quant=linear_mxfp8"])
    assert "branch needs RUN: a run, a part of its name" in capsys.readouterr().err


def test_a_dry_run_says_what_would_run_and_writes_nothing(trained: Path, capsys: Captured) -> None:
    words = ["branch", str(trained), "quant=linear_mxfp8,linear_mxfp4", "--steps", "1,2"]
    words += ["--tokens", "200", "--control", "chaos,noise", "dry_run=true"]
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["arms"] == [
        *("bf16", "linear_mxfp8", "linear_mxfp4", "bf16 chaos"),
        *("linear_mxfp8 noise", "linear_mxfp4 noise"),
    ]
    assert (plan["seeds"], plan["checkpoints"], plan["branches"]) == ([1, 2], [2], 12)
    assert plan["held_out_tokens"] == 256, "whole micro-batches of two sequences of 64"
    assert plan["cpu_s"] > 0
    assert all(each["working_loss"] is None for each in plan["smallest_gaps"])
    assert main(words) == 0
    assert "not known" in capsys.readouterr().out
    assert main([*words[:3], "--steps", "1", "--warm-up", "1", "dry_run=true"]) == 0
    assert "1, after a warm-up of 1" in capsys.readouterr().out
    assert not list(Path.cwd().iterdir())


def test_looks_are_planned_before_the_first_one(in_tmp: Path) -> None:
    folder = in_tmp / "branch"
    assert looks_of(folder, "8,16", 0, is_dry=True) == (8, 16)
    assert looks_of(folder, None, 0, is_dry=False) == ()
    assert not folder.exists()
    assert looks_of(folder, "8,16", 5, is_dry=False) == (8, 16)
    assert looks_of(folder, None, 8, is_dry=False) == looks_of(folder, "8,16", 8, is_dry=False)
    with pytest.raises(ConfigError, match=r"branch was planned with --looks 8,16; leave the flag"):
        looks_of(folder, "8,24", 8, is_dry=False)
    with pytest.raises(ConfigError, match=r"has results of 6 seeds, which may have been judged"):
        looks_of(in_tmp / "other", "8,16", 6, is_dry=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_branches_run_once_are_judged_and_go_on(
    trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["branch", str(trained), "quant=linear_mxfp4", "--steps", "1,2", "--tokens", "256"]
    words += ["--control", "chaos,noise"]
    assert main([*words, "--json"]) == 0
    captured = capfd.readouterr()
    content = json.loads(captured.out)
    assert "8 of 8 branches" in captured.err
    lines = json_lines(Path("branch/results.jsonl"))
    assert sorted({(line["seed"], line["scheme"]) for line in lines}) == [
        (seed, name)
        for seed in (1, 2)
        for name in ("bf16", "bf16 chaos", "linear_mxfp4", "linear_mxfp4 noise")
    ]
    assert all(line["failure"] is None for line in lines)
    row = content["working_loss"][1]
    own, base = (
        next(x["working_loss"][1] for x in lines if (x["seed"], x["scheme"]) == (1, name))
        for name in ("linear_mxfp4", "bf16")
    )
    assert row["gaps"]["1"] == own - base
    assert (row["verdict"], row["more_seeds"]) == ("cannot be told", 4)
    for branch in Path("branch/branches").iterdir():
        assert json.loads(RunDir(branch).precision.read_text())["proved"]
    # The same command runs nothing again; a line that is lost runs alone.
    assert main(words) == 0
    shown = capfd.readouterr()
    assert "branches" not in shown.err
    assert "figure  branch/branch.png branch/branch.pdf" in shown.out
    before = Path("branch/results.jsonl").read_text().splitlines(keepends=True)
    Path("branch/results.jsonl").write_text("".join(before[:-1]))
    assert main(words) == 0
    assert "1 of 1 branches" in capfd.readouterr().err
    again = json_lines(Path("branch/results.jsonl"))
    for name in ("working_loss", "scheme_loss"):
        assert again[-1][name] == lines[-1][name], "a branch repeats its bits"
    assert main([*words, "dry_run=true", "--json"]) == 0
    plan = json.loads(capfd.readouterr().out)
    assert plan["missing"] == 0
    assert plan["smallest_gaps"][0]["working_loss"] > 0


@pytest.mark.slow
def test_a_seed_that_cannot_run_is_one_line(
    trained: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["branch", str(trained), "quant=linear_mxfp4", "--steps", "1", "--tokens", "900000"]
    assert main(words) == 1
    error = capfd.readouterr().err.splitlines()
    assert error[-1].startswith("quantexp: seed 1: the design takes ")
