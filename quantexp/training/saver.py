"""Writes the configured checkpoints; the training loop calls the saver after every iteration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantexp.model.checkpoints import PADDING, STATE, checkpoint_bytes, folder_of, is_saved
from quantexp.model.huggingface.mapping import mapping
from quantexp.model.layout import Layout
from quantexp.model.safetensors import write_safetensors
from quantexp.runs.disk import writing
from quantexp.runs.status import Phase
from quantexp.training.context import RunContext

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from quantexp.training.megatron.callbacks import Saver
    from quantexp.training.megatron.gathering import WholeTensors


def make_saver(context: RunContext) -> Saver:
    """The saver of a rank. Rank 0 writes; the other ranks send it their parts, and fail with it."""
    checkpoint = context.experiment.checkpoint

    def save(
        iteration: int, last: bool, chunks: Sequence[GPTModel], state: Callable[[], dict[str, Any]]
    ) -> None:
        if not is_saved(checkpoint, iteration, last):
            return
        from quantexp.training.megatron.gathering import WholeTensors, lead_or_serve
        from quantexp.training.megatron.model import DTYPES

        experiment = context.experiment
        whole = WholeTensors.of(
            chunks,
            experiment.model,
            DTYPES[experiment.training.precision],
            Layout.of(experiment),
            context.rank.rank,
        )
        lead_or_serve(lambda: _write(context, iteration, whole, state), whole.send)

    return save


def _write(
    context: RunContext,
    iteration: int,
    whole: WholeTensors,
    state: Callable[[], dict[str, Any]],
) -> None:
    from quantexp.training.megatron.finite import require_finite, tensors_in
    from quantexp.training.megatron.publish import save_published

    context.set_phase(Phase.SAVING)
    folder, model = folder_of(context.run, iteration), context.experiment.model
    extra: dict[str, Callable[[Path], object]] = {}
    padding = [(each.name, whole.tensor(each.name)) for each in mapping(model) if each.padding]
    if padding:
        finite = dict(require_finite(padding, folder))
        extra[PADDING] = lambda file: write_safetensors(file, finite, {})
    if context.experiment.checkpoint.optimizer:
        resumed = state()
        for _ in require_finite(tensors_in(resumed), folder):
            pass
        extra[STATE] = lambda file: save_state(resumed, file)
    with writing(folder, checkpoint_bytes(context.experiment)):
        save_published(whole, model, folder, extra=extra)
    context.set_phase(Phase.TRAINING)


def save_state(state: dict[str, Any], file: Path) -> None:
    """Write through Python's own file, whose error says that the disk is full, as torch's writer does not."""
    import torch

    with file.open("wb") as stream:
        torch.save(state, stream)
