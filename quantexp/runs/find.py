"""What DIR means on the command line: a folder of runs, one run, a sweep's list, or a submission to SLURM.

A name that is no path is looked for below the folder of runs, in its sweeps and in its submissions; of a run's name a
part is enough, where no other run's holds it: `FA_mxfp8-1a2b3c4d`, or `FA_mxfp8`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantexp.errors import RunError
from quantexp.folders import short_path
from quantexp.runs.paths import RunDir, RunsRoot, Submission
from quantexp.terminal.close_matches import did_you_mean, near

#: The name of a run that never had a folder.
UNNAMED = "-"
#: Runs of one part of a name that are listed.
_MOST_NAMES = 5


@dataclass(frozen=True)
class Missing:
    """A run that a sweep lists and that has no folder."""

    #: The folder's name, or what the run was to be.
    name: str
    reason: str
    #: The configuration that makes it, where the sweep's list has it.
    config: dict[str, Any] | None = None


@dataclass(frozen=True)
class Scope:
    """The runs that a command is about."""

    #: What DIR was, in words.
    about: str
    runs: tuple[RunDir, ...]
    missing: tuple[Missing, ...] = ()
    #: Of a sweep's runs, by name: those of a later stage wait for those of an earlier one.
    stages: Mapping[str, int] = field(default_factory=dict)


def scope(given: str | None, root: Path) -> Scope:
    """The runs behind DIR; without DIR all below `root`, none where there is no such folder.

    Raises:
        RunError: DIR is gone, or is none of what it may be.
    """
    if given is None:
        return Scope(str(root), tuple(runs_below(root)))
    path = _found(given, root)
    if path.is_file():
        return _sweep(path)
    if path.parent.name == "submissions":
        return _submission(path)
    if is_run(RunDir(path)):
        return Scope(str(path), (RunDir(path),))
    runs = tuple(runs_below(path))
    if not runs:
        raise RunError(
            f"{path} holds no runs: it must be a folder of runs, a run's folder, runs/sweeps/NAME.json or "
            "runs/submissions/NAME"
        )
    return Scope(str(path), runs)


def is_run(run: RunDir) -> bool:
    """Whether this is a run's folder."""
    return run.status.is_file() or run.config.is_file()


def runs_below(root: Path) -> list[RunDir]:
    """The run folders in a folder of runs, by name."""
    return [run for folder in sorted(root.glob("*-*")) if is_run(run := RunDir(folder))]


def find_run(given: str, root: Path) -> RunDir:
    """One run, by its path or by a part of its name that no other has.

    Raises:
        RunError: none, or several.
    """
    path = Path(given).expanduser().absolute()
    if path.is_dir() and is_run(RunDir(path)):
        return RunDir(path)
    run = _named(given, root)
    if run is None:
        raise RunError(
            f"RUN must be a run's folder or a part of its name, got {given!r}, and no run in {root} fits; "
            f"{_meant(given, root)}see quantexp status {root}"
        )
    return run


def existing_or_named(given: str, root: Path) -> str:
    """A path that is there, else the run or sweep below `root` that has this name or this part of it.

    Raises:
        RunError: nothing has this name, or it is a part of several runs' names.
    """
    return given if Path(given).expanduser().exists() else str(_found(given, root))


def _named(given: str, root: Path) -> RunDir | None:
    """The run whose name this is, or a part of; None where there is none."""
    runs = runs_below(root)
    fitting = [run for run in runs if run.root.name == given] or [
        run for run in runs if given in run.root.name
    ]
    if len(fitting) > 1:
        lines = [run.root.name for run in fitting[:_MOST_NAMES]]
        if more := len(fitting) - len(lines):
            lines.append(f"and {more} more")
        listed = "".join(f"\n  {line}" for line in lines)
        raise RunError(f"RUN must be a part of one run's name, got {given!r}, which fits{listed}")
    return fitting[0] if fitting else None


def _found(given: str, root: Path) -> Path:
    """The file or folder that is meant: a path, with or without .json, or a name below `root`."""
    place = _place(given, root)
    if place is not None:
        return place
    raise RunError(
        f"there is no run, sweep or folder {given}, and no run in {short_path(root)} has that in its name; "
        f"{_meant(given, root)}see quantexp list runs"
    )


def _meant(given: str, root: Path) -> str:
    """`did you mean FA_mxfp8? ` of a mistyped run; empty where no name is close.

    Ends of names are compared, with the hash and without.
    """
    names = [run.root.name for run in runs_below(root)]
    parts = [name.split("_") for full in names for name in (full, full.rpartition("-")[0])]
    ends = dict.fromkeys("_".join(part[i:]) for part in parts for i in range(len(part)))
    close = did_you_mean(near(Path(given).name, ends))
    return close and f"{close} "


def _place(given: str, root: Path) -> Path | None:
    shared = RunsRoot(root)
    for base in (Path.cwd(), root, shared.sweeps, shared.submissions):
        path = base / Path(given).expanduser()
        candidates = [path, *([path.with_name(f"{path.name}.json")] if path.name else [])]
        for candidate in candidates:
            if candidate.exists():
                return candidate.absolute()
    run = _named(given, root)
    return None if run is None else run.root


def _sweep(file: Path) -> Scope:
    entries = _listed(file, "a sweep's list of runs; give one of runs/sweeps/")
    if not all(isinstance(entry, dict) for entry in entries):
        raise RunError(f"{file} is not a sweep's list of runs; give one of runs/sweeps/")
    root = file.parent.parent
    unstarted = [e for e in entries if e.get("run") is None]
    missing = [
        Missing(UNNAMED, f"did not start: {e.get('reason')}", e.get("config")) for e in unstarted
    ]
    listed = {str(e["run"]): e for e in entries if e not in unstarted}
    found = _scope(file, [root / name for name in listed], missing)
    return replace(
        found,
        missing=tuple(
            replace(m, config=listed.get(m.name, {}).get("config")) for m in found.missing
        ),
        stages={name: int(e.get("stage", 0)) for name, e in listed.items()},
    )


def _submission(folder: Path) -> Scope:
    tasks = Submission(folder).tasks
    runs = _listed(tasks, "a submission's list of runs; give one of runs/submissions/")
    return _scope(folder, [Path(str(run)) for run in runs], [])


def _scope(about: Path, folders: list[Path], missing: list[Missing]) -> Scope:
    """The runs that are there, each once, and those that are gone."""
    runs = [RunDir(folder) for folder in dict.fromkeys(folders)]
    gone = [
        Missing(run.root.name, f"its folder is gone: {run.root}") for run in runs if not is_run(run)
    ]
    return Scope(str(about), tuple(run for run in runs if is_run(run)), (*gone, *missing))


def _listed(file: Path, what: str) -> list[Any]:
    try:
        runs = json.loads(file.read_text())["runs"]
    except FileNotFoundError as error:
        raise RunError(f"{file} is gone: {file.parent} is not {what}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{file} is not {what}") from error
    if not isinstance(runs, list):
        raise RunError(f"{file} is not {what}")
    return runs
