from __future__ import annotations

import json

import pytest
import yaml

from quantexp.analysis.compare.comparison import compare, record
from quantexp.analysis.compare.side import read_side
from quantexp.errors import RunError
from quantexp.runs.find import Missing
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State

from .runs import BF16, MX8, Runs, change_json


def compared(*folders: RunDir):  # type: ignore[no-untyped-def]
    return compare([read_side(run) for run in folders])


def test_gap_speed_and_memory_are_relative_to_bf16(runs: Runs) -> None:
    comparison = compared(runs.add("FA_linear_mxfp8", [6.0, 5.5, 4.0, 3.75]), runs.add())
    quantised, baseline = record(comparison)["runs"]
    assert quantised["baseline"] == baseline["run"]
    assert baseline["is_baseline"]
    assert quantised["gap"] == {"iteration": 4, "last": 0.25, "late": 0.25, "num_late": 1}
    assert quantised["speed"]["memory_gb"] == 2.4
    assert quantised["speed"]["step_time_s"] == 2.0, "the first iteration sets up"
    assert comparison.warnings == ()
    json.dumps(record(comparison), allow_nan=False)


def test_a_baseline_is_recognised_by_its_map_and_not_by_its_name(runs: Runs) -> None:
    quantised = runs.add("bf16", settings=MX8)
    base = runs.add("mine", settings=BF16)
    rows = compared(quantised, base).rows
    assert [row.baseline for row in rows] == [1, 1]
    quantised.provenance.unlink()
    quantised.precision.unlink()
    assert compared(quantised).rows[0].side.is_baseline, "nothing but the name is left"


def test_each_run_is_paired_with_the_bf16_run_of_its_seed(runs: Runs) -> None:
    first, second = runs.add(seed=1), runs.add(seed=2)
    a, b = runs.add("FA_mxfp8", seed=1), runs.add("FA_mxfp8", seed=2)
    comparison = compared(first, second, b, a)
    assert [row.baseline for row in comparison.rows] == [0, 1, 1, 0]
    assert [row.label for row in comparison.rows][2:] == ["FA_mxfp8 seed 2", "FA_mxfp8 seed 1"]
    assert all(row.matched for row in comparison.rows)


def test_unmatched_runs_have_a_warning_with_the_reason(runs: Runs) -> None:
    comparison = compared(
        runs.add(), runs.add("FA_mxfp8", seed=2), runs.add("linear_mxfp8", seed=2)
    )
    (warning,) = comparison.warnings
    assert warning == (
        "FA_mxfp8 seed 2, linear_mxfp8 seed 2 and bf16 seed 1234 are not a matched pair, so the gap is not the "
        "scheme's alone: data order (training.seed 2 against 1234); initialisation (training.seed 2 against 1234)"
    )


def test_without_bf16_there_is_no_gap_but_a_command_for_a_baseline(runs: Runs) -> None:
    first, second = runs.add("FA_mxfp8"), runs.add("linear_mxfp8", lr=1.0)
    command = ["quantexp", "-m", "training=fast", "quant=FA_mxfp8,linear_mxfp8", "quant/pv=none"]
    for run in (first, second):
        change_json(run.provenance, command=command)
    comparison = compared(first, second)
    assert comparison.warnings == (
        "FA_mxfp8, linear_mxfp8: no baseline, so no gap: there is no bf16 run among these; to make one: quantexp -m "
        "training=fast quant=bf16",
    )
    assert [row.gap for row in comparison.rows] == [None, None]
    assert not any(row.matched for row in comparison.rows)
    assert [d.key for d in comparison.rows[1].config] == ["training.lr"], "told from the first run"
    rows = record(comparison)["runs"]
    assert [row["baseline"] for row in rows] == [None, None]
    assert rows[0]["no_baseline"] == "there is no bf16 run among these"


def test_perturbed_runs_alone_have_a_command_for_a_run_with_unperturbed_weights(runs: Runs) -> None:
    folders = [runs.add(chaos=1), runs.add("FA_mxfp8", chaos=1)]
    command = ["quantexp", "-m", "training=fast", "quant=bf16,FA_mxfp8", "+training.chaos=1"]
    for run in folders:
        change_json(run.provenance, command=command)
    assert compared(*folders).warnings == (
        "bf16 chaos 1, FA_mxfp8 chaos 1: no baseline, so no gap: there is no bf16 run with unperturbed initial "
        "weights among these; to make one: quantexp -m training=fast quant=bf16",
    )


