"""The record of a run's start."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from quantexp.runs.code_digest import code_digest
from quantexp.runs.provenance import LOOP, add_what_ran, checkout, command_line, provenance
from quantexp.runs.status import read_json, write_json


def test_provenance_of_a_checkout_names_the_commit() -> None:
    source = provenance({}, [], Path("0123"))["source"]
    assert source["snapshot"] == "0123"
    assert set(source) >= {"commit", "diff"}
    if (Path(__file__).parents[2] / ".git").exists():
        assert len(source["commit"] or "") == 40


def test_code_is_that_of_the_snapshot_or_else_of_this_process(tmp_path: Path) -> None:
    assert provenance({}, [], None)["code"] == code_digest()
    assert provenance({LOOP: {}}, [], None)["code"] != code_digest(), "that of another loop besides"
    (tmp_path / "quantexp" / "quant").mkdir(parents=True)
    (tmp_path / "quantexp" / "quant" / "one.py").write_text("X = 1\n")
    assert provenance({}, [], tmp_path)["code"] == code_digest(tmp_path / "quantexp")


def test_device_and_products_are_added_with_the_verification(tmp_path: Path) -> None:
    file = tmp_path / "provenance.json"
    write_json(file, {"command": ["quantexp"]})
    add_what_ran(file, "cpu", {"state": "not verified"})
    assert "products" not in read_json(file)["ran"]
    add_what_ran(file, "cpu", {"state": "not verified"}, products="fp32")
    content = read_json(file)
    assert content["ran"]["products"] == "fp32"
    assert set(content) == {"command", "ran", "verified"}
    assert content["ran"]["device"] == "cpu"
    assert content["verified"] == {"state": "not verified"}


def test_command_line_is_recorded_as_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/quantexp", "quant=glob(*)", "a b"])
    assert command_line() == ["quantexp", "quant=glob(*)", "a b"]


def test_uncommitted_changes_of_files_of_secrets_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        subprocess.run(command, check=True, capture_output=True)

    names = (".env", "a/prod.ENV", "a/server.pem", "a/b/id_rsa", "a/.aws/config", "a/b/source.py")
    git("init")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before\n")
    git("add", "-A")
    git("commit", "-m", "all")
    for name in names:
        (tmp_path / name).write_text(f"after in {name}\n")
    monkeypatch.setattr("quantexp.runs.provenance.__file__", str(tmp_path / "a/b/source.py"))
    diff = checkout.__wrapped__()["diff"]
    assert diff is not None
    assert [line for line in diff.splitlines() if line.startswith("+after")] == [
        "+after in a/b/source.py"
    ]
