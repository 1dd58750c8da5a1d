"""Counts the content of a capture; at the end of a run, `report.json` beside the manifest holds the counts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from quantexp.capture.reader import Capture, CapturedTensor, open_capture
from quantexp.capture.store.manifest import HASHES, MANIFEST
from quantexp.capture.store.values import identity
from quantexp.model.decoder import layer_words
from quantexp.model.safetensors import DTYPES
from quantexp.runs.status import write_json

REPORT = "report.json"
#: The keys that group the counts; the layer type is the site, attention or linear.
KEYS = ("layer_type", "module", "layer", "operation", "quant_type")


def write_report(folder: Path) -> None:
    """Write the report of a capture folder, if it lists any tensor."""
    manifest = folder / MANIFEST
    if manifest.is_file() and manifest.stat().st_size:
        write_json(folder / REPORT, {**summary(open_capture(folder)), "hashes": HASHES})


def summary(capture: Capture) -> dict[str, Any]:
    """Counts and bytes by site, module, layer, operation and quantisation type.

    `tensors` counts lines, those of the parts of a divided tensor as one, and `files` stored values; a tensor in a
    shard counts as a file. `statistics_only` counts tensors without values, and `described_bytes` is the size that
    their values would have.
    """
    without = [entry for entry in capture if is_described(entry)]
    files = [stored.metadata for entry in capture.with_values() for stored in entry.stored]
    shards = {line["file"] for line in files if line.get("key") is not None}
    return {
        "folder": str(capture.folder),
        "listed": len(capture),
        "iterations": iterations_of(capture),
        "files": len(files),
        "shards": len(shards),
        "bytes": capture.num_bytes,
        "left_out": sum(1 for entry in capture if entry.metadata.get("left_out")),
        "statistics_only": len(without),
        "described_bytes": sum(_described_bytes(entry.metadata) for entry in without),
        **{f"by_{key}": _by(capture, key) for key in KEYS},
    }


def is_described(entry: CapturedTensor) -> bool:
    """Whether a tensor has statistics only by configuration."""
    metadata = entry.metadata
    has_statistics = isinstance(metadata.get("statistics"), dict)
    return has_statistics and not metadata.get("file") and not metadata.get("left_out")


def iterations_of(entries: Sequence[CapturedTensor] | Capture) -> list[int]:
    """The iterations of these tensors, ascending."""
    iterations = {entry.metadata.get("iteration") for entry in entries}
    return sorted(iteration for iteration in iterations if isinstance(iteration, int))


def _by(capture: Capture, key: str) -> dict[str, dict[str, int]]:
    groups: dict[str, list[CapturedTensor]] = {}
    for entry in capture:
        value = str(entry.metadata.get(key))
        if key == "layer":
            value = layer_words(value, str(entry.metadata.get("module")))
        groups.setdefault(value, []).append(entry)
    seen: set[tuple[str, str | None]] = set()
    return {value: _counts(entries, seen) for value, entries in groups.items()}


def _counts(entries: Sequence[CapturedTensor], seen: set[tuple[str, str | None]]) -> dict[str, int]:
    """Counts of one group; values in `seen` are counted in the group that lists them first."""
    files = num_bytes = 0
    for metadata in (stored.metadata for entry in entries for stored in entry.stored):
        if metadata.get("file") and (place := identity(metadata)) not in seen:
            seen.add(place)
            files += 1
            num_bytes += int(metadata.get("bytes") or 0)
    return {
        "tensors": len(entries),
        "iterations": len(iterations_of(entries)),
        "files": files,
        "bytes": num_bytes,
        "described_bytes": sum(_described_bytes(e.metadata) for e in entries if is_described(e)),
    }


def _described_bytes(known: Mapping[str, Any]) -> int:
    """The size that a tensor's values would have; 0 if shape or dtype is missing."""
    dtype = str(known.get("dtype"))
    shape = known.get("shape")
    if dtype not in DTYPES or not isinstance(shape, list):
        return 0
    itemsize: int = getattr(torch, dtype).itemsize
    return math.prod(shape) * itemsize