def test_a_lone_quantised_run_is_no_baseline(runs: Runs) -> None:
    (row,) = compared(runs.add("FA_mxfp8")).rows
    assert not row.is_baseline
    assert row.lacks == "there is no bf16 run among these"


def test_a_bf16_run_without_a_loss_is_no_baseline(runs: Runs) -> None:
    comparison = compared(runs.add("FA_mxfp8"), runs.add(losses=[]))
    assert comparison.rows[0].lacks == "the bf16 run is without a loss"
    with_losses = compared(runs.add("FA_mxfp8"), runs.add(losses=[]), runs.add(lr=2.0))
    assert with_losses.rows[0].baseline == 2


@pytest.mark.parametrize(
    ("section", "field", "reason"),
    [
        ("model", "name", "the bf16 run is of another model, other, 2 layers"),
        ("dataset", "label", "the bf16 run is of other data, other"),
    ],
)
def test_a_bf16_run_of_another_model_or_of_other_data_is_no_baseline(
    runs: Runs, section: str, field: str, reason: str
) -> None:
    quantised, other = runs.add("FA_mxfp8"), runs.add()
    config = yaml.safe_load(other.config.read_text())
    config[section][field] = "other"
    other.config.write_text(yaml.safe_dump(config))
    identity = json.loads(other.provenance.read_text())["identity"]
    change_json(other.provenance, identity={**identity, section: {"num_layers": 3}})
    comparison = compared(quantised, other, runs.add("linear_mxfp8"))
    assert [row.lacks for row in comparison.rows] == [reason, None, reason]


def test_a_bf16_run_with_other_initial_weights_is_a_baseline_with_a_warning(runs: Runs) -> None:
    quantised, base = runs.add("FA_mxfp8"), runs.add()
    identity = json.loads(base.provenance.read_text())["identity"]
    for run, weights in ((quantised, "a1" * 32), (base, "b2" * 32)):
        model = {**identity["model"], "initial_weights": weights}
        content = json.loads(run.provenance.read_text())["identity"]
        change_json(run.provenance, identity={**content, "model": model})
    (row, _), warnings = compared(quantised, base).rows, compared(quantised, base).warnings
    assert row.lacks is None
    assert any("other initial weights: a1a1a1a1 against b2b2b2b2" in words for words in warnings)


@pytest.mark.parametrize("command", [None, ["quantexp"], ["quantexp", "resume", "runs"]])
def test_without_a_command_to_change_the_remedy_is_in_words(
    runs: Runs, command: list[str] | None
) -> None:
    run = runs.add("FA_mxfp8")
    change_json(run.provenance, command=command)
    (warning,) = compared(run).warnings
    assert warning.endswith("; to make one, run its command with quant=bf16")


def test_everything_that_qualifies_a_gap_is_a_warning(runs: Runs) -> None:
    broken = runs.add("linear_mxfp8", proved=False)
    change_json(broken.status, state="failed", reason="what ran is not what was declared")
    running = runs.add("FA_mxfp8", [6.0, None, 4.0, 3.5], state=State.RUNNING)
    missing = Missing("-", "did not start: no data", {"quant": {"name": "mxfp4"}})
    comparison = compare([read_side(r) for r in (runs.add(), broken, running)], [missing])
    assert comparison.warnings == (
        "mxfp4: did not start: no data",
        "linear_mxfp8 is failed at iteration 4: what ran is not what was declared",
        "linear_mxfp8 failed its proof, so it counts as no seed: L0 qkv fprop.x: 3 elements are off the "
        "grid",
        "FA_mxfp8 is running at iteration 4",
        "FA_mxfp8: iterations whose loss was not finite are left out: 2",
        "linear_mxfp8 and bf16 are not a matched pair, so the gap is not the scheme's alone: proof "
        "(failed)",
    )


def test_runs_of_different_code_are_named_in_labels_warnings_and_json(runs: Runs) -> None:
    folders = [runs.add(), runs.add("FA_mxfp8"), runs.add("linear_mxfp8")]
    for run, code in zip(folders, ("a1" * 8, "b2" * 8, "a1" * 8), strict=True):
        change_json(run.provenance, code=code)
    comparison = compared(*folders)
    labels = ["bf16 code a1a1a1a1", "FA_mxfp8 code b2b2b2b2", "linear_mxfp8 code a1a1a1a1"]
    assert [row.label for row in comparison.rows] == labels
    assert [row.matched for row in comparison.rows] == [True, False, True]
    assert comparison.warnings == (
        "these runs were made by different code, which can change numbers; their labels have it: a1a1a1a1, "
        "b2b2b2b2",
        "FA_mxfp8 code b2b2b2b2 and bf16 code a1a1a1a1 are not a matched pair, so the gap is not the scheme's "
        "alone: code (b2b2b2b2 against a1a1a1a1)",
    )
    content = record(comparison)
    assert content["warnings"] == list(comparison.warnings)
    assert [run["code"] for run in content["runs"]] == [["a1" * 8], ["b2" * 8], ["a1" * 8]]
    assert [run["matched"] for run in content["runs"]] == [True, False, True]
    assert content["runs"][1]["mismatches"] == [
        {"aspect": "code", "why": "b2b2b2b2 against a1a1a1a1"}
    ]


