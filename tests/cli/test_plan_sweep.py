"""The plan of a sweep: a row for each run in 80 columns, and last the reasons why runs cannot start."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from quantexp.cli.plan_record import Plan, make_plan
from quantexp.cli.plan_sweep import exit_code, show_sweep
from quantexp.cli.plan_text import tflop
from quantexp.config.compose import compose
from quantexp.schema import Experiment

WORDS = ["quant=bf16", "quant=FA_mxfp8", "quant=linear_hifp8"]


@pytest.fixture(scope="module")
def experiments() -> list[Experiment]:
    return [compose(["training=fast", "model.num_layers=1", word], None, {}) for word in WORDS]


@pytest.fixture(scope="module")
def plans(experiments: list[Experiment]) -> list[Plan]:
    return [replace(make_plan(each), time_s=60.0, product_gflop_per_s=95.0) for each in experiments]


def lines_of(
    experiments: Sequence[Experiment], plans: Sequence[Plan], width: int = 80
) -> list[str]:
    out = io.StringIO()
    show_sweep(experiments, plans, Console(file=out, width=width), maps=False)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_every_run_has_a_row_that_fits_80_columns(
    experiments: list[Experiment], plans: list[Plan]
) -> None:
    table = lines_of(experiments, plans)[:-2]
    assert max(map(len, table)) <= 80
    rows = [line.split() for line in table if line.endswith("fits")]
    assert [row[0] for row in rows] == ["bf16", "FA_mxfp8", "linear_hifp8"]
    memory = f"{plans[0].memory_gb_per_gpu:.1f}"
    assert rows[0][1:] == [
        memory,
        "GB",
        *rows[0][3:5],
        *tflop(plans[0].tflop).split(),
        "60",
        "s",
        "fits",
    ]


def test_a_long_name_breaks_between_its_words_alone(plans: list[Plan]) -> None:
    words = [
        ["training.lr=0.00010001", "training.min_lr=0.00000001", "training.weight_decay=0.123456"],
        ["training.lr=0.00010002", "training.min_lr=0.00000002", "training.weight_decay=0.123457"],
    ]
    two = [compose(["training=fast", "model.num_layers=1", *each], None, {}) for each in words]
    text = lines_of(two, plans[:2])
    assert any("lr=0.00010001" in line.split() for line in text)
    assert any("weight_decay=0.123457" in line.split() for line in text)


def test_sum_has_the_time_of_all_runs_and_the_measured_rates(
    experiments: list[Experiment], plans: list[Plan]
) -> None:
    *_, total, _ = lines_of(experiments, plans)
    work = sum(plan.tflop for plan in plans)
    assert total == (
        f"in all  3 runs, {work:.1f} TFLOP, about 3 min of training on this machine (measured: 95.0 GFLOP/s in bf16 "
        "products)"
    )
    slower = [*plans[:2], replace(plans[2], product_gflop_per_s=47.5)]
    *_, total, _ = lines_of(experiments, slower)
    assert total.endswith("(measured: 95.0 GFLOP/s in bf16, 47.5 GFLOP/s in bf16 products)")


def test_a_sweep_of_one_point_is_1_run(experiments: list[Experiment], plans: list[Plan]) -> None:
    title, *_, total, _ = lines_of(experiments[:1], plans[:1])
    assert title == "1 run"
    assert total.startswith("in all  1 run, ")


@pytest.mark.parametrize(
    ("scripts", "why"),
    [
        (["script"] * 3, "they do not run on this machine"),
        (["script", None, "script"], "2 of them do not run on this machine"),
        ([None, None, "script"], "1 of them does not run on this machine"),
        ([None, None, None], "the GPU has no memory free for a measurement"),
    ],
)
def test_sum_has_the_reason_why_the_time_is_unknown(
    experiments: list[Experiment], plans: list[Plan], scripts: list[str | None], why: str
) -> None:
    # All on a full GPU, where no run is a job.
    unknown = [
        replace(
            plan, script=script, time_s=plan.time_s if script is None and any(scripts) else None
        )
        for plan, script in zip(plans, scripts, strict=True)
    ]
    *_, total, _ = lines_of(experiments, unknown)
    assert total.endswith(f"TFLOP, the time is not known: {why}")


def test_row_has_a_mark_if_the_run_does_not_fit_or_start(
    experiments: list[Experiment], plans: list[Plan]
) -> None:
    large = replace(plans[0], to_fit="9.0 GB do not fit in 1.0 GB (this machine)")
    ignored = replace(large, memory="ignore")
    out = io.StringIO()
    show_sweep(
        experiments,
        [large, ignored, replace(ignored, missing="no data")],
        Console(file=out, width=80, color_system="standard", force_terminal=True),
        maps=False,
    )
    red, yellow = "\x1b[31m", "\x1b[33m"
    marks = [f"{red}too large", f"{yellow}too large, starts", f"{red}cannot start"]
    assert [mark in out.getvalue() for mark in marks] == [True] * 3


def test_reasons_why_runs_cannot_start_are_first_each_once(
    experiments: list[Experiment], plans: list[Plan]
) -> None:
    large = "9.0 GB do not fit in 1.0 GB (this machine): take another"
    blocked = [replace(plan, missing="no data") for plan in plans]
    blocked[1], blocked[2] = (replace(plan, to_fit=large) for plan in blocked[1:])
    text = lines_of(experiments, blocked)
    assert text[:4] == [
        "will not start: all 3 runs",
        "  no data",
        "will not start: FA_mxfp8; linear_hifp8",
        f"  {large}",
    ]
    assert [line.split()[-2:] for line in text if line.endswith(("too large", "cannot start"))] == [
        ["cannot", "start"],
    ] * 3
    assert exit_code(experiments, blocked, print) == 1
    assert exit_code(experiments, plans, print) == 0


def test_simultaneous_runs_that_do_not_fit_together_are_reported(
    experiments: list[Experiment], plans: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantexp.launch.refusal.host_memory_gb", lambda: 3.0)
    for experiment in experiments:
        monkeypatch.setattr(experiment.launcher, "max_parallel", 2)
    assert lines_of(experiments, plans)[0].startswith(
        "will not start: launcher.max_parallel=2: the 2 largest runs take "
    )
    assert exit_code(experiments, plans, print) == 1
