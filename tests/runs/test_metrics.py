"""One definition of a run's losses and speed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from quantexp.errors import UnreadableError
from quantexp.runs.curves import CurveLines
from quantexp.runs.metrics import (
    WINDOW,
    LossCurve,
    Speed,
    last_metrics,
    latest,
    loss_curve,
    read_metrics,
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


def written(numbers: Iterable[int], **values: object) -> str:
    """Lines as a run writes them, each with a speed of its own."""
    return "".join(
        json.dumps(
            {
                "iteration": i,
                "loss": 5.0,
                "grad_norm": 1.0,
                "step_time_s": (i * 37 % 101) / 7,
                "tokens_per_s": (i * 53 % 103) * 11.5,
                "time": "2026-01-01T00:00:00+00:00" * 9,
                **values,
            }
        )
        + "\n"
        for i in numbers
    )


@pytest.mark.parametrize(
    "text",
    [
        *(written(range(1, count + 1)) for count in (1, 2, 50, 100, 101, 102, 150, 300)),
        written(range(0, 90)),
        written(range(57, 300)),
        written(range(1, 50)) + written(range(60, 110)),
        written(range(1, 50)) + written(range(1, 40)),
        written(range(1, 120), tokens_per_s=None),
        written(range(1, 120)) + written(range(120, 121), tokens_per_s=None),
        written(range(1, 120), tokens_per_s=7),
        written(range(1, 120), tokens_per_s=1.5e-7),
        written(range(1, 120)).replace(": ", ":"),
        written(range(1, 120)) + '{"iteration": 120, "lo',
        written(range(1, 120)) + "\n\n",
    ],
)
def test_the_speed_at_the_end_of_a_file_is_that_of_all_its_lines(tmp_path: Path, text: str) -> None:
    run = RunDir(tmp_path)
    run.metrics.write_text(text)
    expected = read_metrics(run)
    end = latest(run)
    assert end.line == expected[-1] == last_metrics(run)
    speed = speed_of(expected)
    assert end.speed.tokens_per_s == speed.tokens_per_s
    assert end.speed.step_time_s == speed.step_time_s


@pytest.mark.parametrize("damage", ['{"torn\n', '{"torn'])
def test_a_torn_line_among_the_latest_is_named_unless_only_the_last_is_asked_for(
    tmp_path: Path, damage: str
) -> None:
    run = RunDir(tmp_path)
    run.metrics.write_text(written(range(1, 200)) + damage + written(range(200, 210)))
    with pytest.raises(UnreadableError, match=r"metrics\.jsonl, line 200: "):
        latest(run)
    last = last_metrics(run)
    assert last is not None
    assert last["iteration"] == 209


def test_steps_left_out_in_the_search_for_a_loss_scale_are_told(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.metrics.write_text(written(range(1, 4), skipped=True, loss_scale=256.0))
    assert latest(run).without_a_step.startswith("all of the last 3 steps left out")


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
@pytest.mark.parametrize("read", [read_metrics, latest])
def test_a_damaged_line_is_named(
    tmp_path: Path, line: str, words: str, read: Callable[[RunDir], object]
) -> None:
    good = '{"iteration": 1, "loss": 5}\n' * (3000 if read is latest else 1)
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
