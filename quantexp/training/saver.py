"""What the training loop calls after every iteration: checkpoints, where the configuration asks for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantexp.errors import RunError
from quantexp.model.checkpoints import PADDING, STATE, folder_of
from quantexp.model.safetensors import write_safetensors
from quantexp.runs.status import Phase
from quantexp.training.context import RunContext

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from quantexp.training.megatron.callbacks import Saver


def saver_of(context: RunContext) -> Saver:
    """The saver of a rank; every rank has the same model, and rank 0 writes it."""
    asked, training = context.experiment.checkpoint, context.experiment.training

    def save(
        iteration: int, last: bool, gpt: GPTModel, state: Callable[[], dict[str, Any]]
    ) -> None:
        on_the_way = asked.every is not None and iteration % asked.every == 0
        if not context.rank.leads or not (on_the_way or (asked.at_end and last)):
            return
        import torch

        from quantexp.training.megatron.model import DTYPES
        from quantexp.training.megatron.publish import save_published
        from quantexp.training.megatron.published_weights import padding_rows

        context.tell(Phase.SAVING)
        folder = folder_of(context.run, iteration)
        more: dict[str, Callable[[Path], object]] = {}
        if padding := padding_rows(gpt, context.experiment.model):
            more[PADDING] = lambda file: write_safetensors(file, padding, {})
        if asked.optimizer:
            more[STATE] = lambda file: torch.save(state(), file)
        try:
            save_published(
                gpt, context.experiment.model, DTYPES[training.precision], folder, more=more
            )
        except OSError as error:
            raise RunError(
                f"{folder} cannot be written ({error.strerror}); make room, or set paths.root to another disk"
            ) from error
        context.tell(Phase.TRAINING)

    return save
