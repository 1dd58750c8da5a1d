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
import os
import platform
import signal
import sys
from pathlib import Path

from quantexp.analysis.after_run import REPORT_LOOK_S, draw_figures
from quantexp.config.load import read
from quantexp.data.tokenizers.protocol import Tokenizer
from quantexp.errors import QuantexpError
from quantexp.folders import cache_dir
from quantexp.formats.verify.certificate import standing
from quantexp.memory.room import require_memory_here
from quantexp.processes.unresponsive import leave_if_stuck
from quantexp.processes.with_parent import end_with_parent, parent_from
from quantexp.runs.fencing import TakenOverError
from quantexp.runs.lock import take_lock
from quantexp.runs.outcome import ENDED_FROM_OUTSIDE
from quantexp.runs.paths import RunDir
from quantexp.runs.provenance import add_what_ran
from quantexp.runs.ranks import Rank, RankRecord, end_record, own_rank, write_record
from quantexp.runs.snapshot import require_snapshot
from quantexp.runs.status import (
    INTERRUPTED,
    Phase,
    State,
    finish,
    now,
)
from quantexp.schema import AutoDraw, Experiment
from quantexp.training.context import RunContext
from quantexp.training.log import LOG, library_messages_in, own_lines
from quantexp.training.observer import RunObserver
from quantexp.training.saver import saver_of

