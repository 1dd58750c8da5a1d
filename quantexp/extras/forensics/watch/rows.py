"""What the page shows of each run and sweep, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quantexp.analysis.scheme_style import SchemeStyle
from quantexp.extras.forensics.watch.followed import FollowedRun
from quantexp.extras.forensics.watch.tail import Kept
from quantexp.runs.metrics import speed_of
from quantexp.runs.paths import RunsRoot
from quantexp.runs.status import MISSING, State
from quantexp.runs.sweep_list import SweepList, read_sweep
from quantexp.terminal.units import duration, human_bytes

#: Sweeps that are listed.
MOST_SWEEPS = 20
#: A row of the ledger, as `quantexp status --json` has it, with `about`.
LedgerRow = Mapping[str, Any]


class GapWords(NamedTuple):
    """The gap in the last iteration that both runs have, and its mean over the last tenth."""

    last: str
    late: str


def run_row(
    one: FollowedRun,
    label: str,
    style: SchemeStyle,
    ledger: LedgerRow,
    gap: GapWords | None,
    note: str,
) -> dict[str, Any]:
    """A run of the page's table."""
    metrics = one.metrics
    speed = speed_of(metrics.latest)
    last = metrics.latest[-1] if metrics.latest else {}
    iteration = max(int(ledger.get("iteration") or 0), int(last.get("iteration") or 0))
    wanted = ledger.get("iterations")
    notes = [note, *_notes(one)]
    return {
        "key": one.key,
        "name": one.run.root.name,
        "label": label,
        "colour": style.colour,
        "dash": list(style.dash),
        "state": ledger.get("state") or "",
        "phase": ledger.get("phase") or "",
        "iteration": f"{iteration:,}" + (f" / {wanted:,}" if wanted else ""),
        "loss": _loss(last),
        "gap": "" if gap is None else gap.last,
        "late_gap": "" if gap is None else gap.late,
        "tokens_per_s": "" if speed.tokens_per_s is None else f"{speed.tokens_per_s:,.0f}",
        "memory": "" if speed.memory_gb is None else f"{speed.memory_gb:.1f} GB",
        "left": duration(ledger.get("time_left_s")),
        "captured": _captured(ledger.get("capture") or {}),
        "proof": one.proof or "",
        "about": ledger.get("about") or "",
        "notes": [words for words in notes if words],
        "is_baseline": one.side.is_baseline,
    }


def _loss(line: Mapping[str, Any]) -> str:
    if "loss" not in line:
        return ""
    loss = line["loss"]
    return f"{loss:.4f}" if isinstance(loss, int | float) else "not finite"


def _captured(capture: Mapping[str, Any]) -> str:
    if not capture.get("tensors"):
        return ""
    words = f"{capture['tensors']:,} tensors, {human_bytes(capture.get('num_bytes') or 0)}"
    queue = capture.get("queue_bytes") or 0
    if queue:
        words += f"; {human_bytes(queue)} in the queue"
    if (waited := capture.get("waited_s") or 0) >= 1:
        words += f"; training waited {duration(waited)}"
    if stopped := capture.get("stopped"):
        words += f"; stopped: {stopped}"
    return words


def _notes(one: FollowedRun) -> list[str]:
    count = one.metrics.curve.num_nonfinite
    notes = [*one.side.trouble, *one.metrics.damage]
    if count:
        notes.append(f"{count:,} iterations without a finite loss are left out of its line")
    return notes


class Sweeps:
    """The sweeps of a folder of runs."""

    def __init__(self) -> None:
        self._read = Kept(read_sweep)

    def rows(self, root: Path, states: Mapping[str, str]) -> list[dict[str, Any]]:
        """The newest sweeps, with how many of their runs are in each state; `states` has those of run folders."""
        files = sorted(RunsRoot(root).sweeps.glob("*.json"), reverse=True)[:MOST_SWEEPS]
        read = [(file, self._read(file)) for file in files]
        return [_sweep_row(file, sweep, states) for file, sweep in read if sweep is not None]


def _sweep_row(file: Path, sweep: SweepList, states: Mapping[str, str]) -> dict[str, Any]:
    runs = sweep["runs"]
    names = [run["run"] for run in runs]
    counts = Counter(MISSING if name is None else states.get(name, MISSING) for name in names)
    return {
        "name": file.stem,
        "started": sweep.get("started"),
        "finished": bool(sweep.get("finished")),
        "runs": len(names),
        "states": counted(counts),
    }


def counted(counts: Mapping[str, int]) -> str:
    """`2 running, 17 completed`, in the order of the states."""
    order: Sequence[str] = [*(state.value for state in State), *counts]
    return ", ".join(f"{counts[word]} {word}" for word in dict.fromkeys(order) if counts.get(word))
