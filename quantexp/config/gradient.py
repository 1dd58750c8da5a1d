"""The gradient of one iteration under parts of a scheme (`gradient.only`, `quantexp bisect --gradient`)."""

from __future__ import annotations

from collections.abc import Sequence

from quantexp.config.evaluation import settings_of_training
from quantexp.errors import ConfigError
from quantexp.quant.precision import precision_map
from quantexp.quant.units import Unit, aspects_of, units_of
from quantexp.schema import Experiment


def check_gradient(experiment: Experiment) -> None:
    """Refuse keys without an effect on gradients, and more than the one iteration that they belong to.

    Raises:
        ConfigError: names key and value.
    """
    gradient, training = experiment.gradient, experiment.training
    aspects_of(gradient.by)
    if not gradient.only:
        if gradient.by:
            raise ConfigError(
                f"gradient.by={','.join(gradient.by)} belongs to quantexp bisect --gradient, and this run trains"
            )
        return
    if experiment.evaluate.only:
        raise ConfigError("gradient.only and evaluate.only are different runs; drop one of them")
    first = experiment.first_iteration
    if training.last_iteration != first:
        raise ConfigError(
            f"training.stop_after must be {first} with gradient.only=true, which is about one iteration, got "
            f"{training.stop_after}"
        )
    for setting in settings_of_training(experiment):
        raise ConfigError(f"{setting} has no effect on gradient.only, which trains nothing")


def units_compared(experiment: Experiment, iteration: int | None = None) -> list[Unit]:
    """The units that are quantised alone, and left out alone; empty without `gradient.by`.

    `iteration` is the one whose gradient is computed; None: the run's first.
    """
    aspects = aspects_of(experiment.gradient.by)
    if not aspects:
        return []
    first = experiment.first_iteration if iteration is None else iteration
    return units_of([precision_map(experiment.model, experiment.quant, first)], aspects)


def num_passes(units: Sequence[Unit]) -> int:
    """How often the passes of the iteration run: in bf16, under the scheme, and twice for each unit."""
    return 2 + 2 * len(units)
