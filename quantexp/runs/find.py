"""Resolves DIR on the command line: a folder of runs, one run, a sweep's list, or a submission to SLURM.

A name that is not a path is looked up in the folder of runs, its sweeps and its submissions. A part of a run's name is
enough if it is unique: `FA_mxfp8-1a2b3c4d`, or `FA_mxfp8`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quantexp.errors import RunError, UnreadableError
from quantexp.folders import shell_word, short_path, user_path
from quantexp.runs.paths import SUBMISSIONS, RunDir, RunsRoot, Submission
from quantexp.runs.sweep_list import read_sweep, read_tasks
from quantexp.terminal.close_matches import did_you_mean, near

#: The name of a run that never had a folder.
UNNAMED = "-"
#: The folders that may be those of runs, whose names Megatron-LM's users choose.
FOLDERS = "[!.]*"
#: Runs of one part of a name that are listed.
_MOST_NAMES = 5


@dataclass(frozen=True)
class Missing:
    """A run that a sweep lists, without a folder."""

    #: The folder's name, or `UNNAMED`.
    name: str
    reason: str
    #: The configuration of the run, if the sweep's list has it.
    config: dict[str, Any] | None = None
    #: The folder of runs that it belongs to, if a sweep lists it.
    root: Path | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Scope:
    """The runs that a command works on."""

    #: DIR as shown to the user.
    about: str
    runs: tuple[RunDir, ...]
    missing: tuple[Missing, ...] = ()
    #: Run name -> stage of the sweep; runs of a later stage wait for those of an earlier one.
    stages: Mapping[str, int] = field(default_factory=dict)


def scope(name: str | None, root: Path) -> Scope:
    """The runs that DIR stands for; without DIR all runs in `root`, none if `root` does not exist.

    Raises:
        RunError: DIR does not exist, or is none of the four kinds.
    """
    if name is None:
        return Scope(str(root), tuple(runs_below(root)))
    path = _resolve(name, root)
    if path.is_file():
        return _sweep(path)
    if path.parent.name.startswith(SUBMISSIONS):
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
    return os.path.lexists(run.status) or os.path.lexists(run.config)


def runs_below(root: Path) -> list[RunDir]:
    """The run folders in a folder of runs, sorted by name."""
    folders = sorted(root.glob(FOLDERS), key=lambda folder: folder.name)
    return [run for folder in folders if is_run(run := RunDir(folder))]


def runs_named(name: str, root: Path) -> list[RunDir]:
    """The run in `root` with this name, or all that have it as a part of theirs."""
    runs = runs_below(root)
    return [run for run in runs if run.root.name == name] or [
        run for run in runs if name in run.root.name
    ]


def find_run(name: str, root: Path) -> RunDir:
    """The run with this path, this name or this unique part of a name.

    Raises:
        RunError: no run matches, or several do.
    """
    path = user_path(name).absolute()
    if path.is_dir() and is_run(RunDir(path)):
        return RunDir(path)
    run = _named(name, root)
    if run is None:
        raise RunError(
            f"RUN must be a run's folder or a part of its name, got {name!r}, and no run in {root} fits; "
            f"{_suggestion(name, root)}see quantexp status {shell_word(str(root))}"
        )
    return run


def existing_or_named(name: str, root: Path) -> str:
    """The path itself if it exists, else the run or sweep in `root` with this name or part of a name.

    Raises:
        RunError: nothing has this name, or it is a part of several runs' names.
    """
    return name if user_path(name).exists() else str(_resolve(name, root))


def _named(name: str, root: Path) -> RunDir | None:
    """The run with this name or this part of a name; None if no run matches.

    Raises:
        RunError: the part fits several runs.
    """
    matches = runs_named(name, root)
    if len(matches) > 1:
        lines = [run.root.name for run in matches[:_MOST_NAMES]]
        if more := len(matches) - len(lines):
            lines.append(f"and {more} more")
        raise RunError(f"RUN must be a part of one run's name, got {name!r}, which fits", lines)
    return matches[0] if matches else None


def _resolve(name: str, root: Path) -> Path:
    """The file or folder with this path or name, with or without .json.

    Raises:
        RunError: nothing matches.
    """
    path = _existing_path(name, root)
    if path is not None:
        return path
    raise RunError(
        f"there is no run, sweep or folder {name}, and no run in {short_path(root)} has that in its name; "
        f"{_suggestion(name, root)}see quantexp list runs"
    )


def _suggestion(name: str, root: Path) -> str:
    """`did you mean FA_mxfp8? ` for a mistyped run; empty if no name is close.

    The name is compared with the ends of the runs' names, with and without hash.
    """
    run_names = [run.root.name for run in runs_below(root)]
    parts = [name.split("_") for full in run_names for name in (full, full.rpartition("-")[0])]
    ends = dict.fromkeys("_".join(part[i:]) for part in parts for i in range(len(part)))
    close = did_you_mean(near(Path(name).name, ends))
    return close and f"{close} "


def _existing_path(name: str, root: Path) -> Path | None:
    shared = RunsRoot(root)
    for base in (Path.cwd(), root, shared.sweeps, shared.submissions):
        path = base / user_path(name)
        candidates = [path, *([path.with_name(f"{path.name}.json")] if path.name else [])]
        for candidate in candidates:
            if candidate.exists():
                return candidate.absolute()
    run = _named(name, root)
    return None if run is None else run.root


def _sweep(file: Path) -> Scope:
    try:
        entries = read_sweep(file)["runs"]
    except UnreadableError as error:
        what = "a sweep's list of runs; give one of runs/sweeps/"
        raise RunError(f"{file} is not {what} ({error})") from error
    root = file.parent.parent
    unstarted = [e for e in entries if e["run"] is None]
    missing = [
        Missing(UNNAMED, f"did not start: {e.get('reason')}", e.get("config"), root)
        for e in unstarted
    ]
    listed = {e["run"]: e for e in entries if e["run"] is not None}
    scope = _scope(file, [root / name for name in listed], missing)
    return replace(
        scope,
        missing=tuple(
            replace(m, config=listed[m.name].get("config"), root=root) if m.name in listed else m
            for m in scope.missing
        ),
        stages={name: e.get("stage", 0) for name, e in listed.items()},
    )


def _submission(folder: Path) -> Scope:
    submission = Submission(folder)
    what = "a submission's list of runs; give one of runs/submissions/"
    if submission.plan.is_file():
        name = folder.name
        raise RunError(
            f"{folder} has jobs of quantexp {name.partition('-')[0]}, which are no runs: that command shows them, "
            f"scancel --name={name} ends them, and their output is there"
        )
    if not os.path.lexists(submission.tasks):
        raise RunError(f"{submission.tasks} is gone: {folder} is not {what}")
    try:
        runs = read_tasks(submission)["runs"]
    except UnreadableError as error:
        raise RunError(f"{submission.tasks} is not {what} ({error})") from error
    root = folder.parent.parent  # the recorded paths are those before it was moved or copied
    return _scope(folder, [root / Path(run).name for run in runs], [])


def _scope(about: Path, folders: list[Path], missing: list[Missing]) -> Scope:
    """The scope of these folders without repeats; folders that no longer exist join `missing`."""
    runs = [RunDir(folder) for folder in dict.fromkeys(folders)]
    missing_folders = [
        Missing(run.root.name, f"its folder is gone: {run.root}") for run in runs if not is_run(run)
    ]
    return Scope(
        str(about), tuple(run for run in runs if is_run(run)), (*missing_folders, *missing)
    )
