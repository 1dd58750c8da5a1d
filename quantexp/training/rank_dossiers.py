"""What a rank does for dossiers; the extra `forensics` writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from quantexp.extra import Service, required, service
from quantexp.runs.metrics import Metrics
from quantexp.training.context import RunContext

if TYPE_CHECKING:
    from torch import Tensor

    from quantexp.capture.record.recorder import Recorder


class RankDossiers(Protocol):
    """The ring and the dossiers of one rank."""

    @property
    def recorder(self) -> Recorder | None:
        """What takes tensors; None before something is to be taken."""

    @property
    def takes_values(self) -> bool:
        """Whether the values of the current iteration are taken."""

    def tokens(self, iteration: int, index: int, ids: Tensor) -> None:
        """Hold the tokens of a micro-batch, [B, T]."""

    def after(self, metrics: Metrics) -> None:
        """End an iteration; every rank calls this."""

    def close(self) -> None:
        """End the background work."""


class _None:
    """Without the extra: nothing is held, and no request is served."""

    recorder = None
    takes_values = False

    def tokens(self, iteration: int, index: int, ids: Tensor) -> None:
        """Hold nothing."""

    def after(self, metrics: Metrics) -> None:
        """Write nothing."""

    def close(self) -> None:
        """End nothing."""


def rank_dossiers(context: RunContext, text_of: Callable[[int], str]) -> RankDossiers:
    """The ring and the dossiers of a rank; `text_of` gives the text of a token's id.

    Raises:
        ConfigError: a ring is configured, and its extra is not installed.
    """
    ring = context.experiment.capture.ring
    if ring is None and service(Service.DOSSIERS) is None:
        return _None()
    dossiers: RankDossiers = required(Service.DOSSIERS, f"capture.ring={ring}")(context, text_of)
    return dossiers
