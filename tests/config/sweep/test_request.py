"""The allowed shapes of `sweep.*`, and their meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quantexp.config.sweep.request import Request, request
from quantexp.errors import ConfigError
from quantexp.schema import SweepConfig


def request_of(**values: Any) -> Request:
    return request(SweepConfig(**values), 1234)


def test_empty_sweep_is_an_empty_request() -> None:
    assert request_of() == Request(zip=[], points=None, exclude=[], seeds=None, first=[])


def test_one_group_or_pattern_is_a_list_of_one() -> None:
    assert request_of(zip=["a", "b"]).zip == request_of(zip=[["a", "b"]]).zip == [["a", "b"]]
    assert request_of(zip=[["a", "b"], ["c", "d"]]).zip == [["a", "b"], ["c", "d"]]
    assert request_of(exclude={"quant": "FA_*"}).exclude == [{"quant": "FA_*"}]
    assert request_of(first=[{"quant": "bf16"}, {"model": "x", "quant": "y"}]).first == [
        {"quant": "bf16"},
        {"model": "x", "quant": "y"},
    ]


def test_number_of_seeds_begins_at_the_configured_seed() -> None:
    assert request_of(seeds=1).seeds == [1234]
    assert request_of(seeds=3).seeds == [1234, 1235, 1236]
    assert request_of(seeds=[7, 0]).seeds == [7, 0]


def test_home_in_the_files_name_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert request_of(points="~/p.yaml").points == Path("/home/me/p.yaml")


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "3", [], [1, 1], [-1], [True], ["a"], {}])
def test_invalid_seeds_are_refused(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"sweep\.seeds must be how many \(at least 1\), or a list"
    ):
        request_of(seeds=value)


@pytest.mark.parametrize("value", ["quant", ["quant"], [["quant"]], [1, 2], [["a", "b"], "c"], {}])
def test_zip_of_another_shape_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"sweep\.zip must be a list of two or more swept keys"):
        request_of(zip=value)


@pytest.mark.parametrize("key", ["exclude", "first"])
@pytest.mark.parametrize("value", ["bf16", {}, [{}], ["bf16"], [{"quant": ["bf16"]}], 3])
def test_pattern_of_another_shape_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        request_of(**{key: value})
    assert str(caught.value).startswith(
        f"sweep.{key} must be a mapping of keys to shell patterns such as {{quant: 'FA_*'}}, or a list"
    )
    assert str(caught.value).endswith(f"got {value!r}")


def test_more_seeds_than_a_sweep_may_have_points_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="a sweep must have at most 10,000 points, got 1,000,000,0"
    ):
        request_of(seeds=1_000_000_000)


@pytest.mark.parametrize("value", [-1, True, "two", [1], 1.5])
def test_invalid_numbers_of_perturbed_runs_are_refused(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"sweep\.chaos must be a number of perturbed bf16 runs for each seed, at"
    ):
        request_of(chaos=value)
    assert request_of(chaos=0).chaos == 0
