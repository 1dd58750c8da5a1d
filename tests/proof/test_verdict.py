"""Verdicts of several ranks are merged without losing a failure."""

from __future__ import annotations

import pytest

from quantexp.errors import EngagementError
from quantexp.formats import resolve
from quantexp.proof.merging import merged
from quantexp.proof.verdict import Verdict, require
from quantexp.quant.precision import ModuleId, ModulePrecision, PrecisionMap
from quantexp.quant.records import entry_record
from quantexp.quant.sites import FPROP_X

QKV, OTHER = ModuleId(0, "qkv"), ModuleId(1, "qkv")


def declaration(*modules: ModuleId) -> PrecisionMap:
    """A map with one slot for each module."""
    spec = resolve("mxfp8_e4m3")
    return {module: ModulePrecision(module, {FPROP_X: spec}) for module in modules}


def of(status: str, reason: str = "", *failures: str, module: ModuleId = QKV) -> Verdict:
    (entry,) = declaration(module)[module].entries()
    calls = {"calls": 2, "recomputed_calls": 1, "quantised_calls": 2}
    record = {**entry_record(entry), **calls, "status": status, "reason": reason}
    return Verdict(1, [record], list(failures))


def test_one_rank_is_its_own_verdict() -> None:
    alone = of("engaged")
    assert merged(declaration(QKV), [alone]) == alone


def test_calls_of_all_ranks_add_up() -> None:
    result = merged(declaration(QKV), [of("engaged"), of("engaged")])
    (entry,) = result.entries
    assert [entry[n] for n in ("calls", "recomputed_calls", "quantised_calls")] == [4, 2, 4]
    assert (entry["status"], entry["reason"]) == ("engaged", "")
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
    result = merged(declaration(QKV), [of(each) for each in statuses])
    assert result.entries[0]["status"] == status


def test_mismatch_on_one_rank_names_it_and_ends_the_run() -> None:
    bad = of("mismatch", "off the grid", "layer 0 qkv: off the grid")
    result = merged(declaration(QKV), [of("engaged"), bad])
    assert result.entries[0]["reason"] == "rank 1: off the grid"
    with pytest.raises(EngagementError, match="in iteration 1: rank 1: layer 0 qkv: off the grid"):
        require(result)


def test_mismatch_on_every_rank_is_reported_once() -> None:
    bad = of("mismatch", "off the grid", "layer 0 qkv: off the grid")
    result = merged(declaration(QKV), [bad, bad])
    assert result.entries[0]["reason"] == "off the grid"
    assert result.failures == ["ranks 0, 1: layer 0 qkv: off the grid"]


def test_stages_of_a_pipeline_make_one_map_in_its_order() -> None:
    second, first = of("engaged", module=OTHER), of("engaged", module=QKV)
    result = merged(declaration(QKV, OTHER), [second, first])
    assert [(entry["layer"], entry["calls"]) for entry in result.entries] == [(0, 2), (1, 2)]
    assert not result.failures


def test_mismatch_on_one_rank_of_four_is_named_with_it() -> None:
    bad = of("mismatch", "off the grid", "layer 1 qkv: off the grid", module=OTHER)
    good = [of("engaged", module=module) for module in (QKV, QKV, OTHER)]
    result = merged(declaration(QKV, OTHER), [*good, bad])
    assert [entry["reason"] for entry in result.entries] == ["", "rank 3: off the grid"]
    assert result.failures == ["rank 3: layer 1 qkv: off the grid"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_module_that_no_rank_holds_fails_the_run(ranks: int) -> None:
    result = merged(declaration(QKV, OTHER), [of("engaged")] * ranks)
    assert result.entries[1]["status"] == "not_reached"
    words = "layer 1 qkv linear.fprop.x: declared mxfp8_e4m3, no rank holds its module"
    assert result.failures == [words]
