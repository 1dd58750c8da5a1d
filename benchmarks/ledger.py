"""How long the commands that read a whole folder of runs take: status, list and compare.

    python benchmarks/ledger.py [--runs 10000] [--iterations 2] [--turns 3]

One tiny run is trained, and its files are copied into as many folders as asked for, with seeds, states and reasons of
their own; `--iterations` is the number of lines of each metrics.jsonl. Each measurement is a whole command in a process
of its own, from the start of Python; the commands alternate, and a first turn, which fills the file cache, is not
counted. `compare` is given 100 of the runs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from quantexp.runs.find import runs_below
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State, read_status, write_json

QUANTEXP = [sys.executable, "-m", "quantexp"]
TINY = [
    *("model=llama32-1b", "dataset=wikipedia", "quant=FA_linear_mxfp8", "training=fast"),
    *("model.num_layers=2", "model.hidden_size=128", "model.ffn_hidden_size=192"),
    *("model.num_attention_heads=4", "model.num_query_groups=2", "model.head_dim=32"),
    *("training.seq_length=64", "training.iterations=2", "training.warmup_iterations=1"),
    *("capture=off", "analysis.auto=false"),
]
ENDS = (
    (State.COMPLETED, ""),
    (State.FAILED, "loss nan, gradient norm inf in 8 iterations in a row"),
    (State.COMPLETED, ""),
    (State.CANCELLED, "cancelled by quantexp cancel"),
)


def make_runs(one: RunDir, root: Path, num_runs: int, num_iterations: int) -> None:
    """Copies of a run, without its logs and figures."""
    status, config = read_status(one.status), one.config.read_text()
    assert status is not None
    last = json.loads(one.metrics.read_text().splitlines()[-1])
    metrics = "".join(
        json.dumps({**last, "iteration": i}) + "\n" for i in range(1, num_iterations + 1)
    )
    same = {file: file.read_text() for file in (one.precision, one.provenance)}
    stem = one.root.name.rpartition("-")[0]
    for index, (state, reason) in zip(range(num_runs), itertools.cycle(ENDS), strict=False):
        run = RunDir(root / f"{stem}-{index:08x}")
        run.root.mkdir(parents=True)
        write_json(run.status, asdict(replace(status, state=state, reason=reason)))
        run.config.write_text(config.replace("seed: 1234", f"seed: {index}"))
        run.metrics.write_text(metrics)
        for file, text in same.items():
            (run.root / file.name).write_text(text)


def seconds(words: list[str], columns: int, folder: Path) -> tuple[float, float]:
    """Wall and processor time of a command that must end well."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [*QUANTEXP, *words],
        cwd=folder,
        env={**os.environ, "COLUMNS": str(columns)},
        check=True,
        stdout=subprocess.DEVNULL,
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Make the runs, measure every command in turn and print a table."""
    parser = argparse.ArgumentParser(description="Read a large folder of runs.")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    out = sys.stdout.write
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subprocess.run(
            [*QUANTEXP, *TINY, "paths.root=one"],
            cwd=folder,
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        (one,) = runs_below(folder / "one")
        make_runs(one, folder / "runs", arguments.runs, arguments.iterations)
        hundred = [f"runs/{run.root.name}" for run in runs_below(folder / "runs")[:100]]
        commands = {
            "status": (["status"], 160),
            "status, 80 columns": (["status"], 80),
            "status --json": (["status", "--json"], 160),
            "list runs": (["list", "runs"], 160),
            f"compare of {len(hundred)}": (["compare", *hundred], 160),
        }
        _, *turns = [
            {name: seconds(*command, folder) for name, command in commands.items()}
            for _ in range(1 + arguments.turns)
        ]
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    out(f"{arguments.runs:,} runs of {arguments.iterations} iterations, {arguments.turns} turns; ")
    out(f"{platform.machine()}, {cores} cores, load {load:.1f}\n")
    out(f"{'':20}{'wall':>8}{'median':>8}{'processor':>11}{'median':>8}\n")
    for name in commands:
        wall, processor = zip(*(taken[name] for taken in turns), strict=True)
        out(f"{name:20}{min(wall):8.2f}{statistics.median(wall):8.2f}")
        out(f"{min(processor):11.2f}{statistics.median(processor):8.2f}\n")


if __name__ == "__main__":
    main()
