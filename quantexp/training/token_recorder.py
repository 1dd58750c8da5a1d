"""Records the tokens of captured micro-batches: one of the ranks that share a micro-batch lists them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quantexp.capture.select.choice import takes_micro_batch
from quantexp.capture.select.rules import captured_iterations
from quantexp.capture.store.token_list import TokenList
from quantexp.model.layout import Layout
from quantexp.schema import CaptureLevel, Experiment

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor


class TokenRecorder:
    """Lists the tokens where a run captures values."""

    def __init__(
        self, experiment: Experiment, folder: Path, rank: int, text_of: Callable[[int], str]
    ) -> None:
        """Take a run; `text_of` is the text of a token id."""
        self._capture, self._training = experiment.capture, experiment.training
        self._layout = Layout.of(experiment)
        self._place = self._layout.place(rank)
        self._iterations = frozenset(captured_iterations(self._capture, self._training.iterations))
        self._list = TokenList(folder, rank, text_of)

    def add(self, iteration: int, index: int, tokens: Tensor) -> None:
        """List micro-batch `index` of this rank, ids [B, T], if its values are captured.

        Raises:
            CaptureError: the list cannot be written.
        """
        place = self._place
        is_first = place.tensor == place.context == place.pipeline == 0
        if not (is_first and self._is_captured(iteration, index)):
            return
        first = (iteration - 1) * self._training.global_batch_size
        first += (index * self._layout.data + place.data) * self._training.micro_batch_size
        samples = list(range(first, first + len(tokens)))
        self._list.add(iteration, index, place.data, samples, tokens.tolist())

    def _is_captured(self, iteration: int, index: int) -> bool:
        return (
            self._capture.level is CaptureLevel.tensors
            and iteration in self._iterations
            and takes_micro_batch(self._capture, index)
        )
