"""The plan of a sweep: a row for each run in 80 columns, and last what keeps runs from starting."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from quantexp.cli.plan_record import Plan, make_plan
from quantexp.cli.plan_sweep import show_sweep
from quantexp.config.compose import compose
from quantexp.schema import Experiment

WORDS = ["quant=bf16", "quant=FA_mxfp8", "quant=linear_hifp8"]


@pytest.fixture(scope="module")
def experiments() -> list[Experiment]:
    return [compose(["training=fast", "model.num_layers=1", word], None, {}) for word in WORDS]


@pytest.fixture(scope="module")
def plans(experiments: list[Experiment]) -> list[Plan]:
    return [replace(make_plan(each), time_s=60.0, product_gflop_per_s=95.0) for each in experiments]


def shown(experiments: Sequence[Experiment], plans: Sequence[Plan], width: int = 80) -> list[str]:
    out = io.StringIO()
    show_sweep(experiments, plans, Console(file=out, width=width), maps=False)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_every_run_has_a_row_that_fits_80_columns(
    experiments: list[Experiment], plans: list[Plan]
) -> None:
    table = shown(experiments, plans)[:-2]
    assert max(map(len, table)) <= 80
    rows = [line.split() for line in table if line.endswith("fits")]
    assert [row[0] for row in rows] == ["bf16", "FA_mxfp8", "linear_hifp8"]
    memory = f"{plans[0].memory_gb_per_gpu:.1f}"
    assert rows[0][1:] == [
        memory,
        "GB",
        *rows[0][3:5],
        f"{plans[0].tflop:.1f}",
        "TFLOP",
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
    text = shown(two, plans[:2])
    assert any("lr=0.00010001" in line.split() for line in text)
    assert any("weight_decay=0.123457" in line.split() for line in text)


def test_sum_says_the_time_of_all_and_what_was_measured(
    experiments: list[Experiment], plans: list[Plan]
) -> None:
    *_, total, _ = shown(experiments, plans)
    work = sum(plan.tflop for plan in plans)
    assert total == (
        f"in all  3 runs, {work:.1f} TFLOP, about 3 min of training on this machine (measured: 95.0 GFLOP/s in bf16 "
        "products)"
    )
    slower = [*plans[:2], replace(plans[2], product_gflop_per_s=47.5)]
    *_, total, _ = shown(experiments, slower)
    assert total.endswith("(measured: 95.0 GFLOP/s in bf16, 47.5 GFLOP/s in bf16 products)")


def test_a_sweep_of_one_point_is_1_run(experiments: list[Experiment], plans: list[Plan]) -> None:
    title, *_, total, _ = shown(experiments[:1], plans[:1])
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
def test_sum_says_why_the_time_is_not_known(
    experiments: list[Experiment], plans: list[Plan], scripts: list[str | None], why: str
) -> None:
    # All on a full GPU, where no run is a job.
    unknown = [
        replace(
            plan, script=script, time_s=plan.time_s if script is None and any(scripts) else None
        )
        for plan, script in zip(plans, scripts, strict=True)
    ]
    *_, total, _ = shown(experiments, unknown)
    assert total.endswith(f"TFLOP, the time is not known: {why}")


def test_row_says_what_becomes_of_a_run(experiments: list[Experiment], plans: list[Plan]) -> None:
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


def test_what_keeps_runs_from_starting_is_last_each_reason_once(
    experiments: list[Experiment], plans: list[Plan]
) -> None:
    large = "9.0 GB do not fit in 1.0 GB (this machine): take another"
    blocked = [replace(plan, missing="no data") for plan in plans]
    blocked[1], blocked[2] = (replace(plan, to_fit=large) for plan in blocked[1:])
    text = shown(experiments, blocked)
    assert text[-4:] == [
        "will not start: all 3 runs",
        "  no data",
        "will not start: FA_mxfp8; linear_hifp8",
        f"  {large}",
    ]
    assert [line.split()[-2:] for line in text if line.endswith(("too large", "cannot start"))] == [
        ["cannot", "start"],
    ] * 3


def test_runs_at_once_that_do_not_fit_together_are_named(
    experiments: list[Experiment], plans: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantexp.launch.refusal.host_memory_gb", lambda: 3.0)
    for experiment in experiments:
        monkeypatch.setattr(experiment.launcher, "max_parallel", 2)
    assert shown(experiments, plans)[-1].startswith(
        "will not start: launcher.max_parallel=2: the 2 largest runs take "
    )
