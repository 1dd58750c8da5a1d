"""Keys of a run that compares gradients, and of one that ends early."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quantexp.config.gradient import num_passes, units_compared
from quantexp.errors import ConfigError
from quantexp.schema import Experiment

Tiny = Callable[..., Experiment]
GRADIENT = ("gradient.only=true", "training.stop_after=1", "capture=off", "quant=linear_mxfp4")


def test_passes_are_bf16_the_scheme_and_two_for_each_unit(tiny: Tiny) -> None:
    experiment = tiny(*GRADIENT, "gradient.by=[layer]")
    assert [str(unit) for unit in units_compared(experiment)] == ["layer 0", "layer 1"]
    assert num_passes(units_compared(experiment)) == 6
    assert num_passes(units_compared(tiny(*GRADIENT))) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("gradient.by=[layer]",),
            "gradient.by=layer belongs to quantexp bisect --gradient, and this run trains",
        ),
        (
            (*GRADIENT, "gradient.by=[head]"),
            "gradient.by must be among slot, product, site, module, layer, got 'head'",
        ),
        (
            ("gradient.only=true", "capture=off"),
            "training.stop_after must be 1 with gradient.only=true, which is about one iteration, got None",
        ),
        (
            (*GRADIENT[:2],),
            "capture=tensors has no effect on gradient.only, which trains nothing",
        ),
        (
            (*GRADIENT, "checkpoint.at_end=true"),
            "checkpoint.at_end=true has no effect on gradient.only, which trains nothing",
        ),
        (
            (*GRADIENT, "evaluation.every=1"),
            "evaluation.every=1 has no effect on gradient.only, which trains nothing",
        ),
        (
            (*GRADIENT, "evaluate.only=true", "training.start_from=run@1"),
            "gradient.only and evaluate.only are different runs; drop one of them",
        ),
    ],
)
def test_what_does_nothing_is_refused(words: tuple[str, ...], message: str, tiny: Tiny) -> None:
    with pytest.raises(ConfigError) as raised:
        tiny(*words)
    assert str(raised.value) == message


@pytest.mark.parametrize("stop", [0, 3])
def test_a_run_stops_between_its_first_and_its_last_iteration(stop: int, tiny: Tiny) -> None:
    with pytest.raises(ConfigError, match=r"training\.stop_after must"):
        tiny(f"training.stop_after={stop}")


def test_the_words_about_an_end_before_the_start(tiny: Tiny) -> None:
    with pytest.raises(
        ConfigError,
        match=r"training\.stop_after must lie between 2, the first iteration, and training\.iterations=2, got 1",
    ):
        tiny("training.stop_after=1", "training.start_from=run@1")
