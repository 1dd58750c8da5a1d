"""The files that are copied from the source: those with the suffix of source, and no name of a secret."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path, PurePosixPath

from quantexp.runs.redaction import is_secret_name

#: Suffixes of the package's own files.
_SUFFIXES = frozenset(
    {
        *(".py", ".pyi", ".typed", ".c", ".h", ".yaml", ".toml", ".jsonl", ".xml", ".csv"),
        *(".html", ".css", ".js", ".bash", ".fish", ".zsh"),
    }
)


def is_source(name: str) -> bool:
    """Whether a file of this relative name may be copied; not a hidden one, nor one in a hidden folder.

    A Python module is source, whatever its name: `credentials.py` may.
    """
    path = PurePosixPath(name)
    if path.suffix not in _SUFFIXES or any(part.startswith(".") for part in path.parts):
        return False
    return path.suffix in (".py", ".pyi") or not is_secret_name(path.stem)


def ignored_by_git(folder: Path) -> frozenset[Path]:
    """The files below a folder that git ignores.

    There are none without git, outside a checkout, or if git ignores the folder itself: an installed package or a
    snapshot may lie in an ignored folder of any checkout.
    """
    if git_output(folder, "check-ignore", "--quiet", ".") is not None:
        return frozenset()
    listed = git_output(
        folder, "ls-files", "-z", "--others", "--ignored", "--exclude-standard", "--", "."
    )
    return frozenset(folder / name for name in (listed or "").split("\0") if name)


def git_output(folder: Path, *arguments: str) -> str | None:
    """What git prints; None if it fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        completed = subprocess.run(command, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return os.fsdecode(completed.stdout)
