"""The progress of running runs: current phase, loss and time left, read from the run folders alone.

A terminal shows a live line for each run, which keeps iteration, loss and time left at any width. Without a terminal,
each new iteration or phase prints a plain line, at most one every `LINE_S` seconds, and one every `REPEAT_S` seconds
while nothing changes.
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

from quantexp.errors import RunError, UnreadableError
from quantexp.quant.label import describe_format
from quantexp.quant.slots import WORKING
from quantexp.runs.metrics import Speed, latest
from quantexp.runs.paths import RunDir
from quantexp.runs.status import Phase, Status, instant, read_status
from quantexp.schema import Precision
from quantexp.terminal.console import plain
from quantexp.terminal.fitted_table import Column, Shrink, fitted_table
from quantexp.terminal.units import clock, duration, human_bytes

#: Iterations with a dossier that are listed.
_MOST_DOSSIERS = 3
#: Minimum seconds between two plain lines about a run.
LINE_S = 2.0
#: Seconds after which the line of an unchanged run is printed again.
REPEAT_S = 60.0
#: Seconds after which the elapsed time of an iteration is shown.
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
    """The state of one running run, as its line shows it."""

    name: str
    run: RunDir | None = None
    status: Status = field(default_factory=Status)
    loss: float | None = None
    speed: Speed = field(default_factory=Speed)
    #: When the run started, by the monotonic clock.
    began: float = field(default_factory=time.monotonic)
    #: When `PlainLines` last printed a line of this run, and the key of that line.
    last_printed: tuple[float, object] = (-math.inf, None)
    _size: int = -1

    def update(self) -> None:
        """Read status and metrics from the folder."""
        if self.run is None:
            return
        with contextlib.suppress(RunError):  # another version of quantexp may have written the file
            self.status = read_status(self.run.status) or self.status
        with contextlib.suppress(OSError, UnreadableError):
            size = self.run.metrics.stat().st_size
            if size != self._size:
                metrics, self._size = latest(self.run), size
                self.loss = None if metrics.line is None else metrics.line["loss"]
                self.speed = metrics.speed

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
        """The current activity and its duration."""
        return activity(self.status) or ("starting" if self.status.finished is None else "ending")

    def cells(self) -> list[str | Text]:
        """The cells of the run's line on a terminal."""
        tokens = tokens_words(self.speed) if self.speed.tokens_per_s is not None else ""
        return [
            plain(self.name),
            self.iteration,
            self.loss_words,
            self.left_words,
            plain(self.doing, "cyan"),
            tokens,
            captured_words(self.status.capture),
            clock(time.monotonic() - self.began),
        ]


def lines_table(lines: Sequence[RunLine], width: int) -> Table:
    """A table with one line for each run, at most `width` characters wide."""
    columns = [Column("", c.worth, c.shrink, c.is_number, c.min_width) for c in _COLUMNS]
    return fitted_table(columns, [line.cells() for line in lines], width).table


class PlainLines:
    """Prints progress without a terminal: no control codes, no padding, one line at a time."""

    def __init__(self, write_line: Callable[[str], None]) -> None:
        self._write_line = write_line

    def update(self, line: RunLine, prefix: str = "") -> None:
        """Print a run's new iteration or phase, unless a line was printed just before."""
        status = line.status
        is_new_iteration = status.iteration > 0 and (
            status.phase is Phase.TRAINING or evaluates_only(status)
        )
        key = status.iteration if is_new_iteration else (status.phase, status.current_iteration)
        now, (printed_at, printed_key) = time.monotonic(), line.last_printed
        pause_s = REPEAT_S if key == printed_key else LINE_S
        if not status.phase or now - printed_at < pause_s:
            return
        line.last_printed = (now, key)
        words = [line.loss_words, line.left_words] if is_new_iteration else [activity(status)]
        tokens = tokens_words(line.speed) if is_new_iteration else ""
        at = f"iteration {status.iteration} of {status.iterations}" if is_new_iteration else ""
        self._write_line(prefix + ", ".join(filter(None, (at, *words, tokens))))


@contextlib.contextmanager
def live_line(run: RunDir, names: list[str], console: Console) -> Iterator[Callable[[], None]]:
    """Show the progress of a run; yields the function that refreshes it.

    `names` are model, dataset and scheme; on a narrow console only the scheme is shown.
    """
    line = RunLine(" ".join(names) if console.width >= 140 else names[-1], run)
    if not console.is_terminal:
        plain = PlainLines(lambda words: console.print(words, soft_wrap=True, markup=False))

        def print_progress() -> None:
            line.update()
            plain.update(line)

        yield print_progress
        return
    with Live(
        get_renderable=lambda: lines_table([line], console.width),
        console=console,
        transient=True,
        refresh_per_second=4,
    ):
        yield line.update


