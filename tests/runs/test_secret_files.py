"""The files that a copy of the source omits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from quantexp.runs.secret_files import ignored_by_git, may_hold_secrets


@pytest.mark.parametrize(
    "name",
    [
        *(
            ".env",
            "a/.env.local",
            "id_rsa",
            "a/id_ed25519.pub",
            "x.PEM",
            "x.key",
            "x.p12",
            ".netrc",
        ),
        *(".npmrc", ".aws/config", "b/.ssh/known_hosts", "kubeconfig", "credentials.json"),
    ],
)
def test_files_of_secrets_are_left_out(name: str) -> None:
    assert may_hold_secrets(name)


@pytest.mark.parametrize(
    "name", ["keys.py", "credentials.py", "secrets.py", "key.yaml", "env.yaml", "a/environment.py"]
)
def test_source_and_configuration_stay(name: str) -> None:
    assert not may_hold_secrets(name)


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)


def test_what_git_ignores_is_listed_unless_it_ignores_the_folder(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name in ("kept.py", "new.py", "notes.txt", "über.txt"):
        (package / name).write_text("")
    assert ignored_by_git(package) == frozenset()
    git(tmp_path, "init")
    (tmp_path / ".gitignore").write_text("*.txt\n")
    assert ignored_by_git(package) == {package / "notes.txt", package / "über.txt"}
    (tmp_path / ".gitignore").write_text("package/\n")
    assert ignored_by_git(package) == frozenset()


def test_without_git_nothing_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ignored_by_git(tmp_path) == frozenset()
