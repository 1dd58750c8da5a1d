"""How soon `quantexp watch` shows a folder of long runs, and how much memory its server takes.

    python benchmarks/watch.py [--runs 10] [--iterations 100000] [--turns 3]

A tiny bf16 run and a quantised one are trained, with statistics of their tensors, and copied into as many folders as
asked for, with losses of a random walk in each metrics.jsonl. A turn starts the command as a user does, in a process of
its own, and opens its page in a Chromium that is already running (the one on the PATH). Seconds count from the start of
Python; processor time is the server's. Memory is the server's resident set, at the end and at most, before and after
the map of numerics was opened, which imports torch. The files are in the file cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from ledger import QUANTEXP, TINY
from playwright.sync_api import Page, sync_playwright

from quantexp.runs.find import runs_below
from quantexp.runs.paths import RunDir

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_KB = re.compile(r"^(VmRSS|VmHWM):\s+(\d+) kB$", re.MULTILINE)


def make_runs(originals: list[RunDir], root: Path, num_runs: int, num_iterations: int) -> int:
    """Copies of the runs with long metrics; returns the bytes of one metrics.jsonl."""
    size = 0
    for index, one in zip(range(num_runs), itertools.cycle(originals), strict=False):
        run = RunDir(root / f"{one.root.name.rpartition('-')[0]}-{index:08x}")
        shutil.copytree(one.root, run.root)
        config = run.config.read_text()
        run.config.write_text(config.replace("seed: 1234", f"seed: {index // len(originals)}"))
        line = json.loads(one.metrics.read_text().splitlines()[-1])
        noise, loss = random.Random(index), 6.0
        with run.metrics.open("w") as stream:
            for iteration in range(1, num_iterations + 1):
                loss += (3.0 - loss) / 4_000
                now = {"iteration": iteration, "loss": loss + noise.gauss(0, 0.05)}
                stream.write(json.dumps({**line, **now}) + "\n")
        size = run.metrics.stat().st_size
    return size


def memory_mb(pid: int) -> dict[str, float]:
    """The resident set of a process, now and at most, in units of 1e6 bytes."""
    found = _KB.findall(Path(f"/proc/{pid}/status").read_text())
    return {name: int(kb) * 1024 / 1e6 for name, kb in found}


def turn(folder: Path, page: Page, num_runs: int) -> dict[str, float]:
    """One start of the server, and what it took."""
    start = time.perf_counter()

    def seconds() -> float:
        return time.perf_counter() - start

    process = subprocess.Popen(
        [*QUANTEXP, "watch"],
        cwd=folder,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        took = {"address": seconds()}
        page.goto(address)
        page.locator("#loss-chart polyline").nth(num_runs - 1).wait_for(state="attached")
        took["picture"] = seconds()
        took["picture, processor"] = sum(psutil.Process(process.pid).cpu_times()[:2])
        while (state := _state(address))["content"]["reading"]:
            time.sleep(0.1)
        took["whole"] = seconds()
        took["answer_mb"] = len(json.dumps(state)) / 1e6
        time.sleep(2)
        losses = memory_mb(process.pid)
        took |= {"memory": losses["VmRSS"], "peak": losses["VmHWM"]}
        opened = seconds()
        page.locator("#numerics").scroll_into_view_if_needed()
        page.wait_for_selector("#map .cell", timeout=60_000)
        took["map"] = seconds() - opened
        time.sleep(2)
        both = memory_mb(process.pid)
        took |= {"memory with numerics": both["VmRSS"], "peak with numerics": both["VmHWM"]}
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
    return took


def _state(address: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{address}state?since=0") as answer:
        content: dict[str, Any] = json.load(answer)
    return content


def main() -> None:
    """Make the runs, start the server in turn, and print a table."""
    parser = argparse.ArgumentParser(description="Watch a folder of long runs.")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    out = sys.stdout.write
    chromium = next(path for name in _NAMES if (path := shutil.which(name)))
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        folder = Path(scratch)
        for scheme in ("bf16", "FA_linear_mxfp8"):
            words = [*TINY, f"quant={scheme}", "capture=stats", "paths.root=one"]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            subprocess.run([*QUANTEXP, *words], cwd=folder, check=True, **quiet)  # type: ignore[call-overload]
        size = make_runs(
            runs_below(folder / "one"), folder / "runs", arguments.runs, arguments.iterations
        )
        browser = playwright.chromium.launch(executable_path=chromium, args=options)
        _, *turns = [
            turn(folder, browser.new_page(), arguments.runs) for _ in range(1 + arguments.turns)
        ]
        browser.close()
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    out(f"{arguments.runs} runs of {arguments.iterations:,} iterations, {size / 1e6:.0f} MB each; ")
    out(f"{arguments.turns} turns; {platform.machine()}, {cores} cores, load {load:.1f}\n")
    for name in turns[0]:
        values = [one[name] for one in turns]
        out(f"{name:22}{min(values):8.2f}{statistics.median(values):8.2f}{max(values):8.2f}\n")


if __name__ == "__main__":
    main()
