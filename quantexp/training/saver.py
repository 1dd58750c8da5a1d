"""Writes the configured checkpoints; the training loop calls the saver after every iteration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quantexp.model.checkpoints import PADDING, checkpoint_bytes, folder_of, is_saved
from quantexp.model.huggingface.mapping import mapping
from quantexp.model.layout import Layout
from quantexp.model.safetensors import write_safetensors
from quantexp.runs.disk import writing
from quantexp.runs.status import Phase
from quantexp.training.context import RunContext

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from quantexp.model.checkpoint_hashes import FileHash
    from quantexp.training.megatron.callbacks import Saver
    from quantexp.training.megatron.gathering import WholeTensors
    from quantexp.training.megatron.state_shards import RankState


def make_saver(context: RunContext) -> Saver:
    """The saver of a rank: rank 0 publishes the weights of all, each rank writes its part of the training state."""
    checkpoint = context.experiment.checkpoint

    def save(
        iteration: int, last: bool, chunks: Sequence[GPTModel], state: Callable[[], RankState]
    ) -> None:
        if not is_saved(checkpoint, iteration, last):
            return
        from quantexp.training.megatron.gathering import TOGETHER, WholeTensors, lead_or_serve
        from quantexp.training.megatron.model import DTYPES
        from quantexp.training.megatron.state_files import write_state

        experiment = context.experiment
        folder, layout = folder_of(context.run, iteration), Layout.of(experiment)
        dtype = DTYPES[experiment.training.precision]
        whole = WholeTensors.of(chunks, experiment.model, dtype, layout, context.rank.rank)

        def write_own() -> dict[str, FileHash]:
            return write_state(folder, iteration, layout, state())

        def serve(request: int) -> None:
            if request == TOGETHER:
                write_own()
            else:
                whole.send(request)

        lead_or_serve(lambda: _write(context, folder, whole, write_own), serve)

    return save


def _write(
    context: RunContext,
    folder: Path,
    whole: WholeTensors,
    write_own: Callable[[], dict[str, FileHash]],
) -> None:
    from quantexp.training.megatron.finite import require_finite
    from quantexp.training.megatron.gathering import TOGETHER, request_of
    from quantexp.training.megatron.publish import save_published

    context.set_phase(Phase.SAVING)
    model = context.experiment.model
    extra: dict[str, Callable[[Path], object]] = {}
    padding = [(each.name, whole.tensor(each.name)) for each in mapping(model) if each.padding]
    if padding:
        finite = dict(require_finite(padding, folder))
        extra[PADDING] = lambda file: write_safetensors(file, finite, {})

    def write_together() -> dict[str, FileHash]:
        request_of(TOGETHER)
        return write_own()

    state = write_together if context.experiment.checkpoint.optimizer else None
    with writing(folder, checkpoint_bytes(context.experiment)):
        save_published(whole, model, folder, extra=extra, state=state)
    context.set_phase(Phase.TRAINING)
