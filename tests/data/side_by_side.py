"""Separate processes that do something at the same time.

Forking the tests' own process would copy locks of torch's threads, and the copy would occasionally hang.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

_LOOP = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    print("result", work(*line.rstrip("\\n").split("\\t")), flush=True)
"""


def side_by_side(program: str, rounds: Sequence[Sequence[Sequence[object]]]) -> list[list[str]]:
    """The results of every process in every round.

    Args:
        program: defines `work`, which takes arguments and returns a result in one line.
        rounds: for each round, for each process, its arguments, which contain no tab.
    """
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program + _LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in rounds[0]
    ]
    try:
        for process in processes:
            _read_line(process, "ready")
        results = []
        for words in rounds:
            for process, own in zip(processes, words, strict=True):
                assert process.stdin is not None
                process.stdin.write("\t".join(map(str, own)) + "\n")
                process.stdin.flush()
            results.append([_read_line(process, "result") for process in processes])
        return results
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _read_line(process: subprocess.Popen[str], word: str) -> str:
    """Read up to the next line that begins with a word, and return the rest of it."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.split(maxsplit=1)[:1] == [word]:
            return line[len(word) :].strip()
    raise AssertionError(f"a process ended without saying {word}")