def activity(status: Status) -> str:
    """The current activity and its duration: `capturing iteration 1, micro-batch 3 of 4 for 2m`; empty at the end."""
    phase, iteration = status.phase, status.current_iteration
    seconds = _seconds_since(status.phase_since)
    if phase is Phase.STEPPING and iteration is not None:
        words = f"iteration {iteration}, {phase.value}"
    elif phase in (Phase.TRAINING, Phase.PROVING, Phase.CAPTURING) and iteration is not None:
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
        queue_bytes = status.capture.get("queue_bytes")
        words = f"writing {human_bytes(queue_bytes)}" if queue_bytes else "writing"
    else:
        words = phase.value
    return f"{words} for {duration(seconds)}" if words and (seconds or 0.0) >= 1 else words


def evaluates_only(status: Status) -> bool:
    """Whether a run evaluates without training: its iterations have no micro-batches."""
    return status.phase is Phase.EVALUATING and status.micro_batches is None


def _seconds_since(time_: str | None) -> float | None:
    if time_ is None:
        return None
    return max(0.0, (datetime.now(UTC) - instant(time_)).total_seconds())


def time_left_s(status: Status, speed: Speed) -> float | None:
    """Seconds until the last iteration ends, at the median step time; None if that is unknown, and at the end."""
    left = status.iterations - status.iteration
    if left <= 0 or speed.step_time_s is None:
        return None
    seconds = left * speed.step_time_s
    return seconds if math.isfinite(seconds) else None


def tokens_words(speed: Speed) -> str:
    """`1,234 tokens/s`; `-` if the speed is unknown."""
    return "-" if speed.tokens_per_s is None else f"{speed.tokens_per_s:,.0f} tokens/s"


def captured_words(captured: Mapping[str, Any]) -> str:
    """Captured tensors, pending bytes and the write rate; empty if nothing is captured."""
    if captured.get("stopped"):
        return "capture stopped"
    if not captured.get("tensors"):
        return ""
    words = captured_size(captured["tensors"], captured.get("num_bytes", 0))
    if not captured.get("queue_bytes"):
        return words
    words += f", {human_bytes(captured['queue_bytes'])} wait"
    rate = captured.get("bytes_per_s")
    return f"{words}, {human_bytes(rate)}/s" if rate else words


def left_out_words(status: Status) -> str:
    """The steps that were left out, and why the last one was; empty without one."""
    steps = "1 step" if status.skipped == 1 else f"{status.skipped} steps"
    return f"{steps} left out, the last in {status.nonfinite}" if status.skipped else ""


def dossier_words(status: Status) -> str:
    """The iterations after which a dossier was written, the last ones; empty without one."""
    if not status.dossiers:
        return ""
    after = ", ".join(map(str, status.dossiers[-_MOST_DOSSIERS:]))
    noun = "1 dossier" if len(status.dossiers) == 1 else f"{len(status.dossiers)} dossiers"
    last = ", the last" if len(status.dossiers) > _MOST_DOSSIERS else ""
    return f"{noun}{last} after iteration {after}"


def captured_size(num_tensors: int, num_bytes: int) -> str:
    """`64 tensors, 2.4 MB`, or `statistics of 64 tensors` if no values are kept."""
    if num_tensors and not num_bytes:
        return f"statistics of {num_tensors} tensors"
    return f"{num_tensors} tensors, {human_bytes(num_bytes)}"


def proof_line(proof: Mapping[str, Any] | None, precision: Precision) -> str:
    """The proof of engagement in one line."""
    if proof is None:
        return "none"
    entries = proof["entries"]
    quantised = [e for e in entries if e["format"] != WORKING]
    engaged = sum(e.get("status") == "engaged" for e in quantised)
    inconclusive = sum(e.get("status") == "inconclusive" for e in entries)
    parts = [
        f"{engaged} of {len(quantised)} quantised slots engaged, "
        f"{len(entries) - len(quantised)} slots {describe_format(WORKING, precision)}, "
        f"{proof.get('quantised_calls', 0)} quantised operands seen"
    ]
    if inconclusive:
        parts.append(f"{inconclusive} inconclusive")
    return "; ".join(parts)
