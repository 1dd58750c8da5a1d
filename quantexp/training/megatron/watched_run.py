"""What the proof watches of a run, and what it knows of it from its configuration and its checkpoint."""

from __future__ import annotations

from collections.abc import Container, Mapping

from megatron.core.models.gpt.gpt_model import GPTModel

from quantexp.config.start_point import StartPoint
from quantexp.model.training_state import MAIN, LossScale, StateIndex, read_index
from quantexp.proof.draws import Moment
from quantexp.proof.objective import Objective, Samples
from quantexp.proof.saved_state import Elements, drawn, num_other
from quantexp.runs.metrics import lines_before
from quantexp.training.context import RunContext
from quantexp.training.megatron.state_shards import Held
from quantexp.training.megatron.watched import Watched


def watched_of(
    context: RunContext,
    chunks: list[GPTModel],
    sample: Samples | None,
    held_out: Samples | None,
) -> Watched:
    """This rank's parts of the model of a run that begins or goes on; `sample` and `held_out` as in `Objective`."""
    experiment, start = context.experiment, context.start
    watched = Watched(chunks, experiment.training.seed, experiment.model, experiment.quant)
    if sample is not None:  # in quantexp's own loop; Megatron-LM's script has settings of its own
        watched.configured = experiment.model
    watched.objective = Objective.of(experiment, context.rank.rank, sample, held_out)
    watched.objective.num_routers = len(watched.routers)
    declaration = watched.declaration
    assert declaration is not None
    declaration.num_iterations = experiment.training.iterations
    for line in lines_before(context.run, start.iteration + 1) if start is not None else ():
        declaration.see(line)
    init_from = experiment.model.init_from
    if start is None and experiment.training.start_from is None and init_from is None:
        watched.expect_drawn(experiment, context.rank.rank)
    if start is not None and start.state.is_file():
        histories = read_index(start.state).amax_histories
        watched.histories.expect({name: h["amaxes"] for name, h in histories.items()})
    return watched


def drawn_elements(
    held: Mapping[str, Held], seed: int, iteration: int, moved: Container[str] = ()
) -> Elements:
    """Some elements of all that a rank holds after an iteration; `moved` as below."""
    chosen, seen = Moment(seed, iteration).choice("saved"), {}
    for name, each in held.items():
        if number := each.main.numel():
            at, tensors = drawn(number, chosen.random()), each.tensors()
            own = {kind: x for kind, x in tensors.items() if kind != MAIN or name not in moved}
            values = {kind: x.reshape(-1)[at].float().cpu().numpy() for kind, x in own.items()}
            seen[name] = each.piece, at, values
    return seen


def other_than_saved(
    start: StartPoint,
    index: StateIndex,
    held: Mapping[str, Held],
    scale: LossScale | None,
    seed: int,
    moved: Container[str],
) -> list[str]:
    """Which tensors of the training state a rank does not hold as a checkpoint has them.

    Args:
        start: the checkpoint.
        index: its state.json.
        held: what the rank holds, before the first step.
        scale: its loss scale, if it has one.
        seed: the run's, from which the compared elements follow.
        moved: parameters whose main weights `training.chaos` has moved.
    """
    files = [start.state.parent / file for file in index.files]
    wrong = num_other(files, drawn_elements(held, seed, start.iteration, moved))
    found = [
        f"{number} drawn elements of {name} are not those of the checkpoint"
        for name, number in wrong.items()
    ]
    if None not in (scale, index.loss_scale) and scale != index.loss_scale:
        found.append("the loss scale is not that of the checkpoint")
    return found
