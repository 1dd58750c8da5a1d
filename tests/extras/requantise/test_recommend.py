from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from quantexp.analysis.scheme_yaml import scheme_path
from quantexp.analysis.tensors.operands import slots_of_tensor
from quantexp.capture.statistics.errors import Fidelity
from quantexp.cli.plan_record import make_plan
from quantexp.config.compose import compose
from quantexp.extras.requantise.candidates import Candidate, candidates, formats_of
from quantexp.extras.requantise.passing import Work
from quantexp.extras.requantise.recommend import NAME, Choice, recommend, scheme_text
from quantexp.extras.requantise.tally import Place, Tally, Worst
from quantexp.formats import Hadamard
from quantexp.quant.precision import precision_map
from quantexp.quant.sites import PRODUCTS, Product, Site, operands_of
from quantexp.quant.slots import resolve_site
from quantexp.schema import Experiment, LinearSite

ALL = candidates(formats_of(["mxfp4", "mxfp6_e2m3", "hifp8"]))
SLOTS = {
    str(slot): slot
    for tensor in ("input", "weight", "grad_output")
    for slot in slots_of_tensor({"layer_type": "linear", "tensor": tensor})
}
NAMES = [label.removeprefix("linear.").replace(".", "_") for label in SLOTS]
#: Decibels of a candidate.
Table = Callable[[Candidate], float]


def tally(every: Sequence[Candidate] = ALL, **tables: Table) -> Tally:
    """One tensor for each slot that is named, `fprop_x`."""
    scores = Tally(Work(every, [], 0))
    for name, decibel in tables.items():
        slot = SLOTS["linear." + name.replace("_", ".")]
        worst = [Worst() for _ in every]
        for one, candidate in zip(worst, every, strict=True):
            one.add(Fidelity(decibel(candidate), 0.0, 0.0), "a tensor")
        scores.worst[Place("fc1", slot)] = worst
    return scores


def by_bits(four: float, six: float, eight: float) -> Table:
    """The same for all options of a format."""
    return lambda one: {4: four, 6: six, 8: eight}[one.format.element.bits]


def chosen(choices: list[Choice]) -> dict[str, str | None]:
    return {str(one.slot): one.candidate.name if one.candidate else None for one in choices}


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
def test_the_fewest_bits_that_reach_the_sqnr_have_their_usual_options(
    sqnr_db: float, name: str | None
) -> None:
    table = by_bits(20, 30, 32)
    names = chosen(recommend(tally(fprop_x=table, fprop_w=table), sqnr_db))
    assert {names[label] for label in FPROP} == {name}


def test_slots_that_were_not_captured_stay_as_they_are() -> None:
    table = by_bits(20, 30, 32)
    choices = recommend(tally(fprop_x=table, fprop_w=table), 20)
    others = [one for one in choices if str(one.slot) not in FPROP]
    assert len(others) == 4
    assert {(one.candidate, one.captured, one.bits) for one in others} == {(None, False, 16.0)}


def test_a_tenth_of_a_decibel_is_no_reason_for_other_options() -> None:
    def table(one: Candidate, more: float) -> float:
        return 20 + (more if one.scale_rule == "ceil" and one.rounding == "away" else 0)

    for more, name in ((0.05, "mxfp4_e2m1 floor even"), (0.2, "mxfp4_e2m1 ceil away")):
        tables: dict[str, Any] = {
            n: lambda one, more=more: table(one, more) for n in ("fprop_x", "fprop_w")
        }
        names = chosen(recommend(tally(**tables), 19))
        assert {names[label] for label in FPROP} == {name}


def only_with(hadamard: Hadamard) -> Table:
    """Four bits reach the SQNR only after this transform, six always."""

    def table(one: Candidate) -> float:
        few = one.format.element.bits == 4
        return 20 if not few or one.hadamard is hadamard else 10

    return table


def test_both_operands_or_neither_have_a_transform() -> None:
    """Together 4.25 + 4.25 with it against 6.25 + 6.25 without."""
    table = only_with(Hadamard.DETERMINISTIC)
    names = chosen(recommend(tally(wgrad_g=table, wgrad_x=table), 15))
    assert names["linear.wgrad.g"] == names["linear.wgrad.x"]
    assert names["linear.wgrad.x"] == "mxfp4_e2m1 floor even deterministic Hadamard"


