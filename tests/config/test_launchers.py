"""Finding launchers; tests/launchers/test_another_launcher.py adds one."""

from __future__ import annotations

import pytest

from quantexp.config import launchers
from quantexp.errors import ConfigError


def test_installation_older_than_the_source_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "entry_points", lambda group: ())
    words = r"installed before its source was updated, .*; install it again \(pip install -e \.\)"
    with pytest.raises(ConfigError, match=words):
        launchers.load_launcher.__wrapped__("local")
