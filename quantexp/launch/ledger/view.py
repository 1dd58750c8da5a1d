"""The rows of `quantexp status`: its table, and for `--json` one object for each run, always with the same keys.

The location or reason of a run is a column, or below the table if it is too wide. A live table must fit the terminal.
If it does not, it drops first the completed runs, then the part below the table, then rows from the end, keeping
running runs at the top. The summary always counts all runs.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.text import Text

from quantexp.launch.backend import Standing
from quantexp.launch.progress import activity, captured_words, dossier_words, left_out_words
from quantexp.model.checkpoints import next_iteration
from quantexp.runs.find import Missing
from quantexp.runs.paths import RunDir
from quantexp.runs.status import MISSING, UNREADABLE, State, Status
from quantexp.terminal.console import plain
from quantexp.terminal.escaping import printable_line
from quantexp.terminal.fitted_table import Column, Fitted, Shrink, fitted_table, wrapped
from quantexp.terminal.units import duration

#: The column with a run's location or reason, which moves below a narrow table.
ABOUT = "where, or why it ended"
_COLUMNS = (
    Column("run", shrink=Shrink.CUT_START),
    Column("state"),
    Column("iteration", is_number=True),
    Column("loss", is_number=True),
    Column("tokens/s", worth=2, is_number=True),
    Column("left", is_number=True),
    Column(ABOUT, worth=1, shrink=Shrink.WRAP, min_width=60),
)
#: Maximum run names for one reason below the table.
FEW = 4
#: Lines around the rows: heading, shared prefix of the names, count of omitted rows, summary.
FRAME = 4
_COLOURS = {
    State.PENDING: "blue",
    State.RUNNING: "cyan",
    State.COMPLETED: "green",
    State.FAILED: "red",
    State.PREEMPTED: "magenta",
    State.CANCELLED: "yellow",
}
#: Matches the start of the scheme in a run's name.
_SCHEME = re.compile(r"_(?=FA_|linear_|bf16)")


def view(
    standings: Sequence[Standing],
    missing: Sequence[Missing],
    console: Console,
    height: int | None = None,
) -> RenderableType:
    """The table and the part below it, in at most `height` lines."""
    page = _Page(standings, missing, console)
    content = page.content(standings)
    if height is None or page.lines(content) <= height:
        return content
    unfinished = [s for s in standings if s.state is not State.COMPLETED]
    for below in (True, False):
        if page.lines(content := page.content(unfinished, below=below)) <= height:
            return content
    unfinished.sort(key=lambda s: s.state is not State.RUNNING)
    return page.content(unfinished[: max(1, height - FRAME)], below=False)


@dataclass(frozen=True)
class _Page:
    """All runs, of which a part is shown."""

    standings: Sequence[Standing]
    missing: Sequence[Missing]
    console: Console

    def lines(self, content: RenderableType) -> int:
        return len(self.console.render_lines(content))

    def content(self, shown: Sequence[Standing], *, below: bool = True) -> Group:
        """The rows of the shown runs, and the summary of all."""
        missing = self.missing if below else ()
        names = [standing.run.root.name for standing in shown]
        text = cache(plain)  # many runs have the same reason
        rows = [[_state(each), *_numbers(each), text(about(each))] for each in shown]
        rows += [[f"[red]{MISSING}[/]", "", "", "", "", text(run.reason)] for run in missing]
        fitted, shared = self._table(names, missing, rows), ""
        if fitted.left_out:
            shared = _shared([standing.run.root.name for standing in self.standings])
            names = [name.removeprefix(shared) for name in names]
            fitted = self._table(names, missing, rows)
        parts: list[RenderableType] = [plain(f"{shared}...", "dim")] * bool(shared)
        parts.append(fitted.table)
        if below and ABOUT in fitted.left_out:
            parts.append(_below(shown, missing, names, self.console.width))
        if below:
            parts += [plain(note, "yellow") for note in _notes(self.standings)]
        elif len(shown) < len(self.standings):
            parts.append(plain(f"and {len(self.standings) - len(shown)} more", "dim"))
        return Group(*parts, plain(summary(self.standings, self.missing)))

    def _table(
        self, names: list[str], missing: Sequence[Missing], rows: list[list[str | Text]]
    ) -> Fitted:
        """The table of the shown runs by these names, of missing ones, and of the other cells of both."""
        all_names = itertools.chain(names, (run.name for run in missing))
        named = [[plain(name), *row] for name, row in zip(all_names, rows, strict=True)]
        return fitted_table(_COLUMNS, named, self.console.width)


def _shared(names: list[str]) -> str:
    """The common prefix of several names: whole words, without the scheme's name."""
    if len(names) < 2:
        return ""
    equal = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    scheme = _SCHEME.search(names[0])
    prefix = "".join(letters[0] for letters in equal)[: scheme.end() if scheme else None]
    return prefix[: prefix.rfind("_") + 1]


def _state(standing: Standing) -> str:
    word = state_word(standing)
    colour = "red" if word == UNREADABLE else _COLOURS[State(word)]
    return f"[{colour}]{word}[/]"


def _numbers(standing: Standing) -> list[str | Text]:
    status, pace = standing.status, standing.pace
    return [
        f"{status.iteration}/{status.iterations}" if status.iterations else "",
        f"{pace.loss:.4f}" if pace.loss is not None else "",
        f"{pace.tokens_per_s:,.0f}" if pace.tokens_per_s is not None else "",
        duration(pace.time_left_s) if standing.state is State.RUNNING else "",
    ]


