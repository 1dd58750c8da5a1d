"""Writes the statistics of all tensors: a table to read, details as text, CSV for programs, JSON with everything.

    tensor_stats.txt            a line for each tensor
    statistics/statistics.txt   a paragraph for each tensor
    statistics/statistics.csv   a row for each tensor
    statistics/statistics.json  a list with an object for each tensor: its metadata, its statistics, its finding

Numbers are of the finite elements; std is that of the population (divided by n), kurtosis is 3 for a normal
distribution, quantiles are linear between neighbours in order, as numpy's default.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from quantexp.analysis.measures.counted import finding_of
from quantexp.analysis.measures.row import TensorRow
from quantexp.analysis.tensors.largest import largest_words
from quantexp.analysis.tensors.place import experts_as_one
from quantexp.analysis.tree import STATISTICS
from quantexp.capture.reader import CapturedTensor
from quantexp.capture.statistics.histogram import QUANTILES
from quantexp.terminal.escaping import printable
from quantexp.terminal.units import human_bytes

TABLE = "tensor_stats.txt"
_ABOUT = (
    *("module", "layer", "layer_type", "operation", "phase", "component", "quant_type", "tensor"),
    *("iteration", "micro_batch", "rank"),
)
_COUNTS = ("count", "zeros", "nan", "inf", "zero_share")
_NUMBERS = ("mean", "std", "min", "max", "abs_max", "skew", "kurtosis")
_DETAILS = ("mean", "std", "min", "max", "skew", "kurtosis")
_PER_LINE = 4


@dataclass(frozen=True)
class Row:
    """One tensor with its statistics."""

    source: str
    entry: CapturedTensor
    measures: TensorRow

    @property
    def record(self) -> dict[str, Any]:
        """The statistics, which must have been wanted."""
        assert self.measures.record is not None
        return self.measures.record

    @property
    def finding(self) -> str | None:
        """`empty`, `all zero`, ...; None for an ordinary tensor."""
        return finding_of(self.record)

    @property
    def label(self) -> str:
        """The tensor, with iteration, micro-batch and rank if they are known."""
        words = [self.entry.label]
        for key, letter in (("iteration", "i"), ("micro_batch", "m"), ("rank", "r")):
            value = self.entry.metadata.get(key)
            words.append("" if value is None else f"{letter}{value}")
        return " ".join(filter(None, words))


def write_tables(
    out: Path, rows: Sequence[Row], problems: Mapping[str, str], *, details: bool
) -> list[Path]:
    """Write `tensor_stats.txt`, and with `details` the folder; each file atomically.

    Raises:
        OSError: the folder cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    with _written(out / TABLE) as stream:
        _write_table(stream, rows, problems)
    if not details:
        return [out / TABLE]
    folder = out / STATISTICS
    folder.mkdir(exist_ok=True)
    written = [folder / f"statistics.{kind}" for kind in ("txt", "csv", "json")]
    for path, write in zip(written, (_write_text, _write_csv, _write_json), strict=True):
        with _written(path) as stream:
            write(stream, rows)
    return [out / TABLE, *written]


class _Printable:
    """A stream of a text for people, which shows hidden characters by their codes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(printable(text))

    def writelines(self, lines: Iterable[str]) -> None:
        self._stream.writelines(map(printable, lines))


@contextlib.contextmanager
def _written(path: Path) -> Iterator[TextIO]:
    """Write a file atomically."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("w", encoding="utf-8", errors="backslashreplace", newline="") as stream:
            yield cast(TextIO, _Printable(stream)) if path.suffix == ".txt" else stream
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _write_table(stream: TextIO, rows: Sequence[Row], problems: Mapping[str, str]) -> None:
    num_bytes = sum(int(row.entry.metadata.get("bytes") or 0) for row in rows)
    stream.write(f"{len(rows)} tensors, {human_bytes(num_bytes)}\n")
    for source, count in Counter(row.source for row in rows).items():
        stream.write(f"  {source}: {count}\n")
    for title, key in CLASSES.items():
        stream.write(f"by {title}: {_shares(counted_by(rows, key), num_bytes)}\n")
    for finding, labels in _findings(rows).items():
        stream.write(f"{finding}: {len(labels)}\n")
        stream.writelines(f"  {label}\n" for label in labels)
    if problems:
        stream.write(f"files that could not be used: {len(problems)}\n")
        stream.writelines(f"  {file}\n" for file in problems)
    heads = (*("mean", "std", "min", "median", "max", "kurtosis"), "zero", "nonfinite")
    several = len({row.source for row in rows}) > 1
    labels = [f"{row.source}  {row.label}" if several else row.label for row in rows]
    width = max((len(label) for label in labels), default=6)
    shapes = ["x".join(map(str, row.record["shape"])) or "scalar" for row in rows]
    wide = max((len(shape) for shape in shapes), default=5)
    stream.write(f"\n{'tensor':{width}}  {'dtype':8}  {'shape':{wide}}")
    stream.write("".join(f"  {head:>10}" for head in heads) + "\n")
    for row, label, shape in zip(rows, labels, shapes, strict=True):
        record = row.record
        median = (record["quantiles"] or {}).get("0.5")
        numbers = [record["mean"], record["std"], record["min"], median, record["max"]]
        cells = [_number(value) for value in (*numbers, record["kurtosis"])]
        cells += [_share(record["zero_share"]), f"{record['nonfinite']:,}"]
        stream.write(f"{label:{width}}  {record['dtype']:8}  {shape:{wide}}")
        stream.write("".join(f"  {cell:>10}" for cell in cells) + "\n")


