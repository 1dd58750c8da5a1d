"""One rank of one run: reads the run folder, trains, proves, captures, draws. `python -m quantexp.worker RUN_DIR`.

All it knows comes from RUN_DIR/config.yaml. It tells about itself through the folder alone: status.json, metrics.jsonl,
precision.json, tensors/. Of several ranks (torchrun's environment says which one this is) rank 0 alone writes what a
run has once; each has its own log, its record (`ranks`) and its share of the captured tensors. A user's error ends it
with exit code 1 and the message in status.json; a bug also keeps its traceback, on standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import platform
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantexp.capture.manifest import join_parts
from quantexp.data.tokenizer import Tokenizer
from quantexp.errors import EngagementError, QuantexpError
from quantexp.load import read
from quantexp.paths import RunDir, cache_dir
from quantexp.ranks import Rank, RankRecord, ended, own_rank, write_record
from quantexp.schema import CaptureLevel, Experiment
from quantexp.status import State, Status, now, read_status, write_json, write_status

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from quantexp.capture.recorder import Progress
    from quantexp.megatron.trainer import Metrics
    from quantexp.proof.verdict import Verdict
    from quantexp.quant.precision import PrecisionMap

#: prctl(2): the signal this process gets when its parent dies.
_PR_SET_PDEATHSIG = 1
#: Iterations watched in a row before a map that cannot be proved fails the run; fp16 needs one for each halving.
MAX_PROOFS = 64
#: Seconds between two updates of status.json while tensors are captured.
STATUS_INTERVAL_S = 0.2


def main(argv: list[str] | None = None) -> int:
    """Run one rank; the exit code says how it ended."""
    parser = argparse.ArgumentParser(prog="python -m quantexp.worker", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument(
        "--with-parent", action="store_true", help="end when the process that started this one ends"
    )
    arguments = parser.parse_args(argv)
    run = RunDir(arguments.run_dir)
    try:
        experiment = read(run.config)
        rank = own_rank(experiment.launcher.num_processes)
    except QuantexpError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if not rank.alone:
        _log_to(run.rank_log(rank.rank))
    worker = Worker(run, experiment, rank)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, worker.interrupt)
    if arguments.with_parent:
        _end_with_parent()
    return worker.run()


def _log_to(log: Path) -> None:
    """Whatever this process prints from now on, a crash's last words included, goes to its own log."""
    with log.open("ab") as stream:
        for standard in (sys.stdout, sys.stderr):
            standard.flush()
            os.dup2(stream.fileno(), standard.fileno())


