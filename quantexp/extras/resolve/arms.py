"""The arms of a design: the schemes that the words compose, the baseline, and the controls.

chaos    the baseline from weights moved in last bits (`training.chaos`): what no experiment can repeat
noise    each scheme with the sign of every rounding error drawn anew: `noise` says how
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantexp.config.from_run import from_run
from quantexp.config.sweep.points import compose_points
from quantexp.errors import ConfigError
from quantexp.extras.resolve.design import Arm, Base
from quantexp.extras.resolve.noise import noisy
from quantexp.runs.paths import RunsRoot
from quantexp.schema import Experiment, QuantConfig

CHAOS, NOISE, NONE = "chaos", "noise", "none"
#: The baseline if `against=` names none.
BASELINE = "bf16"


def controls_of(text: str) -> tuple[str, ...]:
    """The controls of `--control A,B`.

    Raises:
        ConfigError: an unknown one.
    """
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in (CHAOS, NOISE, NONE):
            raise ConfigError(f"--control must be among chaos, noise, none, got {name!r}")
    if NONE in names and len(names) > 1:
        raise ConfigError(f"--control none stands alone, got {text}")
    return () if NONE in names else names


def arms_of(
    base: Base,
    checkpoint: int,
    words: Sequence[str],
    against: str,
    controls: Sequence[str],
    config_dir: Path | None,
    folder: Path,
) -> list[Arm]:
    """The arms, the baseline first; `folder` gets the formats of the control `noise`.

    Raises:
        ConfigError: a scheme cannot be for these runs, none is composed, or `against` is none of them.
    """
    start = f"{base.run.root}@{checkpoint}"
    model = [
        word
        for word in from_run(start, words, RunsRoot(base.run.root.parent).root)
        if not word.startswith("training.start_from=")
    ]
    schemes = _schemes([*model, *words], config_dir)
    if against == BASELINE and against not in schemes:
        schemes |= _schemes([*model, f"quant={BASELINE}"], config_dir)
    if against not in schemes:
        raise ConfigError(
            f"against={against}: no scheme of the words has this name; there are {', '.join(schemes)}"
        )
    baseline = Arm(against, schemes.pop(against))
    if not schemes:
        raise ConfigError(f"there is no scheme besides {against}: give quant=NAME")
    arms = [baseline, *(Arm(name, quant) for name, quant in schemes.items())]
    if CHAOS in controls:
        arms.append(Arm(f"{against} chaos", baseline.quant, CHAOS))
    if NOISE in controls:
        arms += [
            Arm(f"{name} noise", noisy(quant, base.experiment.model, checkpoint + 1, folder), NOISE)
            for name, quant in schemes.items()
        ]
    return arms


def _schemes(words: list[str], config_dir: Path | None) -> dict[str, QuantConfig]:
    """The schemes of a sweep by their names."""
    experiments: list[Experiment] = [p.experiment for p in compose_points(words, config_dir)]
    return {str(each.quant.name): each.quant for each in experiments}
