"""One rank of one run: `python -m quantexp.training.worker RUN_DIR` trains, proves, captures and draws.

All it knows comes from RUN_DIR/config.yaml. It tells about itself through the folder alone: status.json from here,
metrics.jsonl, precision.json and tensors/ from its `observer`. Of several ranks (torchrun's environment says which one
this is) rank 0 alone writes what a run has once; each has its own log, its record (`ranks`) and its share of the
captured tensors. A user's error ends it with exit code 1 and the message in status.json; a bug also keeps its
traceback, on standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from quantexp.analysis.after_run import REPORT_LOOK_S, draw_figures
from quantexp.config.evaluation import num_samples
from quantexp.config.load import read
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import QuantexpError
from quantexp.folders import cache_dir
from quantexp.formats.verify.certificate import standing
from quantexp.memory.room import require_memory_here
from quantexp.model.checkpoints import first_iteration
from quantexp.processes.unresponsive import leave_if_stuck
from quantexp.processes.with_parent import end_with_parent, parent_from
from quantexp.runs.ending import ENDED_FROM_OUTSIDE
from quantexp.runs.fencing import TakenOverError, require_ours
from quantexp.runs.lock import take_lock
from quantexp.runs.paths import RunDir
from quantexp.runs.provenance import add_what_ran
from quantexp.runs.ranks import Rank, RankRecord, ended, own_rank, write_record
from quantexp.runs.snapshot import require_snapshot
from quantexp.runs.status import (
    INTERRUPTED,
    Phase,
    State,
    Status,
    now,
    over,
    read_status,
    write_status,
)
from quantexp.schema import AutoDraw, Experiment
from quantexp.training.library_messages import library_messages_in
from quantexp.training.observer import RunObserver, say
from quantexp.training.saver import saver_of
from quantexp.training.tracking.attached import Tracking

if TYPE_CHECKING:
    from quantexp.capture.record.recorder import Progress

#: Seconds that the last step of a job's script, or of an earlier start, may hold the folder.
JOB_PATIENCE_S = 60.0
#: What stands in the log when it begins; iterations have lines of their own.
_LOGGED = (
    Phase.IMPORTING,
    Phase.READING_DATA,
    Phase.BUILDING,
    Phase.SAVING,
    Phase.WRITING,
    Phase.DRAWING,
)
#: Seconds between two updates of status.json while tensors are captured.
STATUS_INTERVAL_S = 0.2


def main(argv: list[str] | None = None) -> int:
    """Run one rank; the exit code says how it ended."""
    parser = argparse.ArgumentParser(prog="python -m quantexp.training.worker", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument(
        "--with-parent", action="store_true", help="end when the process that started this one ends"
    )
    parser.add_argument(
        "--in-job", action="store_true", help="hold the folder's lock, as no other process does"
    )
    arguments = parser.parse_args(argv)
    run = RunDir(arguments.run_dir)
    try:
        experiment = read(run.config)
        rank = own_rank(experiment.launcher.num_processes)
        require_snapshot(run.provenance)
        if arguments.in_job and rank.leads:
            take_lock(run, JOB_PATIENCE_S)  # until this process ends
    except QuantexpError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if arguments.in_job or not rank.alone:
        _log_to(run.rank_log(rank.rank))
    worker = Worker(run, experiment, rank, in_job=arguments.in_job)
    ends = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        ends.append(signal.SIGHUP)
    for number in ends:
        signal.signal(number, worker.interrupt)
    signal.signal(signal.SIGUSR2, worker.warned)
    leave_if_stuck(ends, lambda: worker.interrupted or worker.ending, worker.leave)
    if arguments.with_parent:
        end_with_parent(parent_from(os.environ))
    return worker.run()


def _log_to(log: Path) -> None:
    """Whatever this process prints from now on, a crash's last words included, goes to its own log."""
    with log.open("ab") as stream:
        for standard in (sys.stdout, sys.stderr):
            standard.flush()
            os.dup2(stream.fileno(), standard.fileno())


