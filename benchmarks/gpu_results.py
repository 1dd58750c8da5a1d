"""What `on_gpu.py` records: one JSON file, and the same as tables in Markdown."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_SMI = (
    *("name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "clocks.mem"),
    *("temperature.gpu", "power.draw", "power.limit"),
)
#: Longer words of a cell are in the JSON file alone.
_CELL = 160


@dataclass
class Results:
    """Of all parts, by name; a part has a status, its seconds and its cases by name."""

    machine: dict[str, Any]
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def earlier(cls, file: Path | None) -> Results:
        """Those of an earlier call, to which this one adds."""
        known = json.loads(file.read_text())["parts"] if file else {}
        return cls(machine(), known)

    def done(self, part: str) -> set[str]:
        """The cases of a part that have a result."""
        cases = self.parts.get(part, {}).get("cases", {})
        return {name for name, case in cases.items() if "error" not in case}

    def add(self, part: str, status: str, seconds: float, cases: list[dict[str, Any]]) -> None:
        """Record what this call has of a part so far."""
        known = self.parts.setdefault(part, {"cases": {}})
        known.update({"status": status, "seconds": seconds, "on": self.machine})
        known["cases"].update({case["case"]: case for case in cases})

    def write(self, folder: Path, titles: dict[str, str]) -> None:
        """Write `on_gpu.json` and `on_gpu.md`, each whole."""
        content = {"machine": self.machine, "parts": self.parts}
        _replace(folder / "on_gpu.json", json.dumps(content, indent=1, default=str))
        _replace(folder / "on_gpu.md", self.markdown(titles))

    def markdown(self, titles: dict[str, str]) -> str:
        """The machine, then a section for each part."""
        lines = ["# Results", "", "| | |", "|---|---|"]
        lines += [f"| {key} | {_cell(value)} |" for key, value in self.machine.items()]
        for name, title in titles.items():
            part = self.parts.get(name, {"status": "not begun", "cases": {}})
            lines += ["", f"## {title}", "", f"{part['status']}, {part.get('seconds', 0):.0f} s"]
            lines += _tables(part["cases"])
        return "\n".join(lines) + "\n"


def machine() -> dict[str, Any]:
    """The device, its clocks at this moment, and the versions."""
    facts: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds")}
    facts |= clocks() or {"name": "no GPU"}
    facts |= {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    facts["Python"] = platform.python_version()
    for package in ("torch", "triton", "megatron-core", "numpy"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "absent"
    facts["commit"] = _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"]) or "unknown"
    return facts


def clocks() -> dict[str, str]:
    """What nvidia-smi says of the first device; empty without one."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader"]
    line = _output(query).partition("\n")[0]
    return dict(zip(_SMI, line.split(", "), strict=True)) if line else {}


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _tables(cases: dict[str, dict[str, Any]]) -> list[str]:
    """A table of the rows of all cases for each set of columns, then the errors."""
    by_columns: dict[tuple[str, ...], list[list[Any]]] = {}
    lines = []
    for name, case in cases.items():
        for row in case.get("rows", []):
            by_columns.setdefault(tuple(row), []).append([name, *row.values()])
    for columns, rows in by_columns.items():
        lines += ["", f"| measured | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        lines += [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    for name, case in cases.items():
        if "error" in case:
            lines += ["", f"{name} failed:", "", "```text", case["error"].rstrip(), "```"]
    return lines


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    words = "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")
    return words if len(words) <= _CELL else words[:_CELL] + " ..."


def _replace(file: Path, text: str) -> None:
    part = file.with_suffix(".part")
    part.write_text(text)
    part.replace(file)
