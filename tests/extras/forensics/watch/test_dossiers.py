"""Dossiers are listed as they appear."""

from __future__ import annotations

from quantexp.extras.forensics.watch.dossiers import MOST, Dossiers
from quantexp.runs.dossiers import DOSSIER, Dossier, Trigger, folder_of, write_dossier
from quantexp.runs.paths import RunDir
from tests.analysis.compare.runs import Runs


def add(run: RunDir, iteration: int, time: str, trigger: Trigger, words: str = "") -> None:
    folder_of(run, iteration).mkdir(parents=True)
    write_dossier(run, Dossier(iteration, time, trigger, words))


def test_the_newest_dossier_is_first(runs: Runs) -> None:
    first, second = runs.add(), runs.add("linear_mxfp4")
    add(first, 12, "2026-01-30T12:00:00+00:00", Trigger.LOSS, "The loss rose by 3.")
    add(second, 7, "2026-01-31T12:00:00+00:00", Trigger.NONFINITE, "NaN in fc1.")
    add(first, 3, "2025-01-31T12:00:00+00:00", Trigger.REQUEST)
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
    file = folder_of(run, 12) / DOSSIER
    file.parent.mkdir(parents=True)
    dossiers = Dossiers()
    assert dossiers.of([run]) == []
    for text in ("", '{"iteration": 1', '{"iteration": "x"}', "[]", '{"words": "no iteration"}'):
        file.write_text(text)
        assert dossiers.of([run]) == []
    write_dossier(run, Dossier(12, "2026-01-31T12:00:00+00:00", Trigger.LOSS, "9"))
    (row,) = dossiers.of([run])
    assert (row["iteration"], row["trigger"]) == ("12", "loss")


def test_a_page_lists_the_newest_of_many(runs: Runs) -> None:
    run = runs.add()
    for iteration in range(MOST + 5):
        time = f"2026-01-31T12:{iteration // 60:02}:{iteration % 60:02}+00:00"
        add(run, iteration, time, Trigger.LOSS)
    rows = Dossiers().of([run])
    assert len(rows) == MOST
    assert rows[0]["iteration"] == str(MOST + 4)
