"""Tests that are skipped for want of something are counted in the last lines, in one process and in several."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """\
import pytest

@pytest.mark.parametrize("n", range(3))
def test_needs_it(n):
    pytest.skip("not run: of the moon (bring it here)")

def test_skips():
    pytest.skip("not here")
"""


@pytest.mark.parametrize("processes", ["0", "2"])
def test_what_is_not_run_is_counted_at_the_end(pytester: pytest.Pytester, processes: str) -> None:
    pytester.makeconftest(Path(__file__).with_name("not_run.py").read_text())
    pytester.mkpydir("folder").joinpath("test_moon.py").write_text(TESTS)
    result = pytester.runpytest_subprocess("-n", processes, "-p", "no:cacheprovider")
    result.assert_outcomes(skipped=4)
    lines = [line for line in result.outlines if line.startswith("not run: ")]
    assert lines == ["not run: 3 tests of the moon (bring it here)"]
