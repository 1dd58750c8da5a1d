"""What capturing costs: the time of a training step with and without, in one run.

    python benchmarks/capture_steps.py [--repeats 3] [--iterations 24] [capture=stats ...]

Blocks of five iterations with capture and without take turns, in the same process on the same weights: what is
counted in the background while the step after a captured one runs is paid by a block with capture. Every repeat is a
run of its own. Of wall time two ratios are given: of the quickest blocks, as other processes on the machine can only
add to them, and the median over neighbouring blocks; of processor time, which other processes change least, the median
over neighbours. Threads of OpenMP that wait for the next operation count as busy, as in any run: with
OMP_WAIT_POLICY=passive they do not, and processor time is that of work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

#: Some 30 million parameters and long enough sequences that products are what a step mostly does.
MODEL = [
    "training=fast",
    "model.num_layers=4",
    "model.hidden_size=768",
    "model.ffn_hidden_size=2048",
    "model.num_attention_heads=12",
    "model.num_query_groups=4",
    "model.head_dim=64",
    "training.seq_length=512",
    "training.micro_batch_size=1",
    "training.global_batch_size=4",
    "training.warmup_iterations=1",
    "analysis.auto=false",
]
#: Iterations that follow each other with, or without, capture.
BLOCK = 5
CASES = {
    "statistics, one format": ["capture=stats", "capture.format=mxfp8"],
    "statistics": ["capture=stats"],
    "ring, mxfp8": ["capture=off", "capture.ring=20", "quant=linear_mxfp8"],
}


def run_here(words: list[str]) -> None:
    """One run in this process; what each step took, and how the capture ended, on stdout."""
    from quantexp.config.compose import compose
    from quantexp.extras.forensics.ring.store import RingRecorder
    from quantexp.launch.attempt import open_run
    from quantexp.runs.device import device_class
    from quantexp.training.observer import RunObserver
    from quantexp.training.worker import Worker

    ends = [(time.perf_counter(), time.process_time())]
    original = RunObserver.iteration

    def iteration(self: RunObserver, metrics: Any) -> bool:
        ends.append((time.perf_counter(), time.process_time()))
        return original(self, metrics)

    RunObserver.iteration = iteration  # type: ignore[method-assign]
    # A ring takes every iteration: here, those of every second block.
    RingRecorder.captures = lambda self, iteration: (iteration - 1) // BLOCK % 2 == 1  # type: ignore[method-assign]
    experiment = compose(words)
    device = device_class(experiment.launcher)
    with open_run(experiment, device, ["benchmark"]) as (folder, _):
        code = Worker(folder.run, experiment).run()
    status = json.loads(folder.run.status.read_text())["capture"]
    wall, processor = ([b[i] - a[i] for a, b in itertools.pairwise(ends)] for i in (0, 1))
    result = {"code": code, "wall": wall, "processor": processor, **status}
    sys.stdout.write(json.dumps(result) + "\n")


def run(script: str, *words: str) -> dict[str, Any]:
    """What `run_here` says, called by a script in a process of its own."""
    with tempfile.TemporaryDirectory() as root:
        command = [sys.executable, "-W", "ignore", script, "--run", *words, f"paths.root={root}"]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def blocks(times: list[float]) -> tuple[list[float], list[float]]:
    """A step's mean time in each block without capture, and in the one after it with; the first two are warm-up."""
    starts = range(0, len(times), BLOCK)
    means = [statistics.mean(times[start : start + BLOCK]) for start in starts]
    return means[2::2], means[3::2]


def median_ratio(times: list[float]) -> float:
    """The median over neighbours of the block with capture over that without."""
    return statistics.median(b / a for a, b in zip(*blocks(times), strict=False))


def captured(num_blocks: int) -> str:
    """Every second block is captured."""
    first = range(BLOCK + 1, num_blocks * BLOCK, 2 * BLOCK)
    return "capture.iterations=[" + ",".join(f"{i}-{i + BLOCK - 1}" for i in first) + "]"


def measured(words: list[str], num_blocks: int) -> dict[str, Any]:
    """A run in a process of its own: seconds of the quickest blocks, and the ratios of captured to other steps."""
    more = [f"training.iterations={num_blocks * BLOCK}", captured(num_blocks)]
    more += ["capture.collect_micro_batches=0"]
    result = run(__file__, *words, *more)
    without, with_ = (min(times) for times in blocks(result["wall"]))
    return {
        "without s": without,
        "with s": with_,
        "of quickest": with_ / without,
        "of neighbours": median_ratio(result["wall"]),
        "processor": median_ratio(result["processor"]),
        "captured MB": result.get("num_bytes", 0) / 1e6,
    }


def main() -> None:
    """Measure each case, by turns."""
    parser = argparse.ArgumentParser(description="The step time with capture over that without.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=8, help="with and without capture, in all")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="one case of your own instead")
    arguments = parser.parse_intermixed_args()
    if arguments.run:
        run_here(arguments.words)
        return
    cases = {" ".join(arguments.words): arguments.words} if arguments.words else CASES
    out = sys.stdout.write
    out(
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}\n"
    )
    for turn in range(arguments.repeats):
        for name, words in cases.items():
            row = measured([*MODEL, *words], arguments.blocks)
            out(
                f"{turn + 1}: {name}: {row['without s']:.3f} s without, {row['with s']:.3f} s with, ratio "
                f"{row['of quickest']:.2f} of the quickest, {row['of neighbours']:.2f} of neighbours, "
                f"{row['processor']:.2f} in processor time; load {os.getloadavg()[0]:.1f}\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
