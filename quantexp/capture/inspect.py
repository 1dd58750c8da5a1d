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

from quantexp.capture.reader import Capture, CapturedTensor, open_capture
from quantexp.capture.store.values import identity
from quantexp.errors import CaptureError
from quantexp.folders import beside
from quantexp.model.safetensors import write_safetensors

#: Formats of `--to`.
FORMATS = ("pt", "safetensors", "npz")
#: Where a tensor was, which its copy has no use for.
_PLACE = ("file", "key", "offsets")


def selected(folder: str, words: list[str]) -> Capture:
    """The tensors of a folder that `key=pattern` words select, also those of which statistics alone were kept.

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
    return open_capture(folder, statistics=True).select(**wanted)


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
    """Compare every stored tensor with its hash.

    Raises:
        CaptureError: there are no values.
    """
    found: Counter[bool | None] = Counter()
    damaged = []
    for entry in _stored(capture):
        try:
            is_intact = entry.is_intact()
        except CaptureError as error:
            damaged.append(str(error))
            continue
        found[is_intact] += 1
        if is_intact is False:
            damaged.append(f"{_where(entry)}: other values than the manifest's hash")
    return Checked(found[True], found[None], damaged)


def _stored(capture: Capture) -> Capture:
    files = capture.with_values()
    if len(capture) and not len(files):
        raise CaptureError(
            f"{capture.folder} has statistics of what is selected and no values: run with capture=tensors to keep them"
        )
    return files


def _where(entry: CapturedTensor) -> str:
    file, key = identity(entry.metadata)
    return file if key is None else f"{file}, {key}"


def export(capture: Capture, to: Path, kind: str) -> int:
    """Write every selected tensor, with its metadata, into a file of its own below `to`; how many.

    npz holds `tensor` and `metadata` (JSON text), bfloat16 widened to float32.

    Raises:
        CaptureError: there are no values, or a file is there already or cannot be read or written.
    """
    files = _stored(capture)
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
