"""Progress where there is no terminal."""

from __future__ import annotations

import io
import time
from collections.abc import Callable

import pytest
from rich.console import Console

from quantexp.analysis import chapter
from quantexp.analysis.chapter import progress_bar, working

#: Seconds after which a line is not coming.
LIMIT_S = 60.0


class Lines:
    """What a console without a terminal has printed."""

    def __init__(self) -> None:
        self.out = io.StringIO()
        self.console = Console(file=self.out)

    def wait_for(self, is_it: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not any(map(is_it, self.out.getvalue().splitlines())):
            assert time.monotonic() < deadline, self.out.getvalue()
            time.sleep(0.005)


def test_without_a_terminal_work_prints_lines_of_what_is_innermost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chapter, "LINE_S", 0.01)
    lines = Lines()
    with working("numerics", lines.console):
        lines.wait_for(lambda line: line == "numerics: 0s")
        with progress_bar("reading", 4, lines.console, "files") as advance:
            lines.wait_for(lambda line: line.startswith("reading: 0 of 4 files in "))
            advance()
            lines.wait_for(
                lambda line: line.startswith("reading: 1 of 4 files in ") and line.endswith("left")
            )
    printed = lines.out.getvalue()
    inner = printed[printed.index("reading: 0") : printed.rindex("reading: 1")]
    assert "numerics" not in inner
    time.sleep(0.05)
    assert lines.out.getvalue() == printed, "nothing after its end"
