"""Writes the configured checkpoints; the training loop calls the saver after every iteration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantexp.model.checkpoints import PADDING, STATE, checkpoint_bytes, folder_of
from quantexp.model.safetensors import write_safetensors
from quantexp.runs.disk import writing
from quantexp.runs.status import Phase
from quantexp.training.context import RunContext

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from quantexp.training.megatron.callbacks import Saver


def make_saver(context: RunContext) -> Saver:
    """The saver of a rank. All ranks have the same model; only rank 0 writes it."""
    checkpoint, training = context.experiment.checkpoint, context.experiment.training

    def save(
        iteration: int, last: bool, chunks: list[GPTModel], state: Callable[[], dict[str, Any]]
    ) -> None:
        is_due = checkpoint.every is not None and iteration % checkpoint.every == 0
        if not context.rank.leads or not (is_due or (checkpoint.at_end and last)):
            return
        from quantexp.training.megatron.finite import require_finite, tensors_in
        from quantexp.training.megatron.model import DTYPES
        from quantexp.training.megatron.publish import save_published
        from quantexp.training.megatron.published_weights import padding_rows

        context.set_phase(Phase.SAVING)
        folder = folder_of(context.run, iteration)
        extra: dict[str, Callable[[Path], object]] = {}
        if padding := padding_rows(chunks[0], context.experiment.model):
            padding = dict(require_finite(padding.items(), folder))
            extra[PADDING] = lambda file: write_safetensors(file, padding, {})
        if checkpoint.optimizer:
            resumed = state()
            for _ in require_finite(tensors_in(resumed), folder):
                pass
            extra[STATE] = lambda file: save_state(resumed, file)
        with writing(folder, checkpoint_bytes(context.experiment)):
            save_published(
                chunks[0], context.experiment.model, DTYPES[training.precision], folder, extra=extra
            )
        context.set_phase(Phase.TRAINING)

    return save


def save_state(state: dict[str, Any], file: Path) -> None:
    """Write through Python's own file, whose error says that the disk is full, as torch's writer does not."""
    import torch

    with file.open("wb") as stream:
        torch.save(state, stream)
