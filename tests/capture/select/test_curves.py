"""The choice of curves: which tensors have which, and what a limit leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quantexp.capture.select.curves import (
    Curve,
    choose_curves,
    curves_in_words,
    possible_curves,
    scores_scheme,
)
from quantexp.schema import Experiment, TrackedStatistic

Tiny = Callable[..., Experiment]
#: The statistics of a layer's tensors of four linear modules and attention, with a weight once.
LINEAR, ATTENTION = 4 * 5, 8


def tensors(experiment: Experiment, statistic: TrackedStatistic) -> set[tuple[str, str]]:
    return {(c.module, c.tensor) for c in possible_curves(experiment, [statistic])}


def test_tag_names_statistic_layer_module_and_tensor() -> None:
    assert Curve(TrackedStatistic.sqnr, 3, "fc1", "input").tag == "sqnr_db/L3-fc1/input"
    assert Curve(TrackedStatistic.amax, 3, "attention", "query").tag == "amax/L3/query"


def test_there_are_none_by_default(tiny: Tiny) -> None:
    assert choose_curves(tiny("capture=stats")).curves == ()


def test_amax_has_a_curve_for_every_captured_tensor(tiny: Tiny) -> None:
    choice = choose_curves(tiny("capture=stats", "tracking.statistics=[amax]"))
    assert len(choice.curves) == 2 * (LINEAR + ATTENTION)
    assert choice.layers == [0, 1]
    assert choice.num_left_out == 0


def test_scheme_is_scored_where_a_product_quantises(tiny: Tiny) -> None:
    words = ("capture=stats", "tracking.statistics=[amax,sqnr]")
    linear = tiny(*words, "quant=linear_mxfp8")
    modules = ("qkv", "proj", "fc1", "fc2")
    expected = {(m, t) for m in modules for t in ("input", "weight", "grad_output")}
    assert tensors(linear, TrackedStatistic.sqnr) == expected
    attention = tiny(*words, "quant=FA_mxfp8")
    expected = {("attention", "query"), ("attention", "key")}
    assert tensors(attention, TrackedStatistic.sqnr) == expected
    assert scores_scheme(linear)
    every = tiny(*words, "quant=linear_mxfp8", "capture.format=mxfp4")
    assert tensors(every, TrackedStatistic.sqnr) == tensors(every, TrackedStatistic.amax)
    assert not scores_scheme(every)


def test_curves_follow_the_rules_of_the_capture(tiny: Tiny) -> None:
    rules = 'capture.rules=[{level: "off"},{modules: [fc2],tensors: [input],level: stats}]'
    experiment = tiny("capture=stats", rules, "tracking.statistics=[histogram]")
    assert [c.tag for c in choose_curves(experiment).curves] == [
        "log2_magnitude/L0-fc2/input",
        "log2_magnitude/L1-fc2/input",
    ]


def test_scheme_of_any_captured_iteration_counts(tiny: Tiny) -> None:
    rule = "quant.rules=[{iterations: [2,null],format: mxfp8,modules: [fc1]}]"
    words = ("quant=bf16", rule, "training.iterations=4", "tracking.statistics=[amax,sqnr]")
    late = tiny(*words, "capture=stats", "capture.control_iter=3")
    assert tensors(late, TrackedStatistic.sqnr)
    early = [*words[:-1], "tracking.statistics=[amax]", "capture=stats", "capture.control_iter=1"]
    assert not scores_scheme(tiny(*early))


@pytest.mark.parametrize(
    ("most", "layers"),
    [
        (8 * 28, [0, 1, 2, 3, 4, 5, 6, 7]),
        (8 * 28 - 1, [0, 1, 2, 4, 5, 6, 7]),
        (3 * 28, [0, 4, 7]),
        (2 * 28, [0, 7]),
        (28, [0]),
    ],
)
def test_limit_keeps_evenly_spread_layers(tiny: Tiny, most: int, layers: list[int]) -> None:
    words = ("model.num_layers=8", "capture=stats", "tracking.statistics=[amax]")
    choice = choose_curves(tiny(*words, f"tracking.most_curves={most}"))
    assert choice.layers == layers
    assert len(choice.curves) == 28 * len(layers)
    assert choice.num_left_out == 28 * (8 - len(layers))


def test_limit_below_a_layer_keeps_its_first_curves(tiny: Tiny) -> None:
    words = ("capture=stats", "tracking.statistics=[histogram,amax]")
    whole = choose_curves(tiny(*words))
    choice = choose_curves(tiny(*words, "tracking.most_curves=3"))
    assert choice.curves == whole.curves[:3]
    assert {curve.statistic for curve in choice.curves} == {TrackedStatistic.histogram}


def test_nothing_scores_bf16(tiny: Tiny) -> None:
    words = ("capture=stats", "quant=bf16", "tracking.statistics=[sqnr,amax,underflow]")
    choice = choose_curves(tiny(*words))
    assert len(choice.curves) == 2 * (LINEAR + ATTENTION)
    assert choice.missing == (TrackedStatistic.sqnr, TrackedStatistic.underflow)
    assert choose_curves(tiny(*words, "capture.format=mxfp8")).missing == ()


def test_words_say_what_is_left_out() -> None:
    assert curves_in_words(0, 0, [], ["sqnr"]) == "no curves of sqnr: nothing is quantised"
    assert curves_in_words(2, 0, [0], ["sqnr", "underflow"]) == (
        "2 curves of captured statistics; no curves of sqnr, underflow: nothing is quantised"
    )
    assert curves_in_words(1200, 0, [0, 1]) == "1,200 curves of captured statistics"
    assert curves_in_words(2, 4, [0, 5]) == (
        "2 of 6 curves of captured statistics, of layers 0, 5: tracking.most_curves allows no more layers"
    )
    assert "of layer 0:" in curves_in_words(2, 4, [0])
