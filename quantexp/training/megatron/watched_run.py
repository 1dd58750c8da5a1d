"""What the proof watches of a run, and what it knows of it from its configuration and its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from quantexp.model.training_state import read_index
from quantexp.proof.objective import Objective
from quantexp.runs.metrics import lines_before
from quantexp.training.context import RunContext
from quantexp.training.megatron.watched import Watched


def watched_of(
    context: RunContext,
    chunks: list[GPTModel],
    sample: Callable[[int], Mapping[str, Tensor]] | None,
) -> Watched:
    """This rank's parts of the model of a run that begins or goes on; `sample` as in `Objective`."""
    experiment, start = context.experiment, context.start
    watched = Watched(chunks, experiment.training.seed, experiment.model, experiment.quant)
    watched.objective = Objective.of(experiment, sample)
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
