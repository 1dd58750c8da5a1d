"""Records the tokens of captured micro-batches: one of the ranks that share a micro-batch lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quantexp.capture.select.choice import takes_micro_batch
from quantexp.capture.select.schedule import captured_iterations
from quantexp.capture.store.token_list import TokenList
from quantexp.model.layout import Layout, Place
from quantexp.schema import CaptureLevel, Experiment

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


def own_samples(
    experiment: Experiment, place: Place, iteration: int, index: int, count: int
) -> list[int] | None:
    """The samples, from 0 in the run's order, of a rank's micro-batch `index`; None if another rank lists them."""
    if not place.tensor == place.context == place.pipeline == 0:
        return None
    training, layout = experiment.training, Layout.of(experiment)
    first = (iteration - 1) * training.global_batch_size
    first += (index * layout.data + place.data) * training.micro_batch_size
    return list(range(first, first + count))


class TokenRecorder:
    """Lists the tokens where a run captures values."""

    def __init__(
        self, experiment: Experiment, folder: Path, rank: int, text_of: Callable[[int], str]
    ) -> None:
        """Take a run; `text_of` is the text of a token id."""
        self._experiment, self._capture = experiment, experiment.capture
        self._place = Layout.of(experiment).place(rank)
        iterations = captured_iterations(self._capture, experiment.training.last_iteration)
        self._iterations = frozenset(iterations)
        self._list = TokenList(folder, rank, text_of)

    def add(self, iteration: int, index: int, tokens: Tensor) -> None:
        """List micro-batch `index` of this rank, ids [B, T], if its values are captured.

        Raises:
            CaptureError: the list cannot be written.
        """
        if not self._is_captured(iteration, index):
            return
        samples = own_samples(self._experiment, self._place, iteration, index, len(tokens))
        if samples is not None:
            self._list.add(iteration, index, self._place.data, samples, tokens.tolist())

    def _is_captured(self, iteration: int, index: int) -> bool:
        return (
            self._capture.level is CaptureLevel.tensors
            and iteration in self._iterations
            and takes_micro_batch(self._capture, index)
        )
