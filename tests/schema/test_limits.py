"""Limits declared with fields: which values they apply to, and the keys that the messages name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from quantexp.errors import ConfigError
from quantexp.schema import Composition
from quantexp.schema.keys import keys, kind_of, section_of
from quantexp.schema.limits import (
    NOT_NEGATIVE,
    POSITIVE,
    Limit,
    at_least,
    at_most,
    between,
    check_limits,
    limited,
    limits,
)

EVEN = Limit(lambda value: value % 2 == 0, "must be even")
PLAIN = Limit(str.isalpha, "must be letters")


@dataclass
class Inner:
    width: int = limited(2, at_least(1), EVEN)
    scale: float | None = limited(None, POSITIVE)


@dataclass
class Outer:
    words: list[str] = field(default_factory=list, metadata=limits(PLAIN))
    named: dict[str, int] = field(default_factory=dict, metadata=limits(EVEN))
    inner: Inner | None = None
    rules: list[Inner] = field(default_factory=list)
    free: int = -1


def test_values_within_their_limits_pass_and_a_missing_value_has_none() -> None:
    check_limits("outer", Outer())
    rules = [Inner(4, 0.5), Inner()]
    check_limits("outer", Outer(["a"], {"b": 2}, Inner(), rules))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (Outer(inner=Inner(0)), "outer.inner.width must be at least 1, got 0"),
        (Outer(inner=Inner(3)), "outer.inner.width must be even, got 3"),
        (
            Outer(inner=Inner(scale=float("nan"))),
            "outer.inner.scale must be a positive number, got nan",
        ),
        (Outer(rules=[Inner(), Inner(1)]), "outer.rules[1].width must be even, got 1"),
        (Outer(words=["a", "4"]), "outer.words must be letters, got '4'"),
        (Outer(named={"a": 2, "b": 1}), "outer.named.b must be even, got 1"),
    ],
)
def test_value_outside_a_limit_is_refused_by_its_full_key(section: Outer, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_limits("outer", section)
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300, 3.1e38, -1.0, 1e-45, 1e-300])
def test_positive_number_is_one_that_fp32_represents(value: float) -> None:
    for limit in (POSITIVE, NOT_NEGATIVE):
        with pytest.raises(ConfigError):
            limit.check("key", value)


def test_number_above_fp32_is_refused_by_that_bound() -> None:
    for limit in (POSITIVE, NOT_NEGATIVE):
        with pytest.raises(ConfigError, match=r"key must be at most 3e\+38, got 1e\+300"):
            limit.check("key", 1e300)


def test_zero_is_not_negative_and_not_positive() -> None:
    NOT_NEGATIVE.check("key", 0.0)
    with pytest.raises(ConfigError, match="key must be a positive number, got 0"):
        POSITIVE.check("key", 0)


def test_range_includes_both_its_ends() -> None:
    for value in (1, 1_000):
        for limit in between(1, 1_000):
            limit.check("key", value)
    with pytest.raises(ConfigError, match="key must be at most 1,000, got 1001"):
        at_most(1_000).check("key", 1_001)


def test_every_number_of_the_schema_has_an_upper_bound() -> None:
    """A size without one is a plan without an end; `launcher.options` and lists of layers have rules of their own."""
    for key in keys():
        owner: Any = Composition
        *parents, name = key.split(".")
        for parent in parents:
            owner = section_of(owner, parent)
        hint = get_type_hints(owner)[name]
        if not {int, float}.intersection([hint, *get_args(hint)]) or get_origin(hint) is list:
            continue
        (field,) = [field for field in dataclasses.fields(owner) if field.name == name]
        declared = field.metadata.get("limits", ())
        sizes = [10**18] if float not in (hint, *get_args(hint)) else []
        for value in (*sizes, 1e300, float("inf"), float("nan")):
            assert not all(limit.holds(value) for limit in declared), (key, value)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("training.name", str),
        ("launcher.partition", str),
        ("launcher.environment.ANY", str),
        ("training.lr", float),
        ("training.deterministic", bool),
        ("capture.every", int),
        ("capture.iterations", list[str]),
        ("launcher.options.any", None),
        ("nope.nope", None),
    ],
)
def test_key_determines_the_type(key: str, kind: object) -> None:
    assert kind_of(key) == kind
