"""The CPU kernel compiled for each kind of processor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quantexp.formats.kernels import cpu

from .builds import compiled_for


@pytest.fixture
def build(request: pytest.FixtureRequest) -> Iterator[str]:
    """The kernel compiled for one kind of processor."""
    with compiled_for(request.param, cpu.functions) as name:
        yield name