#: Seconds that the last step of a job's script, or of an earlier start, may hold the folder.
JOB_PATIENCE_S = 60.0


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
    leave_if_stuck(ends, lambda: worker.context.interrupted or worker.ending, worker.leave)
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
    """Runs one rank, and writes how it ended, whatever ended it."""

    def __init__(
        self,
        run: RunDir,
        experiment: Experiment,
        rank: Rank | None = None,
        *,
        in_job: bool = False,
    ) -> None:
        self.context = RunContext(run, experiment, rank, in_job=in_job)
        self._observer: RunObserver | None = None
        #: How the run ended is being written, or has been.
        self.ending = False

    def interrupt(self, signum: int, frame: object) -> None:
        """The handler of signals that end a run.

        What is writing its end is left to it, and so is what ends because of an earlier signal: of a Ctrl-C in a
        terminal, and the signal of the process that started this one, one comes just after the other.
        """
        if not self.ending and not self.context.interrupted:
            self.context.interrupted = True
            raise KeyboardInterrupt

    def leave(self) -> None:
        """End the process from another thread than the main one, which is in one long operation.

        What has been captured is written first, as far as the main thread has let go of it. The process ends even where
        that, or how the run ended, cannot be written.
        """
        self.context.interrupted = True
        try:
            try:
                if self._observer is not None and self._observer.recorder is not None:
                    self._observer.recorder.store.queue.close()
            finally:
                self._interrupted()
        except Exception:  # noqa: BLE001
            LOG.exception("the end of the run could not be recorded")
        finally:  # no later signal would end it
            leave_process(130)

    def warned(self, signum: int, frame: object) -> None:
        """The scheduler's signal that the job will soon be ended; training goes on until then."""
        name = signal.Signals(signum).name
        LOG.warning("the scheduler will end this job soon, as %s announces", name)

    def run(self) -> int:
        """Train to the end and say how it ended: 0 completed, 1 failed, 130 interrupted."""
        log = self.context.run.library_log(self.context.rank.rank)
        log.parent.mkdir(exist_ok=True)
        with own_lines(f"rank {self.context.rank.rank}"), library_messages_in(log):
            try:
                return self._run_or_interrupted()
            except TakenOverError:
                LOG.error("the job was started again elsewhere: this start of it ends")
                return 1

    def _run_or_interrupted(self) -> int:
        try:
            return self._run()
        except KeyboardInterrupt:  # in the training, or just as its error was about to be told
            return self._interrupted()

    def _interrupted(self) -> int:
        if self.context.in_job:  # the scheduler's doing; why, the end of the job's script finds out
            return self._end(State.PREEMPTED, ENDED_FROM_OUTSIDE, 130)
        return self._end(State.CANCELLED, INTERRUPTED, 130)

    def _run(self) -> int:
        self.context.status.started = now()
        self.context.status.host, self.context.status.pid = platform.node(), os.getpid()
        self.context.status.state = State.RUNNING
        self.context.status.current_iteration = self.context.status.micro_batch = None
        self.context.tell(Phase.IMPORTING)
        self._record(RankRecord(os.getpid()))
        if self.context.tracking is not None:
            self.context.tracking.start(self.context.status.created)
        try:
            self._train()
        except KeyboardInterrupt:
            raise
        except QuantexpError as error:
            return self._end(State.FAILED, str(error), 1)
        except Exception as error:
            if self.context.interrupted:  # raised in the middle of torch's own bookkeeping
                raise KeyboardInterrupt from error
            LOG.exception("the run failed")
            first = (str(error).strip().splitlines() or [""])[0]
            where = self.context.run.rank_log(self.context.rank.rank)
            reason = f"{type(error).__name__}: {first}; traceback in {where}"
            lost = not self.context.rank.alone and _lost_peer(error)
            return self._end(State.FAILED, reason, 1, lost_peer=lost)
        return self._end(State.COMPLETED, self.context.status.reason, 0)

    def _end(self, state: State, reason: str, code: int, *, lost_peer: bool = False) -> int:
        self.ending = True
        finish(self.context.status, state, reason)
        if self.context.rank.leads:
            self.context.run.reserve.unlink(
                missing_ok=True
            )  # room for the last words on a full disk
        self._record(end_record(state, reason, lost_peer=lost_peer))
        self.context.write_status()
        if self.context.tracking is not None:
            self.context.tracking.end(state, reason)
            with contextlib.suppress(OSError):  # how the run ended has been told
                self.context.write_status()
        wanted = self.context.experiment.analysis.drawing is not AutoDraw.nothing
        if state in (State.COMPLETED, State.FAILED) and wanted:
            self._report()
        return code

    def _report(self) -> None:
        """Write report.html, which shows how the run ended; that it cannot be written changes nothing about that."""
        if not self.context.rank.leads:
            return
        try:
            from quantexp.analysis.report.write import write_report

            write_report([self.context.run.root], self.context.run.root, REPORT_LOOK_S)
        except Exception:  # noqa: BLE001
            LOG.exception("report.html was not written; quantexp report %s", self.context.run.root)

    def _record(self, record: RankRecord) -> None:
        if not self.context.rank.alone:
            write_record(self.context.run, self.context.rank.rank, record)

    def _train(self) -> None:
        from quantexp.training.megatron.without_te import hide_broken_te

        hide_broken_te()
        import torch

        from quantexp.training.megatron.data_loader import rank_batches
        from quantexp.training.megatron.device import device_name
        from quantexp.training.megatron.session import products_of, session
        from quantexp.training.megatron.trainer import train

        context, experiment = self.context, self.context.experiment
        training, launcher = experiment.training, experiment.launcher
        require_memory_here(experiment)
        context.tell(Phase.READING_DATA)
        if launcher.num_threads is not None:
            torch.set_num_threads(launcher.num_threads)
        prefixes, tokenizer = _data(experiment)
        process = session(training, context.rank, launcher.timeout_min)
        with process as device, contextlib.redirect_stdout(sys.stderr):
            if context.rank.leads:
                known = standing(cache_dir(experiment.paths.cache), device.type)
                products = products_of(training, device)
                provenance = context.run.provenance
                add_what_ran(provenance, device_name(device), known.record(), products)
            own = rank_batches(experiment, context.rank, prefixes, tokenizer)
            context.tell(Phase.BUILDING)
            self._observer = observer = RunObserver(context, device)
            with contextlib.closing(observer):
                train(
                    experiment,
                    own.train,
                    observer,
                    device,
                    saver=saver_of(context),
                    held_out=own.held_out,
                )
                observer.finish()
        if context.rank.leads and experiment.analysis.drawing is not AutoDraw.nothing:
            self._draw()

    def _draw(self) -> None:
        self.context.tell(Phase.DRAWING)
        draw_figures(self.context.run, self.context.experiment.analysis.drawing)


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
