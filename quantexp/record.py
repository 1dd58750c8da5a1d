"""Opening a run folder: identity, attempts, provenance.

A folder belongs to one identity. What lies at its top is the newest attempt; before another one starts, the earlier
is moved whole into `attempts/N/` and never touched again. A lock (flock, released by any death of its holder) keeps
two processes out of one folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantexp import __version__
from quantexp.capture.choice import WEIGHT_GRADS, wanted
from quantexp.errors import ConfigError, RunError
from quantexp.identity import folder_name, identity
from quantexp.load import read, save
from quantexp.paths import RunDir
from quantexp.schema import CaptureConfig, CaptureLevel, Experiment
from quantexp.status import State, Status, now, read_status, write_json, write_status

#: Packages whose versions decide what runs.
PACKAGES = (
    "torch",
    "megatron-core",
    "hydra-core",
    "omegaconf",
    "numpy",
    "submitit",
    "transformer-engine",
)
#: What a run keeps free for its last status.
RESERVE_BYTES = 1 << 16
#: A larger diff than this is cut, in bytes.
LARGEST_DIFF = 1 << 20
_LEVELS = (CaptureLevel.off, CaptureLevel.stats, CaptureLevel.tensors)


@dataclass(frozen=True)
class Opened:
    """A run folder, and whether it needs to run at all."""

    run: RunDir
    #: Why nothing needs to run; None where a new attempt is ready.
    skipped: str | None = None
    #: Why a completed run of this identity runs again; None where that is not the case.
    notice: str | None = None


def root_of(experiment: Experiment) -> Path:
    """The folder of the run folders."""
    return Path(experiment.paths.root).expanduser().absolute()


@contextlib.contextmanager
def opened(
    experiment: Experiment, device_class: str, command: list[str]
) -> Iterator[tuple[Opened, int]]:
    """The experiment's run folder, ready for a new attempt and locked, with the lock's file descriptor.

    Raises:
        RunError: the folder cannot be written, or another process runs in it.
        DataError: data that is missing.
    """
    content = identity(experiment, device_class)
    run = RunDir(root_of(experiment) / folder_name(experiment, content))
    try:
        run.root.mkdir(parents=True, exist_ok=True)
        lock = os.open(run.lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _cannot_write(run, error) from error
    try:
        _lock(lock, run)
        skipped, notice = _skipped_or_noticed(experiment, run)
        if skipped is None:
            _prepare(experiment, run, content, command)
        yield Opened(run, skipped, notice), lock
    finally:
        os.close(lock)


def _cannot_write(run: RunDir, error: OSError) -> RunError:
    return RunError(
        f"the run folder {run.root} cannot be written: {error.strerror}; set paths.root to a folder that "
        "can"
    )


def _lock(lock: int, run: RunDir) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        status = None
        with contextlib.suppress(RunError):  # whatever it says, the folder is in use
            status = read_status(run.status)
        known = status is not None and status.pid is not None
        where = f"process {status.pid} on {status.host}" if status and known else "another process"
        raise RunError(f"{run.root} is in use by {where}; wait for it, or stop it first") from error


def _skipped_or_noticed(experiment: Experiment, run: RunDir) -> tuple[str | None, str | None]:
    """Why nothing needs to run; or, of a folder that looks as if nothing needed to, why it runs all the same."""
    try:
        skipped = _why_skipped(experiment, run)
        notice = None if skipped is None else _other_versions(run)
    except (RunError, KeyError, TypeError) as error:
        return None, f"an earlier attempt cannot be read ({error}): set aside, running again"
    return (None, notice) if notice is not None else (skipped, None)


def _why_skipped(experiment: Experiment, run: RunDir) -> str | None:
    status = read_status(run.status)
    if experiment.force or status is None or status.state is not State.COMPLETED:
        return None
    try:
        earlier = read(run.config)
    except ConfigError:
        return None
    if status.iteration < status.iterations and not experiment.capture.stop_after_capture:
        return None  # it ended with its capture, as it was asked to
    if not covers(earlier.capture, experiment.capture, experiment.training.iterations):
        return None
    if not _is_captured_there(run.captured(earlier.capture.dir), experiment.capture.level):
        return None
    return f"already completed {status.finished}, with all the capture asked for; force=true runs it again"


def _other_versions(run: RunDir) -> str | None:
    """What an earlier attempt ran with that is another version now."""
    then = read_json(run.provenance)
    before = {"quantexp": then["quantexp"], **then["packages"]}
    now_ = {"quantexp": __version__, **{name: _version(name) for name in PACKAGES}}
    changed = [
        f"{name} {before.get(name)} then, {version} now"
        for name, version in now_.items()
        if before.get(name) != version
    ]
    if not changed:
        return None
    return f"completed before with other versions ({'; '.join(changed)}): running again"


def covers(earlier: CaptureConfig, asked: CaptureConfig, iterations: int) -> bool:
    """Whether what an earlier attempt captured holds all that is asked now, in the same place."""

    def last(capture: CaptureConfig) -> int:
        end = capture.first_iteration + capture.control_iter - 1
        return iterations if capture.control_iter == 0 else min(end, iterations)

    if asked.level is CaptureLevel.off:
        return True
    whole = 1 << 62
    optional = ("attn_weights", *WEIGHT_GRADS)
    return (
        _LEVELS.index(earlier.level) >= _LEVELS.index(asked.level)
        and earlier.first_iteration <= asked.first_iteration
        and last(earlier) >= last(asked)
        and (earlier.collect_micro_batches or whole) >= (asked.collect_micro_batches or whole)
        and all(wanted(earlier, name) or not wanted(asked, name) for name in optional)
        and earlier.dir == asked.dir
    )


def _is_captured_there(tensors: Path, asked: CaptureLevel) -> bool:
    """Whether what an earlier attempt captured is still on disk."""
    if asked is CaptureLevel.off:
        return True
    if asked is CaptureLevel.stats:
        return (tensors / "statistics.jsonl").is_file()
    try:
        lines = (tensors / "manifest.jsonl").read_text().splitlines()
        return all((tensors / json.loads(line)["file"]).is_file() for line in lines)
    except (OSError, ValueError, KeyError):
        return False


def _prepare(
    experiment: Experiment, run: RunDir, content: dict[str, Any], command: list[str]
) -> None:
    captured = RunDir(run.captured(experiment.capture.dir).absolute())
    try:
        _set_aside([run] if captured.root == run.tensors else [run, captured])
        _write_new(experiment, run, content, command)
    except OSError as error:
        raise _cannot_write(run, error) from error


def _set_aside(places: list[RunDir]) -> None:
    """Move an earlier attempt, whatever it left in each place, into a folder of its own there."""
    left = {
        place: [p for p in place.root.iterdir() if p not in (place.attempts, place.lock)]
        for place in places
        if place.root.is_dir()
    }
    numbers = [int(p.name) for place in left for p in place.attempts.glob("[0-9]*")]
    number = str(max(numbers, default=0) + 1)
    for place, paths in left.items():
        for path in paths:
            (place.attempts / number).mkdir(parents=True, exist_ok=True)
            path.rename(place.attempts / number / path.name)


def _write_new(
    experiment: Experiment, run: RunDir, content: dict[str, Any], command: list[str]
) -> None:
    run.logs.mkdir()
    run.reserve.write_bytes(bytes(RESERVE_BYTES))
    save(experiment, run.config)
    write_json(run.provenance, provenance(content, command))
    status = Status(created=now(), iterations=experiment.training.iterations, host=platform.node())
    write_status(run.status, status)


def provenance(content: dict[str, Any], command: list[str]) -> dict[str, Any]:
    """Versions, commit and diff, host, command line and what the run's hash covers; no environment variables."""
    return {
        "quantexp": __version__,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "source": _source(Path(__file__).parent.parent),
        "host": platform.node(),
        "platform": platform.platform(),
        "command": command,
        "folder": str(Path.cwd()),
        "created": now(),
        "identity": content,
    }


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _source(folder: Path) -> dict[str, Any]:
    """Commit and uncommitted changes of quantexp's own source, where it is a git checkout."""
    if not (folder / ".git").exists():
        return {"commit": None, "diff": None}
    diff = _git(folder, "diff", "HEAD")
    return {
        "commit": _git(folder, "rev-parse", "HEAD"),
        "diff": diff and diff[:LARGEST_DIFF],
        "untracked": (_git(folder, "ls-files", "--others", "--exclude-standard") or "").split(),
    }


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def command_line() -> list[str]:
    """The command as it was typed."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]


def read_json(file: Path) -> Any:
    """A JSON file of a run folder.

    Raises:
        RunError: it is missing or broken.
    """
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{file} cannot be read: {error}") from error
