"""`quantexp captures DIR [key=pattern ...]`: selects and exports the tensors of a capture folder.

Arguments after the folder select by metadata (`layer=0 tensor=grad_*`). `--export FOLDER --to pt|safetensors|npz`
writes each selected tensor with its metadata into its own file.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from quantexp.capture.reader import Capture, CapturedTensor, open_capture
from quantexp.errors import CaptureError
from quantexp.folders import written_beside
from quantexp.model.safetensors import write_safetensors

#: Metadata of a tensor's location, which its copy does not need.
_PLACE = ("file", "key", "offsets")


def selected(folder: str, words: list[str]) -> Capture:
    """The tensors of a folder that `key=pattern` arguments select, including those with statistics only.

    Raises:
        CaptureError: the folder has no captures, an argument is not key=pattern, or no tensor has the key.
    """
    return open_capture(folder, statistics=True).select(**patterns_of(words))


def patterns_of(words: list[str]) -> dict[str, object]:
    """The selection of `key=pattern` arguments.

    Raises:
        CaptureError: an argument is not key=pattern.
    """
    patterns: dict[str, object] = {}
    for word in words:
        key, equals, pattern = word.partition("=")
        if not (key and equals):
            raise CaptureError(
                f"a selection must be key=pattern, such as tensor=grad_*, got {word!r}"
            )
        patterns[key] = pattern
    return patterns


def _stored(capture: Capture) -> Capture:
    files = capture.with_values()
    if len(capture) and not len(files):
        raise CaptureError(
            f"{capture.folder} has statistics of what is selected and no values: run with capture=tensors to keep them"
        )
    return files


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
