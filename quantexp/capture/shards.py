"""Shards: captured tensors one after another in large safetensors files.

    shards/rank0-00001.safetensors    [header, padded to 64 KiB][values of a tensor][values of the next] ...

Values are appended as they come, and need no memory afterwards. Room for the header is kept in front of them, and taken
on the disk when a shard begins, so that a full disk cannot keep the shard from being sealed. Until the header is there
the file has the suffix `.part` and is no safetensors file; but the manifest names the bytes of every tensor in it as
soon as they are written, and `open_capture` reads them from there. `finish_shards` seals what a killed process left
open, and writes the index by which other programs find a tensor's file.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantexp.capture.content import content_hash
from quantexp.capture.direct import DirectFile
from quantexp.capture.files import Prepared
from quantexp.capture.manifest import MANIFEST, lines_of
from quantexp.capture.safetensors import content_of, dtype_name, entry, framed
from quantexp.status import write_json

if TYPE_CHECKING:
    from torch import Tensor

#: Below the capture folder.
SHARDS = "shards"
INDEX = "capture.safetensors.index.json"
PART = ".part"
#: Values of a shard, bytes, unless its first tensor alone has more.
SHARD_BYTES = 1 << 28
#: Where values begin.
HEADER_BYTES = 1 << 16

_PREAMBLE: dict[str, Any] = {"__metadata__": {"format": "pt"}}
#: Colon, comma and the quotes of a key are counted with some to spare.
_KEY_BYTES = 8


class ShardFiles:
    """Writes one rank's tensors into its shards."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self._shard: _Shard | None = None

    def prepared(self, name: str, values: Tensor, metadata: Mapping[str, Any]) -> Prepared:
        """A contiguous CPU tensor, to be appended. The manifest alone keeps the metadata."""
        return Prepared(
            content_hash(values), lambda is_behind: self._write(name, values, is_behind)
        )

    def _write(self, name: str, values: Tensor, is_behind: bool) -> dict[str, Any]:
        """Append; where it cannot be, the shard keeps what was whole before, sealed."""
        key, content = name.removesuffix(".pt"), content_of(values)
        dtype, shape = dtype_name(values), list(values.shape)
        if self._shard is not None and not self._shard.has_room(key, dtype, shape, len(content)):
            self.seal()
        if self._shard is None:
            self._shard = _Shard(self._next())
        try:
            start = self._shard.append(key, dtype, shape, content, is_behind)
        except OSError:
            self.seal()
            raise
        file = self._shard.path.relative_to(self.folder)
        return {"file": str(file), "key": key, "offsets": [start, start + len(content)]}

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


class _Shard:
    """A shard that is being written."""

    def __init__(self, path: Path) -> None:
        self.path, self._part = path, path.with_name(path.name + PART)
        self._header, self._header_bytes, self._end = dict(_PREAMBLE), len(framed(_PREAMBLE)), 0
        self._file = DirectFile(self._part, os.O_EXCL)
        try:
            self._file.write_at(b" " * HEADER_BYTES, 0)
        except OSError:
            self._file.close()
            self._part.unlink()
            raise

    def has_room(self, key: str, dtype: str, shape: list[int], num_bytes: int) -> bool:
        """Whether a tensor fits; into an empty shard each does."""
        if self._end and self._end + num_bytes > SHARD_BYTES:
            return False
        return self._header_bytes + self._described(key, dtype, shape, num_bytes) <= HEADER_BYTES

    def append(
        self, key: str, dtype: str, shape: list[int], content: memoryview, is_behind: bool
    ) -> int:
        """Put a tensor at the end; where it begins in the file."""
        end = self._end + len(content)
        described = self._described(key, dtype, shape, len(content))
        try:
            self._file.write_at(content, HEADER_BYTES + self._end, is_behind)
        except OSError:
            self._file.truncate(HEADER_BYTES + self._end)
            raise
        self._header[key] = entry(dtype, shape, self._end, end)
        start, self._end = HEADER_BYTES + self._end, end
        self._header_bytes += described
        return start

    def _described(self, key: str, dtype: str, shape: list[int], num_bytes: int) -> int:
        described = entry(dtype, shape, self._end, self._end + num_bytes)
        return len(json.dumps({key: described})) + _KEY_BYTES

    def seal(self) -> None:
        """Write the header; a shard that holds nothing is taken away."""
        holds_any = len(self._header) > len(_PREAMBLE)
        try:
            if holds_any:
                self._file.write_at(framed(self._header, HEADER_BYTES), 0)
        finally:
            self._file.close()
        if holds_any:
            self._part.rename(self.path)
        else:
            self._part.unlink()


def finish_shards(folder: Path) -> None:
    """Seal the shards that killed processes left open, and write the index; no process may be writing.

    Of an open shard what the manifest names is kept, and what was being written is cut off; one that is not as the
    manifest says stays as it is.

    Raises:
        OSError: the folder cannot be written.
    """
    if not (folder / SHARDS).is_dir():
        return
    of_file: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines_of(folder / MANIFEST):
        if line.get("key") is not None:
            of_file.setdefault(str(line["file"]), {})[str(line["key"])] = line
    for part in sorted((folder / SHARDS).glob(f"rank*.safetensors{PART}")):
        path = part.with_name(part.name.removesuffix(PART))
        _seal_listed(part, path, of_file.get(str(path.relative_to(folder)), {}))
    weight_map = {key: file for file, lines in of_file.items() for key in lines}
    total = sum(int(line["bytes"]) for lines in of_file.values() for line in lines.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _seal_listed(part: Path, path: Path, lines: Mapping[str, Mapping[str, Any]]) -> None:
    header, end = dict(_PREAMBLE), HEADER_BYTES
    try:
        for key, line in lines.items():
            start, stop = line["offsets"]
            if start != end:
                return
            header[key] = entry(
                line["dtype"], line["shape"], start - HEADER_BYTES, stop - HEADER_BYTES
            )
            end = stop
        content = framed(header, HEADER_BYTES)
    except (KeyError, TypeError, ValueError):
        return
    if not lines or part.stat().st_size < end:
        return
    with part.open("r+b") as stream:
        stream.write(content)
        stream.truncate(end)
    part.rename(path)