def _end_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent dies, however it dies (Linux; elsewhere nothing happens)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Worker:
    """Keeps status.json true from the first moment to the last."""

    def __init__(self, run: RunDir, experiment: Experiment, rank: Rank | None = None) -> None:
        self.folder, self.experiment, self.rank = run, experiment, rank or Rank()
        self.status = read_status(run.status) or Status(created=now())
        self._written = 0.0
        self._ending = False
        #: A signal asked for the end; what it interrupted may have turned it into another error, or dropped it.
        self.interrupted = False

    def interrupt(self, signum: int, frame: object) -> None:
        """The handler of signals that end a run; what is writing its end is left to it."""
        if not self._ending:
            self.interrupted = True
            raise KeyboardInterrupt

    def run(self) -> int:
        """Train to the end and say how it ended: 0 completed, 1 failed, 130 interrupted."""
        try:
            return self._run()
        except KeyboardInterrupt:  # in the training, or just as its error was about to be told
            return self._end(State.CANCELLED, "interrupted", 130)

    def _run(self) -> int:
        self.status.started = now()
        self.status.host, self.status.pid = platform.node(), os.getpid()
        self.status.state = State.RUNNING
        self.tell("setting up")
        self._record(RankRecord(os.getpid()))
        try:
            self._train()
        except KeyboardInterrupt:
            raise
        except QuantexpError as error:
            return self._end(State.FAILED, str(error), 1)
        except Exception as error:
            if self.interrupted:  # raised in the middle of torch's own bookkeeping
                raise KeyboardInterrupt from error
            traceback.print_exc()
            first = (str(error).strip().splitlines() or [""])[0]
            where = self.folder.rank_log(self.rank.rank)
            reason = f"{type(error).__name__}: {first}; traceback in {where}"
            lost = not self.rank.alone and _lost_peer(error)
            return self._end(State.FAILED, reason, 1, lost_peer=lost)
        return self._end(State.COMPLETED, self.status.reason, 0)

    def tell(self, phase: str) -> None:
        """What the run is doing now."""
        if not self.rank.leads:
            return
        self.status.phase = phase
        write_status(self.folder.status, self.status)
        self._written = time.monotonic()

    def _end(self, state: State, reason: str, code: int, *, lost_peer: bool = False) -> int:
        self._ending = True
        self.status.state, self.status.reason, self.status.finished = state, reason, now()
        if self.rank.leads:
            self.folder.reserve.unlink(missing_ok=True)  # room for the last words on a full disk
        self._record(ended(state, reason, lost_peer=lost_peer))
        self.tell("")
        return code

    def _record(self, record: RankRecord) -> None:
        if not self.rank.alone:
            write_record(self.folder, self.rank.rank, record)

    def _train(self) -> None:
        from quantexp.megatron.without_te import hide_broken_te

        with _quiet_imports():
            hide_broken_te()
            import torch

            from quantexp.data.loader import batches, build_datasets
            from quantexp.megatron.session import session
            from quantexp.megatron.trainer import train
        if self.experiment.launcher.num_threads is not None:
            torch.set_num_threads(self.experiment.launcher.num_threads)
        experiment, training = self.experiment, self.experiment.training
        prefix, tokenizer = _data(experiment)
        process = session(training, self.rank, experiment.launcher.timeout_min)
        with process as device, contextlib.redirect_stdout(sys.stderr):
            datasets = build_datasets(
                prefix,
                tokenizer,
                seq_length=training.seq_length,
                seed=training.seed,
                num_samples_train=training.iterations * training.global_batch_size,
                cache_dir=cache_dir(experiment.paths.cache),
                split=experiment.dataset.split,
            )
            stream = batches(
                datasets.train,
                micro_batch_size=training.micro_batch_size,
                data_parallel_rank=self.rank.rank,
                data_parallel_size=self.rank.world_size,
            )
            self.tell("building the model")
            observer = RunObserver(self)
            train(experiment, stream, observer, device)
            observer.finish()
        if experiment.analysis.auto and self.rank.leads:
            self._draw()

    def _draw(self) -> None:
        from quantexp.analysis.quick import draw_quick_analysis

        self.tell("drawing")
        self.folder.figures.mkdir(exist_ok=True)
        draw_quick_analysis(self.folder.root, self.folder.figures)

    def captured(self, progress: Progress) -> None:
        """Tensors were captured: show it, but not too often."""
        self.status.capture = asdict(progress)
        if time.monotonic() - self._written > STATUS_INTERVAL_S:
            self.tell("capturing")


