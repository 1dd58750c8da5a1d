from __future__ import annotations

from quantexp.analysis.report.proof import MAX_ROWS, proof
from tests.analysis.compare.runs import BF16, MX8, entries


def found(status: str, *, settings: dict[str, object] = MX8) -> list[dict[str, object]]:
    more = {"calls": 2, "status": status, "reason": ""}
    return [{**entry, **more} for entry in entries(settings)]


def test_slots_that_are_alike_share_a_row() -> None:
    shown = proof(
        {"proved": True, "iteration": 1, "quantised_calls": 16, "entries": found("engaged")}, []
    )
    assert shown.proved
    assert shown.words == (
        "in iteration 1: 8 of 8 quantised slots engaged, 0 slots high, 16 quantised operands seen "
        "at the matrix products"
    )
    assert [(row.module, row.slot, row.layers, row.num_slots, row.calls) for row in shown.rows] == [
        ("qkv", "fprop.x", "0-1", 2, 4),
        ("qkv", "fprop.w", "0-1", 2, 4),
        ("fc1", "fprop.x", "0-1", 2, 4),
        ("fc1", "fprop.w", "0-1", 2, 4),
    ]


def test_a_mismatch_has_a_row_of_its_own_and_its_words() -> None:
    rows = found("engaged")
    rows[0] = {**rows[0], "status": "mismatch", "reason": "off the grid"}
    shown = proof({"proved": False, "failures": ["L0 qkv"], "entries": rows}, [])
    assert shown.proved is False
    assert shown.failures == ("L0 qkv",)
    assert ("0", "mismatch", "off the grid") in [(r.layers, r.status, r.reason) for r in shown.rows]
    assert "7 of 8 quantised slots engaged, 1 mismatch" in shown.words


def test_without_a_proof_the_map_is_shown_as_declared() -> None:
    shown = proof(None, entries(BF16))
    assert shown.proved is None
    assert shown.words == "no proof: the run has no precision.json; the map as declared"
    assert {row.status for row in shown.rows} == {"declared"}
    assert proof(None, []).words == "no proof: the run has no precision.json"


def test_a_map_that_is_different_in_every_slot_is_cut_and_counted() -> None:
    rows = [{**entry, "reason": str(i)} for i, entry in enumerate(entries(MX8) * 60)]
    shown = proof({"proved": True, "entries": rows}, [])
    assert len(shown.rows) == MAX_ROWS
    assert shown.left_out == 480 - MAX_ROWS
