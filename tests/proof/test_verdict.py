"""Verdicts of several ranks are merged without losing a failure."""

from __future__ import annotations

from typing import Any

import pytest

from quantexp.errors import EngagementError
from quantexp.proof.verdict import Verdict, merged, require


def of(status: str, reason: str = "", *failures: str) -> Verdict:
    entry: dict[str, Any] = {"layer": 0, "calls": 2, "recomputed_calls": 1, "quantised_calls": 2}
    return Verdict(1, [{**entry, "status": status, "reason": reason}], list(failures))


def test_one_rank_is_its_own_verdict() -> None:
    alone = of("engaged")
    assert merged([alone]) is alone


def test_calls_of_all_ranks_add_up() -> None:
    result = merged([of("engaged"), of("engaged")])
    assert result.entries == [
        {
            "layer": 0,
            "calls": 4,
            "recomputed_calls": 2,
            "quantised_calls": 4,
            "status": "engaged",
            "reason": "",
        }
    ]
    assert not result.failures


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        (["engaged", "mismatch"], "mismatch"),
        (["not_reached", "mismatch"], "mismatch"),
        (["engaged", "not_reached"], "not_reached"),
        (["inconclusive", "engaged"], "engaged"),
        (["inconclusive", "inconclusive"], "inconclusive"),
    ],
)
def test_worst_status_decides(statuses: list[str], status: str) -> None:
    assert merged([of(each) for each in statuses]).entries[0]["status"] == status


def test_mismatch_on_one_rank_names_it_and_ends_the_run() -> None:
    result = merged([of("engaged"), of("mismatch", "off the grid", "layer 0 qkv: off the grid")])
    assert result.entries[0]["reason"] == "rank 1: off the grid"
    with pytest.raises(EngagementError, match="in iteration 1: rank 1: layer 0 qkv: off the grid"):
        require(result)


def test_mismatch_on_every_rank_is_reported_once() -> None:
    bad = of("mismatch", "off the grid", "layer 0 qkv: off the grid")
    result = merged([bad, bad])
    assert result.entries[0]["reason"] == "off the grid"
    assert result.failures == ["ranks 0, 1: layer 0 qkv: off the grid"]
