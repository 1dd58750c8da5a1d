from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron_lm.checkout import VERSIONS, checkout


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Version -> its source."""
    folder = tmp_path_factory.mktemp("megatron_lm")
    return {version: checkout(version, folder) for version in VERSIONS}


@pytest.fixture(scope="session")
def source(sources: dict[str, Path]) -> Path:
    return sources["0.16.1"]
