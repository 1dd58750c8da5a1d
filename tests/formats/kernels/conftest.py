"""The CPU kernel compiled for each kind of processor."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest

from quantexp.formats.kernels import cpu
from quantexp.processes import compiled

from .builds import BUILDS


@pytest.fixture
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernel compiled for one kind of processor."""
    if request.param != "native" and platform.machine() != "x86_64":
        pytest.skip("flags of x86")
    monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, *BUILDS[request.param]))
    for cached in (cpu.functions, compiled.library):
        cached.cache_clear()
    assert cpu.functions() is not None, "these tests need a C compiler"
    yield request.param
    for cached in (cpu.functions, compiled.library):
        cached.cache_clear()
