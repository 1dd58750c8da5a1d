"""Shards: captured tensors one after another in large safetensors files, with the layout of `sealing`.

Values are appended as they arrive, and need no memory afterwards. The space for the header is reserved on disk when a
shard is created, so that a full disk cannot prevent sealing. Until the header is written the file has the suffix
`.part` and is not a safetensors file, but the manifest names the bytes of every written tensor, and `open_capture`
reads them from there. `sealing` handles shards of killed processes and the index.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from quantexp.capture.store.content import content_hash
from quantexp.capture.store.direct import DirectFile
from quantexp.capture.store.files import Prepared
from quantexp.capture.store.sealing import HEADER_BYTES, PREAMBLE, SHARDS
from quantexp.folders import PART, beside
from quantexp.model.safetensors import content_of, dtype_name, entry, framed

if TYPE_CHECKING:
    from torch import Tensor

#: Maximum bytes of a shard's values, unless its first tensor alone is larger.
SHARD_BYTES = 1 << 28
#: An upper bound for the colon, comma and quotes of a key.
_KEY_BYTES = 8


class ShardFiles:
    """Writes one rank's tensors into its shards."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._shard: _Shard | None = None

    def prepared(self, name: str, values: Tensor, metadata: Mapping[str, Any]) -> Prepared:
        """Prepare a contiguous CPU tensor; only the manifest keeps its metadata."""
        return Prepared(name, values, content_hash(values))

    def write(self, together: Sequence[Prepared], is_behind: bool) -> None:
        """Append values, as many at once as fit into a shard, and set their places.

        Raises:
            OSError: a value cannot be written. The shard is sealed with its complete values; values with a place are
                written.
        """
        rest = [_Value.of(prepared) for prepared in together]
        while rest:
            if self._shard is None:
                self._shard = _Shard(self._next())
            num_taken = self._shard.room_for(rest)
            if num_taken:
                self._append(self._shard, rest[:num_taken], is_behind)
                rest = rest[num_taken:]
            else:
                self.seal()

    def _append(self, shard: _Shard, values: Sequence[_Value], is_behind: bool) -> None:
        """Append values to a shard; one by one if the disk has no room for all."""
        try:
            shard.append(values, is_behind)
        except OSError:
            if len(values) == 1:
                self.seal()
                raise
            for value in values:
                self._append(shard, [value], is_behind)
            return
        file = str(shard.path.relative_to(self.folder))
        for value in values:
            offsets = [HEADER_BYTES + offset for offset in value.offsets]
            value.prepared.place = {"file": file, "key": value.key, "offsets": offsets}

    def seal(self) -> None:
        """Complete the open shard.

        Raises:
            OSError: the header cannot be written; the manifest's places stay valid.
        """
        shard, self._shard = self._shard, None
        if shard is not None:
            shard.seal()

    def _next(self) -> Path:
        """The first name that no earlier process has used."""
        folder = self.folder / SHARDS
        folder.mkdir(parents=True, exist_ok=True)
        pattern = re.compile(rf"rank{self.rank}-(\d+)\.safetensors({re.escape(PART)})?")
        numbers = [
            int(match[1]) for path in folder.iterdir() if (match := pattern.fullmatch(path.name))
        ]
        return folder / f"rank{self.rank}-{max(numbers, default=0) + 1:05d}.safetensors"


@dataclass
class _Value:
    """A tensor to append."""

    prepared: Prepared
    key: str
    dtype: str
    shape: list[int]
    content: memoryview
    #: The offsets in the shard's values; its entry in the header, and the size of that entry.
    offsets: tuple[int, int] = (0, 0)
    entry: dict[str, Any] = field(default_factory=dict)
    header_bytes: int = 0

    @classmethod
    def of(cls, prepared: Prepared) -> Self:
        values, key = prepared.values, prepared.name.removesuffix(".pt")
        return cls(prepared, key, dtype_name(values), list(values.shape), content_of(values))

    def put_at(self, start: int) -> None:
        self.offsets = start, start + len(self.content)
        self.entry = entry(self.dtype, self.shape, *self.offsets)
        self.header_bytes = len(json.dumps({self.key: self.entry})) + _KEY_BYTES


class _Shard:
    """The open shard."""

    def __init__(self, path: Path) -> None:
        self.path, self._part = path, beside(path)
        self._header, self._header_bytes, self._end = dict(PREAMBLE), len(framed(PREAMBLE)), 0
        self._file = DirectFile(self._part, os.O_EXCL)
        try:
            self._file.write_at([b" " * HEADER_BYTES], 0)
        except OSError:
            self._file.close()
            self._part.unlink()
            raise

    def room_for(self, values: Sequence[_Value]) -> int:
        """The number of leading values that fit, at least one into an empty shard; sets their offsets."""
        end, header_bytes = self._end, self._header_bytes
        for number, value in enumerate(values):
            value.put_at(end)
            end, header_bytes = value.offsets[1], header_bytes + value.header_bytes
            is_first = number == 0 and not self._holds_any
            if not is_first and (end > SHARD_BYTES or header_bytes > HEADER_BYTES):
                return number
        return len(values)

    def append(self, values: Sequence[_Value], is_behind: bool) -> None:
        """Append tensors with offsets from `room_for`, all or none.

        Raises:
            OSError: they cannot be written.
        """
        start = HEADER_BYTES + self._end
        try:
            self._file.write_at([value.content for value in values], start, is_behind)
        except OSError:
            self._file.truncate(start)
            raise
        for value in values:
            self._header[value.key] = value.entry
            self._header_bytes += value.header_bytes
            self._end = value.offsets[1]

    @property
    def _holds_any(self) -> bool:
        return len(self._header) > len(PREAMBLE)

    def seal(self) -> None:
        """Write the header; an empty shard is removed."""
        try:
            if self._holds_any:
                self._file.write_at([framed(self._header, HEADER_BYTES)], 0)
        finally:
            self._file.close()
        if self._holds_any:
            self._part.rename(self.path)
        else:
            self._part.unlink()
