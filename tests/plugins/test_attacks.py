"""An attack makes a few fixed cases by default, and as many new ones as `--count` names."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PLUGIN = Path(__file__).with_name("attacks.py")
TESTS = """
from attacks import attack
from hypothesis import given, strategies

@attack
@given(strategies.integers())
def test_hypothesis(number):
    print("number", number)

def test_cases(cases):
    print("seeds", len([case.random() for case in cases]))
"""


@pytest.fixture
def attacked(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(attacks=PLUGIN.read_text())
    pytester.makepyfile(test_attacks=TESTS)
    return pytester


def numbers(attacked: pytest.Pytester, *arguments: str) -> list[str]:
    result = attacked.runpytest_subprocess(
        "-p", "attacks", "-p", "no:cacheprovider", "-s", *arguments
    )
    result.assert_outcomes(passed=2)
    return [line for line in result.outlines if "number" in line or line.startswith("seeds")]


def test_by_default_an_attack_makes_the_same_few_cases(attacked: pytest.Pytester) -> None:
    first = numbers(attacked)
    assert first[-1] == "seeds 25"
    assert len(first) == 26
    assert numbers(attacked) == first


def test_count_makes_that_many_new_cases(attacked: pytest.Pytester) -> None:
    first = numbers(attacked, "--count=60")
    assert first[-1] == "seeds 60"
    assert len(first) == 61
    assert numbers(attacked, "--count=60") != first
