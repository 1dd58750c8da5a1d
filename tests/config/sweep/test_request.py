"""The shapes that `sweep.*` may have, and what each means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantexp.config.sweep.request import Request, request
from quantexp.errors import ConfigError
from quantexp.schema import SweepConfig


def asked(**values: Any) -> Request:
    return request(SweepConfig(**values), 1234)


def test_nothing_asked_asks_for_nothing() -> None:
    assert asked() == Request(zip=[], points=None, exclude=[], seeds=None, first=[])


def test_one_group_or_pattern_is_a_list_of_one() -> None:
    assert asked(zip=["a", "b"]).zip == asked(zip=[["a", "b"]]).zip == [["a", "b"]]
    assert asked(zip=[["a", "b"], ["c", "d"]]).zip == [["a", "b"], ["c", "d"]]
    assert asked(exclude={"quant": "FA_*"}).exclude == [{"quant": "FA_*"}]
    assert asked(first=[{"quant": "bf16"}, {"model": "x", "quant": "y"}]).first == [
        {"quant": "bf16"},
        {"model": "x", "quant": "y"},
    ]


def test_number_of_seeds_begins_at_the_seed_that_there_is() -> None:
    assert asked(seeds=1).seeds == [1234]
    assert asked(seeds=3).seeds == [1234, 1235, 1236]
    assert asked(seeds=[7, 0]).seeds == [7, 0]


def test_home_in_the_files_name_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert asked(points="~/p.yaml").points == Path("/home/me/p.yaml")


@pytest.mark.parametrize("given", [0, -1, True, 1.5, "3", [], [1, 1], [-1], [True], ["a"], {}])
def test_seeds_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"sweep\.seeds must be how many \(at least 1\), or a list"
    ):
        asked(seeds=given)


@pytest.mark.parametrize("given", ["quant", ["quant"], [["quant"]], [1, 2], [["a", "b"], "c"], {}])
def test_zip_of_another_shape_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"sweep\.zip must be a list of two or more swept keys"):
        asked(zip=given)


@pytest.mark.parametrize("key", ["exclude", "first"])
@pytest.mark.parametrize("given", ["bf16", {}, [{}], ["bf16"], [{"quant": ["bf16"]}], 3])
def test_pattern_of_another_shape_is_refused(key: str, given: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        asked(**{key: given})
    assert str(caught.value).startswith(
        f"sweep.{key} must be a mapping of keys to shell patterns such as {{quant: 'FA_*'}}, or a list"
    )
    assert str(caught.value).endswith(f"got {given!r}")


def test_more_seeds_than_a_sweep_may_have_points_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="a sweep must have at most 10,000 points, got 1,000,000,0"
    ):
        asked(seeds=1_000_000_000)
