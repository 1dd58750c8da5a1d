"""Prints a capture: counts by site, module, layer and operation, or a row for each tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from quantexp.capture.reader import Capture, CapturedTensor
from quantexp.capture.report import KEYS, summary
from quantexp.model.decoder import layer_words
from quantexp.quant.slots import WORKING
from quantexp.terminal.console import plain
from quantexp.terminal.fitted_table import ALWAYS, Column, fitted_table
from quantexp.terminal.units import human_bytes

#: The columns that locate a tensor; a column with one value in all rows is printed above the list.
_COLUMNS = (
    "iteration",
    "micro_batch",
    "rank",
    "layer",
    "module",
    "operation",
    "phase",
    "tensor",
    "shape",
    "dtype",
)
#: Maximum iterations listed one by one.
_MAX_ITERATIONS = 8
#: Statistics of a row, by the name of their column.
_STATISTICS = {"abs_max": "amax", "std": "std", "zero_share": "zeros"}

#: The order in which a narrow terminal drops columns of the list.
_LEAST_WORTH = ("phase", "zeros", "dtype", "rank", "micro_batch", "std", "shape", "iteration")


def print_summary(capture: Capture, console: Console) -> None:
    """Print the counts."""
    counts = summary(capture)
    console.print(escape(counts["folder"]), soft_wrap=True)
    console.print(_heading(counts))
    has_iterations = bool(counts["iterations"])  # file names alone do not tell them
    if has_iterations:
        console.print(_iterations(counts["iterations"]), soft_wrap=True)
    has_values, has_statistics = counts["files"] > 0, counts["statistics_only"] > 0
    names = ["tensors", *["iterations"] * has_iterations, *["files", "bytes"] * has_values]
    names += ["bytes described"] * has_statistics
    columns = [Column(), Column(), *(Column(name, is_number=True) for name in names)]
    rows: list[list[str | Text]] = []
    for key in KEYS:
        groups = counts[f"by_{key}"]
        for i, (value, group) in enumerate(groups.items()):
            cells = [f"{group['tensors']}", *[f"{group['iterations']}"] * has_iterations]
            if has_values:
                cells += [f"{group['files']}", human_bytes(group["bytes"])]
            if has_statistics:
                cells.append(human_bytes(group["described_bytes"]))
            name = key.replace("_", " ") if i == 0 else ""
            words = f"{value} (not quantised)" if value == WORKING else value
            rows.append([name, escape(words), *cells])
    console.print(fitted_table(columns, rows, console.width).table)


def _iterations(numbers: Sequence[int]) -> str:
    if len(numbers) <= _MAX_ITERATIONS:
        return f"iteration{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
    return f"{len(numbers)} iterations, {numbers[0]} to {numbers[-1]}"


def _heading(counts: Mapping[str, Any]) -> str:
    num_described = counts["statistics_only"]
    described = f"statistics of {num_described} tensors"
    size = human_bytes(counts["described_bytes"])
    if not counts["files"] and num_described:
        return f"{described}, no values (capture=tensors would keep {size})"
    where = f"in {counts['files']} files"
    if counts["shards"]:
        several = "s" * (counts["shards"] > 1)
        where = f"{counts['files']} with values in {counts['shards']} shard{several}"
    num_listed = counts["listed"] - num_described
    parts = [f"{num_listed} tensors {where}", human_bytes(counts["bytes"])]
    if counts["shards"]:
        parts[0] = f"{num_listed} tensors, {where}"
    if counts["left_out"]:
        parts.append(f"{counts['left_out']} left out")
    if num_described:
        parts.append(f"and {described} without values ({size})")
    return ", ".join(parts)


def print_list(capture: Capture, console: Console) -> None:
    """Print a row for each tensor, with its statistics if it has any; values common to all rows are above them."""
    rows = [_cells(entry) for entry in capture]
    names = (*_COLUMNS, *_STATISTICS.values())
    shared = {
        name: rows[0][i] for i, name in enumerate(names) if len({row[i] for row in rows}) == 1
    }
    if len(rows) < 2:
        shared = {}
    if common := ", ".join(f"{name} {value}" for name, value in shared.items() if value):
        console.print(f"all: {escape(common)}", soft_wrap=True)
    kept = [i for i, name in enumerate(names) if name not in shared]
    columns = [
        Column(
            names[i].replace("_", " "),
            worth=_LEAST_WORTH.index(names[i]) if names[i] in _LEAST_WORTH else ALWAYS,
            is_number=names[i] in _STATISTICS.values(),
        )
        for i in kept
    ]
    shown = [[plain(row[i]) for i in kept] for row in rows]
    console.print(fitted_table(columns, shown, console.width).table)


def _cells(entry: CapturedTensor) -> list[str]:
    metadata: Mapping[str, Any] = entry.metadata
    statistics = metadata.get("statistics")
    numbers: Mapping[str, Any] = statistics if isinstance(statistics, dict) else {}
    cells = ["" if metadata.get(name) is None else _text(metadata[name]) for name in _COLUMNS]
    layer, module = (_COLUMNS.index(name) for name in ("layer", "module"))
    cells[layer] = layer_words(cells[layer], cells[module])
    return cells + [_number(key, numbers.get(key)) for key in _STATISTICS]


def _text(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, list) else str(value)


def _number(key: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return f"{value:.2%}" if key == "zero_share" else f"{value:.3g}"
