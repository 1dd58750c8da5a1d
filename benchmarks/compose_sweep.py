"""How long a sweep of 60 points takes to be composed, validated and planned, against Hydra's own no-op multirun.

    python benchmarks/compose_sweep.py [--repeats 5]

Each measurement is a whole command in a process of its own, imports included: `quantexp -m ... dry_run=true`, which
prints every point's plan, and a `hydra.main` program on the same configuration with Hydra's basic sweeper and launcher
and a task that does nothing. Both are given the same words, by turns. Of wall time and of processor time the least
counts: other processes on the machine can only add to them.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from quantexp.folders import conf_dir

SWEEPS = {
    "10 schemes x 2 datasets x 3 seeds": [
        "quant=glob(*)",
        "dataset=wikipedia,dolma",
        "training.seed=1,2,3",
        "training=fast",
    ],
    "10 schemes x 2 datasets x 3 captures": [
        "quant=glob(*)",
        "dataset=wikipedia,dolma",
        "capture=off,stats,tensors",
    ],
}

NO_OP = """\
import hydra
from hydra.core.config_store import ConfigStore
from quantexp.schema import Composition

ConfigStore.instance().store(name="schema", node=Composition)

@hydra.main(config_path={conf!r}, config_name="config", version_base="1.3")
def main(config):
    pass

main()
"""
#: The parts of Hydra that its own multirun needs and quantexp leaves out.
PARTS = [
    "hydra/launcher=basic",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
    *(f"hydra/{part}=default" for part in ("env", "help", "hydra_help", "output")),
]


def seconds(command: list[str], folder: Path) -> tuple[float, float]:
    """Wall and processor time of a command that must end well."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure both programs on each sweep, by turns."""
    parser = argparse.ArgumentParser(description="Compose 60 points, as quantexp and as Hydra.")
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    out = sys.stdout.write
    out(f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores\n")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        program = folder / "no_op.py"
        program.write_text(NO_OP.format(conf=str(conf_dir().absolute())))
        for name, words in SWEEPS.items():
            ours = [sys.executable, "-m", "quantexp", "-m", *words, "dry_run=true"]
            hydras = [sys.executable, str(program), "hydra.mode=MULTIRUN", *words, *PARTS]
            turns = [(seconds(ours, folder), seconds(hydras, folder)) for _ in range(repeats)]
            out(f"{name}\n")
            for index, kind in enumerate(("wall", "processor")):
                mine, theirs = (min(turn[side][index] for turn in turns) for side in (0, 1))
                ratio = f"{theirs / mine:.1f} times as long"
                out(f"  {kind:9}  quantexp {mine:.1f} s, Hydra {theirs:.1f} s, {ratio}\n")


if __name__ == "__main__":
    main()
