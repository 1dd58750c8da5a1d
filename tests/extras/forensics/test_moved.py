"""What moved first: planted moves are found, in their order, and noise is not."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from quantexp.extras.forensics.moved import Series, series_of

ITERATIONS = range(101, 121)


def lines(
    values: Callable[[int, str], dict[str, Any]], tensors: tuple[str, ...] = ("input", "weight")
) -> Iterator[dict[str, Any]]:
    for iteration in ITERATIONS:
        for tensor in tensors:
            yield {
                "layer": 3,
                "module": "fc1",
                "operation": "forward",
                "tensor": tensor,
                "iteration": iteration,
                "statistics": values(iteration, tensor),
            }


def left(found: Iterator[Series]) -> dict[str, int]:
    return {f"{s.where}, {s.statistic}": s.left_at for s in found if s.left_at is not None}


def noisy(iteration: int, tensor: str) -> dict[str, Any]:
    draws = random.Random(f"{iteration}{tensor}")
    fidelity = {
        "sqnr_db": 30 + draws.gauss(0, 0.3),
        "saturated_share": abs(draws.gauss(0, 0.001)),
        "underflow_share": 0.02 + draws.gauss(0, 0.002),
    }
    amax = 4.0 * 2 ** draws.gauss(0, 0.1)
    return {"abs_max": amax, "std": 1 + draws.gauss(0, 0.01), "nonfinite": 0, "fidelity": fidelity}


def test_noise_leaves_no_band() -> None:
    assert left(iter(series_of(lines(noisy)))) == {}


def test_each_statistic_that_moves_is_found_where_it_moved() -> None:
    def planted(iteration: int, tensor: str) -> dict[str, Any]:
        record = noisy(iteration, tensor)
        if tensor == "input":
            if iteration >= 113:
                record["abs_max"] *= 2.0 ** (iteration - 111)
            if iteration >= 116:
                record["fidelity"]["saturated_share"] = 0.2
            if iteration == 120:
                record["nonfinite"] = 5
        return record

    assert left(iter(series_of(lines(planted)))) == {
        "L3-fc1 input, log2 amax": 113,
        "L3-fc1 input, saturated share": 116,
        "L3-fc1 input, not finite": 120,
    }


def test_series_that_comes_back_has_not_left() -> None:
    def planted(iteration: int, tensor: str) -> dict[str, Any]:
        record = noisy(iteration, tensor)
        record["abs_max"] *= 50.0 if iteration == 115 else 1.0
        return record

    assert left(iter(series_of(lines(planted)))) == {}


def test_tensor_that_is_not_in_every_iteration_and_a_short_ring_have_no_series() -> None:
    some = [each for each in lines(noisy) if each["tensor"] == "input" or each["iteration"] > 105]
    assert {series.tensor for series in series_of(some)} == {"input"}
    assert list(series_of(each for each in lines(noisy) if each["iteration"] > 113)) == []


def test_parts_of_a_tensor_are_together() -> None:
    parts = [*lines(noisy, ("input",)), *lines(noisy, ("input",))]
    for part in parts[len(parts) // 2 :]:
        part["statistics"] = {**part["statistics"], "abs_max": 1e-3, "std": 3.0}
    series = {each.statistic: each for each in series_of(parts)}
    whole = {each.statistic: each for each in series_of(lines(noisy, ("input",)))}
    assert series["log2 amax"].values == whole["log2 amax"].values, "the largest"
    assert all(v > 0.5 for v in series["log2 std"].values), "the mean"
