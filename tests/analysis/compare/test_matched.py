from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from quantexp.analysis.compare.leaves import leaves
from quantexp.analysis.compare.matched import (
    _DECIDES,
    DATA_ORDER,
    INITIALISATION,
    LENGTH,
    UNKNOWN,
    decides,
    in_words,
    mismatches,
)
from quantexp.analysis.compare.side import read_side
from quantexp.launch.identity import identity
from quantexp.schema import Experiment

from .runs import Runs, change_json


def aspects(runs: Runs, **training: object) -> dict[str, str]:
    base = read_side(runs.add())
    other = read_side(runs.add("FA_linear_mxfp8", **training))  # type: ignore[arg-type]
    return {m.aspect: m.why for m in mismatches(other, base)}


def test_runs_that_differ_in_their_scheme_alone_are_matched(runs: Runs) -> None:
    assert aspects(runs) == {}


def test_another_seed_changes_data_order_and_initialisation(runs: Runs) -> None:
    why = "training.seed 7 against 1234"
    assert aspects(runs, seed=7) == {DATA_ORDER: why, INITIALISATION: why}


def test_another_length_is_named(runs: Runs) -> None:
    assert aspects(runs, iterations=8) == {LENGTH: "training.iterations 8 against 4"}


def test_a_run_that_ended_early_is_not_of_the_same_length(runs: Runs) -> None:
    reasons = aspects(runs, losses=[6.0, 5.0])
    assert reasons == {LENGTH: "iteration 2 reached against 4"}


def test_other_data_is_another_data_order(runs: Runs) -> None:
    assert aspects(runs, data="sample-2") == {DATA_ORDER: "data.tokens sample-2 against sample-1"}


def test_fingerprints_are_short_and_described_in_words(runs: Runs) -> None:
    base, other = (
        read_side(runs.add(data="a1" * 32)),
        read_side(runs.add("FA_mxfp8", data="b2" * 32)),
    )
    assert (
        in_words(mismatches(other, base)) == "data order (other tokens: b2b2b2b2 against a1a1a1a1)"
    )
    blend = [["c3" * 32, 0.5], ["d4" * 32, 0.5]]
    mixed = read_side(runs.add("linear_mxfp8", data=blend))  # type: ignore[arg-type]
    assert in_words(mismatches(mixed, base)) == (
        "data order (other tokens: [['c3c3c3c3', 0.5], ['d4d4d4d4', 0.5]] against a1a1a1a1)"
    )


@pytest.mark.parametrize(
    ("change", "aspect"),
    [({"lr": 1.0}, "training"), ({"precision": "fp32"}, "arithmetic")],
)
def test_every_other_cause_of_different_numbers_is_named(
    runs: Runs, change: dict[str, object], aspect: str
) -> None:
    assert list(aspects(runs, **change)) == [aspect]


def test_another_torch_is_named(runs: Runs) -> None:
    base, other = runs.add(), runs.add("linear_mxfp8")
    change_json(other.provenance, ran={"packages": {"torch": "2.9.0", "megatron-core": "0.16.1"}})
    change_json(base.provenance, ran={"packages": {"torch": "2.13.0", "megatron-core": "0.16.1"}})
    differences = mismatches(read_side(other), read_side(base))
    assert in_words(differences) == "arithmetic (packages.torch 2.9.0 against 2.13.0)"


CODES = ("a1" * 8, "b2" * 8, "c3" * 8)


