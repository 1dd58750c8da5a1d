"""What the continuous proof adds to a training step, beside steps of the same run without it.

    OMP_NUM_THREADS=1 python benchmarks/proof_steps.py [--iterations 200] [--complete] [--profile] [model=tiny ...]

Every other iteration after the first is not checked, in the order checked, not, not, checked. The table has the median
step of both kinds, in seconds of the clock and of the processor, and the median of the differences of neighbours. With
`--complete` each check is that of a first iteration; with PYTHONPATH=TREE:TREE/launchers it is that of another TREE.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import logging
import pstats
import statistics
import sys
import tempfile
import time
from typing import Any

from quantexp.config.compose import compose
from quantexp.launch.attempt import open_run
from quantexp.runs.device import device_class
from quantexp.runs.status import read_status
from quantexp.training.megatron.step import Stepper
from quantexp.training.observer import RunObserver
from quantexp.training.worker import Worker

COMMON = ["training=fast", "capture=off", "analysis.auto=false", "tracking.tensorboard=false"]


def main() -> None:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(description="Time steps with and without the drawn proof.")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--complete", action="store_true", help="check as in a first iteration")
    parser.add_argument("--profile", action="store_true", help="where the check spends its time")
    parser.add_argument("words", nargs="*", default=["model=tiny"])
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    times: list[tuple[bool, float, float]] = []
    ended = [0]
    profile = cProfile.Profile() if arguments.profile else None
    proof, step = RunObserver.proof, Stepper.step

    def some(self: RunObserver, iteration: int, declared: Any, **keywords: Any) -> Any:
        if iteration > 1 and not is_checked(iteration):
            return contextlib.nullcontext()
        return proof(self, iteration, declared, **keywords)

    def timed(self: Any, iteration: int, *args: Any, **kwargs: Any) -> Any:
        is_profiled = profile is not None and iteration > 2 and is_checked(iteration)
        if is_profiled and profile is not None:
            profile.enable()
        clock, processor = time.perf_counter(), time.process_time()
        result = step(self, iteration, *args, **kwargs)
        ended[0] = iteration
        own = time.perf_counter() - clock, time.process_time() - processor
        if profile is not None:
            profile.disable()
        if iteration > 2:
            times.append((is_checked(iteration), *own))
        return result

    if arguments.complete:
        is_next = property(lambda _: is_checked(ended[0] + 1))
        RunObserver.unproved = is_next  # type: ignore[method-assign,assignment]
    RunObserver.proof = some  # type: ignore[method-assign]
    Stepper.step = timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as root:
        words = [*COMMON, *arguments.words, f"training.iterations={arguments.iterations + 2}"]
        experiment = compose([*words, f"paths.root={root}"])
        with open_run(experiment, device_class(experiment.launcher), ["proof_steps.py"]) as run:
            if Worker(run[0].run, experiment).run():
                status = read_status(run[0].run.status)
                raise SystemExit("no status" if status is None else status.reason)
    for name, column in (("clock", 1), ("processor", 2)):
        with_check, without = ([t[column] for t in times if t[0] is kind] for kind in (True, False))
        pairs = zip(with_check, without, strict=False)
        added = statistics.median(a - b for a, b in pairs)
        base = statistics.median(without)
        sys.stdout.write(
            f"{name:9} checked {1e3 * statistics.median(with_check):9.2f} ms, not {1e3 * base:9.2f} ms, "
            f"the check {1e3 * added:7.2f} ms, {added / base:.1%}\n"
        )
    if profile is not None:
        pstats.Stats(profile, stream=sys.stdout).sort_stats("cumulative").print_stats(70)


def is_checked(iteration: int) -> bool:
    """Whether an iteration after the first is checked."""
    return iteration % 4 in (0, 3)


if __name__ == "__main__":
    main()
