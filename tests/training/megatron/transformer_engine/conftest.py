"""Fixtures: child processes in which Transformer Engine's Python runs without CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.training.megatron.transformer_engine.child import Child
from tests.training.megatron.transformer_engine.wheels import LATER, VERSIONS


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
