"""What there is to choose from, read from the configuration's folders without composing or importing torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from quantexp.errors import ConfigError, RunError
from quantexp.fitted_table import Column, Shrink, fitted_table
from quantexp.model_label import short_model_label
from quantexp.paths import RunDir, conf_dir
from quantexp.progress import last_metrics
from quantexp.quant.scheme import SCHEMES
from quantexp.status import read_status

#: What can be listed -> the configuration group, or None for what lies elsewhere.
KINDS: dict[str, str | None] = {
    "models": "model",
    "datasets": "dataset",
    "schemes": "quant",
    "presets": "training",
    "captures": "capture",
    "experiments": "experiment",
    "runs": None,
}


_REASON = "reason"
_RUNS = (
    Column("run", shrink=Shrink.CUT_START),
    Column("state"),
    Column("iteration", is_number=True),
    Column("loss", is_number=True),
    Column(_REASON, worth=2, shrink=Shrink.WRAP, min_width=40),
    Column("model", worth=1),
)


@dataclass(frozen=True)
class Choice:
    """One name the user may choose, and what it is."""

    name: str
    about: str


def choices(kind: str, config_dir: Path | None) -> list[Choice]:
    """The choices of one kind: shipped ones and those of the user's folder.

    Raises:
        ConfigError: an unknown kind.
    """
    if kind not in KINDS or KINDS[kind] is None:
        raise ConfigError(f"list must be one of {', '.join(KINDS)}, got {kind!r}")
    group = KINDS[kind]
    found: dict[str, Choice] = {}
    for folder in (conf_dir(), config_dir):
        if folder is None:
            continue
        for file in sorted((folder / str(group)).glob("*.yaml")):
            found[file.stem] = Choice(file.stem, _about(file, group == "quant"))
        if group == "quant":
            for file in sorted((folder / "quant" / "more").glob("*.yaml")):
                found[f"more/{file.stem}"] = Choice(f"more/{file.stem}", _about(file, True))
    if group == "quant":
        order = {name: index for index, name in enumerate(SCHEMES)}
        return sorted(found.values(), key=lambda c: (order.get(c.name, len(order)), c.name))
    return list(found.values())


def _about(file: Path, is_scheme: bool) -> str:
    """The comment at the head of a file, without its first `#`s; the sites of a scheme without one."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if "@package" not in line:
            lines.append(line.lstrip("# ").strip())
    if lines or not is_scheme:
        return " ".join(lines)
    if file.stem not in SCHEMES:
        return ""
    linear, qk = SCHEMES[file.stem]
    return f"linear {linear}, QK {qk}, PV none"


def run_rows(root: Path) -> list[dict[str, object]]:
    """Every run below the root, newest first."""
    rows: list[dict[str, object]] = []
    for folder in sorted(root.glob("*-*")):
        run = RunDir(folder)
        try:
            status = read_status(run.status)
        except RunError:
            continue
        if status is None:
            continue
        metrics = last_metrics(run)
        rows.append(
            {
                "run": folder.name,
                "state": status.state.value,
                "iteration": status.iteration,
                "iterations": status.iterations,
                "loss": metrics["loss"] if metrics and math.isfinite(metrics["loss"]) else None,
                "created": status.created,
                "reason": status.reason,
                "model": _model(run),
            }
        )
    return sorted(rows, key=lambda row: str(row["created"]), reverse=True)


def _model(run: RunDir) -> str:
    """The model's label; empty where the configuration is gone or cannot be read."""
    try:
        config = yaml.safe_load(run.config.read_text(encoding="utf-8"))
        return short_model_label(config["model"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return ""


def listing(kinds: list[str], config_dir: Path | None, root: Path) -> dict[str, object]:
    """What `list --json` prints: every kind asked for, all but runs where none is named."""
    wanted = kinds or [kind for kind, group in KINDS.items() if group is not None]
    return {
        kind: run_rows(root)
        if kind == "runs"
        else [{"name": c.name, "about": c.about} for c in choices(kind, config_dir)]
        for kind in wanted
    }


def print_listing(content: dict[str, object], console: Console) -> None:
    """The listing for a person."""
    for kind, rows in content.items():
        assert isinstance(rows, list)
        if not rows:
            console.print(f"{kind}: none")
        elif kind == "runs":
            _print_runs(rows, console)
        else:
            table = Table(
                title=kind, title_justify="left", show_header=False, box=None, pad_edge=True
            )
            table.add_column(style="bold", no_wrap=True)
            table.add_column(overflow="fold")
            for row in rows:
                table.add_row(row["name"], escape(row["about"]))
            console.print(table)


def _print_runs(rows: list[dict[str, Any]], console: Console) -> None:
    """A line for each run; why it ended stands below the table where that does not fit beside it."""
    cells: list[list[str | Text]] = [
        [
            Text(row["run"]),
            row["state"],
            f"{row['iteration']}/{row['iterations']}",
            "-" if row["loss"] is None else f"{row['loss']:.4f}",
            Text(row["reason"]),
            Text(row["model"]),
        ]
        for row in rows
    ]
    fitted = fitted_table(_RUNS, cells, console.width, "runs")
    console.print(fitted.table)
    if _REASON in fitted.left_out:
        for row in rows:
            if row["reason"]:
                console.print(f"{escape(row['run'])}: {escape(row['reason'])}")
