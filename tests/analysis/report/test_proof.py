from __future__ import annotations

from quantexp.analysis.report.proof import MAX_ROWS, proof
from tests.analysis.compare.runs import BF16, MX8, entries


def entries_with(status: str, *, settings: dict[str, object] = MX8) -> list[dict[str, object]]:
    more = {"calls": 2, "status": status, "reason": ""}
    return [{**entry, **more} for entry in entries(settings)]


def test_slots_that_are_alike_share_a_row() -> None:
    section = proof(
        {"proved": True, "iteration": 1, "quantised_calls": 16, "entries": entries_with("engaged")},
        [],
    )
    assert section.proved
    assert section.words == (
        "in iteration 1: 8 of 8 quantised slots engaged, 0 slots high, 16 quantised operands seen "
        "at the matrix products"
    )
    assert [
        (row.module, row.slot, row.layers, row.num_slots, row.calls) for row in section.rows
    ] == [
        ("qkv", "fprop.x", "0-1", 2, 4),
        ("qkv", "fprop.w", "0-1", 2, 4),
        ("fc1", "fprop.x", "0-1", 2, 4),
        ("fc1", "fprop.w", "0-1", 2, 4),
    ]


def test_a_mismatch_has_a_row_of_its_own_with_its_reason() -> None:
    rows = entries_with("engaged")
    rows[0] = {**rows[0], "status": "mismatch", "reason": "off the grid"}
    section = proof({"proved": False, "failures": ["L0 qkv"], "entries": rows}, [])
    assert section.proved is False
    assert section.failures == ("L0 qkv",)
    assert ("0", "mismatch", "off the grid") in [
        (r.layers, r.status, r.reason) for r in section.rows
    ]
    assert "7 of 8 quantised slots engaged, 1 mismatch" in section.words


def test_without_a_proof_the_map_is_shown_as_declared() -> None:
    section = proof(None, entries(BF16))
    assert section.proved is None
    assert section.words == "no proof: the run has no precision.json; the map as declared"
    assert {row.status for row in section.rows} == {"declared"}
    assert proof(None, []).words == "no proof: the run has no precision.json"


def test_a_map_that_is_different_in_every_slot_is_cut_with_a_count() -> None:
    rows = [{**entry, "reason": str(i)} for i, entry in enumerate(entries(MX8) * 60)]
    section = proof({"proved": True, "entries": rows}, [])
    assert len(section.rows) == MAX_ROWS
    assert section.left_out == 480 - MAX_ROWS
