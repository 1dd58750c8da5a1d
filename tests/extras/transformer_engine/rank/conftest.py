"""Fixtures: child processes in which Transformer Engine's Python runs without CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.extras.transformer_engine.rank.child import Child
from tests.extras.transformer_engine.rank.ranks import Ranks
from tests.extras.transformer_engine.rank.wheels import LATER, VERSIONS


@pytest.fixture(scope="session")
def _children() -> Iterator[dict[str, Child]]:
    children = {version: Child(version) for version in (*VERSIONS, LATER)}
    yield children
    for child in children.values():
        child.close()


@pytest.fixture
def te(_children: dict[str, Child]) -> Child:
    """A process with the oldest tested version; `te.run(function, *arguments)` calls a test file's function there."""
    return _children[VERSIONS[0]]


@pytest.fixture(
    params=[VERSIONS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in VERSIONS[1:])]
)
def each_te(_children: dict[str, Child], request: pytest.FixtureRequest) -> Child:
    """As `te`, with each tested version in turn, the later ones in the slow tests."""
    return _children[request.param]


@pytest.fixture
def later_te(_children: dict[str, Child]) -> Child:
    """As `te`, with a version after the tested ones."""
    return _children[LATER]


@pytest.fixture(scope="session")
def _seconds() -> Iterator[dict[str, Child]]:
    """A further process for each version, the second rank of a run."""
    children = {version: Child(version) for version in (*VERSIONS, LATER)}
    yield children
    for child in children.values():
        child.close()


@pytest.fixture
def ranks(
    _children: dict[str, Child], _seconds: dict[str, Child], tmp_path: Path, tiny_words: list[str]
) -> Callable[..., Ranks]:
    """Runs on one or two ranks, with the oldest tested version or another one."""

    def make(number: int = 2, version: str = VERSIONS[0]) -> Ranks:
        children = [_children[version], _seconds[version]][:number]
        return Ranks(children, tmp_path, tiny_words[-1])

    return make
