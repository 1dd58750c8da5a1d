"""The numerics of an iteration are the report's, from lists that grow."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from quantexp.analysis.report.cells import numerics
from quantexp.analysis.report.judged import Deadline
from quantexp.extras.forensics.watch.captures import FollowedCapture
from quantexp.runs.paths import RunDir
from tests.analysis.compare.runs import Runs
from tests.analysis.report.captured import captured, line, write


def append(run: RunDir, lines: list[dict[str, object]], name: str = "manifest.jsonl") -> None:
    with (run.tensors / name).open("a") as stream:
        stream.writelines(json.dumps(one) + "\n" for one in lines)


def test_the_map_of_an_iteration_is_the_reports(runs: Runs) -> None:
    run = runs.add("linear_mxfp8")
    captured(run, iterations=(5,))
    expected = asdict(numerics(run, None, 10_000, Deadline(None)))
    captured(run, iterations=(5, 7))
    followed = FollowedCapture(run, None)
    assert followed.refresh() == {"iterations": [5, 7], "lines": 20}
    shown = followed.numerics(5)
    assert shown["numerics"] == expected
    assert len(shown["numerics"]["cells"]) == 20
    assert followed.numerics(5) is shown, "a map is made once"


def test_iterations_appear_as_they_are_captured(runs: Runs) -> None:
    run = runs.add("linear_mxfp8")
    lines = captured(run)
    followed = FollowedCapture(run, None)
    assert followed.refresh()["iterations"] == [1]
    append(run, [{**one, "iteration": 3} for one in lines[:4]])
    assert followed.refresh() == {"iterations": [1, 3], "lines": 14}
    few = followed.numerics(3)["numerics"]["cells"]
    append(run, [{**one, "iteration": 3} for one in lines[4:]])
    assert len(followed.numerics(3)["numerics"]["cells"]) > len(few), "the rest of the iteration"


def test_parts_of_ranks_that_were_joined_count_once(runs: Runs) -> None:
    run = runs.add("linear_mxfp8")
    lines = captured(run)
    part = run.tensors / "manifest.rank1.jsonl"
    append(run, [{**one, "rank": 1} for one in lines], part.name)
    followed = FollowedCapture(run, None)
    assert followed.refresh()["lines"] == 20
    part.unlink()
    append(run, [{**one, "rank": 1} for one in lines])
    assert followed.refresh()["lines"] == 20


def test_statistics_alone_are_shown(runs: Runs) -> None:
    run = runs.add("linear_mxfp8")
    lines = captured(run)
    (run.tensors / "manifest.jsonl").rename(run.tensors / "statistics.jsonl")
    shown = FollowedCapture(run, None).numerics(1)["numerics"]
    assert len(shown["cells"]) == 2 * len(lines)


def test_a_wrong_line_is_left_out_with_a_note(runs: Runs) -> None:
    run = runs.add("linear_mxfp8")
    write(
        run, [line("forward", "qkv", "input", 0), line("forward", "fc1", "input", 0, layer_type=3)]
    )
    notes = FollowedCapture(run, None).numerics(1)["numerics"]["notes"]
    assert any("layer_type must be" in note for note in notes)


def test_a_run_that_captures_nothing_has_no_iterations(runs: Runs, tmp_path: Path) -> None:
    run = runs.add()
    assert FollowedCapture(run, str(tmp_path / "elsewhere")).refresh() == {
        "iterations": [],
        "lines": 0,
    }
