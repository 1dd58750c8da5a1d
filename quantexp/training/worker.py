"""One rank of one run: `python -m quantexp.training.worker RUN_DIR` trains, proves, captures and draws.

Its only input is RUN_DIR/config.yaml, its only output the run folder: this module writes status.json, the observer
writes metrics.jsonl, precision.json and tensors/. With several ranks (torchrun's environment numbers them), each writes
its own log, record (`ranks`) and captured tensors; rank 0 writes everything else. A user's error ends the process with
exit code 1 and the message in status.json; a bug also prints its traceback to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import sys
from pathlib import Path

from quantexp.config.load import read
from quantexp.errors import QuantexpError
from quantexp.extra import Service, required
from quantexp.folders import shell_word
from quantexp.processes.with_parent import (
    end_with_parent,
    ended_command,
    leave_if_stuck,
    parent_from,
)
from quantexp.runs.disk import explanation, first_line
from quantexp.runs.fencing import TakenOverError, drop_claim, own_start
from quantexp.runs.lock import take_lock
from quantexp.runs.outcome import ENDED_FROM_OUTSIDE, SAVED_BEFORE_LIMIT
from quantexp.runs.paths import RunDir
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
from quantexp.training.drawing import Drawing
from quantexp.training.log import LOG, log_to, log_to_stderr, redirect_library_messages
from quantexp.training.observer import RunObserver
from quantexp.training.rank_session import rank_session
from quantexp.training.requests import Request

#: Seconds to wait for the run lock while an earlier step of the job script, or an earlier attempt, still holds it.
JOB_PATIENCE_S = 60.0


def main(argv: list[str] | None = None) -> int:
    """Run one rank and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m quantexp.training.worker", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument(
        "--with-parent", action="store_true", help="end when the parent process ends"
    )
    parser.add_argument(
        "--in-job", action="store_true", help="take the run lock, which no parent process holds"
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
        log_to(run.rank_log(rank.rank))
    worker = Worker(run, experiment, rank, in_job=arguments.in_job)
    signals = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signals.append(signal.SIGHUP)
    for number in signals:
        signal.signal(number, worker.interrupt)
    signal.signal(signal.SIGUSR2, worker.take_user_signal)
    leave_if_stuck(signals, worker.is_ending, worker.leave)
    if arguments.with_parent:
        end_with_parent(parent_from(os.environ))
    return worker.run()


class Worker:
    """Runs one rank and records its end, whatever the cause."""

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
        self._drawing = Drawing(run, experiment)
        #: The signal that ends the run, if one does.
        self._signal: str | None = None
        #: The final status is being written, or has been.
        self.ending = False

    def interrupt(self, signum: int, frame: object) -> None:
        """Handle a signal that ends a run.

        A run that can go on from a checkpoint completes its iteration and saves one first; whoever sent the signal
        kills it if that takes too long. The signal has no effect if the run is already ending: a Ctrl-C in a terminal
        is often followed by a signal from the parent process.
        """
        context = self.context
        if self.ending or context.interrupted or context.requests.ends:
            return
        self._signal = signal.Signals(signum).name
        if self._saves_first:
            context.requests.ends = True
            return
        context.interrupted = True
        raise KeyboardInterrupt

    @property
    def _saves_first(self) -> bool:
        """Whether a signal is served after the iteration, by a checkpoint."""
        return self.context.is_training and self.context.requests.is_possible

    def is_ending(self) -> bool:
        """Whether a signal that ends the run was taken."""
        return self.context.interrupted or self.context.requests.ends or self.ending

    def leave(self) -> None:
        """End the process from another thread, while the main thread is stuck in one long operation.

        The tensors queued by the main thread are written first. The process ends even if these or the final status
        cannot be written. A run that saves a checkpoint first does that when the operation is over.
        """
        if self._saves_first:
            return
        self.context.interrupted = True
        try:
            try:
                if self._observer is not None and self._observer.recorder is not None:
                    self._observer.recorder.store.queue.close()
            finally:
                self._end_interrupted()
        except Exception:  # noqa: BLE001
            LOG.exception("the end of the run could not be recorded")
        finally:  # no later signal would end the process
            leave_process(130)

    def take_user_signal(self, signum: int, frame: object) -> None:
        """Log the scheduler's warning; a run that can go on from a checkpoint saves one and ends in time.

        In a run without a scheduler the signal asks for a dossier.
        """
        if not self.context.in_job:
            self.context.requests.dossier = True
            return
        name, seconds = signal.Signals(signum).name, self.context.experiment.launcher.warning_s
        self.context.requests.warn(seconds)
        saves = self.context.requests.is_possible
        end = (
            "a checkpoint is saved before"
            if saves
            else "checkpoint.optimizer=false, so none is saved"
        )
        LOG.warning("received %s: the scheduler will end this job in %d s; %s", name, seconds, end)

    def run(self) -> int:
        """Run to the end and return the exit code: 0 completed, 1 failed, 130 interrupted."""
        log = self.context.run.library_log(self.context.rank.rank)
        log.parent.mkdir(exist_ok=True, mode=0o700)
        with log_to_stderr(f"rank {self.context.rank.rank}"), redirect_library_messages(log):
            try:
                return self._run_until_interrupted()
            except TakenOverError:
                LOG.error("the run was started again elsewhere: this attempt ends")
                return 1
            finally:
                self._drawing.close()

    def _run_until_interrupted(self) -> int:
        try:
            return self._run()
        except KeyboardInterrupt:  # raised in training, or while an error was about to be recorded
            return self._end_interrupted()

    def _end_interrupted(self) -> int:
        if self.context.requests.agreed is Request.END_AT_LIMIT:
            return self._end(State.PREEMPTED, SAVED_BEFORE_LIMIT, 130)
        if self.context.in_job:  # by the scheduler; the job script's last step determines the cause
            return self._end(State.PREEMPTED, ENDED_FROM_OUTSIDE, 130)
        if self._signal != "SIGINT" and (command := ended_command(os.environ)) is not None:
            why = f"its quantexp command, process {command}, ended without ending it (killed?)"
            code = self._end(State.PREEMPTED, why, 130)
            drop_claim(self.context.run, own_start())
            return code
        return self._end(State.CANCELLED, INTERRUPTED, 130)

    def _run(self) -> int:
        self.context.status.started = now()
        self.context.status.host, self.context.status.pid = platform.node(), os.getpid()
        self.context.status.state = State.RUNNING
        self.context.status.current_iteration = self.context.status.micro_batch = None
        self.context.set_phase(Phase.IMPORTING)
        if self.context.rank.leads:
            self._drawing.prepare()
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
            if isinstance(error, OSError) and (words := explanation(error)) is not None:
                return self._end(State.FAILED, words, 1)
            if self.context.interrupted:  # torch converted the KeyboardInterrupt
                raise KeyboardInterrupt from error
            from quantexp.training.megatron.collectives import is_lost_peer

            LOG.exception("the run failed")
            log = self.context.run.rank_log(self.context.rank.rank)
            reason = f"{first_line(error)}; traceback in {log}"
            lost_peer = not self.context.rank.alone and is_lost_peer(error)
            return self._end(State.FAILED, reason, 1, lost_peer=lost_peer)
        return self._end(State.COMPLETED, self.context.status.reason, 0)

    def _end(self, state: State, reason: str, code: int, *, lost_peer: bool = False) -> int:
        self.ending = True
        finish(self.context.status, state, reason)
        if self.context.rank.leads:
            # Frees space for the final status on a full disk.
            self.context.run.reserve.unlink(missing_ok=True)
        by = f"ended by {self._signal}" if reason == INTERRUPTED and self._signal else reason
        self._record(end_record(state, by, lost_peer=lost_peer))
        self.context.write_status()
        if self.context.tracking is not None:
            self.context.tracking.end(self.context.status.state, self.context.status.reason)
            with contextlib.suppress(OSError):  # the final state is already written
                self.context.write_status()
        reports = self.context.experiment.analysis.drawing is not AutoDraw.nothing
        if state in (State.COMPLETED, State.FAILED) and reports:
            self._report()
        return code

    def _report(self) -> None:
        """Write report.html; a failure to write it does not change the run's state."""
        if self.context.rank.leads and not self._made("report", "report.html was not written"):
            with contextlib.suppress(OSError):  # the final state is already written
                self.context.write_status()

    def _made(self, what: str, otherwise: str) -> bool:
        """Have the run's `figures` or `report` made; a failure is logged, and added to the reason in these words."""
        failure = self._drawing.make(what)
        if failure is None:
            return True
        verb = "draw" if what == "figures" else what
        again = f"quantexp {verb} {shell_word(str(self.context.run.root))}"
        LOG.error("\n".join(filter(None, (f"{otherwise}; {again}", failure.traceback))))
        self._note(f"{otherwise} ({failure.reason}); {again}")
        return False

    def _note(self, words: str) -> None:
        """Add to the reason what failed after training, which is complete."""
        status = self.context.status
        status.reason = "; ".join(filter(None, (status.reason, words)))

    def _record(self, record: RankRecord) -> None:
        if not self.context.rank.alone:
            write_record(self.context.run, self.context.rank.rank, record)

    def _train(self) -> None:
        context, experiment = self.context, self.context.experiment
        if experiment.evaluate.only:
            required(Service.EVALUATION_RUN, "evaluate.only=true")(context)
        elif experiment.gradient.only:
            required(Service.GRADIENT_RUN, "gradient.only=true")(context)
        else:
            self._train_model()
        if context.requests.ends:  # too late to be served
            context.interrupted = True
            raise KeyboardInterrupt
        if context.rank.leads and experiment.analysis.drawing is not AutoDraw.nothing:
            self._draw()

    def _train_model(self) -> None:
        context = self.context
        with rank_session(context) as (device, batches):
            from quantexp.training.megatron.trainer import train
            from quantexp.training.saver import make_saver

            self._observer = observer = RunObserver(context, device, batches.text_of)
            observer.samples = batches.samples
            saver = make_saver(context)
            saver.settle = observer.settle
            observer.last_save_s = lambda: saver.last_s
            with contextlib.closing(observer), contextlib.closing(saver):
                context.is_training = True
                train(
                    context.experiment,
                    batches.train,
                    observer,
                    device,
                    saver=saver,
                    held_out=batches.held_out,
                    start=context.start,
                )
                context.is_training = False
                observer.finish()
                context.status.trained = now()
                context.write_status()

    def _draw(self) -> None:
        """Draw the figures; a failure to draw them does not change the run's state."""
        self.context.set_phase(Phase.DRAWING)
        self._made("figures", "the figures were not drawn")


def leave_process(code: int) -> None:
    """End this process at once; freeing torch and the model object by object would take seconds."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # also on a full disk
        os._exit(code)


if __name__ == "__main__":
    leave_process(main())
