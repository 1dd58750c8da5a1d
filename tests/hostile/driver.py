"""The command of a run with fake workers: `python driver.py RUN MOMENT NUM_PROCESSES TIMEOUT_S`.

It does what `quantexp` does once the folder is prepared: takes lock and claim, starts the workers, waits, records the
end.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from quantexp_launchers.local import execute, processes

from quantexp.config.load import read
from quantexp.launch.attempt import Opened
from quantexp.runs.fencing import claimed
from quantexp.runs.lock import take_lock
from quantexp.runs.paths import RunDir

FAKE = str(Path(__file__).with_name("fake_worker.py"))


def interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(root: str, moment: str, num_processes: int, timeout_s: float) -> None:
    run = RunDir(Path(root))
    more = ["--ranks", str(num_processes)] if num_processes > 1 else []
    # The last words are what the ledger knows a worker by.
    words = [sys.executable, FAKE, root, moment, *more, "quantexp.training.worker"]
    processes.command = lambda *_: words
    processes.GRACE_S = 3.0
    signal.signal(signal.SIGTERM, interrupt)
    experiment = read(run.config)
    experiment.launcher.num_processes = num_processes
    experiment.launcher.timeout_min = timeout_s / 60
    lock = take_lock(run)
    with claimed(run) as claim:
        execute.carry_out(experiment, Opened(run, run.root, claim=claim), lock, lambda: None)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
