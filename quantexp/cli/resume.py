"""`quantexp resume` and `quantexp retry`: start existing runs again with their own configuration.

resume takes what is missing or was interrupted: prepared and never started, cancelled, ended from outside, or listed by
a sweep and gone. retry takes what failed. What waits, runs or has completed is left alone. The configuration is the
run's own, so the run is the same; how it is launched, laid out and saved may be changed (`CHANGEABLE`). A run goes on
from its last whole checkpoint with a training state (`quantexp.launch.going_on`), in its folder also where the layout
is another one. Without such a checkpoint it begins at its first iteration, and what it had is kept in `attempts/`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from quantexp.cli.arguments import ledger_scope
from quantexp.cli.verbs import CHANGEABLE
from quantexp.config.launchers import check_launcher
from quantexp.config.load import from_plain, read, with_overrides
from quantexp.errors import ConfigError, RunError
from quantexp.folders import shell_word
from quantexp.launch.backend import Standing, launcher_of
from quantexp.launch.going_on import differs_in_layout_alone, is_recorded
from quantexp.launch.identity import folder_name, identity
from quantexp.launch.ledger.standing import settle, standings
from quantexp.launch.recorded import in_place, root_of
from quantexp.launch.refusal import Request, require_startable
from quantexp.model.checkpoints import next_iteration
from quantexp.runs.device import device_class
from quantexp.runs.find import UNNAMED, Missing, Scope, scope
from quantexp.runs.paths import RunDir
from quantexp.runs.status import State
from quantexp.schema import Experiment
from quantexp.schema.launcher import LOCAL
from quantexp.terminal.console import output_console

#: Which runs a verb is for.
Wanted = Callable[[Standing], bool]


@dataclass(frozen=True)
class Again:
    """A run to start again."""

    name: str
    experiment: Experiment
    #: Of a sweep: runs of a later stage wait for those of an earlier one.
    stage: int = 0


def run(arguments: argparse.Namespace) -> int:
    """Start the runs of resume or retry again; returns the exit code of the launch.

    Raises:
        QuantexpError: see `start_again`.
    """
    overrides = [word for word in arguments.words if _is_override(word)]
    arguments.words = [word for word in arguments.words if word not in overrides]
    root, named = ledger_scope(arguments)
    wanted = interrupted if arguments.verb == "resume" else failed
    return start_again(named, root, wanted, overrides, output_console())


def _is_override(word: str) -> bool:
    return "=" in word and not word.startswith("paths.root=") and not Path(word).exists()


def interrupted(standing: Standing) -> bool:
    """Whether a run was stopped from outside."""
    states = (State.PENDING, State.CANCELLED, State.PREEMPTED)
    return not standing.alive and standing.state in states


def failed(standing: Standing) -> bool:
    """Whether a run failed."""
    return not standing.alive and standing.state is State.FAILED


def start_again(
    word: str | None, root: Path, wanted: Wanted, overrides: list[str], console: Console
) -> int:
    """Start the wanted runs of a scope again with their configured launchers; returns the exit code.

    Raises:
        RunError: nothing to start, a run that is no longer the same, or one whose folder and configuration are gone.
        ConfigError: an override that is not the launcher's.
    """
    _require_changeable(overrides)
    where = scope(word, root)
    again = [
        replace(each, experiment=with_overrides(each.experiment, overrides))
        for each in _chosen(where, wanted)
    ]
    if not again:
        raise RunError(
            f"nothing to start again in {where.about}; see quantexp status {shell_word(where.about)}"
        )
    for each in again:
        check_launcher(each.experiment.launcher)
        _require_same(each)
    require_startable([Request(each.experiment) for each in again])
    console.print(_where(again), soft_wrap=True)
    return _launch(again, console)


def _where(again: Sequence[Again]) -> str:
    """How many runs go on, and how many start at their first iteration."""
    root = root_of(again[0].experiment)
    restarts = [each.experiment.training.restart for each in again]
    going_on = sum(
        not restart and next_iteration(RunDir(root / each.name)) > 1
        for each, restart in zip(again, restarts, strict=True)
    )
    new = len(again) - going_on
    parts = [
        f"{going_on} {'run goes' if going_on == 1 else 'runs go'} on from the last checkpoint",
        f"{new} {'run starts' if new == 1 else 'runs start'} at the first iteration",
    ]
    return ", ".join(part for part, count in zip(parts, (going_on, new), strict=True) if count)


def _chosen(where: Scope, wanted: Wanted) -> list[Again]:
    settled = [settle(each) for each in standings(where.runs)]
    again = [_recorded(each.run, where) for each in settled if wanted(each)]
    if wanted is interrupted:
        again += [_restored(missing, where) for missing in where.missing]
    return again


def _recorded(run: RunDir, where: Scope) -> Again:
    """A run with its own configuration, in the folder where it is now."""
    stage = where.stages.get(run.root.name, 0)
    if run.root.is_symlink():
        run = RunDir(run.root.resolve())
    return Again(run.root.name, in_place(read(run.config), run), stage)


def _restored(missing: Missing, where: Scope) -> Again:
    if missing.config is None:
        raise RunError(
            f"{missing.name} in {where.about} has neither a folder nor a configuration ({missing.reason}); start it "
            "anew"
        )
    experiment = from_plain(missing.config)
    if missing.root is not None:
        experiment = in_place(experiment, RunDir(missing.root / missing.name))
    return Again(missing.name, experiment, where.stages.get(missing.name, 0))


def _require_changeable(overrides: list[str]) -> None:
    for word in overrides:
        if not word.startswith(CHANGEABLE):
            raise ConfigError(
                f"{word} would make it another run; of a run that exists only launcher.KEY, parallel.KEY, "
                "checkpoint.KEY, memory, code and training.restart can be changed"
            )


def _require_same(again: Again) -> None:
    """Refuse a run whose data, device or numerics have changed: it would get another folder.

    One whose folder was renamed keeps it. One whose layout alone has changed does too, and goes on there.
    """
    experiment = again.experiment
    experiment.paths.run = None
    content = identity(experiment, device_class(experiment.launcher))
    name = folder_name(experiment, content)
    if again.name in (name, UNNAMED):
        return
    run = RunDir(root_of(experiment) / again.name)
    if not differs_in_layout_alone(content, run):
        raise RunError(
            f"{again.name} would be another run now ({name}): its data, device or the numerics changed; start it anew "
            "with quantexp"
        )
    if next_iteration(run) == 1 and not is_recorded(content, run):
        raise RunError(
            f"{again.name} has no checkpoint to go on from in another layout; start it anew with quantexp"
        )
    experiment.paths.run = again.name


def _launch(again: list[Again], console: Console) -> int:
    """Start the runs of each launcher; those of this machine last, because the command waits for them."""
    code = 0
    kinds = {each.experiment.launcher.kind for each in again}
    for kind in sorted(kinds, key=lambda kind: (kind == LOCAL, kind)):
        points = [(e.experiment, e.stage) for e in again if e.experiment.launcher.kind == kind]
        code = launcher_of(kind).submit(points, console, is_sweep=True) or code
    return code
