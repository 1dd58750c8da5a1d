"""An observer of the training loop that does nothing: the base of those of the benchmarks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantexp.runs.metrics import Metrics
    from quantexp.training.requests import Request


class IdleObserver:
    """Proves nothing, captures nothing and asks for nothing (see `quantexp.training.megatron.callbacks.Observer`)."""

    unproved = False

    def built(self, chunks: list[Any]) -> None:
        """Do nothing."""

    def proof(
        self, iteration: int, declared: Any, *, is_complete: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Prove nothing."""
        return contextlib.nullcontext()

    def proof_of_evaluation(
        self, iteration: int, declared: Any, *, quantised: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Prove nothing."""
        return contextlib.nullcontext()

    def outside_products(self, watch: Any, stepped: bool) -> None:
        """Do nothing."""

    def updated(self, iteration: int, used: Any, wrong: list[str]) -> None:
        """Do nothing."""

    def evaluated(self, iteration: int, loss: float, wrong: list[str]) -> None:
        """Do nothing."""

    def micro_batch(self, iteration: int, index: int, loss_scale: float | None) -> None:
        """Do nothing."""

    def tokens(self, iteration: int, index: int, tokens: object) -> None:
        """Do nothing."""

    def needs_gradients(self, iteration: int) -> bool:
        """They are not read."""
        return False

    def gradients(self, iteration: int, loss_scale: float | None) -> None:
        """Do nothing."""

    def evaluation(self) -> None:
        """Do nothing."""

    def request(self) -> Request:
        """Nothing is asked for."""
        from quantexp.training.requests import Request

        return Request.NONE

    def iteration(self, metrics: Metrics) -> bool:
        """Go on."""
        return True
