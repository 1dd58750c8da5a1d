"""The design of a comparison of gradients: runs, checkpoints, arms, batches, and what is quantised alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantexp.errors import ConfigError
from quantexp.extras.resolve.design import Arm, Base, Branch, Unit, branch_of
from quantexp.extras.resolve.driving import Work
from quantexp.extras.resolve.gradient.results import Line
from quantexp.formats.types import Hadamard, Scaling
from quantexp.quant.precision import PrecisionMap, precision_map
from quantexp.quant.units import Unit as Slots
from quantexp.quant.units import aspects_of, units_of
from quantexp.runs.code_digest import DECIDING, code_digest
from quantexp.runs.status import now
from quantexp.schema import Experiment, LauncherConfig

#: Below a design's folder.
GRADIENTS = "gradients"
_OWN = tuple(f"extras/resolve/gradient/{name}.py" for name in ("errors", "estimates", "passes"))


@dataclass(frozen=True)
class GradientDesign:
    """A comparison; `arms` begin with the baseline."""

    folder: Path
    bases: tuple[Base, ...]
    checkpoints: tuple[int, ...]
    arms: tuple[Arm, ...]
    #: Of a checkpoint, each of a step's size; at least two.
    batches: int
    #: Of the random numbers of a batch.
    draws: int
    #: The aspects by which the parts of a scheme are quantised alone.
    by: tuple[str, ...]
    #: An arm of a checkpoint each; those of a checkpoint follow each other.
    branches: tuple[Branch, ...]
    code: str

    @property
    def against(self) -> str:
        """The name of the baseline."""
        return self.arms[0].name

    @property
    def launcher(self) -> LauncherConfig:
        """How the processes run."""
        return self.branches[0].experiment.launcher

    @property
    def tokens(self) -> int:
        """Of a checkpoint, all batches."""
        training = self.bases[0].experiment.training
        return self.batches * training.global_batch_size * training.seq_length

    def has(self, branch: Branch, results: Mapping[str, Line]) -> bool:
        """Whether an arm was measured, by the present code, with the same batches, draws and parts, and was proved."""
        line = results.get(branch.name)
        return (
            line is not None
            and line["failure"] is None
            and line["code"] == self.code
            and (line["batches"], line["draws"]) == (self.batches, self.draws)
            and tuple(line["by"]) == self.by
        )

    def num_passes(self, branch: Branch) -> int:
        """Passes over a batch, besides those in fp32."""
        declared = precision_map(*_scheme_of(branch))
        draws = self.draws if is_random(declared) else 1
        return self.batches * draws * (1 + len(parts_alone(branch.experiment, self.by)))


def gradient_design(
    folder: Path,
    bases: Sequence[Base],
    checkpoints: Sequence[int],
    arms: Sequence[Arm],
    batches: int,
    draws: int,
    by: Sequence[str],
    overrides: Sequence[str],
) -> GradientDesign:
    """The whole design; `overrides` (`launcher.key=value`) change how its processes run.

    Raises:
        ConfigError: an arm's scheme is none for these runs, or has delayed scales.
        DataError: a checkpoint or the data are missing.
    """
    branches = tuple(
        branch_of(folder / GRADIENTS, unit, arm, batches, origin)
        for base in bases
        for unit in [Unit(base, checkpoint, 0) for checkpoint in checkpoints]
        for origin in [unit.origin(overrides)]
        for arm in arms
    )
    for branch in branches[: len(arms)]:
        declared = precision_map(*_scheme_of(branch))
        if any(
            spec.scaling is Scaling.DELAYED for m in declared.values() for spec in m.slots.values()
        ):
            raise ConfigError(
                f"{branch.arm.name} scales by amaxes of earlier iterations, and a checkpoint of a run without it has "
                "none: leave it out; quantexp branch fills them as it trains"
            )
    digest = code_digest(parts=(*DECIDING, *_OWN))
    return GradientDesign(
        folder,
        tuple(bases),
        tuple(checkpoints),
        tuple(arms),
        batches,
        draws,
        tuple(by),
        branches,
        digest,
    )


def _scheme_of(branch: Branch) -> tuple[Any, Any, int]:
    experiment = branch.experiment
    return experiment.model, experiment.quant, experiment.first_iteration


def parts_alone(experiment: Experiment, by: Sequence[str]) -> dict[str, list[Slots]]:
    """What is turned off to quantise each part of a scheme alone; empty if there are not at least two parts."""
    aspects = aspects_of(by, "--by")
    declared = precision_map(experiment.model, experiment.quant, experiment.first_iteration)
    units = units_of([declared], aspects) if aspects else []
    if len(units) < 2:
        return {}
    return {str(unit): [other for other in units if other is not unit] for unit in units}


def is_random(declared: PrecisionMap) -> bool:
    """Whether a map's values depend on random numbers."""
    specs = (spec for module in declared.values() for spec in module.slots.values())
    return any(spec.draws or spec.hadamard is Hadamard.RANDOM for spec in specs)


def gradients_work(design: GradientDesign, missing: Sequence[Branch]) -> Work:
    """The arms of a design that are missing."""
    return Work(
        design.folder,
        GRADIENTS,
        design.launcher,
        missing,
        {
            "measure": "gradient",
            "batches": design.batches,
            "draws": design.draws,
            "by": list(design.by),
        },
        lambda branch: {"checkpoint": branch.unit.checkpoint},
        lambda branch, content: _line_of(design, branch, content),
        "arms",
    )


def _line_of(design: GradientDesign, branch: Branch, content: Mapping[str, Any]) -> dict[str, Any]:
    unit = branch.unit
    return {
        "branch": branch.name,
        "run": str(unit.base.run.root),
        "seed": unit.base.seed,
        "checkpoint": unit.checkpoint,
        "scheme": branch.arm.name,
        "batches": design.batches,
        "draws": design.draws,
        "by": list(design.by),
        "code": design.code,
        "time": now(),
        **{key: content[key] for key in ("parts", "groups", "signal", "cpu_s", "failure")},
    }
