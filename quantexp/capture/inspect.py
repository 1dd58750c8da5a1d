"""`quantexp captures DIR [key=pattern ...]`: lists, checks and exports the tensors of a capture folder.

Arguments after the folder select by metadata (`layer=0 tensor=grad_*`). `--check` compares every file with its hash;
`--export FOLDER --to pt|safetensors|npz` writes each selected tensor with its metadata into its own file.
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
from quantexp.folders import written_beside
from quantexp.model.safetensors import write_safetensors

#: Formats of `--to`.
FORMATS = ("pt", "safetensors", "npz")
#: Metadata of a tensor's location, which its copy does not need.
_PLACE = ("file", "key", "offsets")


def selected(folder: str, words: list[str]) -> Capture:
    """The tensors of a folder that `key=pattern` arguments select, including those with statistics only.

    Raises:
        CaptureError: the folder has no captures, an argument is not key=pattern, or no tensor has the key.
    """
    patterns: dict[str, object] = {}
    for word in words:
        key, equals, pattern = word.partition("=")
        if not (key and equals):
            raise CaptureError(
                f"a selection must be key=pattern, such as tensor=grad_*, got {word!r}"
            )
        patterns[key] = pattern
    return open_capture(folder, statistics=True).select(**patterns)


@dataclass(frozen=True)
class Checked:
    """The result of checking the values of a capture."""

    #: The number of tensors with the manifest's hash, and of tensors without a hash.
    num_intact: int
    num_without_hash: int
    #: An error message for each other tensor.
    damaged: Sequence[str]

    def summary(self) -> str:
        """The result in one line."""
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
    results: Counter[bool | None] = Counter()
    damaged = []
    for entry in _stored(capture):
        try:
            is_intact = entry.is_intact()
        except CaptureError as error:
            damaged.append(str(error))
            continue
        results[is_intact] += 1
        if is_intact is False:
            damaged.append(f"{_where(entry)}: other values than the manifest's hash")
    return Checked(results[True], results[None], damaged)


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
    """Write every selected tensor with its metadata into its own file in `to`; returns their number.

    An npz file holds `tensor` and `metadata` (JSON text), with bfloat16 widened to float32.

    Raises:
        CaptureError: there are no values, or a file exists already or cannot be read or written.
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
        write_safetensors(target, {"tensor": entry.torch()}, {"metadata": json.dumps(metadata)})
        return
    with written_beside(target) as part, part.open("wb") as stream:
        if kind == "pt":
            torch.save({"tensor": entry.torch().clone(), "metadata": metadata}, stream)
        else:
            np.savez(stream, tensor=entry.numpy(), metadata=np.array(json.dumps(metadata)))
