"""Slow tests run in the order of their worth until a deadline, in one process and in several."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PLUGIN = Path(__file__).with_name("slow_tests.py")
DEADLINE = "QUANTEXP_SLOW_TESTS_UNTIL"
CONFIGURATION = """\
[pytest]
markers =
    slow
    exhaustive
addopts = --strict-markers --strict-config -p no:cacheprovider
slow_tests =
    later
    test_first.py
"""
SLOW = """\
import pytest

@pytest.mark.{mark}
@pytest.mark.parametrize("n", range(2))
def test_slow(n):
    pass
"""
QUICK = """
def test_quick():
    pass
"""
#: The clock reaches the deadline within the first test, while a fixture of its file is in use.
LATE = """\
import pytest, time

@pytest.fixture(scope="module")
def shared():
    yield
    print("torn down", flush=True)

@pytest.mark.slow
@pytest.mark.parametrize("n", range(2))
def test_slow(shared, n):
    time.time = lambda: 5e9
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """Seven slow tests in four files and two quick ones; the plugin is the folder's conftest."""
    monkeypatch.delenv(DEADLINE, raising=False)
    pytester.makeini(CONFIGURATION)
    pytester.makeconftest(PLUGIN.read_text())
    pytester.makepyfile(
        **{
            "test_a": SLOW.format(mark="slow") + QUICK,
            "later/test_b": SLOW.format(mark="exhaustive"),
            "test_first": SLOW.format(mark="slow"),
            "test_quick": QUICK,
        }
    )
    return pytester


def outcomes(result: pytest.RunResult) -> list[tuple[str, str]]:
    """Each test's file and outcome, in the order of the output of `pytest -v`."""
    lines = [line.rpartition(" [")[0] for line in result.outlines if line.endswith("%]")]
    return [(line.partition("::")[0], line.partition(" ")[2].strip()) for line in lines]


def test_slow_tests_come_last_in_the_order_of_the_list(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess("-v")
    result.assert_outcomes(passed=8)
    assert "left out" not in result.stdout.str()
    assert [file for file, _ in outcomes(result)] == [
        "test_a.py",
        "test_quick.py",
        *["later/test_b.py"] * 2,
        *["test_first.py"] * 2,
        *["test_a.py"] * 2,
    ]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [[], ["-n", "2"]], ids=str)
def test_after_the_deadline_only_slow_tests_are_left_out_and_counted(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, processes: list[str]
) -> None:
    monkeypatch.setenv(DEADLINE, "1")
    result = project.runpytest_subprocess(*processes)
    assert result.ret == 0
    line, closing = result.outlines[-2:]
    start, _, files = line.partition(" (")
    assert start == "left out for time: 6 tests of 8"
    assert sorted(files.removesuffix(")").split(", ")) == [
        "later/test_b.py 2",
        "test_a.py 2",
        "test_first.py 2",
    ]
    assert "2 passed, 6 left out in " in closing
    assert "skipped" not in closing


def test_deadline_that_comes_later_leaves_every_test_in(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEADLINE, "4e9")
    project.runpytest_inprocess().assert_outcomes(passed=8)


def test_test_that_began_before_the_deadline_ends_with_its_fixtures(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEADLINE, "4e9")
    monkeypatch.setattr(time, "time", time.time)  # restores what the test below replaces
    project.makepyfile(test_first=LATE)
    result = project.runpytest_inprocess("-v", "-s", "test_first.py", "test_a.py", "-m", "slow")
    result.stdout.fnmatch_lines(["*torn down"])
    result.stdout.fnmatch_lines(["left out for time: 3 tests of 4 (test_first.py 1, test_a.py 2)"])
    result.stdout.fnmatch_lines(["*1 passed, * 3 left out in *"])


def test_failure_before_the_deadline_is_the_runs_outcome(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEADLINE, "1")
    project.makepyfile(test_quick="def test_quick():\n    assert False")
    result = project.runpytest_inprocess()
    assert result.ret == 1
    assert "1 failed, 1 passed, 6 left out in " in result.outlines[-1]


def test_deadline_that_is_no_number_is_refused(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEADLINE, "soon")
    result = project.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{DEADLINE} must be seconds since the epoch, got soon"])


def test_every_entry_of_the_list_holds_slow_tests(pytestconfig: pytest.Config) -> None:
    order = pytestconfig.getini("slow_tests")
    assert len(set(order)) == len(order) > 0
    for path in order:
        files = path.rglob("test_*.py") if path.is_dir() else [path]
        assert any("mark.slow" in file.read_text() for file in files), path
