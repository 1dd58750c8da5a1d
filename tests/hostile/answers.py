"""Runs a command in this process and checks that its answer is one of an end, whatever its words are."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantexp.cli.main import main
from quantexp.terminal.console import LONGEST_MESSAGE

#: Seconds of processor time after which a command counts as hung: the slowest one here takes two.
HUNG_AFTER_S = 30


class HungError(BaseException):
    """A command has used its processor time."""


@dataclass
class Answer:
    """What a command did."""

    code: int
    out: str
    err: str


@contextlib.contextmanager
def limited_time(seconds: float = HUNG_AFTER_S) -> Iterator[None]:
    """Raise `HungError` after so much processor time."""

    def stop(*_: object) -> None:
        raise HungError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def answer(words: Sequence[str]) -> Answer:
    """Run a command line; a hang or an exception of it is an assertion."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with limited_time():
                code = main([*words])
        except SystemExit as end:
            code = int(end.code or 0)
        except HungError:
            raise AssertionError(f"no answer after {HUNG_AFTER_S} s of processor time") from None
    return Answer(code, out.getvalue(), err.getvalue())


def check(answer: Answer, ends: Sequence[int] = (0, 1, 2)) -> None:
    """An error is one clean line of a bounded length, and no bug."""
    assert answer.code in ends, answer
    if answer.code == 0:
        return
    lines = answer.err.splitlines()
    assert len(lines) == 1, answer.err
    (line,) = lines
    assert line.startswith("quantexp: "), line
    assert len(line) < LONGEST_MESSAGE + 200
    assert "quantexp: unexpected " not in line, line
    assert "Traceback" not in line, line
    assert not any(ord(character) < ord(" ") for character in line), repr(line)


@dataclass
class Tally:
    """Cases by their class, and those that failed."""

    counts: dict[str, int] = field(default_factory=dict)
    accepted: int = 0
    failed: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def case(self, kind: str, what: Any) -> Iterator[None]:
        """Count a case; an assertion of it is kept, and the next case goes on."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        try:
            yield
        except AssertionError as error:
            self.failed.append(f"{kind}: {repr(what)[:300]}: {str(error)[:600]}")
            sys.stdout.write(f"failed: {self.failed[-1]}\n")

    def report(self) -> None:
        """Print the counts, and fail with the first failures."""
        sys.stdout.write(
            f"{sum(self.counts.values())} cases, {self.accepted} accepted: {self.counts}\n"
        )
        assert not self.failed, f"{len(self.failed)} failed:\n" + "\n".join(self.failed[:20])
