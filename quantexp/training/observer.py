"""Writes the training loop's events to the run folder: proofs, captured tensors and a line of metrics per iteration.

Only rank 0 writes precision.json and metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from quantexp.capture.select.curves import scores_scheme
from quantexp.capture.store.manifest import finish_capture
from quantexp.folders import sync
from quantexp.model.sizes import num_micro_batches_each
from quantexp.quant.rules import switches
from quantexp.quant.slots import declared_formats
from quantexp.runs.disk import writing
from quantexp.runs.dossiers import read_dossiers
from quantexp.runs.fencing import require_ours
from quantexp.runs.metrics import Metrics, finite, is_fault, read_metrics
from quantexp.runs.status import Phase, now
from quantexp.schema import CaptureLayout, CaptureLevel, Precision
from quantexp.training.capture_hooks import CaptureHooks, TokenRecorder
from quantexp.training.context import RunContext
from quantexp.training.curves import Curves
from quantexp.training.log import LOG
from quantexp.training.proofs import Proofs
from quantexp.training.rank_dossiers import rank_dossiers
from quantexp.training.requests import Request

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt.gpt_model import GPTModel
    from torch import Tensor

    from quantexp.capture.record.recorder import Recorder
    from quantexp.proof.objective import Samples
    from quantexp.proof.outside_products import StateWatch
    from quantexp.proof.updates import Used
    from quantexp.quant.precision import PrecisionMap

#: Minimum seconds between two log lines about iterations.
LOG_S = 2.0


class RunObserver:
    """The observer of one rank (see `quantexp.training.megatron.callbacks.Observer`)."""

    def __init__(
        self, context: RunContext, device: torch.device, text_of: Callable[[int], str] = str
    ) -> None:
        """`text_of` gives the text of a token's id."""
        from quantexp.capture.division import Holder
        from quantexp.capture.names import start_timestamp
        from quantexp.capture.record.recorder import Recorder
        from quantexp.capture.select.choice import last_captured
        from quantexp.capture.select.schedule import captured_iterations
        from quantexp.capture.store.folder import CaptureStore
        from quantexp.capture.store.kept import NOTHING, kept
        from quantexp.training.megatron.collectives import gather

        self.context, self.run, self.experiment = context, context.run, context.experiment
        capture = self.experiment.capture
        self.recorder = None
        self.curves: Curves | None = None
        self.token_recorder: TokenRecorder | None = None
        if capture.level is not CaptureLevel.off:
            folder = self.run.captured(capture.dir)
            own = context.rank
            before = NOTHING if context.start is None else kept(folder, own.rank, own.world_size)
            store = CaptureStore(
                folder,
                context.rank.rank,
                int(capture.queue_gb * 1e9),
                capture.store,
                by_type=capture.layout is CaptureLayout.by_type,
            )
            self.token_recorder = TokenRecorder(self.experiment, folder, own.rank, text_of)
            self.recorder = Recorder(
                capture,
                store,
                rank=context.rank.rank,
                on_progress=context.set_captured,
                world_size=context.rank.world_size,
                timestamp=gather(before.timestamp or start_timestamp())[0],
                iterations=captured_iterations(capture, self.experiment.training.last_iteration),
                num_layers=self.experiment.model.num_layers,
                holder=Holder.of(self.experiment, context.rank.rank),
                before=before,
                formats=declared_formats(self.experiment.quant),
                scores_scheme=scores_scheme(self.experiment),
            )
            if self.experiment.tracking.statistics:
                self.curves = Curves(context, self.recorder)
        self.dossiers = rank_dossiers(context, text_of)
        self._count_left_out()
        self.last_captured = last_captured(self.experiment)
        self.proofs = Proofs(context)
        self.samples: tuple[Samples | None, Samples | None] = (None, None)
        self._logged = -math.inf
        self._hooks = contextlib.ExitStack()
        #: Seconds that the last save took.
        self.last_save_s: Callable[[], float] = lambda: 0.0

    def request(self) -> Request:
        """What all ranks do after an iteration: the largest request of one."""
        from quantexp.training.megatron.collectives import largest

        requests = self.context.requests
        if requests.may_come:
            own = requests.after_iteration(self.last_save_s())
            requests.agreed = Request(largest(own))
        return requests.agreed

    def settle(self) -> Callable[[], None]:
        """Send what is captured to be written; the function waits until it, and the metrics, are on the disk."""
        if self.recorder is not None:
            self.recorder.store.send()
        return self._settled

    def _settled(self) -> None:
        files = [] if self.recorder is None else self.recorder.settled()
        if self.context.rank.leads:
            files += [self.run.metrics, self.run.curves]
        for file in files:
            if file.exists():
                sync(file)

    def built(self, chunks: list[GPTModel]) -> None:
        """Connect the capture to the hooks of this rank's parts of the model."""
        from quantexp.capture.record.operand_recorder import OperandRecorder
        from quantexp.quant.hooks import hook_operands
        from quantexp.training.megatron.watched_run import watched_of

        self.watched = watched_of(self.context, chunks, *self.samples)
        self.hooks = CaptureHooks(self.experiment, self.watched, chunks)
        if self.recorder is not None:
            operand_recorder = OperandRecorder(self.recorder)
            self._hooks.enter_context(hook_operands(operand_recorder, operand_recorder.wants))
            self.hooks.add(self.recorder)
        if self.dossiers.recorder is not None:
            self.hooks.add(self.dossiers.recorder)
        self.context.status.micro_batches = num_micro_batches_each(self.experiment)

    @property
    def recorders(self) -> list[Recorder]:
        """What captures: the configured capture, and the ring with its dossiers."""
        return [each for each in (self.recorder, self.dossiers.recorder) if each is not None]

    @property
    def unproved(self) -> bool:
        """Whether the next iteration must be proved, too."""
        return self.proofs.are_open

    def proof(
        self, iteration: int, declared: PrecisionMap, *, is_complete: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Watch an iteration's matrix products, completely or in drawn parts; a mismatch ends the run."""
        prove = self.proofs.of_products if is_complete else self.proofs.of_drawn
        return prove(self.watched, iteration, declared)

    def proof_of_evaluation(
        self, iteration: int, declared: PrecisionMap, *, quantised: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """The same for the evaluation after an iteration, in drawn parts."""
        return self.proofs.of_drawn(
            self.watched, iteration, declared, evaluates=True, quantised=quantised
        )

    def outside_products(self, watch: StateWatch, stepped: bool) -> None:
        """Add what was rounded outside of products to the proof."""
        self.proofs.add_outside_products(watch, stepped)

    def updated(self, iteration: int, used: Used, wrong: list[str]) -> None:
        """End the run if the step was wrong, or its loss is not that of the tokens."""
        self.proofs.of_step(self.watched.objective, iteration, used, wrong)

    def evaluated(self, iteration: int, loss: float, wrong: list[str]) -> None:
        """The same of an evaluation."""
        self.proofs.of_evaluation(self.watched.objective, iteration, loss, wrong)

    def micro_batch(self, iteration: int, index: int, loss_scale: float | None) -> None:
        """Pass the current iteration and micro-batch to the capture and to status.json."""
        self.watched.begin(iteration, index)
        self.watched.objective.scale = loss_scale or 1.0
        for recorder in self.recorders:
            recorder.begin(iteration, index, loss_scale)
        is_capturing = self.recorder is not None and self.recorder.is_capturing
        phase = Phase.TRAINING
        if self.proofs.is_running:  # takes longer than the capture
            phase = Phase.PROVING
        elif is_capturing or self.dossiers.takes_values:
            phase = Phase.CAPTURING
        self.context.set_micro_batch(phase, iteration, index + 1)

    def tokens(self, iteration: int, index: int, tokens: Tensor) -> None:
        """List the tokens of a captured micro-batch."""
        if self.token_recorder is not None:
            self.token_recorder.add(iteration, index, tokens)
        self.dossiers.tokens(iteration, index, tokens)

    def needs_gradients(self, iteration: int) -> bool:
        """Whether this iteration's main gradients are captured."""
        is_captured = any(recorder.captures(iteration) for recorder in self.recorders)
        return is_captured and self.experiment.capture.weight_grads

    def gradients(self, iteration: int, loss_scale: float | None) -> None:
        """Capture the requested main gradients, which have been reduced."""
        for recorder in self.recorders:
            recorder.begin(iteration, None, loss_scale)
            for name, module in self.watched.modules.items():
                weight = self.watched.weights.get(name)
                if weight is not None and recorder.wants(name, "backward", "main_grad"):
                    recorder.record(
                        name, module.precision, "backward", "post", "main_grad", weight.main_grad
                    )
            recorder.settle()
        if self.context.status.phase is not Phase.TRAINING:
            self.context.set_phase(Phase.STEPPING)

    def evaluation(self) -> None:
        """Capture nothing until the next micro-batch: evaluation belongs to no iteration."""
        self.context.set_phase(Phase.EVALUATING)
        for recorder in self.recorders:
            recorder.begin(0, None)

    def iteration(self, metrics: Metrics) -> bool:
        """Write a line of metrics.jsonl and log to the trackers; False if the run ends with its capture."""
        is_fp16 = self.experiment.training.precision is Precision.fp16
        self.watched.histories.is_kept = is_fp16 or not metrics.skipped
        line = {**asdict(metrics), "time": now()}
        if self.context.rank.leads:
            require_ours(self.run)
        curves = None if self.curves is None else self.curves.after(metrics.iteration)
        if self.context.rank.leads:
            text = json.dumps(finite(line), allow_nan=False) + "\n"
            self.proofs.of_line(metrics.iteration, text)
            with writing(self.run.metrics, len(text)), self.run.metrics.open("a") as stream:
                stream.write(text)
            for words in switches(self.experiment.quant, metrics.iteration, metrics.switched):
                LOG.info(words)
            if metrics.skipped:
                LOG.warning(f"iteration {metrics.iteration} is left out: {metrics.nonfinite}")
            if metrics.validation_loss is not None and not math.isfinite(metrics.validation_loss):
                LOG.warning(
                    f"the validation loss after iteration {metrics.iteration} is {metrics.validation_loss}"
                )
            self._log(metrics)
        if self.context.tracking is not None:
            self.context.tracking.log(line, curves)
        self._end_with_dossiers(metrics)
        if self.watched.declaration is not None:
            self.watched.declaration.see(line)
        if self.context.interrupted:
            raise KeyboardInterrupt
        self._advance(metrics.iteration)
        stop = self.experiment.capture.stop_after_capture
        if stop and metrics.iteration >= self.last_captured > 0:
            if self.recorder is not None:
                self.recorder.flush()
            self.context.status.reason = "stopped after capture, as configured"
            return False
        return True

    def _count_left_out(self) -> None:
        """Count the steps left out before this start; those after its checkpoint are computed again."""
        status, start = self.context.status, self.context.start
        before = [] if start is None else read_metrics(self.run)
        status.skipped = sum(is_fault(line) for line in before)
        status.nonfinite = status.nonfinite if status.skipped else ""
        status.dossiers = [dossier.iteration for dossier in read_dossiers(self.run)]

    def _end_with_dossiers(self, metrics: Metrics) -> None:
        """Let the triggers look at an iteration; what they ask for the first time is connected."""
        status, before = self.context.status, self.dossiers.recorder
        if is_fault(asdict(metrics)):
            status.skipped += 1
            status.nonfinite = f"iteration {metrics.iteration}: {metrics.nonfinite}"
        self.dossiers.after(metrics)
        recorder = self.dossiers.recorder
        if recorder is not None and recorder is not before:
            self.hooks.add(recorder)

    def _log(self, metrics: Metrics) -> None:
        """Log the iteration, if it is the first or last, or the previous log line is `LOG_S` old."""
        last = self.experiment.training.last_iteration
        seconds = time.monotonic()
        if metrics.iteration < last and seconds - self._logged < LOG_S:
            return
        self._logged = seconds
        LOG.info(
            f"iteration {metrics.iteration} of {last}, loss {metrics.loss:.4f}, gradient norm {metrics.grad_norm:.3f}, "
            f"{metrics.step_time_s:.2f} s, {metrics.tokens_per_s:,.0f} tokens/s"
        )

    def _advance(self, iteration: int) -> None:
        """Record in status.json that an iteration is complete and that the next one, if any, has begun."""
        status = self.context.status
        status.iteration = iteration
        self._update_queue_status()
        if iteration < self.experiment.training.last_iteration:
            status.current_iteration, status.micro_batch = iteration + 1, 1
            status.phase, status.phase_since = Phase.TRAINING, now()
        self.context.set_phase(Phase.TRAINING)

    def _update_queue_status(self) -> None:
        """Update the capture queue's size and rate, which may have changed since the last captured tensor."""
        if self.recorder is not None and self.context.status.capture:
            store = self.recorder.store
            self.context.status.capture |= {
                "queue_bytes": store.queue.num_bytes,
                "bytes_per_s": store.bytes_per_s,
            }

    def finish(self) -> None:
        """Write all pending tensors and merge the ranks' captures into one; every rank calls this after training."""
        from quantexp.capture.report import write_report

        self.proofs.write_drawn()
        if self.recorder is not None:
            self._update_queue_status()
            self.context.set_phase(Phase.WRITING)
            self.recorder.flush()
        if not self.context.rank.alone:
            self._sum_over_ranks()
        if self.recorder is not None and self.context.rank.leads:
            finish_capture(self.recorder.store.folder)
            write_report(self.recorder.store.folder)

    def _sum_over_ranks(self) -> None:
        from quantexp.training.megatron.collectives import gather

        captured = gather(self.context.status.capture)
        if self.recorder is not None and self.context.rank.leads:
            self.context.status.capture |= {
                name: sum(each.get(name, 0) for each in captured)
                for name in ("tensors", "num_bytes")
            }

    def close(self) -> None:
        """Remove the hooks and write the tensors captured so far, however training ended."""
        self._hooks.close()
        if self.recorder is not None:
            self.recorder.store.close()
        self.dossiers.close()
