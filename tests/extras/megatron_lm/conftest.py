from __future__ import annotations

import runpy
from importlib import metadata
from pathlib import Path

import pytest

from tests.extras.megatron_lm.checkout import INSTALLED, RELEASES, source_of


@pytest.fixture(scope="session", params=[*RELEASES, INSTALLED])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of pretrain_gpt.py, of each Megatron-LM that is there."""
    return source_of(request.param, tmp_path_factory.mktemp("megatron_lm"))


@pytest.fixture
def version(source: Path) -> str:
    """The version of Megatron-Core that the script runs, which a release may name otherwise than its tag does."""
    file = source / "megatron" / "core" / "package_info.py"
    if not file.is_file():
        return metadata.version("megatron-core")
    content = runpy.run_path(str(file))
    return str(content["__version__"])