class Worker:
    """Keeps status.json true from the first moment to the last."""

    def __init__(
        self,
        run: RunDir,
        experiment: Experiment,
        rank: Rank | None = None,
        *,
        in_job: bool = False,
    ) -> None:
        self.folder, self.experiment, self.rank = run, experiment, rank or Rank()
        self.in_job = in_job
        self.status = read_status(run.status) or Status(created=now())
        self.tracking = Tracking(run, experiment) if self.rank.leads else None
        self._written = 0.0
        self._observer: RunObserver | None = None
        #: How the run ended is being written, or has been.
        self.ending = False
        #: A signal asked for the end; what it interrupted may have turned it into another error, or dropped it.
        self.interrupted = False

    def interrupt(self, signum: int, frame: object) -> None:
        """The handler of signals that end a run.

        What is writing its end is left to it, and so is what ends because of an earlier signal: of a Ctrl-C in a
        terminal, and the signal of the process that started this one, one comes just after the other.
        """
        if not self.ending and not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt

    def leave(self) -> None:
        """End the process from another thread than the main one, which is in one long operation.

        What has been captured is written first, as far as the main thread has let go of it. The process ends even where
        that, or how the run ended, cannot be written.
        """
        self.interrupted = True
        try:
            try:
                if self._observer is not None and self._observer.recorder is not None:
                    self._observer.recorder.store.queue.close()
            finally:
                self._interrupted()
        except Exception:  # noqa: BLE001
            traceback.print_exc()
        finally:  # no later signal would end it
            leave_process(130)

    def warned(self, signum: int, frame: object) -> None:
        """The scheduler's signal that the job will soon be ended; training goes on until then."""
        sys.stderr.write(
            f"the scheduler will end this job soon, says {signal.Signals(signum).name}\n"
        )

    def run(self) -> int:
        """Train to the end and say how it ended: 0 completed, 1 failed, 130 interrupted."""
        log = self.folder.library_log(self.rank.rank)
        log.parent.mkdir(exist_ok=True)
        try:
            with library_messages_in(log):
                return self._run_or_interrupted()
        except TakenOverError:
            sys.stderr.write("the job was started again elsewhere: this start of it ends\n")
            return 1

    def _run_or_interrupted(self) -> int:
        try:
            return self._run()
        except KeyboardInterrupt:  # in the training, or just as its error was about to be told
            return self._interrupted()

    def _interrupted(self) -> int:
        if self.in_job:  # the scheduler's doing; why, the end of the job's script finds out
            return self._end(State.PREEMPTED, ENDED_FROM_OUTSIDE, 130)
        return self._end(State.CANCELLED, INTERRUPTED, 130)

    def _run(self) -> int:
        self.status.started = now()
        self.status.host, self.status.pid = platform.node(), os.getpid()
        self.status.state = State.RUNNING
        self.status.current_iteration = self.status.micro_batch = None
        self.tell(Phase.IMPORTING)
        self._record(RankRecord(os.getpid()))
        if self.tracking is not None:
            self.tracking.start(self.status.created)
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

    def tell(self, phase: Phase) -> None:
        """What the run does now."""
        if phase is not self.status.phase:
            self.status.phase, self.status.phase_since = phase, now()
            if self.rank.leads and phase in _LOGGED:
                say(phase.value)
        self._write()

    def at(self, phase: Phase, iteration: int, micro_batch: int) -> None:
        """Which micro-batch, from 1, of which iteration begins now, and what is done with it."""
        status = self.status
        place = (phase, iteration, micro_batch)
        if place == (status.phase, status.current_iteration, status.micro_batch):
            return
        is_new = phase is not status.phase
        status.phase, status.current_iteration, status.micro_batch = place
        status.phase_since = now()
        if is_new or time.monotonic() - self._written > STATUS_INTERVAL_S:
            self._write()

    def _write(self) -> None:
        if not self.rank.leads:
            return
        if self.in_job:
            require_ours(self.folder)
        if self.tracking is not None:
            self.status.tracking = self.tracking.report()
        write_status(self.folder.status, self.status)
        self._written = time.monotonic()

    def _end(self, state: State, reason: str, code: int, *, lost_peer: bool = False) -> int:
        self.ending = True
        over(self.status, state, reason)
        if self.rank.leads:
            self.folder.reserve.unlink(missing_ok=True)  # room for the last words on a full disk
        self._record(ended(state, reason, lost_peer=lost_peer))
        self._write()
        if self.tracking is not None:
            self.tracking.end(state, reason)
            with contextlib.suppress(OSError):  # how the run ended has been told
                self._write()
        wanted = self.experiment.analysis.drawing is not AutoDraw.nothing
        if state in (State.COMPLETED, State.FAILED) and wanted:
            self._report()
        return code

    def _report(self) -> None:
        """Write report.html, which shows how the run ended; that it cannot be written changes nothing about that."""
        if not self.rank.leads:
            return
        try:
            from quantexp.analysis.report.write import write_report

            write_report([self.folder.root], self.folder.root, REPORT_LOOK_S)
        except Exception:  # noqa: BLE001
            traceback.print_exc()
            sys.stderr.write(f"report.html was not written; quantexp report {self.folder.root}\n")

    def _record(self, record: RankRecord) -> None:
        if not self.rank.alone:
            write_record(self.folder, self.rank.rank, record)

    def _train(self) -> None:
        from quantexp.training.megatron.without_te import hide_broken_te

        hide_broken_te()
        import torch

        from quantexp.training.megatron.data_loader import batches, build_datasets
        from quantexp.training.megatron.session import device_name, products_of, session
        from quantexp.training.megatron.trainer import train

        require_memory_here(self.experiment)
        self.tell(Phase.READING_DATA)
        if self.experiment.launcher.num_threads is not None:
            torch.set_num_threads(self.experiment.launcher.num_threads)
        experiment, training = self.experiment, self.experiment.training
        prefixes, tokenizer = _data(experiment)
        process = session(training, self.rank, experiment.launcher.timeout_min)
        with process as device, contextlib.redirect_stdout(sys.stderr):
            if self.rank.leads:
                known = standing(cache_dir(experiment.paths.cache), device.type)
                name = device_name(device)
                add_what_ran(
                    self.folder.provenance, name, known.record(), products_of(training, device)
                )
            datasets = build_datasets(
                prefixes,
                tokenizer,
                seq_length=training.seq_length,
                seed=training.seed,
                num_samples_train=training.iterations * training.global_batch_size,
                num_samples_valid=num_samples(experiment),
                cache_dir=cache_dir(experiment.paths.cache),
                split=str(experiment.dataset.split),
                mask_documents=experiment.dataset.mask_documents,
                mask_eod_loss=experiment.dataset.mask_eod_loss,
            )
            share: dict[str, int] = {
                "micro_batch_size": training.micro_batch_size,
                "data_parallel_rank": self.rank.rank,
                "data_parallel_size": self.rank.world_size,
            }
            stream = batches(
                datasets.train,
                **share,
                start_sample=(first_iteration(experiment) - 1) * training.global_batch_size,
            )
            each = num_samples(experiment) // (training.micro_batch_size * self.rank.world_size)

            def held_out() -> Iterator[dict[str, torch.Tensor]]:
                assert datasets.valid is not None, "asked for where anything is evaluated"
                return itertools.islice(batches(datasets.valid, **share), each)

            self.tell(Phase.BUILDING)
            self._observer = observer = RunObserver(self, device)
            with contextlib.closing(observer):
                train(
                    experiment,
                    stream,
                    observer,
                    device,
                    saver=saver_of(self),
                    held_out=held_out,
                )
                observer.finish()
        if self.rank.leads and experiment.analysis.drawing is not AutoDraw.nothing:
            self._draw()

    def _draw(self) -> None:
        self.tell(Phase.DRAWING)
        draw_figures(self.folder, self.experiment.analysis.drawing)

    def captured(self, progress: Progress) -> None:
        """Tensors were captured or written: show it, but not too often."""
        self.status.capture = dict(vars(progress))
        if time.monotonic() - self._written > STATUS_INTERVAL_S:
            self._write()


def _lost_peer(error: BaseException) -> bool:
    from quantexp.training.megatron.collectives import lost_peer

    return lost_peer(error)


def _data(experiment: Experiment) -> tuple[dict[Path, float], Tokenizer]:
    from quantexp.data.completed import paths, tokenizer_of
    from quantexp.data.sample import sample_prefix

    dataset = experiment.dataset
    if dataset.sample:
        cache = cache_dir(experiment.paths.cache)
        return {sample_prefix(dataset.name, cache, str(dataset.split)): 1.0}, tokenizer_of(dataset)
    return paths(dataset), tokenizer_of(dataset)


def leave_process(code: int) -> None:
    """End this process at once. Taking down torch and the model object by object lasts for seconds."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # a full disk does not keep it
        os._exit(code)


if __name__ == "__main__":
    leave_process(main())
