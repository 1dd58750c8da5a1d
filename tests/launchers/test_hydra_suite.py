"""Hydra's own tests of a launcher, all of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hydra.test_utils.launcher_common_tests import IntegrationTestSuite, LauncherTestSuite
from hydra.version import VersionBase, __compat_version__

#: The suite's programs give no version_base, of which Hydra itself warns.
pytestmark = pytest.mark.filterwarnings("ignore:Future Hydra versions:UserWarning")


@pytest.fixture(autouse=True)
def _as_in_a_fresh_process(hydra_restore_singletons: None) -> Iterator[None]:
    """quantexp's own tests tell Hydra a version to behave like; the suite's programs tell none.

    The handlers which those programs give the root logger are taken away again: they write into folders which the suite
    deletes, so that the next message of any later test would raise FileNotFoundError.
    """
    VersionBase.instance().setbase(__compat_version__)
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()


@pytest.fixture(scope="module", autouse=True)
def _no_handler_stays() -> Iterator[None]:
    """The module leaves the root logger with the handlers it found."""
    before = set(logging.getLogger().handlers)
    yield
    assert set(logging.getLogger().handlers) <= before


@pytest.mark.parametrize(("launcher_name", "overrides"), [("quantexp", [])])
class TestLauncher(LauncherTestSuite):
    """What every launcher does."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"),
    [
        (
            {"defaults": [{"override hydra/launcher": "quantexp"}]},
            ["-m", "hydra.job_logging.formatters.simple.format='[JOB] %(message)s'"],
        )
    ],
)
class TestIntegration(IntegrationTestSuite):
    """What a program sees that is started with it."""
