"""A stand-in for the worker: takes a moment and writes the status of a completed run and a mark of each attempt.

It writes `RUN/started-by-PARENT-PID` first; SIGTERM makes it `cancelled`. Like the real one, it ends with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

SECONDS = float(os.environ.get("STAND_IN_SECONDS", "0.1"))


def say(file: Path, state: str, reason: str, **values: object) -> None:
    status = json.loads(file.read_text())
    status |= {"state": state, "reason": reason, **values}
    part = file.with_name(".part")
    part.write_text(json.dumps(status))
    part.replace(file)


def moment() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + ".999+00:00"


def main(run: Path) -> int:
    def ended(*_: object) -> None:
        say(run / "status.json", "cancelled", "interrupted", finished=moment())
        os._exit(130)

    signal.signal(signal.SIGTERM, ended)
    signal.signal(signal.SIGINT, ended)
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != int(os.environ["QUANTEXP_PARENT"]):  # the parent ended before that
        ended()
    (run.parent / run.name / f"started-by-{os.getppid()}-{os.getpid()}").touch()
    say(run / "status.json", "running", "", started=moment(), pid=os.getpid())
    time.sleep(SECONDS)
    iterations = json.loads((run / "status.json").read_text())["iterations"]
    say(run / "status.json", "completed", "", finished=moment(), iteration=iterations)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