def counted_by(rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    """The tensors of each value of a class."""
    values: dict[str, list[Row]] = {}
    for row in rows:
        values.setdefault(key(row), []).append(row)
    return values


def _shares(values: Mapping[str, Sequence[Row]], num_bytes: int) -> str:
    """`bf16 8 tensors, 12.5 % of the bytes`."""
    words = []
    for name, members in sorted(values.items()):
        of_bytes = sum(int(row.entry.metadata.get("bytes") or 0) for row in members)
        share = f", {of_bytes / num_bytes:.1%} of the bytes" if num_bytes else ""
        words.append(f"{name} {len(members)} tensors{share}")
    return "; ".join(words)


def _value_of(key: str) -> Callable[[Row], str]:
    return lambda row: str(row.entry.metadata.get(key) or "unknown")


#: The classes that group captured tensors: title, and function of a tensor's value.
CLASSES: Mapping[str, Callable[[Row], str]] = {
    "quantisation type": _value_of("quant_type"),
    "layer type": _value_of("layer_type"),
    "operation": _value_of("operation"),
    "module": lambda row: experts_as_one(_value_of("module")(row)),
}


def _findings(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Anomaly -> its tensors, without the numbers in it."""
    findings: dict[str, list[str]] = {}
    for row in rows:
        if row.finding is not None:
            kind = _kind(row.record)
            findings.setdefault(kind, []).append(f"{row.label}: {row.finding}")
    return findings


def _kind(record: Mapping[str, Any]) -> str:
    if not record["count"]:
        return "empty tensors"
    if record["nonfinite"]:
        return "tensors with NaN or Inf"
    return "tensors of zeros" if record["zeros"] == record["count"] else "constant tensors"


def _write_text(stream: TextIO, rows: Sequence[Row]) -> None:
    for row in rows:
        record = row.record
        shape = " x ".join(map(str, record["shape"])) or "scalar"
        finding = "" if row.finding is None else f"  [{row.finding}]"
        stream.write(f"{row.label}{finding}\n  {row.source}, {row.entry.metadata.get('file')}\n")
        stream.write(f"  {record['dtype']} {shape}, {record['count']:,} elements, ")
        stream.write(f"{record['zeros']:,} zero, {record['nan']:,} NaN, {record['inf']:,} Inf\n")
        pairs = [f"{name} {_number(record[name])}" for name in _DETAILS]
        stream.write("  " + "   ".join(pairs) + "\n")
        quantiles = record["quantiles"] or {}
        words = [f"{float(share):7.2%}: {_number(value):>10}" for share, value in quantiles.items()]
        for start in range(0, len(words), _PER_LINE):
            stream.write("  " + "   ".join(words[start : start + _PER_LINE]) + "\n")
        if record.get("largest"):
            stream.write(f"  largest: {largest_words(record['largest'])}\n")
        stream.write("\n")


def _write_csv(stream: TextIO, rows: Sequence[Row]) -> None:
    names = [f"q{share}" for share in QUANTILES]
    table = csv.writer(stream, lineterminator="\n")
    table.writerow(
        ["source", *_ABOUT, "file", "shape", "dtype", *_COUNTS, *_NUMBERS, *names, "finding"]
    )
    for row in rows:
        metadata, record = row.entry.metadata, row.record
        quantiles = record["quantiles"] or {}
        table.writerow(
            [
                row.source,
                *(metadata.get(key) for key in (*_ABOUT, "file")),
                "x".join(map(str, record["shape"])),
                record["dtype"],
                *(record[key] for key in (*_COUNTS, *_NUMBERS)),
                *(quantiles.get(str(share)) for share in QUANTILES),
                row.finding,
            ]
        )


def _write_json(stream: TextIO, rows: Sequence[Row]) -> None:
    """One object in each line, so that writing a list of any length needs no memory."""
    for place, row in enumerate(rows):
        metadata = {key: row.entry.metadata.get(key) for key in (*_ABOUT, "file")}
        content = {"source": row.source, **metadata, **row.record, "finding": row.finding}
        stream.write(("[\n" if place == 0 else ",\n") + json.dumps(content))
    stream.write("\n]\n" if rows else "[]\n")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3%}"
