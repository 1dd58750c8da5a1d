"""Dossiers are listed as they appear."""

from __future__ import annotations

import json
from typing import Any

from quantexp.analysis.watch.dossiers import MOST, Dossiers
from quantexp.runs.paths import RunDir
from tests.analysis.compare.runs import Runs


def add(run: RunDir, iteration: int, **content: Any) -> None:
    folder = run.dossiers / f"iteration_{iteration:08}"
    folder.mkdir(parents=True)
    (folder / "dossier.json").write_text(json.dumps({"iteration": iteration, **content}))


def test_the_newest_dossier_is_first(runs: Runs) -> None:
    first, second = runs.add(), runs.add("linear_mxfp4")
    add(first, 12, time=1_700_000_000.5, trigger="loss", words="The loss rose by 3.")
    add(second, 7, time="2026-01-31T12:00:00+00:00", trigger="nonfinite", words="NaN in fc1.")
    add(first, 3, time=1_600_000_000)
    rows = Dossiers().of([first, second])
    assert [row["iteration"] for row in rows] == ["7", "12", "3"]
    assert rows[0] == {
        "run": second.root.name,
        "folder": "iteration_00000007",
        "iteration": "7",
        "seconds": 1769860800.0,
        "trigger": "nonfinite",
        "words": "NaN in fc1.",
    }


def test_a_dossier_that_is_being_written_appears_when_it_is_whole(runs: Runs) -> None:
    run = runs.add()
    file = run.dossiers / "iteration_00000012" / "dossier.json"
    file.parent.mkdir(parents=True)
    dossiers = Dossiers()
    assert dossiers.of([run]) == []
    for text in ("", '{"iteration": 1', '{"iteration": "x"}', "[]", '{"words": "no iteration"}'):
        file.write_text(text)
        assert dossiers.of([run]) == []
    file.write_text('{"iteration": 12, "time": "yesterday", "more": {}}')
    (row,) = dossiers.of([run])
    assert (row["iteration"], row["seconds"], row["trigger"]) == ("12", None, "")


def test_a_page_lists_the_newest_of_many(runs: Runs) -> None:
    run = runs.add()
    for iteration in range(MOST + 5):
        add(run, iteration, time=iteration)
    rows = Dossiers().of([run])
    assert len(rows) == MOST
    assert rows[0]["iteration"] == str(MOST + 4)
