"""All runs of a folder as the page shows them, refreshed by one thread as long as somebody looks.

Every `REFRESH_S` the thread reads what has been added to the runs' files, one piece of each in turn, so that no large
file keeps the others waiting; every `LEDGER_S` it looks for new runs and asks for their states. What has changed gets
a new version, and a page is sent what has changed since its own. A dossier of a run may appear at any time.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from quantexp.errors import QuantexpError
from quantexp.extras.forensics.watch.captures import FollowedCapture
from quantexp.extras.forensics.watch.followed import FollowedRun
from quantexp.extras.forensics.watch.rows import LedgerRow, Sweeps, counted
from quantexp.extras.forensics.watch.tail import Kept, signature
from quantexp.extras.forensics.watch.view import View
from quantexp.runs.dossiers import Dossier, dossier_files, read_dossier
from quantexp.runs.find import Scope
from quantexp.runs.paths import RunDir
from quantexp.runs.status import MISSING, instant
from quantexp.terminal.escaping import printable_content

#: Seconds between two looks at the runs' files.
REFRESH_S = 1.0
#: Seconds between two looks at the ledger, and with runs whose scheduler must be asked.
LEDGER_S, SCHEDULER_S = 3.0, 10.0
#: Seconds after a request until the thread rests.
REST_S = 30.0
#: Runs that a page shows.
MOST_RUNS = 100

Find = Callable[[], Scope]
Ledger = Callable[[Sequence[RunDir]], Sequence[LedgerRow]]


class FolderWatch:
    """The state of the page."""

    def __init__(self, find: Find, ledger: Ledger, root: Path) -> None:
        """`find` gives the runs, `ledger` their rows in the same order; `root` holds the sweeps."""
        self._find, self._ledger, self._root = find, ledger, root
        #: Tells a restarted server from the one that a page knows.
        self.server = secrets.token_hex(4)
        self._runs: dict[Path, FollowedRun] = {}
        #: The runs that pages know, by their keys.
        self._shown: dict[str, FollowedRun] = {}
        self._rows: dict[Path, LedgerRow] = {}
        self._scope = Scope("", ())
        self._trouble: dict[str, str] = {}
        self._next_look = 0.0
        self._view = View()
        self._dossiers, self._sweeps = Dossiers(), Sweeps()
        self._lock = threading.Lock()
        self._version = self._content_version = 0
        self._content: dict[str, Any] = {}
        self._series: dict[str, tuple[int, dict[str, Any]]] = {}
        self._captures, self._capture_lock = dict[str, FollowedCapture](), threading.Lock()
        self._wake, self._rests, self._is_over = threading.Event(), False, False
        self._requested = time.monotonic()

    def run(self) -> None:
        """Refresh until `close`; the thread's work."""
        while not self._is_over:
            is_whole = self.refresh()
            self._rests = time.monotonic() - self._requested > REST_S
            if self._rests or is_whole:
                self._wake.wait(None if self._rests else REFRESH_S)
            self._wake.clear()

    def close(self) -> None:
        """End `run`."""
        self._is_over = True
        self._wake.set()

    def refresh(self) -> bool:
        """Read what the files have gained, for `REFRESH_S` at most; returns whether nothing is left to read."""
        is_time = time.monotonic() >= self._next_look
        if is_time:
            self._attempt("the folder", self._look_for_runs)
        runs = [*self._runs.values()]
        for one in runs:
            one.metrics.read()
        self._publish(runs)
        if is_time:
            self._attempt("the ledger", self._ask_ledger)
        deadline = time.monotonic() + REFRESH_S
        while left := [one for one in runs if not one.metrics.is_whole]:
            if time.monotonic() > deadline or self._is_over:
                break
            for one in left:
                one.metrics.read()
        self._publish(runs)
        return not left

    def _attempt(self, what: str, look: Callable[[], None]) -> None:
        try:
            look()
            self._trouble.pop(what, None)
        except (QuantexpError, OSError) as error:
            self._trouble[what] = f"{what} cannot be read: {error}"

    def _look_for_runs(self) -> None:
        self._scope = self._find()
        newest = {*sorted(self._scope.runs, key=_changed, reverse=True)[:MOST_RUNS]}
        shown = [run for run in self._scope.runs if run in newest]
        self._runs = {run.root: self._runs.get(run.root) or FollowedRun(run) for run in shown}

    def _ask_ledger(self) -> None:
        runs = [one.run for one in self._runs.values()]
        rows = self._ledger(runs)
        self._rows = {run.root: row for run, row in zip(runs, rows, strict=True)}
        is_remote = any(row.get("alive") and row.get("job_id") for row in rows)
        self._next_look = time.monotonic() + (SCHEDULER_S if is_remote else LEDGER_S)
        for one in self._runs.values():
            one.is_ended = not self._rows[one.run.root].get("alive")

    def _publish(self, runs: Sequence[FollowedRun]) -> None:
        series = self._view.update(runs)
        content = printable_content(self._content_of(runs))
        self._shown = {one.key: one for one in runs}
        with self._lock:
            if content == self._content and not series:
                return
            self._version += 1
            if content != self._content:
                self._content, self._content_version = content, self._version  # type: ignore[assignment]
            keys = {one.key for one in runs}
            self._series = {key: kept for key, kept in self._series.items() if key in keys}
            self._series |= {key: (self._version, line) for key, line in series.items()}

    def _content_of(self, runs: Sequence[FollowedRun]) -> dict[str, Any]:
        left = [one for one in runs if not one.metrics.is_whole]
        rows = [self._rows.get(one.run.root, {}) for one in runs]
        states = {
            one.run.root.name: str(row["state"]) for one, row in zip(runs, rows, strict=True) if row
        }
        missing = len(self._scope.missing)
        counts = Counter(states.values()) + Counter({MISSING: missing})
        num_more = len(self._scope.runs) - len(runs)
        notes = [*self._trouble.values(), *{row["note"] for row in rows if row.get("note")}]
        if num_more:
            notes.append(
                f"the {len(runs)} runs that changed last are shown, and {num_more} are not"
            )
        read, size = (
            sum(getattr(one.metrics.tail, name) for one in runs) for name in ("offset", "size")
        )
        return {
            "about": self._scope.about,
            "summary": _summary(len(runs) + missing, counts),
            "reading": f"{read / size:.0%}" if left and size else "",
            "notes": sorted(notes),
            "runs": self._view.rows(runs, rows),
            "missing": [{"name": one.name, "reason": one.reason} for one in self._scope.missing],
            "sweeps": self._sweeps.rows(self._root, states),
            "dossiers": self._dossiers.of(one.run for one in runs),
        }

    def state(self, server: str, since: int) -> dict[str, Any]:
        """What has changed since a version of a server; everything for another server."""
        self._requested = time.monotonic()
        if self._rests:
            self._wake.set()
        since = since if server == self.server else -1
        with self._lock:
            answer: dict[str, Any] = {"server": self.server, "version": self._version}
            if self._content_version > since:
                answer["content"] = self._content
            answer["series"] = {
                k: line for k, (version, line) in self._series.items() if version > since
            }
            return answer

    def captured(self, key: str) -> dict[str, Any]:
        """The captured iterations of a run.

        Raises:
            KeyError: no run has this key.
            UnreadableError: a list of its captures cannot be read.
        """
        with self._capture_lock:
            return self._capture(key).refresh()

    def numerics(self, key: str, iteration: int) -> dict[str, Any]:
        """The numerics of a captured iteration of a run.

        Raises:
            KeyError: no run has this key.
            UnreadableError: a list of its captures cannot be read.
        """
        with self._capture_lock:
            return self._capture(key).numerics(iteration)

    def _capture(self, key: str) -> FollowedCapture:
        one = self._shown[key]
        if key not in self._captures:
            self._captures[key] = FollowedCapture(one.run, one.side.names.capture_dir)
        return self._captures[key]


