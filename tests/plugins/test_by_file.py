"""The tests of a file or folder share a process, and a crash costs the test that crashed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PLUGIN = Path(__file__).with_name("by_file.py")
CONFIGURATION = """\
[pytest]
addopts = -p no:cacheprovider --no-loadscope-reorder
one_process = shared
"""
#: The process of the first test of shared/ is the one of all its tests.
SHARED = """\
import os, pathlib

def test_process():
    file = pathlib.Path(__file__).with_name("process")
    if not file.exists():
        file.write_text(str(os.getpid()))
    assert file.read_text() == str(os.getpid())
"""
#: The other process has this file from the start, and no more to do when it has finished the first test.
WAITING = """\
import pathlib, time

def test_a():
    while not pathlib.Path("crashing").exists():
        time.sleep(0.01)

def test_b():
    pass

def test_c():
    pathlib.Path("over").touch()
"""
CRASH = """\
import os, pathlib, time

def test_before():
    pass

def test_crash():
    pathlib.Path("crashing").touch()
    while not pathlib.Path("over").exists():
        time.sleep(0.01)
    os._exit(1)

def test_after():
    pass
"""


@pytest.mark.slow
def test_a_crash_fails_its_test_and_the_others_run_once(pytester: pytest.Pytester) -> None:
    pytester.makeini(CONFIGURATION)
    pytester.makeconftest(PLUGIN.read_text())
    three = "".join(f"def test_{each}():\n    pass\n" for each in "abc")
    pytester.makepyfile(
        **{f"test_{n}": three for n in (0, 2, 3)},
        **{f"shared/test_{n}_shared": SHARED for n in range(2)},
        test_1=WAITING,
        test_4=CRASH,
        test_5=three,
    )
    result = pytester.runpytest_subprocess("-n", "2", "-v", timeout=100)
    result.assert_outcomes(passed=5 * 3 + 2 + 2, failed=1)
    result.stdout.fnmatch_lines(["*FAILED test_4.py::test_crash*"])
    lines = [line.split() for line in result.outlines if " PASSED " in line]
    assert len({words[-1] for words in lines}) == len(lines) == 19
    shared = next(words for words in lines if words[-1].startswith("shared/"))
    first_there = next(words for words in lines if words[0] == shared[0])
    assert first_there == shared, "what one process must run comes first"
