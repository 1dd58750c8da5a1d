"""Several submitters of one sweep, each a process: `python several.py ROOT NUM_SUBMITTERS NUM_RUNS [WHO_IS_KILLED]`.

Composes once and forks, because a submitter's imports and compositions are not under test. `worker.py` stands in
for the worker. The submitter that is to be killed gets SIGKILL once it has started a worker, and none of its
workers ends by itself before that. The last printed line has the exit codes.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from pathlib import Path

from quantexp_launchers.local import sweep
from quantexp_launchers.local.submit import run_points
from rich.console import Console

from quantexp.config.compose import compose
from quantexp.schema import Experiment


def submit(experiments: list[Experiment], console: Console, to_be_killed: bool) -> int:
    """Become a submitter; returns its process id."""
    child = os.fork()
    if child:
        return child
    if to_be_killed:
        os.environ["STAND_IN_SECONDS"] = "600"
    code = 70
    try:
        code = run_points([(experiment, 0) for experiment in experiments], console)
    finally:
        os._exit(code)


def main(root: Path, num_submitters: int, num_runs: int, killed: int | None) -> None:
    one = compose(
        ["training=fast", "capture=off", "analysis.auto=false", f"paths.root={root}"], None, {}
    )
    # After composing: Hydra imports its plugins anew when it looks for them.
    from quantexp_launchers.local import processes

    processes.command = lambda run_dir, _=1: [  # type: ignore[assignment]
        *(sys.executable, "-S", str(Path(__file__).with_name("worker.py")), str(run_dir))
    ]
    setattr(sweep, "device_class", lambda _: "cpu")  # noqa: B010
    experiments = [copy.deepcopy(one) for _ in range(num_runs)]
    for seed, experiment in enumerate(experiments):
        experiment.training.seed = seed
    outputs = [(root.parent / f"output{i}").open("w") for i in range(num_submitters)]
    children = [
        submit(experiments, Console(file=output, width=160), i == killed)
        for i, output in enumerate(outputs)
    ]
    if killed is not None:
        while not list(root.glob(f"*/started-by-{children[killed]}-*")):
            time.sleep(0.01)
        os.kill(children[killed], signal.SIGKILL)
    print(*(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))  # noqa: T201


if __name__ == "__main__":
    words = sys.argv[1:]
    main(Path(words[0]), int(words[1]), int(words[2]), int(words[3]) if len(words) > 3 else None)
