"""Writes precision.json: the last complete proof, what was drawn and compared since, and the proofs before it.

Rank 0 alone writes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quantexp.errors import EngagementError
from quantexp.model.sizes import flops_per_iteration, num_micro_batches_each
from quantexp.quant.outside_products import state_slots
from quantexp.runs.status import read_json, write_json
from quantexp.training.context import RunContext

if TYPE_CHECKING:
    from quantexp.proof.drawn import DrawnChecks
    from quantexp.proof.objective import Objective
    from quantexp.proof.outside_products import StateWatch
    from quantexp.proof.updates import Used
    from quantexp.proof.verdict import Verdict
    from quantexp.quant.precision import ModuleId, PrecisionMap
    from quantexp.quant.sites import Slot
    from quantexp.training.megatron.watched import Watched

#: Consecutive iterations without proof that fail the run; fp16 needs one for each halving of the loss scale.
MAX_PROOFS = 64

#: When something was wrong, before `iteration N`.
EVALUATION = "in the evaluation after"

#: Iterations between two writes of what was drawn.
WRITTEN_EACH = 100


@dataclass
class Drawn:
    """What this rank has drawn and compared since the last complete proof."""

    iterations: int = 0
    evaluations: int = 0
    first: int = 0
    last: int = 0
    #: Elements.
    operands: int = 0
    products: int = 0
    slots: set[tuple[ModuleId, Slot]] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)

    def include(self, checks: DrawnChecks, iteration: int, *, evaluates: bool) -> None:
        """Add an iteration, or an evaluation."""
        self.first = self.first or iteration
        self.last = iteration
        self.iterations += not evaluates
        self.evaluations += evaluates
        self.operands += checks.operands
        self.products += checks.products
        self.slots |= checks.slots

    def record(self) -> dict[str, object]:
        """The entry of precision.json."""
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        return {**numbers, "slots": len(self.slots)}


class Proofs:
    """The proofs of a run; every rank calls each method."""

    def __init__(self, context: RunContext) -> None:
        from quantexp.proof.turns import number_of_looks

        self._context, self._run = context, context.run
        self._proofs = _earlier_proofs(context)
        self._verdict: Verdict | None = None
        self._drawn = Drawn()
        experiment = context.experiment
        training = experiment.training
        flops = flops_per_iteration(
            experiment.model, training.seq_length, training.global_batch_size
        )
        self._looks = number_of_looks(flops / context.rank.world_size)
        self._num_micro_batches = num_micro_batches_each(experiment)
        self._attempts = 0
        #: Whether the scheme rounds outside of products, which is added to each proof.
        self._is_more = bool(state_slots(context.experiment.quant))
        #: Whether an iteration is being watched.
        self.is_running = False
        #: What the last step used, and the losses of the evaluation after it, by the names of metrics.jsonl.
        self._used: dict[str, float | None] = {}
        #: Whether the last proof met values that were not finite, so that the next iteration must be watched, too.
        self.are_open = False

    @contextlib.contextmanager
    def of_products(
        self, watched: Watched, iteration: int, declared: PrecisionMap
    ) -> Iterator[None]:
        """Watch an iteration's matrix products and write the verdict; a mismatch ends the run."""
        from quantexp.proof.verdict import require

        self.write_drawn()
        self._drawn = Drawn()
        self.is_running = True
        with watched.proving(iteration, declared) as result_of_all:
            yield
        self.is_running = False
        self._verdict = result_of_all()
        self._proofs.append(self._verdict.record())
        self._write_proof()
        require(self._verdict)
        if not self._is_more:
            self._repeat_if_unproved(self._verdict)

    @contextlib.contextmanager
    def of_drawn(
        self,
        watched: Watched,
        iteration: int,
        declared: PrecisionMap,
        *,
        evaluates: bool = False,
        quantised: bool = True,
    ) -> Iterator[None]:
        """Check drawn parts of an iteration's products, or of an evaluation after it; a mismatch ends the run.

        `quantised`: under the scheme; otherwise the map must quantise nothing.
        """
        from quantexp.proof.drawn import DrawnChecks

        checks = DrawnChecks()
        looks, number = self._looks, self._num_micro_batches
        if evaluates:  # rare, and without backward products, whose turn it might be
            looks, number = max(1, looks), 0
        with watched.drawing(iteration, declared, checks, looks, number, quantised=quantised):
            yield
        self._conclude(checks, iteration, evaluates=evaluates)

    def _conclude(self, checks: DrawnChecks, iteration: int, *, evaluates: bool) -> None:
        from quantexp.proof.merging import named_in_order
        from quantexp.training.megatron.collectives import any_rank, gather

        drawn = self._drawn
        drawn.include(checks, iteration, evaluates=evaluates)
        failed = bool(checks.failures)
        if self._context.rank.world_size > 1:
            failed = any_rank(failed)
        when = EVALUATION if evaluates else "in"
        if failed:
            self._end(named_in_order(gather(checks.in_order())), iteration, when)
        elif iteration % WRITTEN_EACH == 0:
            self.write_drawn()

    def _end(self, named: list[str], iteration: int, when: str) -> None:
        """Write the failures of all ranks, and end the run."""
        from quantexp.proof.verdict import require_none

        self._drawn.failures = [f"{when} iteration {iteration}: {failure}" for failure in named]
        self.write_drawn()
        require_none(named, iteration, when)

    def write_drawn(self) -> None:
        """Write what was drawn and compared since the last proof; nothing if there was no proof."""
        if self._proofs and self._drawn.first:
            self._proofs[-1]["drawn"] = self._drawn.record()
            if self._drawn.failures:
                self._proofs[-1] |= {"proved": False, "failures": self._drawn.failures}
            self._write_proof()

    def _write_proof(self) -> None:
        """Write precision.json: the last proof, and those before it."""
        record = {
            "scheme": self._context.experiment.quant.name,
            **self._proofs[-1],
            "earlier": self._proofs[:-1],
        }
        if self._context.rank.leads:
            write_json(self._run.precision, record)

    def add_outside_products(self, watch: StateWatch, stepped: bool) -> None:
        """Add what was rounded outside of products to the proof; a step that was left out is proved by a later one.

        Of a watch that looks at one parameter alone, a failure ends the run.
        """
        from quantexp.proof.outside_products import merged_state
        from quantexp.proof.verdict import require
        from quantexp.training.megatron.collectives import gather

        state = merged_state(gather(watch.verdict() if stepped else watch.left_out()))
        if watch.only is not None:
            if state.failures:
                self._end(state.failures, watch.iteration, "in")
            return
        assert self._verdict is not None
        self._verdict = replace(
            self._verdict,
            entries=self._verdict.entries + state.entries,
            failures=self._verdict.failures + state.failures,
        )
        self._proofs[-1] = self._verdict.record()
        self._write_proof()
        require(self._verdict)
        self._repeat_if_unproved(self._verdict)

    def of_step(self, objective: Objective, iteration: int, used: Used, wrong: list[str]) -> None:
        """End the run if a step was wrong, or its loss; what it used must be in the line of metrics.jsonl."""
        self._used = dict(used)
        self._of_update(iteration, wrong)
        self._of_loss(objective, iteration, float(used["loss"] or 0.0), "in")

    def of_evaluation(
        self, objective: Objective, iteration: int, loss: float, wrong: list[str]
    ) -> None:
        """The same of an evaluation."""
        is_first = "validation_loss" not in self._used
        self._used["validation_loss" if is_first else "unquantised_loss"] = loss
        self._of_update(iteration, wrong)
        self._of_loss(objective, iteration, loss, EVALUATION)

    def of_line(self, iteration: int, text: str) -> None:
        """End the run before a line of metrics.jsonl is written that has other numbers; rank 0 alone calls this."""
        from quantexp.proof.updates import wrong_line

        lr = self._context.experiment.training.lr
        if words := wrong_line(json.loads(text), self._used, lr):
            self._end([words], iteration, "in")

    def _of_update(self, iteration: int, wrong: list[str]) -> None:
        """End the run if the optimizer's step was wrong on any rank."""
        from quantexp.proof.merging import named_failures
        from quantexp.training.megatron.collectives import any_rank, gather

        if any_rank(bool(wrong)):
            self._end(named_failures(gather(wrong)), iteration, "in")

    def _of_loss(self, objective: Objective, iteration: int, loss: float, when: str) -> None:
        """End the run if a loss that is written is not that of its tokens, as far as passes were watched."""
        from quantexp.training.megatron.collectives import any_rank, gather

        own = objective.taken()
        if any_rank(any(own[:-1])):
            seen, aux_loss = gather(own), self._used.get("aux_loss")
            wrong = objective.wrong_loss(loss, seen), objective.wrong_balance(aux_loss, seen)
            if any(wrong):
                self._end(list(filter(None, wrong)), iteration, when)

    def _repeat_if_unproved(self, result: Verdict) -> None:
        """Repeat a proof that met non-finite values (an fp16 loss scale overflowed), at most `MAX_PROOFS` times."""
        self.are_open = not result.proved
        self._attempts = self._attempts + 1 if self.are_open else 0
        if self._attempts >= MAX_PROOFS:
            raise EngagementError(
                f"the precision map could not be proved in {MAX_PROOFS} iterations: operands contain NaN or Inf. See "
                "precision.json"
            )


def _earlier_proofs(context: RunContext) -> list[dict[str, object]]:
    """The proofs of the iterations before the one that the run goes on with."""
    if context.start is None or not context.run.precision.exists():
        return []
    record = read_json(context.run.precision)
    del record["scheme"]
    proofs: list[dict[str, object]] = [*record.pop("earlier"), record]
    return [each for each in proofs if int(str(each["iteration"])) <= context.start.iteration]
