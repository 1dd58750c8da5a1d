"""provenance.json: what a run was started with. No environment variable is in it.

Versions, commit and uncommitted changes, the source's snapshot, host, command line, and what the run's hash covers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from quantexp import __version__
from quantexp.runs.status import now, read_json, write_json

#: Packages whose versions decide what runs.
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
#: A larger diff than this is cut, in bytes.
LARGEST_DIFF = 1 << 20


def provenance(
    content: dict[str, Any],
    command: list[str],
    snapshot: Path,
    source: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Versions, commit and diff, host, command line and what the run's hash covers; no environment variables.

    `source` is what `checkout` said of the source that the snapshot was taken of; None asks for it now.
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
    """Note in provenance.json where the run really runs and with what, which for a job need not be where it was sent.

    Args:
        file: the run's provenance.json.
        device: `cpu`, or the GPU's name.
        verified: what the certificates of `quantexp verify` say of the numerics that run there.
        products: how matrix products are made in the run's precision, in words; None says nothing.
    """
    ran = {"host": platform.node(), "device": device, "packages": versions(), "started": now()}
    ran |= {} if products is None else {"products": products}
    write_json(file, {**read_json(file), "ran": ran, "verified": verified})


def versions() -> dict[str, str | None]:
    """The installed version of every package that decides what runs."""
    return {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


@functools.cache
def checkout() -> dict[str, Any]:
    """Commit and uncommitted changes of quantexp's own source, where it is a git checkout; looked at once."""
    folder = Path(__file__).parents[2]
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
