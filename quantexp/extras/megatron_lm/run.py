"""One rank's part of a run in Megatron-LM's loop: the model with its scheme, the observer, the numerics' state."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from typing import Any

from megatron.core.utils import unwrap_model

from quantexp.errors import QuantexpError, RunError
from quantexp.extras.megatron_lm.folder import (
    amax_histories,
    beside,
    folder_of,
    identity_of,
    open_folder,
    record_what_ran,
)
from quantexp.extras.megatron_lm.schemes import schemes_of_file
from quantexp.folders import cache_dir
from quantexp.formats.certificate import standing
from quantexp.launch.progress import proof_line
from quantexp.proof.objective import Objective
from quantexp.quant.precision import PrecisionMap, quantises_output
from quantexp.quant.weight_cache.weights import WeightCopies
from quantexp.runs.disk import first_line
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import Rank
from quantexp.runs.status import Phase, State, finish, now, read_json, write_json
from quantexp.schema import Experiment
from quantexp.training.context import RunContext
from quantexp.training.log import LOG, log_to_stderr
from quantexp.training.megatron.collectives import gather, merge_amaxes
from quantexp.training.megatron.device import device_name
from quantexp.training.megatron.experts import moe_layers, pass_rows_to_experts
from quantexp.training.megatron.model import (
    scheme_modules,
    set_precision,
    share_weight_copies,
    use_scheme_beside_decoder,
)
from quantexp.training.megatron.numerics_state import has_delayed_scales, use_numerics
from quantexp.training.observer import RunObserver


class LmRun:
    """The run of this process; `attach` connects it to the model before the first pass."""

    def __init__(self, experiment: Experiment, args: Any, version: str) -> None:
        self.experiment, self.args, self.version = experiment, args, version
        # Of the arguments: from 0.18 on the ranks are not connected yet.
        self.rank = Rank(args.rank, args.world_size, args.local_rank or 0)
        self.copies = WeightCopies()
        self.chunks: list[Any] = []
        self.is_pipelined = args.pipeline_model_parallel_size > 1
        self._open = contextlib.ExitStack()
        #: That of a run whose end is to be recorded.
        self._context: RunContext | None = None
        #: Whether this process has not computed an iteration yet.
        self.is_new = True

    def attach(self, models: list[Any]) -> None:
        """Connect a built model, once: precision, run folder, capture, random numbers and amax histories.

        Raises:
            QuantexpError: the per-module file is wrong, or the folder cannot be used.
        """
        if self.chunks:
            return
        self.models, self.chunks = models, unwrap_model(models)
        for chunk in self.chunks:
            if quantises_output(self.experiment.quant):
                use_scheme_beside_decoder(chunk)
            for moe in moe_layers(chunk).values():
                pass_rows_to_experts(moe)
            share_weight_copies(chunk, self.copies)
        self.schemes = schemes_of_file(self.experiment, self.args, self._entries())
        self.device = next(self.chunks[0].parameters()).device
        self._open.enter_context(log_to_stderr(f"quantexp rank {self.rank.rank}"))
        self.context = self._opened()
        self.state = self._open.enter_context(use_numerics(self.experiment, weights_once=True))
        has_history = has_delayed_scales(self.experiment)
        self.merge = merge_amaxes if has_history and self.rank.world_size > 1 else None
        self._load_histories(has_history)
        self.set_precision(self.args.iteration + 1)
        self.observer = RunObserver(self.context, self.device)
        self.observer.built(self.chunks)
        self.observer.watched.rotary = None  # their arguments know more kinds
        self.observer.watched.initial = None  # the script draws them
        self.observer.watched.objective = Objective()  # and has losses and data of its own
        if (declaration := self.observer.watched.declaration) is not None:
            declaration.of_module = self.schemes.of_module
        self._context = self.context

    def _entries(self) -> dict[Any, dict[str, Any]]:
        """What the per-module file says of the modules of all ranks."""
        own = {
            name: entry
            for chunk in self.chunks
            for name, module in scheme_modules(chunk).items()
            if (entry := getattr(module, "file_entry", None)) is not None
        }
        return {name: entry for each in gather(own) for name, entry in each.items()}

    def _opened(self) -> RunContext:
        """The run folder, which rank 0 opens for all."""
        run, refused = None, ""
        device = device_name(self.device)
        if self.rank.leads:
            try:
                run = folder_of(self.experiment, self.args.save, os.environ)
                content = identity_of(
                    self.experiment, self.schemes, self.args, self.version, device
                )
                open_folder(run, self.experiment, content, self.args.iteration)
                certificate = standing(cache_dir(None), self.device.type)
                record_what_ran(run, device, certificate.record(), self.version)
            except QuantexpError as error:
                refused = str(error)
        root, refused = gather((None if run is None else run.root, refused))[0]
        if refused or root is None:
            raise RunError(refused)
        context = RunContext(RunDir(root), self.experiment, self.rank)
        status = context.status
        status.started, status.host, status.pid = now(), platform.node(), os.getpid()
        status.state, status.current_iteration = State.RUNNING, None
        context.set_phase(Phase.TRAINING)
        return context

    def set_precision(self, iteration: int) -> None:
        """Let every module of this rank quantise as the map of an iteration declares."""
        self.declared = self.schemes.declared(iteration)
        self.use_map(self.declared)

    def use_map(self, declared: PrecisionMap) -> None:
        """Let every module of this rank quantise as a map of the whole model declares."""
        for chunk in self.chunks:
            own = {name: declared[name] for name in scheme_modules(chunk)}
            set_precision(chunk, own, self.experiment.training.attention)

    def weight_copies(self, num_micro_batches: int) -> contextlib.AbstractContextManager[None]:
        """A context for the passes of an iteration, which quantise each weight once."""
        several = num_micro_batches > 1
        return self.copies.step(several, self.args.recompute_granularity is not None)

    def begin_iteration(self) -> int:
        """The iteration that begins, from 1; its precision is set."""
        iteration = int(self.args.curr_iteration) + 1
        if self.is_new or iteration in self.schemes.changes:
            self.set_precision(iteration)
        return iteration

    @contextlib.contextmanager
    def proof(self, iteration: int) -> Iterator[None]:
        """A context for the passes of an iteration, which are proved completely where it is due; that is logged.

        Raises:
            EngagementError: an operand is not as declared; every rank raises it.
        """
        is_due = self.is_new or iteration in self.schemes.changes or self.observer.unproved
        with self.observer.proof(iteration, self.declared, is_complete=is_due):
            yield
        if is_due and self.rank.leads:
            line = proof_line(
                read_json(self.context.run.precision), self.experiment.training.precision
            )
            LOG.info(f"proof of iteration {iteration}: {line}")

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context for passes that belong to no iteration."""
        proof: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._context is not None:  # else training is over
            self.observer.evaluation()
            proof = self.observer.proof_of_evaluation(self.context.status.iteration, self.declared)
        self.state.updates_histories = False
        try:
            with proof, self.copies.step(several=True):
                yield
        finally:
            self.state.updates_histories = True

    def save_histories(self, iteration: int) -> None:
        """Save the amax histories beside Megatron-LM's checkpoint of an iteration; every rank calls this."""
        if not self.chunks or not has_delayed_scales(self.experiment):
            return
        merged = {
            name: one for each in gather(self.state.state_dict()) for name, one in each.items()
        }
        if self.rank.leads:
            file = amax_histories(self.context.run, iteration)
            file.parent.mkdir(exist_ok=True)
            write_json(file, merged)

    def _load_histories(self, has_history: bool) -> None:
        run = self.context.run
        if self.experiment.gradient.only and self.args.load is not None:
            run = beside(self.args.load)  # of the training
        file = amax_histories(run, self.args.iteration)
        if not has_history or not self.args.iteration:
            return
        if file.is_file():
            self.state.load_state_dict(read_json(file), self.device)
        elif self.rank.leads:
            LOG.warning(f"{file} is missing: the amax histories of delayed scales begin anew")

    def leave(self, code: object) -> None:
        """Megatron-LM's loop has ended; every rank calls this."""
        if self._context is None:
            return
        if code not in (0, None):
            self._finish(State.FAILED, f"Megatron-LM left with exit code {code}")
            return
        self.observer.finish()
        self.context.status.trained = now()
        last, reached = self.experiment.training.last_iteration, self.context.status.iteration
        reason = "" if reached >= last else f"Megatron-LM ended after iteration {reached} of {last}"
        self._finish(State.COMPLETED, reason)

    def fail(self, error: BaseException) -> None:
        """An error ends the run."""
        if self._context is not None:
            words = first_line(error) if isinstance(error, Exception) else type(error).__name__
            is_cancelled = isinstance(error, KeyboardInterrupt)
            self._finish(State.CANCELLED if is_cancelled else State.FAILED, words)

    def _finish(self, state: State, reason: str) -> None:
        """Record the end; the numerics stay, as Megatron-LM may still evaluate."""
        self.observer.evaluation()
        self.observer.close()
        finish(self.context.status, state, reason)
        if self.rank.leads:
            self.context.run.reserve.unlink(missing_ok=True)
        self.context.write_status()
        if self.rank.leads:
            LOG.info(f"run folder {self.context.run.root}: {state.value}")
        self._context = None
