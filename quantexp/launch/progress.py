"""What a person sees while runs work: what each does now, its loss and the time left, read from its folder alone.

On a terminal that is a live line for each run, which keeps iteration, loss and time left however narrow it is.
Elsewhere there is a plain line for an iteration or for what else a run does, but not more than one in `LINE_S`, and
one in `REPEAT_S` while nothing changes.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quantexp.errors import RunError
from quantexp.runs.metrics import Speed, recent_metrics, speed_of
from quantexp.runs.paths import RunDir
from quantexp.runs.status import Phase, Status, read_status
from quantexp.terminal.fitted_table import Column, Shrink, fitted_table
from quantexp.terminal.units import clock, duration, human_bytes

#: Seconds between two lines about a run where there is no terminal.
LINE_S = 2.0
#: Seconds after which a line is said again of a run that still does the same.
REPEAT_S = 60.0
#: Seconds that an iteration takes before the time it has taken so far is shown.
_LONG_S = 5.0
_COLUMNS = (
    Column("run", shrink=Shrink.CUT_START),
    Column("iteration", is_number=True),
    Column("loss", is_number=True),
    Column("time left", is_number=True),
    Column("what it does", worth=4, shrink=Shrink.CUT_END, min_width=26),
    Column("tokens/s", worth=3, is_number=True),
    Column("captured", worth=2),
    Column("elapsed", worth=1, is_number=True),
)


@dataclass
class RunLine:
    """One run that goes on, as its line shows it."""

    name: str
    run: RunDir | None = None
    status: Status = field(default_factory=Status)
    loss: float | None = None
    speed: Speed = field(default_factory=Speed)
    #: When it began here, by the monotonic clock.
    began: float = field(default_factory=time.monotonic)
    #: When `PlainLines` last said something of it, and of what.
    said: tuple[float, object] = (-math.inf, None)
    _size: int = -1

    def update(self) -> None:
        """Bring it up to date with the folder."""
        if self.run is None:
            return
        with contextlib.suppress(RunError):  # the file is replaced by other versions of us too
            self.status = read_status(self.run.status) or self.status
        with contextlib.suppress(OSError):
            size = self.run.metrics.stat().st_size
            if size != self._size:
                metrics, self._size = recent_metrics(self.run), size
                self.loss = metrics[-1]["loss"] if metrics else None
                self.speed = speed_of(metrics)

    @property
    def iteration(self) -> str:
        """`3/8`; empty before the number of iterations is known."""
        status = self.status
        return f"{status.iteration}/{status.iterations}" if status.iterations else ""

    @property
    def loss_words(self) -> str:
        """`loss 3.5797`."""
        return "" if self.loss is None else f"loss {self.loss:.4f}"

    @property
    def left_words(self) -> str:
        """`12m left`."""
        left = time_left_s(self.status, self.speed)
        return "" if left is None else f"{duration(left)} left"

    @property
    def doing(self) -> str:
        """What it does now and for how long."""
        return activity(self.status) or ("starting" if self.status.finished is None else "ending")

    def cells(self) -> list[str | Text]:
        """The cells of its line on a terminal."""
        tokens = tokens_words(self.speed) if self.speed.tokens_per_s is not None else ""
        return [
            Text(self.name),
            self.iteration,
            self.loss_words,
            self.left_words,
            Text(self.doing, style="cyan"),
            tokens,
            captured_words(self.status.capture),
            clock(time.monotonic() - self.began),
        ]


def lines_table(lines: Sequence[RunLine], width: int) -> Table:
    """A line for each run, in at most `width` columns."""
    columns = [Column("", c.worth, c.shrink, c.is_number, c.min_width) for c in _COLUMNS]
    return fitted_table(columns, [line.cells() for line in lines], width).table


class PlainLines:
    """Says what runs do where there is no terminal: no control codes, no padding, one line at a time."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def update(self, line: RunLine, prefix: str = "") -> None:
        """Say a run's new iteration, or what else it does by now; nothing where a line was said just before."""
        status = line.status
        is_new_iteration = status.iteration > 0 and status.phase is Phase.TRAINING
        key = status.iteration if is_new_iteration else (status.phase, status.current_iteration)
        now, (said_at, said) = time.monotonic(), line.said
        pause_s = REPEAT_S if key == said else LINE_S
        if not status.phase or now - said_at < pause_s:
            return
        line.said = (now, key)
        words = [line.loss_words, line.left_words] if is_new_iteration else [activity(status)]
        tokens = tokens_words(line.speed) if is_new_iteration else ""
        at = f"iteration {status.iteration} of {status.iterations}" if is_new_iteration else ""
        self._say(prefix + ", ".join(filter(None, (at, *words, tokens))))