@pytest.mark.parametrize(
    ("here", "baseline", "why"),
    [
        ({"code": CODES[0]}, {"code": CODES[0]}, ""),
        ({"code": CODES[0]}, {"code": CODES[1]}, "code (a1a1a1a1 against b2b2b2b2)"),
        (
            {"code": CODES[0], "starts": [CODES[1], CODES[1]]},
            {"code": CODES[1]},
            "code (a1a1a1a1 then b2b2b2b2 against b2b2b2b2)",
        ),
        ({"code": CODES[0]}, {}, "code (a1a1a1a1 against snapshot 01234567)"),
        (
            {"starts": [CODES[0]]},
            {"code": CODES[0]},
            "code (not recorded then a1a1a1a1 against a1a1a1a1)",
        ),
        ({}, {}, ""),
        (
            {"source": {"snapshot": CODES[0]}},
            {},
            "code (snapshot a1a1a1a1 against snapshot 01234567)",
        ),
        ({"source": {}}, {}, "code (not recorded against snapshot 01234567)"),
    ],
)
def test_runs_of_different_code_are_not_matched(
    runs: Runs, here: dict[str, Any], baseline: dict[str, Any], why: str
) -> None:
    """A run of an earlier version, without a digest, has the snapshot of its source."""
    base, other = runs.add(), runs.add("FA_mxfp8")
    for run, changes in ((other, here), (base, baseline)):
        start = {"created": "2026", "goes_on_from": 1, "host": "", "folder": "", "command": []}
        starts = [{**start, "changed": [], "code": code} for code in changes.pop("starts", ())]
        change_json(run.provenance, starts=starts, **changes)
    assert in_words(mismatches(read_side(other), read_side(base))) == why


@pytest.mark.parametrize(
    ("here", "baseline", "why"),
    [
        (False, True, "proof (failed)"),
        (True, False, "proof (failed for the baseline)"),
        (False, False, "proof (failed, failed for the baseline)"),
    ],
)
def test_a_run_whose_proof_failed_is_matched_with_none(
    runs: Runs, here: bool, baseline: bool, why: str
) -> None:
    sides = [
        read_side(runs.add("FA_mxfp8", proved=here)),
        read_side(runs.add(proved=baseline)),
    ]
    assert in_words(mismatches(*sides)) == why


def test_another_layout_is_named(runs: Runs) -> None:
    base, other = runs.add(), runs.add("linear_mxfp8")
    content = json.loads(other.provenance.read_text())["identity"]
    change_json(other.provenance, identity={**content, "layout": {"tensor": 2, "sequence": True}})
    assert in_words(mismatches(read_side(other), read_side(base))) == (
        "arithmetic (layout.tensor 2 against none, layout.sequence True against none)"
    )


def test_emulation_and_hardware_are_matched_and_two_of_hardware_with_their_variables(
    runs: Runs,
) -> None:
    emulated, here, there = runs.add("linear_mxfp8"), runs.add("te_a"), runs.add("te_b")
    backend = {"name": "transformer_engine", "transformer_engine": "2.11.0"}
    for run, environment in ((here, {"NVTE_DEBUG": "0"}), (there, {"NVTE_DEBUG": "1"})):
        content = json.loads(run.provenance.read_text())["identity"]
        content["backend"] = {**backend, "environment": environment}
        change_json(run.provenance, identity=content)
    assert mismatches(read_side(here), read_side(emulated)) == []
    assert in_words(mismatches(read_side(there), read_side(here))) == (
        "arithmetic (backend.environment.NVTE_DEBUG 1 against 0)"
    )


def test_a_run_without_provenance_cannot_be_matched(runs: Runs) -> None:
    base, other = runs.add(), runs.add("linear_mxfp8")
    other.provenance.unlink()
    (mismatch,) = mismatches(read_side(other), read_side(base))
    assert mismatch.aspect == UNKNOWN
    assert mismatch.why == f"{other.provenance} does not say what the run was started with"


def test_every_key_of_an_identity_decides_something_that_is_named(
    tiny: Callable[..., Experiment],
) -> None:
    content = identity(tiny(), "cpu")
    content.pop("scheme")
    named = json.loads(json.dumps(content))
    assert {key.partition(".")[0] for key in leaves(named)} <= set(_DECIDES)
    assert decides("training.adam_beta1") == ("training",)
    assert decides("model.num_layers") == (INITIALISATION,)
    assert decides("training.start.weights") == (INITIALISATION,)
    assert decides("something.of.a.later.version") == ("training",)