class RunObserver:
    """What the training loop tells, put into the run folder."""

    def __init__(self, worker: Worker) -> None:
        from quantexp.capture.choice import last_captured
        from quantexp.capture.recorder import Recorder, start_timestamp
        from quantexp.capture.store import CaptureStore
        from quantexp.megatron.together import gather

        self.worker, self.folder, self.experiment = worker, worker.folder, worker.experiment
        capture = self.experiment.capture
        self.recorder = None
        if capture.level is not CaptureLevel.off:
            store = CaptureStore(self.folder.captured(capture.dir), worker.rank.rank)
            self.recorder = Recorder(
                capture,
                store,
                rank=worker.rank.rank,
                on_progress=worker.captured,
                world_size=worker.rank.world_size,
                timestamp=gather(start_timestamp())[0],
            )
        self.last_captured = last_captured(self.experiment)
        self.proofs: list[dict[str, object]] = []
        self.unproved = False
        self.attempts = 0

    def built(self, model: GPTModel) -> None:
        """Connect the capture to the model's taps."""
        from quantexp.megatron.model import scheme_modules

        self.decoder = {f"layer {layer.layer_number - 1}": layer for layer in model.decoder.layers}
        self.modules = scheme_modules(model)
        for name, module in self.modules.items():
            if self.recorder is not None:
                constants = {"softmax_scale": getattr(module, "softmax_scale", None)}
                module.tap = self.recorder.tap(name, lambda m=module: m.precision, constants)  # type: ignore[misc]
        self.worker.tell("training")

    @contextlib.contextmanager
    def proof(self, iteration: int, declared: PrecisionMap) -> Iterator[None]:
        """Watch an iteration's matrix products and write what was proved; a mismatch ends the run."""
        from quantexp.megatron.together import gather
        from quantexp.proof.verdict import merged, require, verdict
        from quantexp.proof.watch import ProductWatch

        self.worker.tell("proving the precision map")
        watch = ProductWatch(declared, self.decoder)
        with watch.watching():
            yield
        result = merged(gather(verdict(iteration, watch)))
        self.proofs.append(result.record())
        record = {
            "scheme": self.experiment.quant.name,
            **self.proofs[-1],
            "earlier": self.proofs[:-1],
        }
        if self.worker.rank.leads:
            write_json(self.folder.precision, record)
        require(result)
        self._watch_again(result)

    def _watch_again(self, result: Verdict) -> None:
        """A proof with values that were not finite (an fp16 scale that overflows) is repeated, but not for ever."""
        self.unproved = not result.proved
        self.attempts = self.attempts + 1 if self.unproved else 0
        if self.attempts >= MAX_PROOFS:
            raise EngagementError(
                f"the precision map could not be proved in {MAX_PROOFS} iterations: operands hold NaN or Inf. See "
                "precision.json"
            )

    def micro_batch(self, iteration: int, index: int, loss_scale: float | None) -> None:
        """Tell the capture where it is."""
        if self.recorder is not None:
            self.recorder.begin(iteration, index, loss_scale)

    def gradients(self, iteration: int, loss_scale: float | None) -> None:
        """Capture the reduced main gradients where asked for."""
        if self.recorder is None:
            return
        self.recorder.begin(iteration, None, loss_scale)
        for name, module in self.modules.items():
            weight = getattr(module, "weight", None)
            if weight is not None and self.recorder.wants("main_grad"):
                self.recorder.record(
                    name, module.precision, "backward", "post", "main_grad", weight.main_grad, {}
                )

    def iteration(self, metrics: Metrics) -> bool:
        """A line of metrics.jsonl; False once the capture is complete and the run is to end with it."""
        if self.worker.rank.leads:
            with self.folder.metrics.open("a") as stream:
                stream.write(json.dumps(_finite(asdict(metrics)), allow_nan=False) + "\n")
        if self.worker.interrupted:
            raise KeyboardInterrupt
        self.worker.status.iteration = metrics.iteration
        self.worker.tell("training")
        stop = self.experiment.capture.stop_after_capture
        if stop and metrics.iteration >= self.last_captured > 0:
            self.worker.status.reason = "stopped after capture, as configured"
            return False
        return True

    def finish(self) -> None:
        """Every rank is done; what they captured becomes one capture."""
        from quantexp.megatron.together import gather

        if self.worker.rank.alone:
            return
        captured = gather(self.worker.status.capture)
        if self.recorder is not None and self.worker.rank.leads:
            join_parts(self.recorder.store.folder)
            self.worker.status.capture |= {
                name: sum(each.get(name, 0) for each in captured)
                for name in ("tensors", "num_bytes")
            }


def _lost_peer(error: BaseException) -> bool:
    from quantexp.megatron.together import lost_peer

    return lost_peer(error)


def _finite(line: dict[str, Any]) -> dict[str, Any]:
    """The line with null for what is not finite: JSON has neither NaN nor Infinity."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in line.items()
    }


def _data(experiment: Experiment) -> tuple[Path, Tokenizer]:
    from quantexp.data.sample import sample_prefix
    from quantexp.data.tokenizer import load_tokenizer

    dataset = experiment.dataset
    tokenizer = load_tokenizer(dataset.tokenizer.value, dataset.tokenizer_path)
    if dataset.sample:
        return sample_prefix(dataset.name, cache_dir(experiment.paths.cache)), tokenizer
    return Path(str(dataset.path)).expanduser(), tokenizer


@contextlib.contextmanager
def _quiet_imports() -> Iterator[None]:
    """Megatron-Core warns six times on import about packages that are optional."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


if __name__ == "__main__":
    sys.exit(main())
