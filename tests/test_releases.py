"""The table of releases says equal only where every number is."""

from __future__ import annotations

import releases

FIRST: releases.Record = {"a": {"x": 1.5, "y": "9f"}, "b": {"x": 1.0}, "c": {"x": 1.0}}


def cells(other: releases.Record, first: releases.Record = FIRST) -> list[str]:
    return [row[2] for row in releases.rows({"first": first, "other": other})[1:]]


def test_a_row_is_equal_if_every_number_is() -> None:
    assert cells(FIRST) == ["equal"] * 3
    assert cells({**FIRST, "a": {"x": 1.5, "y": "9e"}}) == ["1 of 2 differ", "equal", "equal"]
    assert cells({**FIRST, "a": {"x": 1.5}})[0] == "1 of 2 differ"
    assert cells({**FIRST, "b": {"x": 1.0, "z": 2.0}})[1] == "1 of 2 differ"


def test_what_failed_or_did_not_run_is_never_equal() -> None:
    assert cells({"a": {"failed": "why"}, "b": {"x": 1.0}}) == ["failed", "equal", "not run"]
    failed: releases.Record = {"a": {"failed": "why"}}
    assert cells(failed, failed) == ["failed"]
    assert releases.rows({"first": failed})[1] == ["a", "failed"]


def test_the_table_has_a_row_for_each_group_of_numbers() -> None:
    assert releases.table({"3.11": {"bf16": {"x": 1.0}}, "3.13": {"bf16": {"x": 2.0}}}) == (
        "|  | 3.11 | 3.13 |\n|---|---|---|\n| bf16 | 1 values | 1 of 1 differ |"
    )
