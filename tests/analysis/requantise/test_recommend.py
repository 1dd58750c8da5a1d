from __future__ import annotations

from collections.abc import Callable

import pytest

from quantexp.analysis.requantise.candidates import Candidate, candidates, formats_of
from quantexp.analysis.requantise.passing import Work
from quantexp.analysis.requantise.recommend import Choice, recommend
from quantexp.analysis.requantise.slots import slots_of
from quantexp.analysis.requantise.tally import Place, Tally, Worst
from quantexp.analysis.statistics import Fidelity
from quantexp.formats import Hadamard
from quantexp.quant.sites import Product

ALL = candidates(formats_of(["mxfp4", "mxfp6_e2m3", "hifp8"]))
SLOTS = {
    slot.label: slot
    for tensor in ("input", "weight", "grad_output")
    for slot in slots_of({"layer_type": "linear", "tensor": tensor})
}
#: Decibels of a candidate.
Table = Callable[[Candidate], float]


def tally(**tables: Table) -> Tally:
    """One tensor for each slot that is named, `fprop_x`."""
    found = Tally(Work(ALL, [], 0))
    for name, decibel in tables.items():
        slot = SLOTS["linear." + name.replace("_", ".")]
        worst = [Worst() for _ in ALL]
        for one, candidate in zip(worst, ALL, strict=True):
            one.add(Fidelity(decibel(candidate), 0.0, 0.0), "a tensor")
        found.worst[Place("fc1", slot)] = worst
    return found


def by_bits(four: float, six: float, eight: float) -> Table:
    """The same for all options of a format."""
    return lambda one: {4: four, 6: six, 8: eight}[one.format.element.bits]


def chosen(choices: list[Choice]) -> dict[str, str | None]:
    return {one.label: one.candidate.name if one.candidate else None for one in choices}


FPROP = {"linear.fprop.x", "linear.fprop.w"}


@pytest.mark.parametrize(
    ("sqnr_db", "name"),
    [
        (18, "mxfp4_e2m1 floor even"),
        (20, "mxfp4_e2m1 floor even"),
        (20.5, "mxfp6_e2m3 floor even"),
        (31, "hifp8 current away"),
        (33, None),
    ],
)
def test_the_fewest_bits_that_reach_the_sqnr_in_its_usual_options(
    sqnr_db: float, name: str | None
) -> None:
    table = by_bits(20, 30, 32)
    found = chosen(recommend(tally(fprop_x=table, fprop_w=table), sqnr_db))
    assert {found[label] for label in FPROP} == {name}


def test_slots_that_were_not_captured_stay_as_they_are() -> None:
    table = by_bits(20, 30, 32)
    choices = recommend(tally(fprop_x=table, fprop_w=table), 20)
    others = [one for one in choices if one.label not in FPROP]
    assert len(others) == 4
    assert {(one.candidate, one.captured, one.bits) for one in others} == {(None, False, 16.0)}


def test_a_tenth_of_a_decibel_is_no_reason_for_other_options() -> None:
    def table(one: Candidate, more: float) -> float:
        return 20 + (more if one.scale_rule == "ceil" and one.rounding == "away" else 0)

    for more, name in ((0.05, "mxfp4_e2m1 floor even"), (0.2, "mxfp4_e2m1 ceil away")):
        tables = {n: lambda one, more=more: table(one, more) for n in ("fprop_x", "fprop_w")}
        found = chosen(recommend(tally(**tables), 19))
        assert {found[label] for label in FPROP} == {name}


def only_with(hadamard: Hadamard) -> Table:
    """Four bits reach the SQNR only after this transform, six always."""

    def table(one: Candidate) -> float:
        few = one.format.element.bits == 4
        return 20 if not few or one.hadamard is hadamard else 10

    return table


def test_a_transform_is_taken_by_both_operands_or_neither() -> None:
    """Together 4.25 + 4.25 with it against 6.25 + 6.25 without."""
    table = only_with(Hadamard.DETERMINISTIC)
    found = chosen(recommend(tally(wgrad_g=table, wgrad_x=table), 15))
    assert found["linear.wgrad.g"] == found["linear.wgrad.x"]
    assert found["linear.wgrad.x"] == "mxfp4_e2m1 floor even deterministic Hadamard"


def test_a_partner_that_pays_for_the_transform_decides_with() -> None:
    """X is as cheap without; g needs the transform for its four bits: the pair has it."""
    tables = {"wgrad_x": by_bits(20, 20, 20), "wgrad_g": only_with(Hadamard.RANDOM)}
    found = chosen(recommend(tally(**tables), 15))
    assert found["linear.wgrad.x"] == "mxfp4_e2m1 floor even random Hadamard"


def test_a_partner_in_the_working_precision_takes_no_transform() -> None:
    """Beside an operand that reaches nothing, or was not captured, four bits after a transform are out of reach."""
    table = only_with(Hadamard.DETERMINISTIC)
    for tables in ({"wgrad_x": table, "wgrad_g": by_bits(1, 2, 3)}, {"wgrad_x": table}):
        found = chosen(recommend(tally(**tables), 15))
        assert found["linear.wgrad.g"] is None
        assert found["linear.wgrad.x"] == "mxfp6_e2m3 floor even"


def test_the_worst_tensor_decides() -> None:
    worst = Worst()
    for fidelity, tensor in (
        (Fidelity(30.0, 0.1, 0.0), "L0"),
        (Fidelity(float("nan"), float("nan"), 0.0), "zeros"),
        (Fidelity(20.0, 0.0, 0.2), "L1"),
        (Fidelity(25.0, 0.3, 0.1), "L2"),
    ):
        worst.add(fidelity, tensor)
    assert worst == Worst(20.0, 0.3, 0.2, "L1")


def test_products_come_in_their_order() -> None:
    choices = recommend(tally(fprop_x=by_bits(1, 2, 3)), 15)
    assert [one.product for one in choices[::2]] == [Product.FPROP, Product.DGRAD, Product.WGRAD]
