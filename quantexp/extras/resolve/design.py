"""The design of a comparison by branches: runs, checkpoints, arms and horizons, and the branches that follow.

An arm is what a branch trains with: the baseline, a scheme, or a control. A unit is a checkpoint of a seed's run; all
its branches have the same weights, optimizer state, data, and held-out text.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantexp.config.in_force import sites_in_force
from quantexp.config.load import from_plain, plain
from quantexp.errors import ConfigError, RunError
from quantexp.extras.resolve.results import Line
from quantexp.launch.attempt import run_folder
from quantexp.launch.replays import Origin, origin_of, replayed, trained_experiment
from quantexp.model.checkpoints import resumable
from quantexp.runs.code_digest import DECIDING, code_digest
from quantexp.runs.device import device_class
from quantexp.runs.paths import RunDir
from quantexp.runs.provenance import read_provenance
from quantexp.schema import Experiment, LauncherConfig, QuantConfig

#: Below a design's folder.
BRANCHES = "branches"
#: Code that decides a branch's numbers, besides that of a run's.
_OWN = ("extras/resolve/branch.py", "extras/resolve/mirrored.py")


@dataclass(frozen=True)
class Arm:
    """What a branch trains with."""

    name: str
    quant: QuantConfig
    #: `chaos`, `noise`, or None for the baseline and a scheme.
    control: str | None = None


@dataclass(frozen=True)
class Base:
    """A run that branches begin from: one seed."""

    run: RunDir
    experiment: Experiment

    @property
    def seed(self) -> int:
        """The seed of weights and data."""
        return self.experiment.training.seed


@dataclass(frozen=True)
class Unit:
    """A checkpoint of a base, and its stretch of held-out text, in sequences."""

    base: Base
    checkpoint: int
    first_sequence: int

    def origin(self, overrides: Sequence[str]) -> Origin:
        """What its branches begin from; `overrides` change how they are launched.

        Raises:
            RunError: there is no such checkpoint, or it has no training state.
        """
        return origin_of(self.base.run, self.base.experiment, self.checkpoint, None, overrides)


@dataclass(frozen=True)
class Branch:
    """One arm of a unit."""

    unit: Unit
    arm: Arm
    experiment: Experiment
    #: Its folder; its name follows from all that decides the numbers of the training.
    run: RunDir

    @property
    def name(self) -> str:
        """The name in results.jsonl."""
        return self.run.root.name


@dataclass(frozen=True)
class Design:
    """A comparison; `arms` begin with the baseline."""

    folder: Path
    bases: tuple[Base, ...]
    checkpoints: tuple[int, ...]
    arms: tuple[Arm, ...]
    steps: tuple[int, ...]
    #: Held-out sequences of a unit.
    sequences: int
    branches: tuple[Branch, ...]
    code: str
    #: Steps before the others that fill the optimizer's moments alone.
    warm_up: int = 0

    @property
    def against(self) -> str:
        """The name of the baseline."""
        return self.arms[0].name

    @property
    def launcher(self) -> LauncherConfig:
        """How the processes of the branches run."""
        return self.branches[0].experiment.launcher

    @property
    def num_units(self) -> int:
        """Seeds times checkpoints."""
        return len(self.bases) * len(self.checkpoints)

    @property
    def sequences_in_all(self) -> int:
        """Of the validation part, up to the last one of a unit."""
        return max(each.unit.first_sequence for each in self.branches) + self.sequences

    @property
    def tokens(self) -> int:
        """Held-out tokens of a unit."""
        return self.sequences * self.bases[0].experiment.training.seq_length

    def has(self, branch: Branch, results: Mapping[str, Line]) -> bool:
        """Whether a branch has run, by the present code, at these horizons, on this text, and was proved."""
        line = results.get(branch.name)
        return (
            line is not None
            and line["failure"] is None
            and line["code"] == self.code
            and line["held_out"] == [branch.unit.first_sequence, self.sequences]
            and set(self.steps) <= set(line["steps"])
        )


def bases_of(runs: Sequence[RunDir]) -> tuple[Base, ...]:
    """The runs to branch from, in the order of their seeds.

    Of runs of several schemes those in bf16 are taken, and of perturbed ones (`training.chaos`) those that are not.

    Raises:
        RunError: runs differ in more than the seed, or not in it; one has several processes, or does not train.
    """
    bases = [Base(run, trained_experiment(run)) for run in runs]
    for is_wanted in (_quantises_nothing, _is_unperturbed):
        wanted = [base for base in bases if is_wanted(base)]
        bases = wanted or bases
    bases.sort(key=lambda base: base.seed)
    for base in bases:
        if base.experiment.launcher.num_processes > 1:
            raise RunError(
                f"{base.run.root.name} has {base.experiment.launcher.num_processes} processes, and a branch trains in "
                "one: launcher.num_processes=1 trains a run that it can go on from"
            )
    for one, other in itertools.pairwise(bases):
        _require_alike(one, other)
    return tuple(bases)


def _quantises_nothing(base: Base) -> bool:
    return not sites_in_force(base.experiment)


def _is_unperturbed(base: Base) -> bool:
    return not base.experiment.training.chaos


def _require_alike(one: Base, other: Base) -> None:
    names = f"{one.run.root.name} and {other.run.root.name}"
    if one.seed == other.seed:
        raise RunError(f"{names} both have training.seed={one.seed}: name one run for each seed")
    first, second = (read_provenance(base.run.provenance)["identity"] for base in (one, other))
    differing = sorted(
        key for key in {*first, *second} - {"training"} if first.get(key) != second.get(key)
    )
    trained, also = first["training"], second["training"]
    differing += sorted(
        f"training.{key}"
        for key in {*trained, *also} - {"seed"}
        if trained.get(key) != also.get(key)
    )
    if differing:
        raise RunError(
            f"{names} differ in {', '.join(differing)}: name runs that differ in the seed alone"
        )


def checkpoints_of(
    bases: Sequence[Base], asked: Sequence[int] | None, last_step: int, flag: str = "--steps"
) -> tuple[int, ...]:
    """The checkpoints that every run has with its training state, or those asked for; `flag` set the last step.

    Raises:
        RunError: a run lacks one, none is common, or the run ends before the last horizon.
    """
    common = set.intersection(*(set(resumable(base.run)) for base in bases))
    iterations = bases[0].experiment.training.iterations
    usable = sorted(i for i in common if i + last_step <= iterations)
    if asked is None:
        if not usable:
            raise RunError(
                f"no checkpoint with a training state that all {len(bases)} runs have is {last_step} iterations before "
                f"their end at {iterations} (checkpoint.every=N checkpoint.optimizer=true saves them): give fewer "
                f"{flag}, or other runs"
            )
        return tuple(usable)
    for iteration in asked:
        if iteration not in usable:
            shown = ", ".join(map(str, usable)) or "none"
            raise RunError(
                f"--from {iteration} must be a checkpoint with a training state in every run, {last_step} iterations "
                f"before its end at {iterations}; there is {shown}"
            )
    return tuple(sorted(set(asked)))


def units_of(
    bases: Sequence[Base],
    checkpoints: Sequence[int],
    sequences: int,
    results: Mapping[str, Line],
) -> Iterator[Unit]:
    """The units; each keeps the text that results have of it, and the others get what is free."""
    kept = {
        (line["seed"], line["checkpoint"]): line["held_out"][0]
        for line in results.values()
        if line["held_out"][1] == sequences
    }
    taken = set(kept.values())
    free = (first for index in range(1 << 30) if (first := index * sequences) not in taken)
    for base in bases:
        for checkpoint in checkpoints:
            own = kept.get((base.seed, checkpoint))
            yield Unit(base, checkpoint, next(free) if own is None else own)


def design_of(
    folder: Path,
    bases: Sequence[Base],
    checkpoints: Sequence[int],
    arms: Sequence[Arm],
    steps: Sequence[int],
    warm_up: int,
    tokens: int,
    overrides: Sequence[str],
    results: Mapping[str, Line],
) -> Design:
    """The whole design; `overrides` (`launcher.key=value`) change how branches run.

    Raises:
        ConfigError: an arm's scheme is none for these runs.
        DataError: a checkpoint or the data are missing.
    """
    training = bases[0].experiment.training
    micro = training.micro_batch_size
    sequences = -(-tokens // (training.seq_length * micro)) * micro
    branches = tuple(
        branch_of(folder / BRANCHES, unit, arm, max(steps), origin, warm_up)
        for unit in units_of(bases, checkpoints, sequences, results)
        for origin in [unit.origin(overrides)]
        for arm in arms
    )
    return Design(
        folder,
        tuple(bases),
        tuple(checkpoints),
        tuple(arms),
        tuple(sorted(set(steps))),
        sequences,
        branches,
        code_digest(parts=(*DECIDING, *_OWN)),
        warm_up,
    )


def branch_of(
    folder: Path,
    unit: Unit,
    arm: Arm,
    last_step: int,
    origin: Origin,
    warm_up: int = 0,
) -> Branch:
    """A branch of so many steps after its warm-up, whose folder is in `folder`, from the unit's origin.

    Raises:
        ConfigError: the arm's scheme is none for these runs.
        DataError: the checkpoint or the data are missing.
    """
    base = unit.base
    last = unit.checkpoint + warm_up + last_step
    experiment = replayed(origin, last, folder.absolute(), chaos=int(arm.control == "chaos"))
    experiment.quant = copy.deepcopy(arm.quant)
    experiment.training.held_iterations = warm_up
    try:
        experiment = from_plain(plain(experiment))
        if not experiment.launcher.is_local:
            raise ConfigError("branches run on this machine: add launcher.kind=local")
    except ConfigError as error:
        raise ConfigError(f"{arm.name} from {base.run.root.name}: {error}") from error
    return Branch(unit, arm, experiment, run_folder(experiment, device_class(experiment.launcher)))
