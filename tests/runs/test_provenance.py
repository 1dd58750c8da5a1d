"""What a run was started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.runs.provenance import add_what_ran, command_line, provenance
from quantexp.runs.status import read_json, write_json


def test_provenance_of_a_checkout_names_the_commit() -> None:
    source = provenance({}, [], Path("0123"))["source"]
    assert source["snapshot"] == "0123"
    assert set(source) >= {"commit", "diff"}
    if (Path(__file__).parents[2] / ".git").exists():
        assert len(source["commit"] or "") == 40


def test_what_ran_is_added_with_its_verification(tmp_path: Path) -> None:
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


def test_command_line_is_as_it_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/quantexp", "quant=glob(*)", "a b"])
    assert command_line() == ["quantexp", "quant=glob(*)", "a b"]
