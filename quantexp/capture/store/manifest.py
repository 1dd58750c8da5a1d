"""The lists of a capture folder: their lines, the merge of the ranks' lists, and the shards' index.

Rank 0 appends to `manifest.jsonl` and `statistics.jsonl`, rank N to `manifest.rankN.jsonl` and so on, so the ranks need
no lock. The lists are joined after any end of the run. It needs no torch, because the end of a SLURM job has only
seconds.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

from quantexp.runs.status import write_json

MANIFEST = "manifest.jsonl"
STATISTICS = "statistics.jsonl"
#: The shards' index, in the usual form of safetensors.
INDEX = "capture.safetensors.index.json"

LOG = logging.getLogger(__name__)


class ManifestLine(TypedDict, total=False):
    """A line of the manifest, or of the statistics; a tensor of an old collection has fewer keys."""

    module: str
    layer: int
    layer_type: str
    operation: str
    phase: str
    component: str
    quant_type: str
    tensor: str
    iteration: int
    #: None for a tensor of the whole iteration.
    micro_batch: int | None
    rank: int
    loss_scale: float | None
    shape: list[int]
    dtype: str
    #: Slot -> format and options.
    formats: dict[str, dict[str, Any]]
    statistics: dict[str, Any]
    #: before, after or scale: which of an operand's values these are; the slot, and what determined them.
    values: str
    slot: str
    source: str
    dim: int
    tensor_scale: float | None
    #: The attention's path and scale, the first token of each document, the sequence of each of an expert's rows.
    attention: str
    softmax_scale: float | None
    document_starts: list[list[int]]
    row_sequences: list[int]
    sample: dict[str, Any]
    #: The file with the values, and in a shard the key and the bytes from the shard's start; None without values.
    file: str | None
    key: str
    offsets: list[int]
    bytes: int
    hash: str | None
    #: Why there are no values.
    left_out: str


def finish_capture(folder: Path) -> None:
    """Join the ranks' lists, and write the shards' index.

    The operation is idempotent. A full disk only prints a message, because the captures can be read without it.
    """
    try:
        join_parts(folder)
        _write_index(folder)
    except OSError as error:
        LOG.warning("the lists of %s are left in parts: %s", folder, error.strerror)


def part_of(listing: Path, rank: int) -> Path:
    """The list of a rank."""
    return listing if rank == 0 else listing.with_name(f"{listing.stem}.rank{rank}.jsonl")


def join_parts(folder: Path) -> None:
    """Append every rank's lines to rank 0's list, and remove the ranks' lists.

    An incomplete line of a killed rank is dropped. After an interruption at any moment, the next call completes the
    work without duplicating lines.
    """
    for name in (MANIFEST, STATISTICS):
        listing = folder / name
        parts = sorted(folder.glob(f"{listing.stem}.rank*.jsonl"), key=_rank_of)
        if not parts:
            continue
        lines = dict.fromkeys(line for file in (listing, *parts) for line in _whole_lines(file))
        joined = listing.with_name(f".{name}.{os.getpid()}")
        joined.write_bytes(b"".join(lines))
        joined.replace(listing)
        for part in parts:
            part.unlink()


def lines_of(file: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a list, without the incomplete last line of a killed process; empty without a list."""
    if not file.is_file():
        return
    with file.open("rb") as stream:  # text mode would split lines at more than "\n"
        for line in stream:
            try:
                values = json.loads(line)
            except ValueError:
                continue
            if isinstance(values, dict):
                yield values


def _rank_of(part: Path) -> int:
    return int(part.stem.rpartition(".rank")[2])


def _whole_lines(file: Path) -> list[bytes]:
    if not file.exists():
        return []
    return [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def _write_index(folder: Path) -> None:
    lines = {
        str(line["key"]): line
        for line in lines_of(folder / MANIFEST)
        if line.get("key") is not None
    }
    if lines:
        total = sum(int(line["bytes"]) for line in lines.values())
        weight_map = {key: str(line["file"]) for key, line in lines.items()}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
