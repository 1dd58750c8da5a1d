"""Reads captured tensors: selects them by metadata, and loads their values lazily, memory-mapped.

Opening a capture reads only the manifest (and its parts, while a run of several processes is running), or the file
names of an old collection without a manifest. Values are paged in from disk on access, so a collection may be larger
than memory. No file in a capture folder can run code: files are read as tensors and plain data, and anything else is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from quantexp.capture.lines import lists_of, readable_lines, unlisted
from quantexp.capture.names import metadata_of
from quantexp.capture.place import place_of_captures
from quantexp.capture.store.manifest import MANIFEST, STATISTICS, ManifestLine
from quantexp.capture.store.values import has_hash, identity, load_values, name_of, path_of
from quantexp.errors import CaptureError, UnreadableError
from quantexp.folders import user_path

#: The criterion for a key: a value, a shell pattern, several of them, or a function of the value.
Criterion = object


@dataclass(frozen=True)
class CapturedTensor:
    """One captured tensor: its metadata, and its values on request."""

    folder: Path
    metadata: ManifestLine

    @classmethod
    def of(cls, folder: Path, line: Mapping[str, Any]) -> CapturedTensor:
        """The tensor of a parsed line, whose values nobody has checked."""
        return cls(folder, cast(ManifestLine, line))

    @property
    def path(self) -> Path:
        """The file with the tensor's values.

        Raises:
            CaptureError: there is none, or it lies outside the folder.
        """
        if not self.metadata.get("file"):
            why = self.metadata.get("left_out", "only statistics were kept")
            raise CaptureError(f"{self.label} of {self.folder} has no values: {why}")
        return path_of(self.folder, self.metadata)

    @property
    def name(self) -> str:
        """The file's name relative to the folder, or the key in a shard; both have the same form, without a suffix.

        Raises:
            CaptureError: as for `path`, or the key leads out of the folder.
        """
        return name_of(self.folder, self.metadata)

    @property
    def label(self) -> str:
        """`L3 fc1 backward grad_output`, from the known parts."""
        layer = self.metadata.get("layer")
        words: list[object] = [None if layer is None else f"L{layer}"]
        words += [self.metadata.get(key) for key in ("module", "operation", "tensor")]
        return " ".join(str(word) for word in words if word is not None)

    def torch(self) -> Tensor:
        """The values, memory-mapped copy-on-write.

        Raises:
            CaptureError: there are no values, the file is missing, or it is not a file of captured values.
        """
        return load_values(self.path, self.metadata)

    def numpy(self) -> np.ndarray[Any, Any]:
        """The values, memory-mapped; bfloat16, which numpy does not support, is widened to float32."""
        values = self.torch()
        values = values.float() if values.dtype == torch.bfloat16 else values
        array: np.ndarray[Any, Any] = values.numpy()
        return array

    def is_intact(self) -> bool | None:
        """Whether the values have the manifest's hash; None if the manifest has no hash.

        Raises:
            CaptureError: the file holds no such tensor, or the kind of hash is unknown.
        """
        return None if self.metadata.get("hash") is None else self._has_hash(self.torch())

    def verified(self) -> Tensor:
        """`torch()`, of plain numbers with the manifest's hash, if it has one.

        Raises:
            CaptureError: as for `torch`, the file cannot be read, it holds no plain numbers, or other values.
        """
        try:
            values = self.torch()
            if values.layout is not torch.strided or values.is_complex() or values.is_quantized:
                kind = f"{values.dtype}, {values.layout}"
                raise CaptureError(f"{self.path} holds no plain numbers, got {kind}")
            if self.metadata.get("hash") is not None and not self._has_hash(values):
                raise CaptureError(f"{self.path} holds other values than the manifest's hash says")
        except OSError as error:
            raise CaptureError(f"{self.path} cannot be read: {error.strerror or error}") from error
        return values

    def _has_hash(self, values: Tensor) -> bool:
        try:
            return has_hash(values, str(self.metadata["hash"]))
        except CaptureError as error:
            raise CaptureError(f"{self.path}: {error}") from error


class Capture(Collection[CapturedTensor]):
    """The tensors of a capture folder, or some of them."""

    def __init__(
        self, folder: Path, entries: list[CapturedTensor], damage: Sequence[str] = ()
    ) -> None:
        self.folder, self._entries = folder, entries
        #: What is wrong with lines of the lists, which are left out.
        self.damage = tuple(damage)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[CapturedTensor]:
        return iter(self._entries)

    def __contains__(self, entry: object) -> bool:
        return entry in self._entries

    def __getitem__(self, index: int) -> CapturedTensor:
        return self._entries[index]

    def select(self, **criteria: Criterion) -> Capture:
        """The tensors whose metadata fit all criteria.

        Each key of the metadata takes a value (`layer=0`), a shell pattern (`tensor="grad_*"`), several of
        them (`module=["fc1", "fc2"]`) or a function of the value (`iteration=lambda i: i > 100`).

        Raises:
            CaptureError: no tensor has the key.
        """
        keys = {key for entry in self._entries for key in entry.metadata}
        for key in criteria:
            if self._entries and key not in keys:
                raise CaptureError(
                    f"{key} must be a key of the metadata, one of {', '.join(sorted(keys))}"
                )
        fitting = [
            entry
            for entry in self._entries
            if all(_fits(entry.metadata.get(key), value) for key, value in criteria.items())
        ]
        return Capture(self.folder, fitting, self.damage)

    def with_values(self) -> Capture:
        """The tensors with values, without repeats: a weight is listed for forward and backward."""
        stored = [entry for entry in self._entries if entry.metadata.get("file")]
        first = {identity(entry.metadata): entry for entry in reversed(stored)}
        return Capture(self.folder, list(first.values())[::-1], self.damage)

    def described(self) -> list[CapturedTensor]:
        """The tensors with statistics and without values."""
        return [
            entry
            for entry in self._entries
            if entry.metadata.get("statistics") and not entry.metadata.get("file")
        ]

    @property
    def num_bytes(self) -> int:
        """The bytes of the values, without repeats."""
        return sum(int(entry.metadata.get("bytes") or 0) for entry in self.with_values())

    def rows(self) -> list[dict[str, Any]]:
        """The manifest as plain dictionaries."""
        return [dict(entry.metadata) for entry in self._entries]

    def dataframe(self) -> Any:
        """The manifest as a pandas DataFrame, a column for each key.

        Raises:
            CaptureError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-untyped, unused-ignore]
        except ImportError as error:
            raise CaptureError("a DataFrame needs pandas: install it, or use rows()") from error
        return pandas.DataFrame(self.rows())


