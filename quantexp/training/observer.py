"""What the training loop tells, put into the run folder: proofs, captured tensors, a line an iteration.

Of several ranks, rank 0 writes precision.json and metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from quantexp.capture.store.ending import finish_capture
from quantexp.errors import EngagementError
from quantexp.model.sizes import num_micro_batches_each
from quantexp.runs.metrics import Metrics
from quantexp.runs.status import Phase, now, write_json
from quantexp.schema import AttentionPath, CaptureLevel
from quantexp.training.context import RunContext
from quantexp.training.log import LOG

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt.gpt_model import GPTModel
    from torch import Tensor

    from quantexp.proof.verdict import Verdict
    from quantexp.quant.hooks import TensorHook
    from quantexp.quant.precision import ModuleId, PrecisionMap
    from quantexp.quant.rows import Rows

#: Seconds between two lines about iterations in the log.
LOG_S = 2.0
#: Iterations watched in a row before a map that cannot be proved fails the run; fp16 needs one for each halving.
MAX_PROOFS = 64


class RunObserver:
    """What the training loop tells, put into the run folder."""

    def __init__(self, context: RunContext, device: torch.device) -> None:
        from quantexp.capture.record.recorder import Recorder, start_timestamp
        from quantexp.capture.select.choice import last_captured
        from quantexp.capture.select.schedule import captured_iterations
        from quantexp.capture.store.folder import CaptureStore
        from quantexp.training.megatron.collectives import gather

        self.context, self.run, self.experiment = context, context.run, context.experiment
        capture = self.experiment.capture
        self.recorder = None
        if capture.level is not CaptureLevel.off:
            store = CaptureStore(
                self.run.captured(capture.dir),
                context.rank.rank,
                int(capture.queue_gb * 1e9),
                capture.store,
            )
            self.recorder = Recorder(
                capture,
                store,
                rank=context.rank.rank,
                on_progress=context.captured,
                world_size=context.rank.world_size,
                timestamp=gather(start_timestamp())[0],
                iterations=captured_iterations(capture, self.experiment.training.iterations),
                num_layers=self.experiment.model.num_layers,
            )
        self.last_captured = last_captured(self.experiment)
        self.proofs: list[dict[str, object]] = []
        self.unproved = False
        self._is_proving = False
        self._logged = -math.inf
        self.attempts = 0
        self._hooks = contextlib.ExitStack()

    def built(self, model: GPTModel) -> None:
        """Connect the capture to the model's hooks."""
        from quantexp.capture.record.operand_recorder import OperandRecorder
        from quantexp.quant.hooks import hook_operands
        from quantexp.training.megatron.attention import SchemeAttention
        from quantexp.training.megatron.experts import moe_layers
        from quantexp.training.megatron.model import scheme_modules

        if self.recorder is not None:
            taker = OperandRecorder(self.recorder)
            self._hooks.enter_context(hook_operands(taker, taker.wants))
        self.decoder = {f"layer {layer.layer_number - 1}": layer for layer in model.decoder.layers}
        self.routers = {f"layer {n} router": moe.router for n, moe in moe_layers(model).items()}
        self.modules = scheme_modules(model)
        for name, module in self.modules.items():
            if self.recorder is not None:
                about = partial(_about, module)
                module.hook = self.recorder.hook(name, lambda m=module: m.precision, about)  # type: ignore[misc]
                if isinstance(module, SchemeAttention):
                    module.wants = partial(self.recorder.passes, name)
        self._watch_what_is_not_quantised(model)
        self.context.status.micro_batches = num_micro_batches_each(self.experiment)

    def _watch_what_is_not_quantised(self, model: GPTModel) -> None:
        """Connect the capture to the residual stream and the routers, in the layers where any of it is asked for."""
        from quantexp.capture.names import RESIDUAL, ROUTER
        from quantexp.capture.select.choice import expected_tensors
        from quantexp.quant.precision import ModuleId
        from quantexp.training.megatron.experts import moe_layers, watch_router
        from quantexp.training.megatron.residual import watch_residual

        if self.recorder is None:
            return
        asked = {each.module for each in expected_tensors(self.experiment)}
        for layer in model.decoder.layers:
            module = ModuleId(layer.layer_number - 1, RESIDUAL)
            if module in asked:
                watch_residual(layer, module.layer == 0, self._plain_hook(module))
        for index, moe in moe_layers(model).items():
            module = ModuleId(index, ROUTER)
            if module in asked:
                watch_router(moe, self._plain_hook(module))

    def _plain_hook(self, module: ModuleId) -> TensorHook:
        """The hook of a module that is no part of any scheme."""
        from quantexp.quant.precision import ModulePrecision

        assert self.recorder is not None
        return self.recorder.hook(
            module, lambda: ModulePrecision(module, {}), partial(_about, None)
        )

    @contextlib.contextmanager
    def proof(self, iteration: int, declared: PrecisionMap) -> Iterator[None]:
        """Watch an iteration's matrix products and write what was proved; a mismatch ends the run."""
        from quantexp.proof.verdict import merged, require, verdict
        from quantexp.proof.watch import ProductWatch
        from quantexp.training.megatron.collectives import gather

        watch = ProductWatch(declared, self.decoder, self.routers)
        self._is_proving = True
        with watch.watching():
            yield
        self._is_proving = False
        result = merged(gather(verdict(iteration, watch)))
        self.proofs.append(result.record())
        record = {
            "scheme": self.experiment.quant.name,
            **self.proofs[-1],
            "earlier": self.proofs[:-1],
        }
        if self.context.rank.leads:
            write_json(self.run.precision, record)
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
        """Tell the capture, and status.json, where training is."""
        phase = Phase.PROVING if self._is_proving else Phase.TRAINING
        if self.recorder is not None:
            self.recorder.begin(iteration, index, loss_scale)
            if self.recorder.is_capturing:
                phase = Phase.CAPTURING
        self.context.at(phase, iteration, index + 1)

    def gradients(self, iteration: int, loss_scale: float | None) -> None:
        """Capture the reduced main gradients where asked for."""
        if self.recorder is None:
            return
        self.recorder.begin(iteration, None, loss_scale)
        for name, module in self.modules.items():
            weight = getattr(module, "weight", None)
            if weight is not None and self.recorder.wants(name, "backward", "main_grad"):
                self.recorder.record(
                    name, module.precision, "backward", "post", "main_grad", weight.main_grad
                )
        self.recorder.settle()

    def evaluation(self) -> None:
        """What passes the hooks now belongs to no iteration, and nothing of it is captured."""
        self.context.tell(Phase.EVALUATING)
        if self.recorder is not None:
            self.recorder.begin(0, None)

    def iteration(self, metrics: Metrics) -> bool:
        """A line of metrics.jsonl, and a point for trackers; False once the run is to end with its capture."""
        line = {**asdict(metrics), "time": now()}
        if self.context.rank.leads:
            with self.run.metrics.open("a") as stream:
                stream.write(json.dumps(_finite(line), allow_nan=False) + "\n")
            self._log(metrics)
        if self.context.tracking is not None:
            self.context.tracking.log(line)
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

    def _log(self, metrics: Metrics) -> None:
        """A line of the log for an iteration: the first, the last, and not more than one in `LOG_S` between."""
        last = self.experiment.training.iterations
        seconds = time.monotonic()
        if metrics.iteration < last and seconds - self._logged < LOG_S:
            return
        self._logged = seconds
        LOG.info(
            f"iteration {metrics.iteration} of {last}, loss {metrics.loss:.4f}, gradient norm {metrics.grad_norm:.3f}, "
            f"{metrics.step_time_s:.2f} s, {metrics.tokens_per_s:,.0f} tokens/s"
        )

    def _advance(self, iteration: int) -> None:
        """An iteration is complete; where another follows, it begins now."""
        status = self.context.status
        status.iteration = iteration
        self._say_what_waits()
        if iteration < self.experiment.training.iterations:
            status.current_iteration, status.micro_batch = iteration + 1, 1
            status.phase, status.phase_since = Phase.TRAINING, now()
        self.context.tell(Phase.TRAINING)

    def _say_what_waits(self) -> None:
        """What waits to be written now; the last tensor was captured when more did."""
        if self.recorder is not None and self.context.status.capture:
            store = self.recorder.store
            self.context.status.capture |= {
                "queue_bytes": store.queue.num_bytes,
                "bytes_per_s": store.bytes_per_s,
            }

    def finish(self) -> None:
        """Every rank is done; what they captured becomes one capture."""
        from quantexp.capture.store.report import write_report

        if self.recorder is not None:
            self._say_what_waits()
            self.context.tell(Phase.WRITING)
            self.recorder.flush()
        if not self.context.rank.alone:
            self._add_up()
        if self.recorder is not None and self.context.rank.leads:
            finish_capture(self.recorder.store.folder)
            write_report(self.recorder.store.folder)

    def _add_up(self) -> None:
        from quantexp.training.megatron.collectives import gather

        captured = gather(self.context.status.capture)
        if self.recorder is not None and self.context.rank.leads:
            self.context.status.capture |= {
                name: sum(each.get(name, 0) for each in captured)
                for name in ("tensors", "num_bytes")
            }

    def close(self) -> None:
        """However training ended: what was captured by then is written."""
        self._hooks.close()
        if self.recorder is not None:
            self.recorder.store.close()


#: A linear layer's tensors that have a row for each token.
_BY_TOKEN = frozenset({"input", "output", "grad_output", "grad_input"})
#: Attention's tensors to which the mask belongs.
_OF_MASK = frozenset({"query", "attn_weights"})


def _about(module: object, tensor: str) -> dict[str, object]:
    """What the metadata of a module's tensor says beside its formats."""
    # Of its own: what a module does not have, torch looks for in three other places.
    own: dict[str, Any] = getattr(module, "__dict__", {})
    about: dict[str, object] = {"softmax_scale": own.get("softmax_scale")}
    path = own.get("path", AttentionPath.plain)
    if path is not AttentionPath.plain:
        about["attention"] = path.value
    rows: Rows | None = own.get("rows")
    if rows is not None and tensor in _BY_TOKEN:
        about["row_sequences"] = rows.sequence.tolist()
    mask: Tensor | None = own.get("mask")
    if mask is not None and tensor in _OF_MASK:
        from quantexp.quant.attention.documents import document_starts

        about["document_starts"] = document_starts(mask)
    return about


def _finite(line: dict[str, Any]) -> dict[str, Any]:
    """The line with null for what is not finite: JSON has neither NaN nor Infinity."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in line.items()
    }
