"""A run that compares gradients instead of training: one rank's share, its progress, and gradients.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quantexp.config.gradient import num_passes, units_compared
from quantexp.quant.precision import PrecisionMap, unquantised
from quantexp.quant.units import Unit
from quantexp.runs.disk import writing
from quantexp.runs.fencing import require_ours
from quantexp.runs.gradients import ALONE, SCHEME, WITHOUT, write_gradients
from quantexp.runs.status import Phase, now, write_json
from quantexp.schema import Experiment
from quantexp.training.context import RunContext
from quantexp.training.log import LOG
from quantexp.training.rank_session import rank_session

if TYPE_CHECKING:
    from quantexp.training.gradients import Compared, GradientComparison, RunPasses, Sums
    from quantexp.training.megatron.parameters import Part


def compare_gradients(context: RunContext) -> None:
    """Compare gradients of the run's first iteration in quantexp's own loop.

    Raises:
        EngagementError: a pass did not quantise exactly what was declared.
        DataError: weights or samples are missing.
    """
    experiment = context.experiment
    iteration = experiment.first_iteration
    with rank_session(context) as (device, batches):
        from quantexp.training.gradients import comparison_of
        from quantexp.training.megatron.model import scheme_spec
        from quantexp.training.megatron.numerics_state import use_numerics
        from quantexp.training.megatron.step import Stepper
        from quantexp.training.observer import RunObserver

        with use_numerics(experiment, weights_once=experiment.training.weight_cache) as state:
            observer = RunObserver(context, device, batches.text_of)
            spec = scheme_spec(experiment.model)
            stepper = Stepper(experiment, spec, device, observer, state)
            comparison = comparison_of(stepper, iteration, batches.train)
            context.set_phase(Phase.TRAINING)
            record_comparison(context, comparison, iteration)
    context.status.trained = now()
    context.write_status()


def compare_in_loop(
    context: RunContext,
    run_passes: RunPasses,
    parts: Mapping[str, Part],
    scale: float,
    iteration: int,
) -> None:
    """Compare gradients in another training loop: those that `run_passes` leaves in `parts`, multiplied by `scale`.

    Raises:
        EngagementError: as `compare_gradients`.
    """
    from quantexp.training.gradients import GradientComparison

    record_comparison(context, GradientComparison(run_passes, parts, scale), iteration)


def record_comparison(context: RunContext, comparison: GradientComparison, iteration: int) -> None:
    """Compute the gradient of an iteration in bf16, under the scheme, and under each part of it; write gradients.json.

    Raises:
        EngagementError: a pass did not quantise exactly what was declared.
    """
    experiment = context.experiment
    from quantexp.training.gradients import map_of

    declared = map_of(experiment, iteration)
    reference = comparison.reference(unquantised(declared))
    units = units_compared(experiment, iteration)
    passes: list[dict[str, Any]] = []
    for kind, unit, parts in _maps(experiment, declared, units, iteration):
        context.require_going()
        compared = comparison.compare(parts)
        passes.append(_record(kind, unit, compared))
        if context.rank.leads:
            LOG.info(f"pass {len(passes) + 1} of {num_passes(units)}: {_words(passes[-1])}")
            if kind == SCHEME:
                _write_scheme(context, iteration, compared)
    if context.rank.leads:
        require_ours(context.run)
        write_gradients(context.run, _content(experiment, iteration, reference, passes))
    context.status.iteration = iteration


def _maps(
    experiment: Experiment, declared: PrecisionMap, units: Sequence[Unit], iteration: int
) -> Iterator[tuple[str, str | None, PrecisionMap]]:
    """Kind, unit and map of each pass: the scheme, each unit alone, and all but each unit."""
    from quantexp.training.gradients import map_of

    yield SCHEME, None, declared
    for unit in units:
        others = [other for other in units if other is not unit]
        yield ALONE, str(unit), map_of(experiment, iteration, others)
        yield WITHOUT, str(unit), map_of(experiment, iteration, [unit])


def _write_scheme(context: RunContext, iteration: int, compared: Compared) -> None:
    """Write the proof of the scheme's pass, and the line of metrics.jsonl of the one iteration."""
    require_ours(context.run)
    scheme = {"scheme": context.experiment.quant.name}
    write_json(context.run.precision, {**scheme, **compared.verdict.record(), "earlier": []})
    line = {
        "iteration": iteration,
        "loss": _finite(compared.loss),
        "grad_norm": _finite(math.sqrt(compared.whole.own)),
        "time": now(),
    }
    text = json.dumps(line, allow_nan=False) + "\n"
    with writing(context.run.metrics, len(text)), context.run.metrics.open("a") as stream:
        stream.write(text)


def _record(kind: str, unit: str | None, compared: Compared) -> dict[str, Any]:
    return {
        "kind": kind,
        "unit": unit,
        "loss": _finite(compared.loss),
        "whole": _distance(compared.whole),
        "groups": [_distance(sums) for sums in compared.groups.values()],
    }


def _content(
    experiment: Experiment, iteration: int, reference: Compared, passes: list[dict[str, Any]]
) -> dict[str, Any]:
    """The content of gradients.json."""
    return {
        "iteration": iteration,
        "by": experiment.gradient.by,
        "bf16_loss": _finite(reference.loss),
        "bf16_norm": _finite(math.sqrt(reference.whole.reference)),
        "groups": list(reference.groups),
        "bf16_norms": [_finite(math.sqrt(sums.reference)) for sums in reference.groups.values()],
        "passes": passes,
    }


def _distance(sums: Sums) -> dict[str, float | None]:
    return {"cosine": _finite(sums.cosine), "distance": _finite(sums.distance)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _words(record: dict[str, Any]) -> str:
    """A pass in the log: `linear.fprop.x alone, distance to bf16 0.0123`."""
    distance = record["whole"]["distance"]
    what = "the scheme" if record["unit"] is None else f"{record['unit']} {record['kind']}"
    return (
        f"{what}, distance to bf16 {'not finite' if distance is None else format(distance, '.4g')}"
    )
