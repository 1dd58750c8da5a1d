"""A process whose main thread is in one long operation still ends on a signal."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """\
import hashlib, os, signal, sys, threading, time
from quantexp.processes import unresponsive
unresponsive.PATIENCE_S = {patience_s}
taken = []
signal.signal(signal.SIGTERM, lambda *_: taken.append(True))
signal.signal(signal.SIGUSR2, lambda *_: None)

def leave():
    print("left", flush=True)
    os._exit(7)

unresponsive.leave_if_stuck([signal.SIGTERM], lambda: bool(taken), leave)
os.kill(os.getpid(), signal.SIGUSR2)  # asks for nothing
time.sleep(0.5)
print("asked", flush=True)
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
{meanwhile}
print("goes on", flush=True)
"""
#: One operation of minutes that releases Python's lock, as torch's do.
LONG = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"


@pytest.mark.parametrize(
    ("meanwhile", "patience_s", "words", "code"),
    [
        (LONG, 0.2, "asked\nleft\n", 7),
        # Twice the patience after the handler, which a busy machine may delay.
        ("while not taken: time.sleep(0.1)\ntime.sleep(2)", 1.0, "asked\ngoes on\n", 0),
    ],
)
def test_process_leaves_only_if_its_main_thread_handles_no_signal(
    meanwhile: str, patience_s: float, words: str, code: int
) -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(meanwhile=meanwhile, patience_s=patience_s)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (process.stdout, process.returncode) == (words, code), process.stderr