def test_the_baseline_is_rather_one_of_the_same_code(runs: Runs) -> None:
    folders = [runs.add(), runs.add(), runs.add("FA_mxfp8")]
    for run, code in zip(folders, ("a1" * 8, "b2" * 8, "b2" * 8), strict=True):
        change_json(run.provenance, code=code)
    assert compared(*folders).rows[2].baseline == 1


def test_a_measure_that_was_not_finite_is_a_warning_beside_the_losses(runs: Runs) -> None:
    run = runs.add("FA_mxfp8", [6.0, None, 4.0])
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line, norm in zip(lines, (None, 2.0, None), strict=True):
        line |= {"grad_norm": norm, "validation_loss": None}
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    left_out = "FA_mxfp8: iterations whose {} was not finite are left out: {}"
    comparison = compare([read_side(each, "grad_norm") for each in (runs.add(), run)])
    assert left_out.format("loss", "2") in comparison.warnings
    assert left_out.format("grad_norm", "1,3") in comparison.warnings
    assert comparison.rows[1].side.measured.iterations == (2,)
    assert read_side(run, "validation_loss").measured.nonfinite == ()


def test_a_nonfinite_last_loss_is_not_hidden_behind_the_last_finite_one(runs: Runs) -> None:
    diverged = runs.add("FA_mxfp8", [6.0, 5.0, None, None])
    comparison = compared(runs.add(), diverged, runs.add("FA_mxfp4", []))
    assert [row.side.last_loss for row in comparison.rows] == ["3.5000", "not finite", "-"]
    assert [run["loss"] for run in record(comparison)["runs"]] == [3.5, None, None]
    assert "FA_mxfp8: iterations whose loss was not finite are left out: 3-4" in comparison.warnings
    assert record(comparison)["runs"][1]["gap"]["iteration"] == 2


def test_a_broken_file_is_named_and_the_rest_is_compared(runs: Runs) -> None:
    run = runs.add("FA_mxfp8")
    run.provenance.write_text("{")
    run.precision.write_text("[]")
    run.status.write_text("{}")
    side = read_side(run)
    assert side.trouble == (
        f"{run.status}: state is missing",
        f"{run.provenance}, line 1: unexpected end of data",
        f"{run.precision}: it must be keys with values, got a list",
    )
    assert side.state == "unreadable"
    assert side.losses.losses
    assert any(run.status.name in words for words in compare([side]).warnings)


def test_a_folder_with_nothing_but_a_status_is_compared(runs: Runs) -> None:
    empty = runs.add("FA_mxfp8")
    for file in (empty.config, empty.metrics, empty.precision, empty.provenance):
        file.unlink()
    row = compared(runs.add(), empty).rows[1]
    assert row.label.startswith(empty.root.name)
    assert row.gap is None
    assert not row.matched


def test_lost_ends_of_metrics_are_named(runs: Runs) -> None:
    whole, cut, empty, gone = runs.add(), runs.add("FA_mxfp8"), runs.add("mxfp4"), runs.add("hifp8")
    cut.metrics.write_text(cut.metrics.read_text().partition("\n")[0] + "\n")
    empty.metrics.write_text("")
    gone.metrics.unlink()
    warnings = compared(whole, cut, empty, gone).warnings
    assert [words for words in warnings if "metrics" in words] == [
        "FA_mxfp8: metrics.jsonl ends at iteration 1 of 4",
        "mxfp4: metrics.jsonl ends at iteration 0 of 4",
        "hifp8: metrics.jsonl ends at iteration 0 of 4",
    ]


def test_configuration_is_compared_without_keys_that_change_nothing(runs: Runs) -> None:
    comparison = compared(runs.add(), runs.add("FA_mxfp8", lr=1.0))
    assert [tuple(d) for d in comparison.rows[1].config] == [("training.lr", 1e-4, 1.0)]


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(RunError, match="there is no run to compare; give runs"):
        compare([])
