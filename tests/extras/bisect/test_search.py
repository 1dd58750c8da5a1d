"""The controls come first; what is found is shown in words, in JSON and in a figure."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from quantexp.config.compose import compose
from quantexp.extras.bisect.figure import draw_result
from quantexp.extras.bisect.measures import Measure
from quantexp.extras.bisect.result import (
    Chance,
    Result,
    listed,
    override,
    print_result,
    record,
    write_scheme,
)
from quantexp.extras.bisect.search import Found, Observed, Subset, Verdict, search
from quantexp.extras.bisect.trouble import Step, Trouble
from quantexp.schema import Experiment, Rule

UNITS = ("linear.fprop.x", "linear.fprop.w", "linear.dgrad.g", "linear.wgrad.g")


def searched(
    fails: Callable[[Subset], bool], is_bf16_troubled: bool = False
) -> tuple[Found, list[list[Subset]]]:
    rounds: list[list[Subset]] = []

    def observe(subsets: Sequence[Subset]) -> list[Observed]:
        rounds.append(list(subsets))
        return [Observed(each, fails(each), "measured", f"runs/r-{len(each)}") for each in subsets]

    return search(len(UNITS), observe, lambda each: is_bf16_troubled), rounds


def result_of(found: Found) -> Result:
    trouble = Trouble("loss", 9, "the largest rise of the loss, +1.0000, is at iteration 9")
    measure = Measure("loss", 0.5)
    return Result("a_run-12345678", "linear_mxfp4", 4, 9, trouble, measure, UNITS, found, "same")


def test_controls_run_together_and_end_the_search() -> None:
    found, rounds = searched(lambda each: False)
    assert found.verdict is Verdict.NOT_REPRODUCED
    assert rounds == [[frozenset({0, 1, 2, 3}), frozenset()]]
    for fails, troubled in ((lambda each: True, False), (bool, True)):
        found, rounds = searched(fails, troubled)
        assert found.verdict is Verdict.NOT_QUANTISATION
        assert len(rounds) == 1


def test_two_causes_and_their_cure() -> None:
    found, _ = searched(lambda each: 2 in each or {0, 3} <= each)
    assert found.verdict is Verdict.FOUND
    assert sorted(map(sorted, found.enough)) == [[0, 3], [2]]
    assert 2 in found.cure
    assert len(found.cure) == 2
    by_set = {each.quantised: each.is_trouble for each in found.observed}
    everything = frozenset(range(4))
    assert len(by_set) == len(found.observed)
    for enough in found.enough:  # the largest set in bf16 that is not enough, and one unit more
        assert by_set[enough]
        assert not any(by_set[enough - {unit}] for unit in enough)
    assert not by_set[everything - found.cure]
    assert all(by_set[everything - (found.cure - {unit})] for unit in found.cure)


def test_results_are_printed_recorded_and_drawn(tmp_path: Path) -> None:
    found, _ = searched(lambda each: 2 in each)
    result = result_of(found)
    console = Console(width=100, record=True, file=io.StringIO())
    print_result(result, console)
    shown = console.export_text()
    assert "the quantisation of linear.dgrad.g" in shown
    assert "bf16 for linear.fprop.x, linear.fprop.w, linear.wgrad.g: the trouble stays" in shown
    assert "the whole scheme" in shown
    content = record(result)
    assert content["enough"] == [["linear.dgrad.g"]] == [content["keep_in_bf16"]]
    assert content["verdict"] == "found"
    curves = {"whole scheme": [Step(5, 2.0), Step(6, float("nan"))], "bf16": [Step(5, 2.0)]}
    assert [f.name for f in draw_result(result, curves, tmp_path)] == ["bisect.png", "bisect.pdf"]
    assert draw_result(result, {}, tmp_path)[0].stat().st_size > 1000


@pytest.mark.parametrize(
    ("scheme", "bf16", "is_likely"),
    [((True, True), (False,), False), ((True, False), (False,), True), ((True,), (True,), True)],
)
def test_a_trouble_that_last_bits_decide_may_be_chance(
    scheme: tuple[bool, ...], bf16: tuple[bool, ...], is_likely: bool
) -> None:
    def seen(troubles: tuple[bool, ...]) -> tuple[Observed, ...]:
        return tuple(
            Observed(Subset(), is_trouble, "as measured", "run") for is_trouble in troubles
        )

    found, _ = searched(lambda each: 2 in each)
    result = replace(result_of(found), chance=Chance(seen(scheme), seen(bf16)))
    assert result.words.endswith(", or chance") == is_likely
    console = Console(width=120, record=True, file=io.StringIO())
    print_result(result, console)
    counts = [f"{sum(each)} of {len(each)}" for each in (scheme, bf16)]
    assert (
        f"from weights moved in last bits, the scheme shows it {counts[0]} times, bf16 {counts[1]}"
        in console.export_text()
    )
    assert record(result)["chance"]["likely"] == is_likely


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        (
            lambda each: False,
            "not reproduced: the replay with nothing changed does not show the trouble",
        ),
        (
            lambda each: True,
            "not the quantisation: the replay with no product quantised shows the trouble too",
        ),
    ],
)
def test_verdicts_without_a_culprit(fails: Callable[[Subset], bool], words: str) -> None:
    assert result_of(searched(fails)[0]).words == words


def test_long_lists_are_cut() -> None:
    assert listed(list("abcde")) == "a, b, c and 2 more"
    assert listed([]) == "none"


@pytest.mark.parametrize(
    "words", [["quant=FA_linear_mxfp4"], ["quant=more/linear_nvfp4_recipe", "model.num_layers=7"]]
)
def test_the_scheme_file_is_the_scheme_with_the_rules(
    words: list[str], tiny: Callable[..., Experiment], tiny_words: list[str], tmp_path: Path
) -> None:
    quant = tiny(*words).quant
    rules = [Rule(layers=[1], products=["fprop"], operands=["x"], format="bf16")]
    file = write_scheme(quant, rules, "layer 1 x", tmp_path)
    composed = compose([*tiny_words, *words[1:], "quant=bisected"], tmp_path).quant
    by_hand = tiny(*words, override(quant, rules)).quant
    assert composed.name == "bisected"
    composed.name = by_hand.name
    assert composed == by_hand
    assert yaml.safe_load(file.read_text())["rules"][-1]["operands"] == ["x"]
