"""Shards: captured tensors one after another in large safetensors files, which lie as `sealing` says.

Values are appended as they come, and need no memory afterwards. Room for the header is kept in front of them, and taken
on the disk when a shard begins, so that a full disk cannot keep the shard from being sealed. Until the header is there
the file has the suffix `.part` and is no safetensors file; but the manifest names the bytes of every tensor in it as
soon as they are written, and `open_capture` reads them from there. What a killed process left open, and the index, are
`sealing`'s.
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

#: Values of a shard, bytes, unless its first tensor alone has more.
SHARD_BYTES = 1 << 28
#: Colon, comma and the quotes of a key are counted with some to spare.
_KEY_BYTES = 8


class ShardFiles:
    """Writes one rank's tensors into its shards."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._shard: _Shard | None = None

    def prepared(self, name: str, values: Tensor, metadata: Mapping[str, Any]) -> Prepared:
        """A contiguous CPU tensor, to be appended. The manifest alone keeps the metadata."""
        return Prepared(name, values, content_hash(values))

    def write(self, together: Sequence[Prepared], is_behind: bool) -> None:
        """Append values, as many at once as a shard takes, and say where.

        Raises:
            OSError: one cannot be written: the shard keeps what was whole before, sealed. Those with a place are.
        """
        rest = [_Value.of(one) for one in together]
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
        """Append what fits into a shard; one by one where a disk is too full for all."""
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
        """Make the shard that is open a whole file.

        Raises:
            OSError: that failed; the manifest's places hold all the same.
        """
        shard, self._shard = self._shard, None
        if shard is not None:
            shard.seal()

    def _next(self) -> Path:
        """The first name that no earlier process took."""
        folder = self.folder / SHARDS
        folder.mkdir(parents=True, exist_ok=True)
        ours = re.compile(rf"rank{self.rank}-(\d+)\.safetensors({re.escape(PART)})?")
        taken = [int(found[1]) for path in folder.iterdir() if (found := ours.fullmatch(path.name))]
        return folder / f"rank{self.rank}-{max(taken, default=0) + 1:05d}.safetensors"


@dataclass
class _Value:
    """A tensor that is to be appended, or was."""

    prepared: Prepared
    key: str
    dtype: str
    shape: list[int]
    content: memoryview
    #: Among the values of its shard; its entry in the header, and what that takes there.
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
    """A shard that is being written."""

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
        """How many of these fit behind each other, which are given their offsets; into an empty shard any one."""
        end, header_bytes = self._end, self._header_bytes
        for number, value in enumerate(values):
            value.put_at(end)
            end, header_bytes = value.offsets[1], header_bytes + value.header_bytes
            is_first = number == 0 and not self._holds_any
            if not is_first and (end > SHARD_BYTES or header_bytes > HEADER_BYTES):
                return number
        return len(values)

    def append(self, values: Sequence[_Value], is_behind: bool) -> None:
        """Put tensors at the end, all or none; `room_for` has given them offsets.

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
        """Write the header; a shard that holds nothing is taken away."""
        try:
            if self._holds_any:
                self._file.write_at([framed(self._header, HEADER_BYTES)], 0)
        finally:
            self._file.close()
        if self._holds_any:
            self._part.rename(self.path)
        else:
            self._part.unlink()
