"""Reading curves.jsonl while it grows."""

from __future__ import annotations

import json
from pathlib import Path

from quantexp.runs.curves import CurveLines
from quantexp.runs.paths import RunDir


def text(iteration: int, value: float = 1.0) -> str:
    return json.dumps({"iteration": iteration, "scalars": {"amax/L0/key": value}}) + "\n"


def value(lines: CurveLines, iteration: int) -> float | None:
    line = lines.at(iteration)
    return None if line is None else line["scalars"]["amax/L0/key"]


def test_lines_are_read_by_iteration_in_any_order_while_the_file_grows(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.curves.write_text(text(2, 2.5) + text(4, 4.5)[:12])
    lines = CurveLines(run)
    assert [value(lines, i) for i in (1, 2, 4)] == [None, 2.5, None]
    run.curves.write_text(text(2, 2.5) + text(4, 4.5))
    assert [value(lines, i) for i in (4, 2, 3)] == [4.5, 2.5, None]
    lines.close()


def test_wrong_line_is_left_out(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.curves.write_text('{"iteration": "x"}\n{torn\n[]\n' + text(3))
    lines = CurveLines(run)
    assert value(lines, 3) == 1.0
    lines.close()


def test_without_a_file_there_are_none(tmp_path: Path) -> None:
    lines = CurveLines(RunDir(tmp_path))
    assert lines.at(1) is None
    lines.close()
