"""A folder of runs as quantexp leaves it, and the verbs that read all of it, in this process and within a time."""

from __future__ import annotations

import contextlib
import io
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from quantexp.capture.report import write_report
from quantexp.capture.statistics.summary import statistics
from quantexp.cli.main import main
from quantexp.runs.paths import RunDir
from quantexp.runs.ranks import RankRecord, write_record
from quantexp.runs.status import State, write_json
from tests.analysis.captures import MX8, Capture, linear_formats
from tests.analysis.compare.runs import Runs

#: Seconds of a verb, on a machine that others use too.
LIMIT_S = 60


@dataclass(frozen=True)
class Result:
    """What a command returned and printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its output as JSON."""
        return json.loads(self.out)


def run(*words: str) -> Result:
    """Execute a command in this process, and fail if it takes longer than `LIMIT_S`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _limit(words):
        code = main(list(words))
    return Result(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _limit(words: tuple[str, ...]) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{' '.join(words)} takes longer than {LIMIT_S} s")

    kept: dict[int, Callable[..., Any] | int | None] = {
        number: signal.getsignal(number)
        for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP)
    }
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in kept.items():
            signal.signal(number, handler)


def add_run(root: Path, scheme: str, name: str, **options: Any) -> RunDir:
    """A run with a capture, a log and the record of its rank."""
    made = Runs(root).add(scheme, name=name, **options)
    capture = Capture(made.root)
    generator = torch.Generator().manual_seed(len(name))
    described = []
    for layer in range(2):
        x = torch.randn(32, 64, generator=generator).bfloat16()
        line = capture.add(x, "input", layer=layer, formats=linear_formats(MX8))
        line |= {"statistics": statistics(x), "hash": None}
        described.append({k: v for k, v in line.items() if k not in ("file", "bytes", "hash")})
    capture.write()
    (capture.dir / "statistics.jsonl").write_text("".join(json.dumps(d) + "\n" for d in described))
    write_report(capture.dir)
    made.logs.mkdir()
    made.rank_log(0).write_text("one\ntwo\n")
    write_record(made, 0, RankRecord(1, State.COMPLETED, finished="2026-01-01T00:00:00+00:00"))
    config = made.config.read_text()
    made.config.write_text(config + "launcher: {kind: local, num_processes: 1}\n")
    return made


def add_sweep(root: Path, names: list[str]) -> Path:
    """A sweep's list of runs."""
    (root / "sweeps").mkdir(exist_ok=True)
    rows = [
        {"run": name, "state": "completed", "skipped": False, "reason": "", "stage": 0}
        for name in names
    ]
    file = root / "sweeps" / "20260101_000000_000000_1.json"
    write_json(file, {"started": "2026-01-01T00:00:00+00:00", "finished": None, "runs": rows})
    return file
