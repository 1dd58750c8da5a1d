"""`quantexp captures DIR [key=pattern ...]`: what a capture folder holds, whether it is intact, and copies of it.

Words after the folder select by metadata (`layer=0 tensor=grad_*`). `--check` compares every file with its hash,
`--export FOLDER --to pt|safetensors|npz` writes each selected tensor into a file of its own, with its metadata.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from quantexp.capture.direct import beside
from quantexp.capture.reader import Capture, CapturedTensor, open_capture
from quantexp.capture.report import KEYS, summary
from quantexp.capture.safetensors import write_safetensors
from quantexp.capture.values import identity
from quantexp.errors import CaptureError
from quantexp.progress import human_bytes

#: Formats of `--to`.
FORMATS = ("pt", "safetensors", "npz")
#: Where a tensor was, which its copy has no use for.
_PLACE = ("file", "key", "offsets")
#: Columns of the list.
_COLUMNS = ("iteration", "micro_batch", "rank", "layer", "module", "operation", "phase", "tensor")


def selected(folder: str, words: list[str]) -> Capture:
    """The tensors of a folder that `key=pattern` words select.

    Raises:
        CaptureError: nothing captured there, a word that is none, a key that no tensor has.
    """
    wanted: dict[str, object] = {}
    for word in words:
        key, equals, pattern = word.partition("=")
        if not (key and equals):
            raise CaptureError(
                f"a selection must be key=pattern, such as tensor=grad_*, got {word!r}"
            )
        wanted[key] = pattern
    return open_capture(folder).select(**wanted)


@dataclass(frozen=True)
class Checked:
    """What a look at the values of a capture found."""

    #: Tensors whose values have the manifest's hash, and of which the manifest has none.
    num_intact: int
    num_without_hash: int
    #: What is wrong with each of the others.
    damaged: Sequence[str]

    def told(self) -> str:
        """A line for a person."""
        line = (
            f"{self.num_intact} of {self._num_all} tensors have the values of the manifest's hash"
        )
        if self.num_without_hash:
            line += f", {self.num_without_hash} have no hash to be checked by"
        return line

    @property
    def _num_all(self) -> int:
        return self.num_intact + self.num_without_hash + len(self.damaged)


def checked(capture: Capture) -> Checked:
    """Compare every stored tensor with its hash."""
    found: Counter[bool | None] = Counter()
    damaged = []
    for entry in capture.with_values():
        try:
            is_intact = entry.is_intact()
        except CaptureError as error:
            damaged.append(str(error))
            continue
        found[is_intact] += 1
        if is_intact is False:
            damaged.append(f"{_where(entry)}: other values than the manifest's hash")
    return Checked(found[True], found[None], damaged)


def _where(entry: CapturedTensor) -> str:
    file, key = identity(entry.metadata)
    return file if key is None else f"{file}, {key}"


def export(capture: Capture, to: Path, kind: str) -> int:
    """Write every selected tensor, with its metadata, into a file of its own below `to`; how many.

    npz holds `tensor` and `metadata` (JSON text), bfloat16 widened to float32.

    Raises:
        CaptureError: a file is there already, or cannot be read or written.
    """
    files = capture.with_values()
    for entry in files:
        target = to / f"{entry.name}.{kind}"
        if target.exists():
            raise CaptureError(f"{target} is there already; export to an empty folder")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _write(entry, target, kind)
        except OSError as error:
            raise CaptureError(f"{target} cannot be written: {error.strerror}") from error
    return len(files)


def _write(entry: CapturedTensor, target: Path, kind: str) -> None:
    metadata = {key: value for key, value in entry.metadata.items() if key not in _PLACE}
    if kind == "safetensors":
        text = {"metadata": json.dumps(metadata)}
        write_safetensors(target, {"tensor": entry.torch()}, text)
        return
    part = beside(target)
    with part.open("wb") as stream:
        if kind == "pt":
            torch.save({"tensor": entry.torch().clone(), "metadata": metadata}, stream)
        else:
            np.savez(stream, tensor=entry.numpy(), metadata=np.array(json.dumps(metadata)))
    part.replace(target)


def print_summary(capture: Capture, console: Console) -> None:
    """The counts, for a person."""
    told = summary(capture)
    num_files, num_shards = told["files"], told["shards"]
    where = f" in {num_files} files"
    if num_shards:
        where = f", {num_files} with values in {num_shards} shard{'s' * (num_shards > 1)}"
    console.print(
        f"{escape(told['folder'])}: {told['listed']} tensors{where}, {human_bytes(told['bytes'])}"
        + (f", {told['left_out']} left out" if told["left_out"] else ""),
        soft_wrap=True,
    )
    table = Table()
    for name in ("", "", "files", "bytes"):
        table.add_column(name)
    for key in KEYS:
        for value, counts in told[f"by_{key}"].items():
            table.add_row(key, value, str(counts["files"]), human_bytes(counts["bytes"]))
    console.print(table)


def print_list(capture: Capture, console: Console) -> None:
    """A row for each tensor."""
    table = Table()
    for name in (*_COLUMNS, "shape", "dtype"):
        table.add_column(name)
    for entry in capture:
        row = [entry.metadata.get(name) for name in (*_COLUMNS, "shape", "dtype")]
        table.add_row(*("" if value is None else escape(str(value)) for value in row))
    console.print(table)
