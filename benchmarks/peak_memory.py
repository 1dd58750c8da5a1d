"""Peak memory of training runs beside what `quantexp plan` says of them, each in a process of its own.

    python benchmarks/peak_memory.py [--layouts] [--quick-disk] [words of one run]

Measured is the peak resident set of the process less what it had when everything was imported and torch had multiplied
once: the run's own part. Without words a list of runs that differ in what makes the peak. A run of several processes is
that of the public command, and the measured process the fullest of its ranks.

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

from rank_memory import rank_peaks

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
_TWO = "launcher.num_processes=2"
_TENSOR = f"{_TWO} parallel.tensor=2"
_PIPELINE = f"{_TWO} parallel.pipeline=2 model.num_layers=4 training.global_batch_size=8"
_EXPERT = f"{_TWO} parallel.expert=2 model=deepseek2_lite training.global_batch_size=4"
#: Layouts; the first stage of a pipeline has two micro-batches in flight, or the chunks of more.
LAYOUTS = [
    f"quant=bf16 {_TENSOR}",
    f"quant=bf16 {_TENSOR} parallel.sequence=false",
    f"quant=FA_linear_mxfp8 {_TENSOR}",
    f"quant=bf16 {_PIPELINE}",
    f"quant=bf16 {_PIPELINE} parallel.virtual_pipeline=2",
    f"quant=FA_linear_mxfp8 {_PIPELINE}",
    f"quant=bf16 {_EXPERT}",
    f"quant=bf16 {_EXPERT} parallel.dispatcher=alltoall",
    f"quant=bf16 {_TWO} training.global_batch_size=4",
    f"quant=bf16 {_TWO} training.global_batch_size=4 training.distributed_optimizer=false",
    f"quant=bf16 {_TWO} parallel.context=2 training.seq_length=512",
]
_FEW = ["training=fast", "training.iterations=3", "training.warmup_iterations=0"]
_PLAIN = ["capture=off", "analysis.auto=false"]
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
        words = [*_FEW, *_PLAIN, f"paths.root={root}", *words]
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


def measured_ranks(words: list[str]) -> dict[str, float]:
    """Predicted and measured, in units of 1e9 bytes, of the fullest rank of a run of several processes."""
    from quantexp.config.compose import compose
    from quantexp.memory.footprint import fullest_rank

    words = [*_FEW, *_PLAIN, *words]
    experiment = compose(words)
    peaks = rank_peaks(words, experiment.launcher.num_processes)
    return {"predicted": fullest_rank(experiment).gb, "measured": max(peaks.values())}


def main() -> None:
    """Measure all runs, or the one that is given."""
    parser = argparse.ArgumentParser(description="Predicted and measured memory.")
    parser.add_argument("--json", action="store_true", help="one run in this process, as JSON")
    parser.add_argument("--layouts", action="store_true", help="runs of two processes")
    parser.add_argument("--quick-disk", action="store_true", help="write captures as they come")
    parser.add_argument("words", nargs="*", help="words of one run")
    arguments = parser.parse_args()
    if arguments.json:
        if not arguments.quick_disk:
            write_between_iterations()
        is_alone = not any(word.startswith("launcher.num_processes=") for word in arguments.words)
        result = (measured if is_alone else measured_ranks)(arguments.words)
        sys.stdout.write(json.dumps(result) + "\n")
        return
    runs = LAYOUTS if arguments.layouts else RUNS
    for line in [" ".join(arguments.words)] if arguments.words else runs:
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
