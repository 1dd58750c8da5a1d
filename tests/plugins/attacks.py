"""How many cases each attack of tests/hostile makes: a few that never change by default, `--count` new ones at will.

An attack makes its cases from seeds, by hypothesis or by the fixture `cases`. Without `--count` the seeds are fixed, so
a default run repeats itself; with it they are new in each run, and a failure names its case.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest

#: Cases of an attack in the default tests.
FEW = 25

# A busy machine fails no test: hypothesis measures the time of an example, and of making it.
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")

profile = hypothesis.settings(max_examples=FEW, derandomize=True, database=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--count",
        type=int,
        help=f"new cases of each attack in tests/hostile (default: {FEW} fixed)",
    )


def pytest_configure(config: pytest.Config) -> None:
    global profile
    count = config.getoption("count")
    if count is not None:
        profile = hypothesis.settings(profile, max_examples=count, derandomize=False)


def attack(test: Callable[..., None]) -> Any:
    """The settings of a hypothesis test that is an attack: above `@given`."""
    return profile(test)


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    """A source of random numbers for each case; its seed is printed, so a failing case can be repeated."""
    count = request.config.getoption("count")
    start = 0 if count is None else random.SystemRandom().randrange(2**32)

    def sources() -> Iterator[random.Random]:
        for seed in range(start, start + (count or FEW)):
            sys.stdout.write(f"case with seed {seed}\n")
            yield random.Random(seed)

    return sources()
