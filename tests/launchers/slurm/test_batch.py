"""Which runs share an array, which arrays wait for which, and that a limit holds over all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from quantexp_launchers.slurm.batch import Array, Batch, Ready, assign_lanes, batches, dependency

from quantexp.schema import Experiment, LauncherConfig

ROOT = Path("/w/runs")
SNAPSHOT = ROOT / "snapshots" / "0a"


def ready(name: str, stage: int = 0, snapshot: Path = SNAPSHOT, **keys: Any) -> Ready:
    launcher = LauncherConfig(kind="slurm", **keys)
    return Ready(Experiment(launcher=launcher), stage, ROOT / name, snapshot)


def names(batch: Batch) -> list[str]:
    return [run.name for run in batch.runs]


def test_runs_that_ask_for_the_same_are_one_array_in_their_order() -> None:
    (only,) = batches(ROOT, "q", [ready(name) for name in "cab"])
    assert names(only) == ["c", "a", "b"]
    assert only.name == "q"
    assert only.folder == ROOT / "submissions" / "q"


def test_no_runs_make_no_array() -> None:
    assert batches(ROOT, "q", []) == assign_lanes([]) == []


def test_each_distinct_request_is_an_array_of_its_own() -> None:
    points = [ready("a"), ready("b", time_min=5), ready("c"), ready("d", time_min=5)]
    first, second = batches(ROOT, "q", points)
    assert (names(first), names(second)) == (["a", "c"], ["b", "d"])
    assert (first.name, second.name) == ("q-0", "q-1")
    assert second.launcher.time_min == 5


def test_runs_of_each_source_are_an_array_of_their_own() -> None:
    """A run that goes on has the source of its first start."""
    older = ROOT / "snapshots" / "09"
    first, second = batches(ROOT, "q", [ready("a"), ready("b", snapshot=older), ready("c")])
    assert (names(first), first.snapshot) == (["a", "c"], SNAPSHOT)
    assert (names(second), second.snapshot) == (["b"], older)


@pytest.mark.parametrize(("most", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (4, [4, 1]), (5, [5])])
def test_array_with_more_tasks_than_the_cluster_allows_is_divided(
    most: int, sizes: list[int]
) -> None:
    parts = batches(ROOT, "q", [ready(name) for name in "abcde"], most)
    assert [len(part.runs) for part in parts] == sizes
    assert [name for part in parts for name in names(part)] == list("abcde")
    assert len({part.folder for part in parts}) == len(sizes)


def test_stages_have_separate_arrays_and_the_earlier_one_is_first() -> None:
    points = [ready("a", 1), ready("b", 0), ready("c", 1)]
    first, second = batches(ROOT, "q", points)
    assert (first.stage, names(first)) == (0, ["b"])
    assert (second.stage, names(second)) == (1, ["a", "c"])


@pytest.fixture
def sizes() -> Callable[..., list[Batch]]:
    """Batches with these numbers of runs, and a limit over all of them."""

    def make(*counts: int, limit: int | None) -> list[Batch]:
        points = [
            ready(f"{index}-{n}", time_min=index + 1, max_parallel=limit)
            for index, count in enumerate(counts)
            for n in range(count)
        ]
        return batches(ROOT, "q", points)

    return make


def test_without_a_limit_the_cluster_decides(sizes: Callable[..., list[Batch]]) -> None:
    assert [(b.throttle, b.lane) for b in assign_lanes(sizes(3, 4, limit=None))] == [(None, 0)] * 2


def test_limit_is_shared_among_arrays(sizes: Callable[..., list[Batch]]) -> None:
    shares = [b.throttle for b in assign_lanes(sizes(9, 9, 9, limit=8))]
    assert shares == [3, 3, 2]


def test_share_that_an_array_cannot_use_is_left_to_the_others(
    sizes: Callable[..., list[Batch]],
) -> None:
    shares = [b.throttle for b in assign_lanes(sizes(1, 59, limit=8))]
    assert shares == [1, 7]


def test_limit_below_the_number_of_arrays_makes_lanes(sizes: Callable[..., list[Batch]]) -> None:
    lanes = [(len(b.runs), b.lane, b.throttle) for b in assign_lanes(sizes(9, 1, 2, 3, limit=2))]
    assert lanes == [(9, 0, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1)]


@pytest.mark.parametrize(("arrays", "limit"), list(product(range(1, 8), range(1, 8))))
def test_no_more_than_the_limit_can_run_at_once(
    sizes: Callable[..., list[Batch]], arrays: int, limit: int
) -> None:
    """Each lane runs one array at a time, within its share; the shares add up to the limit, or to all runs."""
    laned = assign_lanes(sizes(*range(1, arrays + 1), limit=limit))
    shares = {batch.lane: batch.throttle or 0 for batch in laned}
    assert all(shares.values())
    assert sum(shares.values()) == min(limit, arrays * (arrays + 1) // 2)
    sent: list[Array] = []
    for number, batch in enumerate(laned):
        before = [array for array in sent if array.batch.lane == batch.lane]
        waits = dependency(batch, sent)
        assert waits == (f"afterany:{':'.join(a.id for a in before)}" if before else None)
        sent.append(Array(batch, (f"{number}_0",)))


def test_least_limit_of_any_run_holds() -> None:
    points = [ready("a", max_parallel=5), ready("b", max_parallel=1), ready("c")]
    laned = assign_lanes(batches(ROOT, "q", points))
    assert [(b.throttle, b.lane) for b in laned] == [(1, 0)] * 3


def sent(batch: Batch, number: int) -> Array:
    return Array(batch, tuple(f"{number}_{task}" for task in range(len(batch.runs))))


def test_later_stage_waits_until_every_array_of_the_earlier_one_completed() -> None:
    points = [ready("a"), ready("b", time_min=5), ready("c", 1)]
    one, two, later = batches(ROOT, "q", points)
    assert dependency(two, [sent(one, 7)]) is None
    assert dependency(later, [sent(one, 7), sent(two, 8)]) == "afterok:7:8"


def test_later_stage_waits_for_runs_of_other_submitters() -> None:
    (later,) = batches(ROOT, "q", [ready("c", 1)])
    assert dependency(later, [], ["3_4", "5"]) == "afterok:3_4:5"


def test_dependency_names_each_array_once() -> None:
    points = [ready("a", max_parallel=1), ready("b", 1, max_parallel=1)]
    first, second = assign_lanes(batches(ROOT, "q", points))
    assert dependency(second, [sent(first, 7)]) == "afterok:7"
    third = replace(second, folder=ROOT, name="other")
    assert dependency(third, [sent(first, 7), sent(second, 8)]) == "afterok:7,afterany:8"