def about(standing: Standing, where: str | None = None) -> str:
    """The location, activity and captures of a run, or the first line of its reason."""
    why = next(iter(reason(standing).splitlines()), "")
    first = goes_on_at(standing)
    again = "" if first is None else f"goes on at iteration {first}"
    running = standing.state is State.RUNNING
    now = (activity(standing.status), captured_words(standing.status.capture)) if running else ()
    left_out = left_out_words(standing.status) or standing.pace.without_a_step
    wrong = left_out, dossier_words(standing.status), standing.pace.early_end
    return "; ".join(part for part in (where or standing.where, *now, again, why, *wrong) if part)


def _below(
    shown: Sequence[Standing], missing: Sequence[Missing], names: list[str], width: int
) -> RenderableType:
    """Each location or reason once with its runs; jobs that wait for the same reason appear without their ids."""
    groups: dict[str, list[str]] = {}
    for name, standing in zip(names, shown, strict=True):
        job = standing.job
        is_waiting = job is not None and job.is_waiting and standing.alive
        where = job.activity if job is not None and is_waiting else None
        groups.setdefault(about(standing, where), []).append(name)
    for run in missing:
        groups.setdefault(run.reason, []).append(run.name)
    rows = []
    for words, runs in groups.items():
        if words:
            some = (
                runs if len(runs) <= FEW else [*runs[: FEW - 1], f"and {len(runs) - FEW + 1} more"]
            )
            rows.append((list(map(printable_line, some)), plain(words)))
    indent = max((cell_len(name) for some, _ in rows for name in some), default=0) + 2
    lines = [
        _beside(name, part, indent, width)
        for some, words in rows
        for name, part in itertools.zip_longest(some, wrapped(words, width - indent))
    ]
    return Group("", *lines, "") if lines else Group()


def _beside(name: str | None, part: Text | None, indent: int, width: int) -> Text:
    """A line of a name and a part of a reason, or two lines where a command is too long to stand beside the name."""
    name, part = name or "", part or Text()
    fits = indent + part.cell_len <= width
    gap = " " * (indent - cell_len(name)) if fits else "\n" * bool(name)
    return Text.assemble((name, "bold"), gap, part, no_wrap=True, overflow="ignore")


def _notes(standings: Sequence[Standing]) -> list[str]:
    counts = Counter(standing.note for standing in standings if standing.note is not None)
    return [f"{count} of {len(standings)}: {note}" for note, count in counts.items()]


def summary(standings: Sequence[Standing], missing: Sequence[Missing] = ()) -> str:
    """`20 runs: 2 running, 17 completed, 1 failed`."""
    counts = Counter({MISSING: len(missing)}) + Counter(map(state_word, standings))
    words = [f"{counts[w]} {w}" for w in (*State, UNREADABLE, MISSING) if counts[w]]
    total = len(standings) + len(missing)
    return f"{total} run{'' if total == 1 else 's'}: {', '.join(words)}" if total else "no runs"


def status_rows(
    standings: Sequence[Standing], missing: Sequence[Missing] = ()
) -> list[dict[str, object]]:
    """One object for each run; a run without a folder has null values except name, state and reason."""
    nulls = dict.fromkeys(_row(Standing(RunDir(Path()), None)))
    missing_rows = [
        {**nulls, "run": run.name, "state": MISSING, "alive": False, "reason": run.reason}
        for run in missing
    ]
    return [_row(standing) for standing in standings] + missing_rows


def state_word(standing: Standing) -> str:
    """The state as shown to the user."""
    if standing.state is None or standing.damage:
        return UNREADABLE
    return standing.state.value


def reason(standing: Standing) -> str:
    """Why a run is unreadable, why it ended, or why it was requeued."""
    return standing.damage or standing.reason


def goes_on_at(standing: Standing) -> int | None:
    """The iteration at which an unfinished run that has ended goes on from its checkpoint; None without one."""
    unfinished = standing.state in (State.FAILED, State.PREEMPTED, State.CANCELLED)
    if standing.alive or not unfinished:
        return None
    first = next_iteration(standing.run)
    return first if first > 1 else None


def _captured(status: Status) -> dict[str, object] | None:
    """The captures of a run, always with the same keys; None if there are none."""
    captured = status.capture
    if not captured:
        return None
    counts = ("tensors", "num_bytes", "queue_bytes", "bytes_per_s", "waited_s")
    return {
        **{name: captured.get(name, 0) for name in counts},
        "stopped": captured.get("stopped", ""),
    }


def _row(standing: Standing) -> dict[str, object]:
    status, job = standing.status, standing.job
    return {
        "run": standing.run.root.name,
        "path": str(standing.run.root),
        "state": state_word(standing),
        "alive": standing.alive,
        "reason": reason(standing),
        "where": standing.where,
        "note": standing.note or standing.pace.early_end or None,
        "phase": status.phase.value,
        "phase_since": status.phase_since,
        "current_iteration": status.current_iteration,
        "micro_batch": status.micro_batch,
        "iteration": status.iteration,
        "iterations": status.iterations,
        "loss": standing.pace.loss,
        "tokens_per_s": standing.pace.tokens_per_s,
        "capture": _captured(status),
        "skipped": status.skipped,
        "nonfinite": status.nonfinite,
        "dossiers": status.dossiers,
        "time_left_s": standing.pace.time_left_s if standing.state is State.RUNNING else None,
        "host": status.host,
        "pid": status.pid,
        "job_id": job.id if job is not None else status.job_id,
        "submission": status.submission,
        "goes_on_at": goes_on_at(standing),
        "restarts": max(len(status.restarts), job.restarts if job is not None else 0),
        "created": status.created,
        "started": status.started,
        "updated": status.updated,
        "finished": status.finished,
    }
