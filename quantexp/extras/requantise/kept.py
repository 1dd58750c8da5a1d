"""The scores of each tensor in a file of its own, for work that several jobs do (`divided`).

A file has the fidelities as float64, so that they come back as they were, NaN and infinity included, and the stamp of
the tensor: scores of another file are computed again. A tensor that cannot be read has none, because whoever joins the
scores names it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from quantexp.analysis.tensors.slots import slots_of
from quantexp.analysis.tensors.stamp import stamp_of
from quantexp.capture.reader import CapturedTensor
from quantexp.capture.statistics.errors import Fidelity
from quantexp.capture.store.values import identity
from quantexp.errors import CaptureError
from quantexp.extras.requantise.passing import FileScores, SlotScores, Work, score_file
from quantexp.runs.work_folder import whole

#: Incremented whenever the same tensor and request give other scores.
VERSION = 1
_SUFFIX = ".npz"


@dataclass(frozen=True)
class KeptScores:
    """The files of one request; its folder exists."""

    folder: Path

    def score(self, entry: CapturedTensor, work: Work) -> FileScores:
        """The kept scores of a tensor, or else `score_file`, which are kept then.

        Raises:
            OSError: they cannot be written.
        """
        if (kept := self._read(entry)) is not None:
            return kept
        scores = score_file(entry, work)
        if scores.problem is None:
            self._write(scores)
        return scores

    def missing(self, files: Sequence[CapturedTensor]) -> list[int]:
        """The tensors without a file, counted from 0."""
        names = {path.name for path in self.folder.glob(f"*{_SUFFIX}")}
        return [index for index, entry in enumerate(files) if _name(entry) not in names]

    def _read(self, entry: CapturedTensor) -> FileScores | None:
        """The kept scores; None if there are none, or they are damaged or of another file."""
        try:
            with (self.folder / _name(entry)).open("rb") as stream, np.load(stream) as arrays:
                about = json.loads(str(arrays["about"]))
                if about["stamp"] != stamp_of(entry):
                    return None
                slots = {str(slot): slot for slot in slots_of(entry.metadata)}
                scores = [
                    SlotScores(
                        slots[name],
                        about["elements"][place],
                        _fidelities(arrays[f"candidates{place}"]),
                        _fidelities(arrays[f"study{place}"]),
                    )
                    for place, name in enumerate(about["slots"])
                ]
            return FileScores(entry, scores, notes=about["notes"])
        except (OSError, CaptureError, ValueError, LookupError, TypeError, EOFError, BadZipFile):
            return None

    def _write(self, scores: FileScores) -> None:
        about = {
            "stamp": stamp_of(scores.entry),
            "slots": [str(one.slot) for one in scores.slots],
            "elements": [one.num_elements for one in scores.slots],
            "notes": scores.notes,
        }
        arrays: dict[str, Any] = {"about": np.array(json.dumps(about))}
        for place, one in enumerate(scores.slots):
            arrays[f"candidates{place}"] = np.array(one.fidelities, np.float64)
            arrays[f"study{place}"] = np.array(one.study, np.float64)
        with whole(self.folder / _name(scores.entry)) as stream:
            np.savez(stream, **arrays)


def _fidelities(numbers_NF: np.ndarray[Any, Any]) -> list[Fidelity]:
    """N fidelities of F numbers each."""
    return [Fidelity(*row) for row in numbers_NF.tolist()]


def _name(entry: CapturedTensor) -> str:
    """The name of a tensor's file, by its place in the capture."""
    place = json.dumps(identity(entry.metadata))
    return hashlib.blake2b(place.encode(), digest_size=16).hexdigest() + _SUFFIX
