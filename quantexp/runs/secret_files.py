"""Files that a copy of the source leaves out: those that may hold secrets, and those that git ignores."""

from __future__ import annotations

import fnmatch
import os
import subprocess
from pathlib import Path

#: Patterns of file and folder names, in lower case.
SECRET_FILES = (
    ".env", ".env.*", "*.env", ".envrc", ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass",
    ".git-credentials", ".aws", ".ssh", ".gnupg", ".azure", ".gcloud", ".kube", "kubeconfig*",
    ".docker", ".huggingface", "id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key",
    "*.p12", "*.pfx", "*.jks", "*.ppk", "credentials", "credentials.*", "*.keystore", "*.kdbx",
    "*.ovpn", "secrets.*", "service-account*.json",
)  # fmt: skip


def may_hold_secrets(name: str) -> bool:
    """Whether a file of this relative name, or a folder in it, may hold secrets.

    A Python module is source, whatever its name: `credentials.py` may.
    """
    parts = name.lower().split("/")
    if parts[-1].endswith((".py", ".pyi")):
        parts.pop()
    return any(fnmatch.fnmatchcase(part, pattern) for part in parts for pattern in SECRET_FILES)


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
