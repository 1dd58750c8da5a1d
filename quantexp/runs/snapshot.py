"""The source snapshot of a run: a copy from the moment of submission, named by the hash of its content.

A run may start long after its submission (a queue, a sweep), and its processes import quantexp when they start. They
import it from this copy, so that edits, updates and checkouts in between change nothing. The copy holds quantexp, its
launchers, the shipped configuration, and the entry points by which it finds its extras: files of source
(`quantexp.runs.source_files`) that git does not ignore. Other packages are recorded by version only.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import quantexp
from quantexp.errors import RunError
from quantexp.folders import conf_dir
from quantexp.runs.disk import explanation
from quantexp.runs.paths import RunsRoot
from quantexp.runs.provenance import read_provenance
from quantexp.runs.source_files import ignored_by_git, is_source

#: The distribution of this project, and its packages that a run imports.
DISTRIBUTION = "quantexp"
PACKAGES = ("quantexp", "quantexp_launchers")
#: Hex digits of a snapshot's name.
DIGITS = 16
_LEFT_OUT = ("__pycache__",)

LOG = logging.getLogger(__name__)


@functools.cache
def take_snapshot(root: Path) -> Path:
    """The folder with a copy of the source that this process imported; copies it if there is none yet.

    A process takes one snapshot for each root and caches it, so all points of a sweep run the same source. Folders have
    mode 0700 and files 0400. Several processes may take the same snapshot at once. A snapshot that was changed is moved
    aside, with a warning, and taken again.

    Raises:
        RunError: the copy cannot be written.
    """
    files = dict(_files())
    folder = RunsRoot(root).snapshots / _digest(files)
    try:
        if folder.is_dir() and _is_whole(folder):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
        try:
            for name, file in files.items():
                target = scratch / name
                target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                shutil.copyfile(file, target)
                target.chmod(0o400)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        if not folder.is_dir():  # otherwise another process was faster
            error.filename = str(folder)
            words = explanation(error) or (
                f"{folder} cannot be written ({error.strerror}); set paths.root to another folder"
            )
            raise RunError(f"the source cannot be copied: {words}") from error
    return folder


def snapshot_name() -> str:
    """The name of a snapshot of the current source."""
    return _digest(dict(_files()))


def check_snapshot(folder: Path) -> None:
    """Refuse a snapshot that is missing or was changed.

    Raises:
        RunError: the snapshot is missing or was changed; the message says what to do.
    """
    if not folder.is_dir():
        raise RunError(
            f"the source this run was submitted with is gone from {folder}; submit the run again"
        )
    if (change := _change(folder)) is not None:
        raise RunError(
            f"the source this run was submitted with was changed in {folder} ({change}); submit the run again"
        )


def _change(folder: Path) -> str | None:
    """What was changed in a snapshot, in words; None if nothing was.

    Everything that Python could import instead of a source file counts: its caches of bytecode, and links.
    """
    files: dict[str, Path] = {}
    for parent, folders, names in os.walk(folder):
        for path in (Path(parent) / name for name in (*folders, *names)):
            name = str(path.relative_to(folder))
            if path.is_symlink() or (path.name in names and not path.is_file()):
                return f"{name} is a link, or no regular file"
            if path.name in _LEFT_OUT:
                return f"{name} was added, which Python imports instead of the source"
            if path.name in names:
                files[name] = path
    if _digest(files) != folder.name:
        return "a file has other content, is missing, or was added"
    return None


def _is_whole(folder: Path) -> bool:
    """Whether a snapshot is as it was taken; one that is not is moved aside."""
    change = _change(folder)
    if change is not None:
        aside = folder.with_name(f".changed-{folder.name}-{os.getpid()}")
        LOG.warning("%s was changed (%s): it is now %s, and is copied again", folder, change, aside)
        folder.rename(aside)
    return change is None


def require_snapshot(provenance: Path) -> None:
    """Refuse to run any other source than the one a run was submitted with.

    Raises:
        RunError: this process imported another quantexp than provenance.json names, or the snapshot was changed.
    """
    expected = read_provenance(provenance).get("source", {}).get("snapshot")
    imported = Path(quantexp.__file__).parent.parent
    if imported.name != expected:
        raise RunError(
            f"this run is for the source snapshot {expected}, and quantexp was imported from {imported}; start it with "
            "quantexp"
        )
    check_snapshot(imported)


def environment(snapshot: Path, *, inherit: bool = True) -> dict[str, str]:
    """Environment variables that make Python import quantexp from a snapshot, in any working directory.

    Args:
        snapshot: the folder that `take_snapshot` returned.
        inherit: append this process's own PYTHONPATH.
    """
    inherited = os.environ.get("PYTHONPATH") if inherit else None
    path = os.pathsep.join([str(snapshot), *([inherited] if inherited else [])])
    # Without PYTHONSAFEPATH the working directory, perhaps a checkout, would come first. Bytecode in the snapshot would
    # be imported instead of the source that its hash covers; a process compiles that in 0.1 to 0.4 s.
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def _files() -> Iterator[tuple[str, Path]]:
    """Pairs of a file's name in the snapshot (the layout of a wheel) and its source file."""
    folders = {name: _folder_of(name) for name in PACKAGES}
    if not (folders["quantexp"] / "conf").is_dir():
        folders["quantexp/conf"] = conf_dir()
    for name, folder in folders.items():
        ignored = ignored_by_git(folder)
        for file in sorted(folder.rglob("*")):
            inside = file.relative_to(folder)
            if not is_source(str(inside)) or file in ignored:
                continue
            if file.is_file() and not set(inside.parts) & set(_LEFT_OUT):
                yield f"{name}/{inside}", file
    yield from _metadata()


def _metadata() -> Iterator[tuple[str, Path]]:
    """What Python must know of the installed distribution; nothing of a source that is not installed."""
    try:
        own = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        return
    for name in ("METADATA", "entry_points.txt"):
        inside = f"{DISTRIBUTION}-{own.version}.dist-info/{name}"
        if (file := Path(str(own.locate_file(inside)))).is_file():
            yield inside, file


def _folder_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _digest(files: dict[str, Path]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:DIGITS]