def capture_folder(folder: str | Path) -> Path:
    """The folder of captured tensors that a path names: itself, or that of a run.

    Raises:
        CaptureError: the folder does not exist.
    """
    folder = place_of_captures(user_path(folder))
    if not folder.is_dir():
        raise CaptureError(f"there is no folder {folder}; give the tensors folder of a run")
    return folder


def open_capture(folder: str | Path, *, statistics: bool = False) -> Capture:
    """The captured tensors of a folder: a run's `tensors/`, the run itself, or an old collection without a manifest.

    Those of a run with `capture.dir` are read from there.

    With `statistics`, tensors with statistics only, which have no values, follow the others.

    Raises:
        CaptureError: the folder does not exist, or has no captured tensors.
    """
    folder = capture_folder(folder)
    wrong: list[UnreadableError] = []
    listings = lists_of(folder, MANIFEST)
    lines = [line for file in listings for line in readable_lines(file, wrong.append)]
    entries = lines or list(old_collection(folder))
    if statistics:
        entries = entries + list(_statistics_only(folder, lines, wrong.append))
    if wrong and not entries:
        raise CaptureError(
            f"{folder} holds no captured tensors that can be read: {wrong[0]}"
        ) from wrong[0]
    if not entries and next(_statistics_only(folder, [], wrong.append), None) is not None:
        raise CaptureError(
            f"{folder} holds no captured tensors: statistics alone were kept; run with capture=tensors"
        )
    if not entries:
        raise CaptureError(
            f"{folder} holds no captured tensors: neither a {MANIFEST} nor files with their names; run with "
            "capture=tensors"
        )
    tensors = [CapturedTensor.of(folder, entry) for entry in entries]
    return Capture(folder, tensors, [str(error) for error in wrong])


def _statistics_only(
    folder: Path, lines: list[dict[str, Any]], report: Callable[[UnreadableError], None]
) -> Iterator[dict[str, Any]]:
    """The lines of statistics without a line in the manifest."""
    listings = lists_of(folder, STATISTICS)
    statistics = (line for file in listings for line in readable_lines(file, report))
    yield from unlisted(statistics, lines)


def old_collection(folder: Path) -> Iterator[dict[str, Any]]:
    """The tensors of a folder without a manifest, by the names of their files."""
    for path in sorted(folder.rglob("*.pt")):
        metadata = metadata_of(path.name)
        if metadata is not None:
            yield {**metadata, "file": str(path.relative_to(folder)), "bytes": path.stat().st_size}


def _fits(value: object, criterion: Criterion) -> bool:
    if callable(criterion):
        return bool(criterion(value))
    if isinstance(criterion, str):
        return value is not None and fnmatchcase(str(value), criterion)
    if isinstance(criterion, list | tuple | set | frozenset | range):
        return any(_fits(value, alternative) for alternative in criterion)
    return value == criterion
