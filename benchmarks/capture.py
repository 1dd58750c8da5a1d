"""What capturing costs: the time of a training step with and without, in one run.

    python benchmarks/capture.py [--repeats 3] [--iterations 24] [capture=stats ...]

Only every second iteration is captured, so that each captured step has one without before and after it, in the same
process on the same weights. Every repeat is a run of its own. Two ratios are given: of the quickest steps, as other
processes on the machine can only add to them, and the median over neighbouring pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

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
CASES = {
    "statistics, one format": ["capture=stats", "capture.format=mxfp8"],
    "statistics": ["capture=stats"],
}


def step_times(words: list[str], iterations: int, root: str) -> list[float]:
    """The seconds of each step of a run whose even iterations are captured."""
    command = [
        *(sys.executable, "-m", "quantexp", *MODEL, f"training.iterations={iterations}"),
        *("capture.every=2", "capture.collect_micro_batches=0", *words),
        *(f"paths.root={root}", "force=true"),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (metrics,) = Path(root).glob("*/metrics.jsonl")
    return [json.loads(line)["step_time_s"] for line in metrics.read_text().splitlines()]


def ratios(times: list[float]) -> tuple[float, float, float, float]:
    """Quickest step without and with capture, their ratio, and the median ratio of neighbours; warm steps only."""
    without, with_ = times[2::2], times[3::2]
    pairs = [b / a for a, b in zip(without, with_, strict=False)]
    return min(without), min(with_), min(with_) / min(without), statistics.median(pairs)


def main() -> None:
    """Measure each case, by turns."""
    parser = argparse.ArgumentParser(description="The step time with capture over that without.")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("words", nargs="*", help="one case of your own instead")
    arguments = parser.parse_intermixed_args()
    cases = {" ".join(arguments.words): arguments.words} if arguments.words else CASES
    out = sys.stdout.write
    out(
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}\n"
    )
    for turn in range(arguments.repeats):
        for name, words in cases.items():
            with tempfile.TemporaryDirectory() as root:
                times = step_times(words, arguments.iterations, root)
            without, with_, best, median = ratios(times)
            out(
                f"{turn + 1}: {name}: {without:.3f} s without, {with_:.3f} s with, "
                f"ratio {best:.2f} of the quickest, {median:.2f} of neighbours\n"
            )


if __name__ == "__main__":
    main()
