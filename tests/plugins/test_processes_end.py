"""No process outlives its test."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

pytest_plugins = ["pytester"]

PLUGIN = Path(__file__).with_name("processes_end.py")
TESTS = """\
import subprocess, sys
import psutil, pytest

def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

SLEEPING = [sys.executable, "-c", "import time; time.sleep(600)"]
DETACHING = f'''
import subprocess
null = subprocess.DEVNULL
print(subprocess.Popen({SLEEPING!r}, start_new_session=True, stdout=null, stderr=null).pid)
'''

def note(kind, pid):
    with open("pids", "a") as file:
        print(kind, pid, file=file)

@pytest.fixture(scope="module")
def served():
    note("module", subprocess.Popen(SLEEPING).pid)

def test_fails(served):
    note("detached", subprocess.check_output([sys.executable, "-c", DETACHING], text=True).strip())
    note("unmarked", subprocess.Popen(SLEEPING, env={}, start_new_session=True).pid)
    note("child", subprocess.Popen(SLEEPING).pid)
    assert False

def test_after():
    pids = dict(line.split() for line in open("pids"))
    alive = {kind for kind, pid in pids.items() if is_alive(int(pid))}
    assert alive == {"module"}
"""


def test_what_a_test_or_a_session_leaves_is_killed(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(PLUGIN.read_text())
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=100)
    result.assert_outcomes(passed=1, failed=1)
    pids = [int(line.split()[1]) for line in (pytester.path / "pids").read_text().splitlines()]
    assert len(pids) == 4
    states = [psutil.Process(pid).status() for pid in pids if psutil.pid_exists(pid)]
    assert set(states) <= {psutil.STATUS_ZOMBIE}, "init has not yet reaped it"