def _changed(run: RunDir) -> int:
    found = signature(run.status)
    return 0 if found is None else found[2]


def _summary(count: int, states: Counter[str]) -> str:
    if not count:
        return "no runs yet"
    return f"{count} run{'s' * (count > 1)}: {counted(states) or 'states not read yet'}"


#: Dossiers that are listed.
MOST = 100


class Dossiers:
    """The dossiers of some runs."""

    def __init__(self) -> None:
        self._read = Kept(read_dossier)

    def of(self, runs: Iterable[RunDir]) -> list[dict[str, object]]:
        """The dossiers of the runs, newest first; one that is being written appears when it is whole."""
        rows = [
            (_seconds(dossier), _row(run, file, dossier))
            for run in runs
            for file in dossier_files(run)
            if (dossier := self._read(file)) is not None
        ]
        rows.sort(key=lambda one: one[0], reverse=True)
        return [row for _, row in rows[:MOST]]


def _seconds(dossier: Dossier) -> float:
    return instant(dossier.time).timestamp()


def _row(run: RunDir, file: Path, dossier: Dossier) -> dict[str, object]:
    return {
        "run": run.root.name,
        "folder": file.parent.name,
        "iteration": f"{dossier.iteration:,}",
        "seconds": _seconds(dossier),
        "trigger": dossier.trigger.value,
        "words": dossier.words,
    }