def test_a_partner_that_needs_the_transform_decides_for_both() -> None:
    """X is as cheap without; g needs the transform for its four bits: the pair has it."""
    tables: dict[str, Any] = {"wgrad_x": by_bits(20, 20, 20), "wgrad_g": only_with(Hadamard.RANDOM)}
    names = chosen(recommend(tally(**tables), 15))
    assert names["linear.wgrad.x"] == "mxfp4_e2m1 floor even random Hadamard"


def test_an_operand_beside_the_working_precision_has_no_transform() -> None:
    """Beside an operand that reaches nothing, or was not captured, four bits after a transform are out of reach."""
    table = only_with(Hadamard.DETERMINISTIC)
    for tables in ({"wgrad_x": table, "wgrad_g": by_bits(1, 2, 3)}, {"wgrad_x": table}):
        names = chosen(recommend(tally(**tables), 15))  # type: ignore[arg-type]
        assert names["linear.wgrad.g"] is None
        assert names["linear.wgrad.x"] == "mxfp6_e2m3 floor even"


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
    assert [one.slot.product for one in choices[::2]] == [
        Product.FPROP,
        Product.DGRAD,
        Product.WGRAD,
    ]


def test_transforms_of_different_blocks_do_not_cancel() -> None:
    """Mxfp4 after 32 beside nvfp4 after 16 would be the fewest bits: g in mxfp4 alone, x in nvfp4 alone."""
    every = candidates(formats_of(["mxfp4", "nvfp4", "mxfp6_e2m3"]))

    def only(name: str) -> Table:
        def table(one: Candidate) -> float:
            wanted = one.format.name == name and one.hadamard is Hadamard.DETERMINISTIC
            return 20 if wanted or one.bits > 6 else 10

        return table

    tables = {"wgrad_g": only("mxfp4_e2m1"), "wgrad_x": only("nvfp4_e2m1")}
    g, x = (one.candidate for one in recommend(tally(every, **tables), 15)[-2:])
    assert g is not None
    assert x is not None
    assert g.transform == x.transform
    # 4.25 + 6.25 under the transform of 32 is less than 6.25 + 4.5 under that of 16 and than 6.25 + 6.25.
    assert (g.bits, x.bits, g.hadamard_block) == (4.25, 6.25, 32)


@pytest.mark.parametrize("seed", range(10))
def test_a_scheme_can_hold_every_recommendation(seed: int) -> None:
    """Decibels at random: every product's operands go together by the rules of schemes."""
    every, draw = candidates(formats_of(None)), random.Random(seed)
    tables = {name: lambda one: draw.uniform(0, 20.2) for name in NAMES if draw.random() < 0.9}
    choices = recommend(tally(every, **tables), 20)
    assert any(one.candidate for one in choices)
    site = LinearSite()
    for one in choices:
        slot = getattr(getattr(site, one.slot.product.value), one.slot.operand)
        for key, value in (one.candidate.settings() if one.candidate else {}).items():
            setattr(slot, key, value)
    slots = resolve_site(Site.LINEAR, site)
    for one in choices:
        wanted = "bf16" if one.candidate is None else one.candidate.format.name
        assert slots[one.slot].fmt.name == wanted


#: One of every format and transform, in turn, so that a scheme holds them all.
EVERY = [
    next(one for one in candidates([fmt]) if one.hadamard is hadamard)
    for hadamard in Hadamard
    for fmt in formats_of(None)
]


def choose(module: str, sites: list[Site], pick: Callable[[int], Candidate | None]) -> list[Choice]:
    """A choice for each slot; `pick` gets the number of the product, so that both operands share a transform."""
    choices = []
    products = [operands_of(site, product) for site in sites for product in PRODUCTS[site]]
    for number, slots in enumerate(products):
        for slot in slots:
            chosen = pick(number)
            choices.append(Choice(module, slot, chosen, Worst(30.0), chosen is not None))
    return choices


def write_scheme(folder: Path, choices: list[Choice]) -> Path:
    path = scheme_path(folder, NAME)
    path.parent.mkdir(parents=True)
    path.write_text(scheme_text(choices, 25.0))
    return folder


