"""Hydra's own tests of a launcher, all of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hydra.test_utils.launcher_common_tests import IntegrationTestSuite, LauncherTestSuite
from hydra.version import VersionBase, __compat_version__

#: The suite's programs set no version_base, and Hydra itself warns about that.
pytestmark = pytest.mark.filterwarnings("ignore:Future Hydra versions:UserWarning")


@pytest.fixture(autouse=True)
def _as_in_a_fresh_process(hydra_restore_singletons: None) -> Iterator[None]:
    """Forgets version_base: quantexp's own tests set it, the suite's programs do not.

    Removes the handlers which those programs add to the root logger: they write into folders which the suite deletes,
    so the next message of any later test would raise FileNotFoundError.
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
    """Leaves the root logger with the handlers that it had before the module."""
    before = set(logging.getLogger().handlers)
    yield
    assert set(logging.getLogger().handlers) <= before


@pytest.mark.parametrize(("launcher_name", "overrides"), [("quantexp", [])])
class TestLauncher(LauncherTestSuite):
    """The tests of every launcher."""


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
    """The tests of a program that uses the launcher."""
