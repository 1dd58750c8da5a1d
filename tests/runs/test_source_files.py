"""The files that a copy of the source holds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import quantexp
from quantexp.folders import conf_dir
from quantexp.runs.source_files import ignored_by_git, is_source


@pytest.mark.parametrize(
    "name",
    [
        *(".env", "a/.env.local", "id_rsa", "a/id_ed25519.pub", "x.PEM", "x.key", "x.p12"),
        *(".netrc", ".aws/config", "b/.ssh/hosts.yaml", "kubeconfig", "credentials.json"),
        *("secrets.yaml", "my-token.yaml", "a/credentials.toml", "notes.txt", "data.bin", "a.pt"),
    ],
)
def test_other_files_and_names_of_secrets_are_left_out(name: str) -> None:
    assert not is_source(name)


@pytest.mark.parametrize(
    "name",
    ["keys.py", "credentials.py", "secrets.py", "tokens.yaml", "env.yaml", "a/environment.c"],
)
def test_source_and_configuration_stay(name: str) -> None:
    assert is_source(name)


def test_every_file_of_the_package_is_source() -> None:
    package = Path(quantexp.__file__).parent
    for folder in (package, conf_dir()):
        files = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
        assert [
            str(f) for f in files if "__pycache__" not in f.parts and not is_source(str(f))
        ] == []


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
