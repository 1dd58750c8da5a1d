"""`quantexp plan` and `dry_run=true` on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quantexp.cli.main import main
from quantexp.config.compose import compose
from quantexp.launch.attempt import open_run
from quantexp.runs.code_digest import code_digest
from quantexp.runs.status import State, read_json, read_status, write_json, write_status

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(in_tmp: Path) -> None:
    pass


def test_plan_prints_json_without_data(capsys: Captured) -> None:
    assert main(["plan", "--json", "training=default", "capture=tensors", "memory=ignore"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["missing"].startswith("dataset=wikipedia has no data")
    assert content["parameters"] == 1_235_814_400
    assert {"memory_gb_per_gpu", "capture_bytes", "precision_map", "commands"} <= set(content)
    assert content["capture_bytes"] > 0
    assert not list(Path.cwd().iterdir())


def test_plan_of_a_sweep_is_a_list(capsys: Captured) -> None:
    assert main(["plan", "-m", "quant=bf16,FA_mxfp8", "training=fast", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [plan["scheme"] for plan in content] == ["bf16", "FA_mxfp8"]
    assert not list(Path.cwd().iterdir())


def test_plan_of_a_sweep_ends_with_its_sum(capsys: Captured) -> None:
    assert main(["plan", "-m", "quant=bf16,FA_mxfp8", "training=fast"]) == 0
    *_, total, captures = capsys.readouterr().out.splitlines()
    assert total.startswith("in all  2 runs, 3.0 TFLOP, about ")
    assert captures.startswith("capture 1.3 GB of values in 224 tensors, statistics of 224; ")
    assert captures.endswith(f" are free in {Path.cwd()}")


def test_plan_of_a_sweep_shows_maps_on_request(capsys: Captured) -> None:
    words = ["plan", "-m", "quant=bf16,FA_mxfp8", "training=fast", "training.seed=1,2"]
    assert main(words) == 0
    assert "precision map" not in capsys.readouterr().out
    assert main([*words, "--maps"]) == 0
    assert capsys.readouterr().out.count("precision map") == 2, "one for both seeds"


def test_plan_of_a_sweep_lists_merged_points_on_standard_error(capsys: Captured) -> None:
    assert main(["plan", "-m", "quant=bf16,bf16", "training=fast", "--json"]) == 0
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)) == 1
    assert captured.err == (
        "quantexp: quant=bf16 training=fast is there more than once: it runs once\n"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["plan"],
        ["plan", "--json"],
        ["plan", "-m"],
        ["plan", "-m", "--json"],
        ["dry_run=true"],
        ["-m", "dry_run=true"],
    ],
)
@pytest.mark.parametrize(
    "blocked", [["training=default", "memory=ignore"], ["training=fast", "memory=0.1"]]
)
def test_a_plan_of_a_run_that_will_not_start_ends_with_1(
    capsys: Captured, words: list[str], blocked: list[str]
) -> None:
    assert main([*words, "model.num_layers=1", *blocked]) == 1
    printed = capsys.readouterr()
    assert "--json" in words or printed.out.startswith("will not start: ")
    if "--json" in words:
        data = json.loads(printed.out)
        assert (data[0] if "-m" in words else data)["blockers"]
    assert printed.err == "quantexp: the run will not start, as its plan says\n"


@pytest.mark.parametrize(("flags", "text"), [([], "precision map"), (["-m"], "in all  1 run,")])
def test_dry_run_shows_the_plan_and_runs_nothing(
    capsys: Captured, flags: list[str], text: str
) -> None:
    assert main([*flags, "training=fast", "quant=FA_mxfp8", "dry_run=true"]) == 0
    assert text in capsys.readouterr().out
    assert not list(Path.cwd().iterdir())


def test_plan_says_whether_a_completed_run_is_skipped_or_runs_again(capsys: Captured) -> None:
    words = ["training=fast", "model.num_layers=1", "capture=off", "quant=bf16"]
    with open_run(compose(words, None, {}), "cpu", []) as (folder, _):
        run = folder.run
    status = read_status(run.status)
    assert status is not None
    completed = replace(status, state=State.COMPLETED, iteration=8, finished="2026-01-01")
    write_status(run.status, completed)
    skipped = "already completed 2026-01-01 with all requested captures; force=true runs it again"
    again = f"completed before with other code (0123 then, {code_digest()} now): running again"
    for code, expected in ((code_digest(), skipped), ("0123", again)):
        write_json(run.provenance, {**read_json(run.provenance), "code": code})
        assert main(["plan", "--json", *words]) == 0
        assert json.loads(capsys.readouterr().out)["earlier"] == expected
        assert main(["plan", *words]) == 0
        assert f"earlier {expected[:30]}" in " ".join(capsys.readouterr().out.split())
        assert main(["plan", "-m", *words, "training.seed=1234,7"]) == 0
        assert capsys.readouterr().out.splitlines()[-2:] == [
            "earlier attempt: bf16 seed=1234",
            f"  {expected}",
        ]
    assert main(["plan", "--json", *words, "training.seed=7"]) == 0
    assert json.loads(capsys.readouterr().out)["earlier"] is None
    assert not run.attempts.exists(), "it changes nothing"
