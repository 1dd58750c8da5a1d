"""What the training loop calls after every iteration: checkpoints, where the configuration asks for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantexp.errors import RunError
from quantexp.model.checkpoints import PADDING, STATE, folder_of
from quantexp.model.safetensors import write_safetensors
from quantexp.runs.status import Phase

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from quantexp.training.worker import Worker

#: Iteration, whether it is the last, the model, and what else training goes on with.
Saver = Callable[[int, bool, "GPTModel", Callable[[], dict[str, Any]]], None]


def saver_of(worker: Worker) -> Saver:
    """The saver of a rank; every rank has the same model, and rank 0 writes it."""
    asked, training = worker.experiment.checkpoint, worker.experiment.training

    def save(
        iteration: int, last: bool, gpt: GPTModel, state: Callable[[], dict[str, Any]]
    ) -> None:
        on_the_way = asked.every is not None and iteration % asked.every == 0
        if not worker.rank.leads or not (on_the_way or (asked.at_end and last)):
            return
        import torch

        from quantexp.training.megatron.model import DTYPES
        from quantexp.training.megatron.publish import save_published
        from quantexp.training.megatron.published_weights import padding_rows

        worker.tell(Phase.SAVING)
        folder = folder_of(worker.folder, iteration)
        more: dict[str, Callable[[Path], None]] = {}
        if padding := padding_rows(gpt, worker.experiment.model):
            more[PADDING] = lambda file: write_safetensors(file, padding, {})
        if asked.optimizer:
            more[STATE] = lambda file: torch.save(state(), file)
        try:
            save_published(
                gpt, worker.experiment.model, DTYPES[training.precision], folder, more=more
            )
        except OSError as error:
            raise RunError(
                f"{folder} cannot be written ({error.strerror}); make room, or set paths.root to another disk"
            ) from error
        worker.tell(Phase.TRAINING)

    return save
