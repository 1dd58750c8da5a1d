"""What a run was started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.provenance import command_line, provenance


def test_provenance_of_a_checkout_names_the_commit() -> None:
    source = provenance({}, [], Path("0123"))["source"]
    assert source["snapshot"] == "0123"
    assert set(source) >= {"commit", "diff"}
    if (Path(__file__).parent.parent / ".git").exists():
        assert len(source["commit"]) == 40


def test_command_line_is_as_it_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/quantexp", "quant=glob(*)", "a b"])
    assert command_line() == ["quantexp", "quant=glob(*)", "a b"]
