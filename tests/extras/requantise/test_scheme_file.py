from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from quantexp.analysis.scheme_yaml import scheme_path
from quantexp.cli.plan_record import make_plan
from quantexp.config.compose import compose
from quantexp.extras.requantise.candidates import Candidate, candidates, formats_of
from quantexp.extras.requantise.recommend import Choice
from quantexp.extras.requantise.scheme_file import NAME, scheme_text
from quantexp.extras.requantise.tally import Worst
from quantexp.formats import Hadamard
from quantexp.quant.precision import precision_map
from quantexp.quant.sites import PRODUCTS, Site, operands_of
from quantexp.schema import Experiment

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
