"""provenance.json: versions, commit and uncommitted changes, source snapshot, host, command line, hashed content.

It holds no environment variables.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from quantexp import __version__
from quantexp.runs.status import now, read_json, write_json


class Source(TypedDict):
    """The state of quantexp's own source; None values if it is not a git checkout."""

    commit: str | None
    diff: str | None
    untracked: NotRequired[list[str]]
    #: The name of the snapshot's folder.
    snapshot: NotRequired[str]


class Ran(TypedDict):
    """The machine on which the last attempt ran."""

    host: str
    device: str
    packages: dict[str, str | None]
    started: str
    products: NotRequired[str]


class Provenance(TypedDict):
    """The content of provenance.json."""

    quantexp: str
    python: str
    packages: dict[str, str | None]
    source: Source
    host: str
    platform: str
    command: list[str]
    folder: str
    created: str
    #: The content that the run's hash covers.
    identity: dict[str, Any]
    ran: NotRequired[Ran]
    #: The verdict of `quantexp verify` on the numerics of the device.
    verified: NotRequired[dict[str, Any]]


#: Packages whose versions affect the run.
PACKAGES = (
    "torch",
    "megatron-core",
    "hydra-core",
    "omegaconf",
    "numpy",
    "submitit",
    "transformer-engine",
    "triton",
)
#: The longest recorded diff, in characters.
LARGEST_DIFF = 1 << 20


def provenance(
    content: dict[str, Any],
    command: list[str],
    snapshot: Path,
    source: Source | None = None,
) -> Provenance:
    """The content of provenance.json at the start of a run.

    Args:
        content: the content that the run's hash covers.
        command: the command line.
        snapshot: the folder of the source snapshot.
        source: `checkout()` at the time of the snapshot; None calls it now.
    """
    return {
        "quantexp": __version__,
        "python": platform.python_version(),
        "packages": versions(),
        "source": {**(source or checkout()), "snapshot": snapshot.name},
        "host": platform.node(),
        "platform": platform.platform(),
        "command": command,
        "folder": str(Path.cwd()),
        "created": now(),
        "identity": content,
    }


def add_what_ran(
    file: Path, device: str, verified: dict[str, Any], products: str | None = None
) -> None:
    """Add the actual host, device and versions to provenance.json; a job need not run where it was submitted.

    Args:
        file: the run's provenance.json.
        device: `cpu`, or the GPU's name.
        verified: the verdict of the certificates of `quantexp verify` on the numerics of this device.
        products: a description of the matrix products in the run's precision; None leaves the key out.
    """
    ran: Ran = {"host": platform.node(), "device": device, "packages": versions(), "started": now()}
    if products is not None:
        ran["products"] = products
    write_json(file, {**read_json(file), "ran": ran, "verified": verified})


def versions() -> dict[str, str | None]:
    """The installed version of each of `PACKAGES`; None if it is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


@functools.cache
def checkout() -> Source:
    """Commit and uncommitted changes of quantexp's source, read once; None values if it is not a git checkout."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return {"commit": None, "diff": None}
    diff = _git(folder, "diff", "HEAD")
    return {
        "commit": _git(folder, "rev-parse", "HEAD"),
        "diff": diff and diff[:LARGEST_DIFF],
        "untracked": (_git(folder, "ls-files", "--others", "--exclude-standard") or "").split(),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        completed = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip()


def command_line() -> list[str]:
    """The command as it was typed."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
