"""Peak memory of training runs beside what `quantexp plan` says of them, each in a process of its own.

    python benchmarks/peak_memory.py [--quick-disk] [words of one run]

Measured is the peak resident set of the process less what it had when everything was imported and torch had multiplied
once: the run's own part. Without words a list of runs that differ in what makes the peak.

The plan counts with all captured tensors of an iteration that the queue holds, as they wait where the disk is slower
than training. So none is written here before the iteration has ended, but with `--quick-disk`, where how much waits is
the disk's and the moment's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from typing import Any

RUNS = [
    "quant=bf16",
    "quant=bf16 training.precision=fp32",
    "quant=bf16 training.seq_length=1024",
    "quant=FA_linear_mxfp8 training.seq_length=1024",
    "quant=bf16 training.seq_length=1024 training.recompute=full",
    "quant=bf16 training.seq_length=1024 training.attention=fused",
    "quant=bf16 training.seq_length=512 training.micro_batch_size=4 training.global_batch_size=4",
    "quant=bf16 training.seq_length=512 capture=tensors capture.iterations=[2]",
    "model=llama31-8b quant=linear_hifp8",
    "model=deepseek2_lite quant=FA_mxfp4",
    "model=deepseek2_lite quant=FA_linear_mxfp4",
    "quant=more/FA_full_mxfp8 training.seq_length=1024 training.attention=tiled",
]
_FEW = ["training=fast", "training.iterations=3", "training.warmup_iterations=0"]
#: Seconds that a write waits at most, where training itself waits for room in the queue.
_WRITE_S = 5.0


def write_between_iterations() -> None:
    """From now on captured tensors of an iteration are written when it has ended."""
    from quantexp.capture.record.recorder import Recorder
    from quantexp.capture.store.folder import CaptureStore

    has_ended, begin, flush, write = (
        threading.Event(),
        Recorder.begin,
        CaptureStore.flush,
        CaptureStore._write,
    )

    def noted(self: Any, iteration: int, *more: Any) -> None:
        if self.captures(iteration):
            has_ended.clear()
        else:
            has_ended.set()
        begin(self, iteration, *more)

    def last(self: Any) -> None:
        has_ended.set()
        flush(self)

    def later(self: Any, batch: Any) -> None:
        has_ended.wait(_WRITE_S)
        write(self, batch)

    Recorder.begin = noted  # type: ignore[assignment,method-assign]
    CaptureStore.flush = last  # type: ignore[method-assign]
    CaptureStore._write = later  # type: ignore[method-assign]


def measured(words: list[str]) -> dict[str, float]:
    """Predicted and measured, in units of 1e9 bytes, of a run in this process."""
    import psutil
    import torch

    import quantexp.training.megatron.data_loader
    import quantexp.training.megatron.trainer  # noqa: F401
    from quantexp.cli.plan_record import make_plan
    from quantexp.config.compose import compose
    from quantexp.launch.attempt import open_run
    from quantexp.training.worker import Worker

    torch.randn(64, 64) @ torch.randn(64, 64)
    with tempfile.TemporaryDirectory() as root:
        words = [*_FEW, "capture=off", "analysis.auto=false", f"paths.root={root}", *words]
        experiment = compose(words)
        predicted = make_plan(experiment).memory_gb_per_gpu
        own = psutil.Process()
        before = own.memory_info().rss
        peak, ended = [before], threading.Event()

        def watch() -> None:
            while not ended.wait(0.003):
                peak[0] = max(peak[0], own.memory_info().rss)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        with open_run(experiment, "cpu", ["benchmark"]) as (folder, _):
            Worker(folder.run, experiment).run()
        ended.set()
        watcher.join()
    return {"predicted": predicted, "measured": (peak[0] - before) / 1e9}


def main() -> None:
    """Measure all runs, or the one that is given."""
    parser = argparse.ArgumentParser(description="Predicted and measured memory.")
    parser.add_argument("--json", action="store_true", help="one run in this process, as JSON")
    parser.add_argument("--quick-disk", action="store_true", help="write captures as they come")
    parser.add_argument("words", nargs="*", help="words of one run")
    arguments = parser.parse_args()
    if arguments.json:
        if not arguments.quick_disk:
            write_between_iterations()
        sys.stdout.write(json.dumps(measured(arguments.words)) + "\n")
        return
    for line in [" ".join(arguments.words)] if arguments.words else RUNS:
        command = [sys.executable, __file__, "--json", *line.split()]
        command += ["--quick-disk"] if arguments.quick_disk else []
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
        result = json.loads(done.stdout.splitlines()[-1])
        off = result["predicted"] / result["measured"] - 1
        sys.stdout.write(
            f"{line:100} predicted {result['predicted']:6.2f} GB, measured {result['measured']:6.2f} GB, {off:+.1%}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
