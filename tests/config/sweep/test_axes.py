"""Axes are Hydra's, value for value and in its order; groups of them advance together."""

from __future__ import annotations

from itertools import product

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from quantexp.config.sweep.axes import Axis, axes, zipped
from quantexp.errors import ConfigError

MOST, FEWER = "a sweep must have at most 10,000 points", "give fewer values, or run several sweeps"


def axes_of(*words: str) -> dict[str, Axis]:
    return axes(OverridesParser.create().parse_overrides(list(words)))


def together(words: list[str], *groups: list[str]) -> list[list[list[str]]]:
    """The words of each variant of each axis."""
    return [[list(v.values()) for v in axis] for axis in zipped(axes_of(*words), list(groups))]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["a=1", "b=2"],
        ["quant=bf16,FA_mxfp8", "training.lr=1e-3,1e-4", "training.seed=1"],
        ["training.seed=range(1,10,3)", "quant=choice(bf16,FA_mxfp8)"],
        ["training.lr=range(0.1,0.5,0.1)"],
        ["a=sort(3,1,2)", "b=sort(3,1,2,reverse=true)"],
        ["a='x,y',z", "b=\"it's\",'q\"q'", "c=\\,,d"],
        ["a=[1,2],[3]", "b={x:1},{y:2}", "c=null,true"],
        ["a=${b},1", "d='$(x)','${e}'", "f=x\\ y,' z '"],
        ["+a=1,2", "~b", "~c=3", "++d=4"],
        ["a=1,2", "b=3", "a=5,6,7"],
        ["quant/linear@quant.linear=mxfp8,mxfp4"],
    ],
)
def test_product_is_that_of_hydras_sweeper(words: list[str]) -> None:
    parsed = OverridesParser.create().parse_overrides(words)
    ((*jobs,),) = BasicSweeper.split_arguments(parsed, None)
    steps = product(*axes(parsed).values())
    assert [[word for variant in step for word in variant.values()] for step in steps] == jobs


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("hydra.job.name=a,b", "hydra.job.name=a,b: hydra.job.name is one for the whole sweep"),
        ("hydra/launcher=a,b", "hydra/launcher=a,b: hydra/launcher is one for the whole sweep"),
        ("a=range(1,1)", "a=range(1,1) stands for no value"),
        (
            "a=range(0,1000000000000)",
            f"{MOST}, got 1,000,000,000,000; {FEWER}",
        ),
        (
            "a=shuffle(range(0,10001))",
            f"{MOST}, got 10,001; {FEWER}",
        ),
        (
            "a=range(1,2,1e-9)",
            f"{MOST}, got 1,000,000,000; {FEWER}",
        ),
        ("a=range(1,2,0)", "a=range(1,2,0) must have a step other than 0"),
        (
            "a=interval(1,2)",
            "a=interval(1,2) has no values to run; write them out, or a=range(first,end,step)",
        ),
    ],
)
def test_word_that_cannot_be_an_axis_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        axes_of(word)
    assert str(caught.value) == message


def test_zipped_keys_advance_together_in_the_place_of_the_first() -> None:
    words = ["a=1,2", "b=5", "+c=x,y", "d=7,8"]
    assert together(words, ["c", "a"]) == [
        [["+c=x", "a=1"], ["+c=y", "a=2"]],
        [["b=5"]],
        [["d=7"], ["d=8"]],
    ]


def test_several_groups_are_zipped_apart() -> None:
    words = ["a=1,2", "b=3,4", "c=5,6", "d=7,8"]
    assert together(words, ["a", "c"], ["b", "d"]) == [
        [["a=1", "c=5"], ["a=2", "c=6"]],
        [["b=3", "d=7"], ["b=4", "d=8"]],
    ]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [["a", "b"]],
            "sweep.zip: a has 2 values and b has 3; keys that advance together need equally many",
        ),
        ([["a", "c"]], "sweep.zip: c is not swept; swept keys: a, b, d"),
        ([["a", "nope"]], "sweep.zip: nope is not swept; swept keys: a, b, d"),
        ([["a", "d"], ["d", "b"]], "sweep.zip: d is there twice; name each key once"),
        ([["a", "a"]], "sweep.zip: a is there twice; name each key once"),
    ],
)
def test_group_that_cannot_advance_together_names_its_keys(
    groups: list[list[str]], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        zipped(axes_of("a=1,2", "b=1,2,3", "c=1", "+d=1,2"), groups)
    assert str(caught.value) == message


def test_zip_without_any_swept_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sweep\.zip: a is not swept; swept keys: none"):
        zipped(axes_of("a=1"), [["a", "b"]])
