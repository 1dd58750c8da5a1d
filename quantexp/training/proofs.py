"""Writes precision.json: the proof of the last iteration that was watched, and those before it. Rank 0 alone writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from quantexp.errors import EngagementError
from quantexp.quant.outside_products import state_slots
from quantexp.runs.status import read_json, write_json
from quantexp.training.context import RunContext

if TYPE_CHECKING:
    from quantexp.proof.outside_products import StateWatch
    from quantexp.proof.verdict import Verdict
    from quantexp.quant.precision import PrecisionMap
    from quantexp.training.megatron.watched import Watched

#: Consecutive iterations without proof that fail the run; fp16 needs one for each halving of the loss scale.
MAX_PROOFS = 64


class Proofs:
    """The proofs of a run; every rank calls each method."""

    def __init__(self, context: RunContext) -> None:
        self._context, self._run = context, context.run
        self._proofs = _earlier_proofs(context)
        self._verdict: Verdict | None = None
        self._attempts = 0
        #: Whether the scheme rounds outside of products, which is added to each proof.
        self._is_more = bool(state_slots(context.experiment.quant))
        #: Whether an iteration is being watched.
        self.is_running = False
        #: Whether the last proof met values that were not finite, so that the next iteration must be watched, too.
        self.are_open = False

    @contextlib.contextmanager
    def of_products(
        self, watched: Watched, iteration: int, declared: PrecisionMap
    ) -> Iterator[None]:
        """Watch an iteration's matrix products and write the verdict; a mismatch ends the run."""
        from quantexp.proof.verdict import require

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
        """Add what was rounded outside of products to the proof; a step that was left out is proved by a later one."""
        from quantexp.proof.outside_products import merged_state
        from quantexp.proof.verdict import require
        from quantexp.training.megatron.collectives import gather

        assert self._verdict is not None
        state = merged_state(gather(watch.verdict() if stepped else watch.left_out()))
        self._verdict = replace(
            self._verdict,
            entries=self._verdict.entries + state.entries,
            failures=self._verdict.failures + state.failures,
        )
        self._proofs[-1] = self._verdict.record()
        self._write_proof()
        require(self._verdict)
        self._repeat_if_unproved(self._verdict)

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
