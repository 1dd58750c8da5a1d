"""Paths as users type them."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantexp.folders import user_path


def test_home_is_the_users_and_an_unknown_name_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/runs") == Path("/home/me/runs")
    assert user_path(Path("runs")) == Path("runs")
    assert user_path("~no-such-user/runs") == Path("~no-such-user/runs")
