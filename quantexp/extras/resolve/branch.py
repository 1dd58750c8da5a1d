"""One branch: a scheme trained from a checkpoint for some steps, and its loss on held-out text at each horizon.

The training is that of `quantexp.training.megatron.trainer`, and is proved as a run is: completely in the first step,
in drawn parts in all others and in each evaluation; the branch's folder has precision.json and metrics.jsonl. The
held-out loss is measured twice on the same text: with nothing quantised, and under the scheme.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quantexp.config.load import read
from quantexp.errors import DataError, EngagementError, QuantexpError
from quantexp.folders import cache_dir
from quantexp.memory.room import require_memory_here
from quantexp.model.layout import Layout
from quantexp.quant.precision import PrecisionMap, unquantised
from quantexp.runs.metrics import Metrics
from quantexp.runs.paths import RunDir
from quantexp.runs.status import Phase, State, finish, now
from quantexp.schema import Experiment
from quantexp.training.context import RunContext
from quantexp.training.observer import RunObserver

if TYPE_CHECKING:
    from quantexp.training.megatron.data_loader import Samples
    from quantexp.training.megatron.passes import Batch
    from quantexp.training.megatron.step import Stepper

#: The order of held-out text: one for all seeds, so that each unit has a stretch of its own.
_ORDER_SEED = 0


@dataclass(frozen=True)
class HeldOut:
    """A unit's stretch of the validation part, in sequences of `training.seq_length` tokens."""

    first: int
    number: int
    #: How many the whole design takes.
    in_all: int


@dataclass
class Measured:
    """The result of a branch; a loss that is not finite is None."""

    #: With nothing quantised, at each horizon, nats a token.
    working_loss: list[float | None] = field(default_factory=list)
    #: Under the scheme.
    scheme_loss: list[float | None] = field(default_factory=list)
    #: Steps that were left out, because they were not finite.
    skipped: int = 0
    #: Of the processor.
    cpu_s: float = 0.0
    #: Why the proof failed; None if the branch is proved.
    failure: str | None = None


def run_branch(run: RunDir, steps: Collection[int], held_out: HeldOut) -> Measured:
    """Train the experiment of a folder's config.yaml, and measure it after these numbers of steps.

    A proof that fails is a result: the branch has no losses then.

    Raises:
        DataError: weights or text are missing, or the text is too short.
        RunError: the branch does not fit into the memory there is, or left a weight that is not finite.
    """
    experiment = read(run.config)
    require_memory_here(experiment)
    begin = time.process_time()
    try:
        measured = _trained(run, experiment, steps, held_out)
    except EngagementError as error:
        measured = Measured(failure=str(error))
    measured.cpu_s = time.process_time() - begin
    return measured


def _trained(
    run: RunDir, experiment: Experiment, steps: Collection[int], held_out: HeldOut
) -> Measured:
    from quantexp.training.megatron.without_te import import_megatron

    import_megatron()
    from quantexp.training.megatron.data_loader import data_of, rank_batches
    from quantexp.training.megatron.session import session
    from quantexp.training.megatron.trainer import train

    context = RunContext(run, experiment)
    process = session(experiment.training, layout=Layout.of(experiment))
    with process as device, contextlib.redirect_stdout(sys.stderr):
        batches = rank_batches(experiment, context.rank, *data_of(experiment))
        text = _text(experiment, held_out)
        observer = RunObserver(context, device, batches.text_of)
        horizons = Horizons(experiment, steps, text, held_out, observer)
        with contextlib.closing(observer), _recorded(context):
            train(experiment, batches.train, observer, device, measure=horizons.measure)
            observer.finish()
    return horizons.measured


@contextlib.contextmanager
def _recorded(context: RunContext) -> Iterator[None]:
    """Record in status.json that the branch runs, and how it ends."""
    status = context.status
    status.state, status.started = State.RUNNING, now()
    status.iterations = context.experiment.training.last_iteration
    context.set_phase(Phase.TRAINING)
    try:
        yield
    except QuantexpError as error:
        finish(status, State.FAILED, str(error))
        raise
    else:
        finish(status, State.COMPLETED, "")
    finally:
        context.write_status()


def _text(experiment: Experiment, held_out: HeldOut) -> Samples:
    """The validation part in the order of all units.

    Raises:
        DataError: it is shorter than what the design takes.
    """
    from quantexp.training.megatron.data_loader import build_datasets, data_of, repeated_part

    dataset = experiment.dataset
    samples = build_datasets(
        *data_of(experiment),
        seq_length=experiment.training.seq_length,
        seed=_ORDER_SEED,
        num_samples_train=0,
        num_samples_valid=held_out.in_all,
        cache_dir=cache_dir(experiment.paths.cache),
        split=str(dataset.split),
        mask_documents=dataset.mask_documents,
        mask_eod_loss=dataset.mask_eod_loss,
    ).valid
    assert samples is not None
    if (part := repeated_part(samples)) is not None:
        length = experiment.training.seq_length
        raise DataError(
            f"the design takes {held_out.in_all:,} held-out sequences, {held_out.number:,} for each checkpoint, and "
            f"{part.dataset_path} has {part.samples_in_all:,} of {length} tokens: take fewer --tokens or checkpoints, "
            "or runs with more of dataset.split"
        )
    return samples


class Horizons:
    """Measures a branch in training; the model and its draws are left as they were."""

    def __init__(
        self,
        experiment: Experiment,
        steps: Collection[int],
        text: Samples,
        held_out: HeldOut,
        observer: RunObserver,
    ) -> None:
        start = experiment.first_iteration - 1 + experiment.training.held_iterations
        self._iterations = {start + step for step in steps}
        self._text, self._held_out, self._observer = text, held_out, observer
        self._training = experiment.training
        self.measured = Measured()

    def measure(self, stepper: Stepper, metrics: Metrics, declared: PrecisionMap) -> None:
        """Add the losses after a step, if it is at a horizon."""
        self.measured.skipped += metrics.skipped
        if metrics.iteration not in self._iterations:
            return
        observer, iteration = self._observer, metrics.iteration
        with observer.proof_of_evaluation(iteration, declared):
            loss = self._loss(stepper)
        self.measured.scheme_loss.append(loss)
        if any(module.is_quantised for module in declared.values()):
            working = unquantised(declared)
            stepper.set_precision(working)
            with observer.proof_of_evaluation(iteration, working, quantised=False):
                loss = self._loss(stepper)
            stepper.set_precision(declared)
        self.measured.working_loss.append(loss)

    def _loss(self, stepper: Stepper) -> float | None:
        loss = stepper.validation_loss(self._batches())
        return loss if math.isfinite(loss) else None

    def _batches(self) -> Iterator[Batch]:
        from quantexp.training.megatron.data_loader import batches

        all_after = batches(
            self._text,
            micro_batch_size=self._training.micro_batch_size,
            data_parallel_rank=0,
            data_parallel_size=1,
            start_sample=self._held_out.first,
        )
        number = self._held_out.number // self._training.micro_batch_size
        return itertools.islice(all_after, number)
