"""The state that products of a run need in any layout: random numbers, delayed scales, amaxes of divided operands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from quantexp.formats.types import Scaling
from quantexp.model.layout import Layout
from quantexp.quant.precision import declared_maps, distinct_slots
from quantexp.quant.step_state import StepState, use_step_state
from quantexp.quant.whole_amax import use_reduction
from quantexp.schema import Experiment
from quantexp.training.megatron.collectives import reduce_amax
from quantexp.training.megatron.operand_positions import Positions


@contextlib.contextmanager
def use_numerics(experiment: Experiment, *, weights_once: bool) -> Iterator[StepState]:
    """Quantise inside as the experiment's layout requires; `weights_once` is that of `StepState`."""
    layout = Layout.of(experiment)
    is_divided = layout.tensor * layout.context * layout.expert_tensor > 1
    state = StepState(experiment.training.seed, weights_once=weights_once)
    if is_divided:
        state.pieces_of = Positions(experiment, torch.distributed.get_rank())
    with (
        use_step_state(state),
        use_reduction(reduce_amax) if is_divided else contextlib.nullcontext(),
    ):
        yield state


def has_delayed_scales(experiment: Experiment) -> bool:
    """Whether any slot has a scale that follows the amaxes of earlier iterations."""
    return any(
        spec.scaling is Scaling.DELAYED
        for declared in declared_maps(experiment.model, experiment.quant)
        for slots in distinct_slots(declared)
        for spec in slots.values()
    )
