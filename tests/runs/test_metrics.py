"""One definition of a run's losses and speed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from quantexp.errors import UnreadableError
from quantexp.runs.metrics import (
    WINDOW,
    CurveLines,
    LossCurve,
    Speed,
    loss_curve,
    read_metrics,
    recent_metrics,
    speed_of,
)
from quantexp.runs.paths import RunDir


def lines(*values: float) -> list[dict[str, float]]:
    return [{"iteration": i, "tokens_per_s": v} for i, v in enumerate(values, 1)]


def test_the_first_iteration_does_not_count() -> None:
    assert speed_of(lines(1.0, 100.0, 300.0, 200.0)).tokens_per_s == 200.0


def test_a_run_of_one_iteration_has_that_iterations_speed() -> None:
    assert speed_of(lines(7.0)).tokens_per_s == 7.0


def test_the_tail_of_a_long_file_gives_the_same_result_as_the_whole() -> None:
    metrics = lines(*range(1, 3 * WINDOW))
    assert speed_of(metrics[-WINDOW:]).tokens_per_s == speed_of(metrics).tokens_per_s


def test_lines_without_numbers_have_no_speed() -> None:
    assert speed_of([]) == Speed()
    assert speed_of([{}, {"iteration": 2, "tokens_per_s": None}]) == Speed()


def test_losses_are_sorted_and_a_repeated_iteration_has_the_later(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 1, "loss": 5}\n{"iteration": 3, "loss": 9.0}\n'
        '{"iteration": 2, "loss": 4.0}\n{"iteration": 3, "loss": 3.0}\n'
    )
    expected = LossCurve((1, 2, 3), (5.0, 4.0, 3.0), repeated=(3,))
    assert loss_curve(read_metrics(RunDir(tmp_path))) == expected


def test_non_finite_losses_are_separate(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 1, "loss": 5}\n{"iteration": 2, "loss": NaN}\n'
    )
    assert loss_curve(read_metrics(RunDir(tmp_path))) == LossCurve((1,), (5.0,), (2,))


def test_lines_without_a_loss_and_an_unfinished_line_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n\n{"iteration": 3, "lo')
    assert loss_curve(read_metrics(RunDir(tmp_path))) == LossCurve()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", "it must be keys with values, got a list"),
        ('{"iteration": 2, "loss": "abc"}', "loss must be a number or null, got 'abc'"),
        ('{"iteration": 2.5}', "iteration must be a whole number from 0, got 2.5"),
        ('{"iteration": 2, "lo', "unexpected control character in string"),
    ],
)
@pytest.mark.parametrize("read", [read_metrics, recent_metrics])
def test_a_damaged_line_is_named(
    tmp_path: Path, line: str, words: str, read: Callable[[RunDir], object]
) -> None:
    good = '{"iteration": 1, "loss": 5}\n' * (3000 if read is recent_metrics else 1)
    (tmp_path / "metrics.jsonl").write_text(f"{good}{line}\n{good[:100]}")
    number = good.count("\n") + 1
    with pytest.raises(UnreadableError, match=rf"metrics\.jsonl, line {number}: {words}"):
        read(RunDir(tmp_path))


def test_a_loss_of_null_was_not_finite(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"iteration": 1, "loss": 5.0}\n{"iteration": 2, "loss": null}\n'
    )
    assert loss_curve(read_metrics(RunDir(tmp_path))) == LossCurve((1,), (5.0,), (2,))


def test_no_metrics_is_an_empty_curve(tmp_path: Path) -> None:
    assert loss_curve(read_metrics(RunDir(tmp_path))) == LossCurve()


def text(iteration: int, value: float = 1.0) -> str:
    return json.dumps({"iteration": iteration, "scalars": {"amax/L0/key": value}}) + "\n"


def value(lines: CurveLines, iteration: int) -> float | None:
    line = lines.at(iteration)
    return None if line is None else line["scalars"]["amax/L0/key"]


def test_lines_are_read_by_iteration_in_any_order_while_the_file_grows(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.curves.write_text(text(2, 2.5) + text(4, 4.5)[:12])
    lines = CurveLines(run)
    assert [value(lines, i) for i in (1, 2, 4)] == [None, 2.5, None]
    run.curves.write_text(text(2, 2.5) + text(4, 4.5))
    assert [value(lines, i) for i in (4, 2, 3)] == [4.5, 2.5, None]
    lines.close()


def test_wrong_line_is_left_out(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.curves.write_text('{"iteration": "x"}\n{torn\n[]\n' + text(3))
    lines = CurveLines(run)
    assert value(lines, 3) == 1.0
    lines.close()


def test_without_a_file_there_are_none(tmp_path: Path) -> None:
    lines = CurveLines(RunDir(tmp_path))
    assert lines.at(1) is None
    lines.close()
