"""With `pytest -n`, the tests of a file run in one process, and so do those of the folders in `one_process`.

`one_process` in pyproject.toml lists folders whose tests share expensive fixtures. They run first, because they take
longest.

After a crash, pytest-xdist 3.8 also hands out the files that the crashed process had finished, and then waits forever
for reports of tests that do not run. Here only the tests after the crash are handed out. It also gives the process that
replaces the crashed one a single file, and a process that knows of one test only waits for the next. Here a process
gets files until it knows of two tests.
"""

from __future__ import annotations

from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("one_process", "folders whose tests run in one process", "paths", default=[])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    folders = config.getini("one_process")
    items.sort(key=lambda item: [folder not in item.path.parents for folder in folders])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc, unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            above = (config.rootpath / file).parents
            return str(next((each for each in config.getini("one_process") if each in above), file))

        def _reschedule(self, node: Any) -> None:
            super()._reschedule(node)
            while (
                not node.shutting_down
                and self.workqueue
                and self._pending_of(self.assigned_work[node]) < 2
            ):
                self._assign_work_unit(node)

        def remove_node(self, node: Any) -> str | None:
            """Take a process away; if it crashed, return the test that it ran, and hand out those after it."""
            work = self.assigned_work.pop(node)
            left = [
                (scope, test) for scope, tests in work.items() for test in tests if not tests[test]
            ]
            if not left:
                return None
            for scope, test in left[1:]:
                self.workqueue.setdefault(scope, {})[test] = False
            for other in self.assigned_work:
                self._reschedule(other)
            return str(left[0][1])

    return ByFile(config, log)