def composed(folder: Path, words: list[str]) -> Experiment:
    return compose([*words, "quant=recommended", f"paths.root={folder / 'runs'}"], folder)


@pytest.mark.parametrize("start", range(0, len(EVERY), 3))
def test_the_precision_map_holds_the_recommendation(
    tmp_path: Path, tiny_words: list[str], start: int
) -> None:
    """Every format under every transform, in every slot of both kinds of modules."""
    choices = [
        *choose("fc1", [Site.LINEAR], lambda n: EVERY[start + n]),
        *choose("fc2", [Site.LINEAR], lambda n: EVERY[start]),
        *choose("attention", [Site.QK, Site.PV], lambda n: EVERY[start + n % 3]),
    ]
    experiment = composed(write_scheme(tmp_path, choices), tiny_words)
    assert experiment.quant.name == "recommended"
    wanted = {(one.module, one.slot): one.candidate for one in choices}
    entries = [
        entry
        for module in precision_map(experiment.model, experiment.quant).values()
        for entry in module.entries()
    ]
    assert len(entries) == 2 * 6 * 6
    for entry in entries:
        candidate = wanted.get((entry.module.name, entry.slot))
        got = entry.spec
        if candidate is None:
            assert entry.module.name in ("qkv", "proj")
            assert got.fmt.name == "bf16"
            continue
        assert got == candidate.spec(entry.slot)
    assert make_plan(experiment).scheme == "recommended"


def test_an_empty_recommendation_is_the_working_precision(
    tmp_path: Path, tiny_words: list[str]
) -> None:
    folder = write_scheme(tmp_path, choose("fc1", [Site.LINEAR], lambda n: None))
    assert composed(folder, tiny_words).quant.rules == []


def test_slots_with_the_same_settings_share_a_rule() -> None:
    usual = EVERY[0]
    choices = [c for m in ("qkv", "fc1") for c in choose(m, [Site.LINEAR], lambda n: usual)]
    rules = yaml.safe_load(scheme_text(choices, 25.0))["rules"]
    assert len(rules) == 6
    assert all(rule["modules"] == ["qkv", "fc1"] for rule in rules)


def test_modules_without_a_name_are_all_of_the_site() -> None:
    """Old names have `linear` and no module; experts are one module for the recommendation and many for the model."""
    text = scheme_text(choose("linear", [Site.LINEAR], lambda n: EVERY[0]), 25.0)
    rules = yaml.safe_load(text)["rules"]
    assert len(rules) == 6
    assert all("modules" not in rule for rule in rules)
    text = scheme_text(choose("expert-fc1", [Site.LINEAR], lambda n: EVERY[0]), 25.0)
    assert yaml.safe_load(text)["rules"][0]["modules"] == ["expert*-fc1"]


def test_a_recommendation_trains_and_proves_its_engagement(
    tmp_path: Path, tiny_words: list[str]
) -> None:
    """Formats of every family, a transform and attention's own slots in one scheme."""
    from quantexp.launch.attempt import open_run
    from quantexp.training.worker import Worker

    by_name = {one.name: one for one in candidates(formats_of(None))}
    linear = [
        by_name["nvfp4_e2m1 exact even"],
        by_name["mxfp8_e5m2 rceil even"],
        by_name["mxfp4_e2m1 floor even deterministic Hadamard"],
    ]
    attention = [by_name["mxfp6_e2m3 floor even"], by_name["hifp8 none away"], None]
    choices = [
        *choose("fc1", [Site.LINEAR], lambda n: linear[n]),
        *choose("attention", [Site.QK], lambda n: attention[n]),
    ]
    words = [*tiny_words, "training.iterations=1", "training.warmup_iterations=0", "capture=off"]
    experiment = composed(write_scheme(tmp_path, choices), words)
    with open_run(experiment, "cpu", ["test"]) as (folder, _):
        code = Worker(folder.run, experiment).run()
    assert code == 0, folder.run.status.read_text()
    record = json.loads(folder.run.precision.read_text())
    assert (record["scheme"], record["proved"]) == ("recommended", True)
    quantised = [entry for entry in record["entries"] if entry["format"] != "bf16"]
    assert len(quantised) == 2 * (6 + 4)
    assert {entry["status"] for entry in quantised} == {"engaged"}