@contextlib.contextmanager
def live_line(run: RunDir, names: list[str], console: Console) -> Iterator[Callable[[], None]]:
    """Show a run while it works; yields the function that brings what is shown up to date.

    `names` are model, dataset and scheme; where they do not fit, the scheme alone is shown.
    """
    line = RunLine(" ".join(names) if console.width >= 140 else names[-1], run)
    if not console.is_terminal:
        plain = PlainLines(lambda words: console.print(words, soft_wrap=True, markup=False))

        def say() -> None:
            line.update()
            plain.update(line)

        yield say
        return
    with Live(
        get_renderable=lambda: lines_table([line], console.width),
        console=console,
        transient=True,
        refresh_per_second=4,
    ):
        yield line.update


def activity(status: Status) -> str:
    """What a run does now and for how long: `capturing iteration 1, micro-batch 3 of 4 for 2m`; empty at its end."""
    phase, iteration = status.phase, status.current_iteration
    seconds = _seconds_since(status.phase_since)
    if phase in (Phase.TRAINING, Phase.PROVING, Phase.CAPTURING) and iteration is not None:
        words = {Phase.CAPTURING: f"capturing iteration {iteration}"}.get(
            phase, f"iteration {iteration}"
        )
        if status.micro_batch is not None and (status.micro_batches or 1) > 1:
            words += f", micro-batch {status.micro_batch} of {status.micro_batches}"
        if phase is Phase.PROVING:
            words += ", proving the precision map"
        if phase is Phase.TRAINING and (seconds or 0.0) < _LONG_S:
            return "training"
    elif phase is Phase.WRITING:
        waiting = status.capture.get("queue_bytes")
        words = f"writing {human_bytes(waiting)}" if waiting else "writing"
    else:
        words = phase.value
    return f"{words} for {duration(seconds)}" if words and (seconds or 0.0) >= 1 else words


def _seconds_since(time_: str | None) -> float | None:
    if time_ is None:
        return None
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(time_)).total_seconds())


def time_left_s(status: Status, speed: Speed) -> float | None:
    """Seconds until the last iteration at the median time of one; None where nothing says it, and at the end."""
    left = status.iterations - status.iteration
    return left * speed.step_time_s if left > 0 and speed.step_time_s is not None else None


def tokens_words(speed: Speed) -> str:
    """`1,234 tokens/s`; `-` where nothing says it."""
    return "-" if speed.tokens_per_s is None else f"{speed.tokens_per_s:,.0f} tokens/s"


def captured_words(captured: Mapping[str, Any]) -> str:
    """What has been captured, what waits to be written and how fast that goes; empty where nothing is captured."""
    if captured.get("stopped"):
        return "capture stopped"
    if not captured.get("tensors"):
        return ""
    words = captured_size(captured["tensors"], captured["num_bytes"])
    if not captured.get("queue_bytes"):
        return words
    words += f", {human_bytes(captured['queue_bytes'])} wait"
    rate = captured.get("bytes_per_s")
    return f"{words}, {human_bytes(rate)}/s" if rate else words


def captured_size(num_tensors: int, num_bytes: int) -> str:
    """`64 tensors, 2.4 MB`, or `statistics of 64 tensors` where no values are kept."""
    if num_tensors and not num_bytes:
        return f"statistics of {num_tensors} tensors"
    return f"{num_tensors} tensors, {human_bytes(num_bytes)}"
