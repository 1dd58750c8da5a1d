"""One definition of a run's speed."""

from __future__ import annotations

from quantexp.runs.metrics import WINDOW, Speed, speed_of


def lines(*values: float) -> list[dict[str, float]]:
    return [{"iteration": i, "tokens_per_s": v} for i, v in enumerate(values, 1)]


def test_the_first_iteration_does_not_count() -> None:
    assert speed_of(lines(1.0, 100.0, 300.0, 200.0)).tokens_per_s == 200.0


def test_a_run_of_one_iteration_has_that_iterations_speed() -> None:
    assert speed_of(lines(7.0)).tokens_per_s == 7.0


def test_the_tail_of_a_long_file_says_the_same_as_all_of_it() -> None:
    metrics = lines(*range(1, 3 * WINDOW))
    assert speed_of(metrics[-WINDOW:]).tokens_per_s == speed_of(metrics).tokens_per_s


def test_nothing_is_said_of_lines_without_numbers() -> None:
    assert speed_of([]) == Speed()
    assert speed_of([{}, {"iteration": 2, "tokens_per_s": None}]) == Speed()
