"""Limits declared with fields: which values they apply to, and the keys that the messages name."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from quantexp.errors import ConfigError
from quantexp.schema.limits import POSITIVE, Limit, at_least, check_limits, limited, limits

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
