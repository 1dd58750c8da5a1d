"""The capture folder: values as files or in shards, `manifest.jsonl` with a line for each tensor, `statistics.jsonl`.

Tensors are copied to host memory when they pass and written in the background, in order. Only when the values are
written is their manifest line appended, in one write, so that whatever the manifest names is whole even if the process
is killed at any moment: what the kernel has taken over, a killed process cannot lose. Nothing is forced to the disk
(fsync): a machine that loses its power may lose the last seconds, and the hashes tell. Ranks other than 0 list in files
of their own, which `finish_capture` joins at the end.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from quantexp.capture.files import PtFiles
from quantexp.capture.host import HostCopy, HostMemory, host_copy
from quantexp.capture.manifest import MANIFEST, STATISTICS, part_of
from quantexp.capture.queue import WorkQueue
from quantexp.capture.safetensors import content_of
from quantexp.capture.shards import ShardFiles
from quantexp.capture.statistics import Summary
from quantexp.errors import CaptureError
from quantexp.schema import StoreKind

#: Bytes that wait to be written, where nothing is configured.
QUEUE_BYTES = 1 << 30


@dataclass
class Stored:
    """Values in the capture folder; their place and hash are known once they are written."""

    num_bytes: int
    #: `file`, and in a shard `key` and `offsets`.
    place: dict[str, Any] = field(default_factory=dict)
    hash: str | None = None


class CaptureStore:
    """Writes one rank's captured tensors, in the background."""

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        queue_bytes: int = QUEUE_BYTES,
        kind: StoreKind = StoreKind.pt,
    ) -> None:
        self.folder, self.rank = folder, rank
        self._values = PtFiles(folder) if kind is StoreKind.pt else ShardFiles(folder, rank)
        #: Bytes of values taken, and of those written.
        self.num_bytes = 0
        self.written_bytes = 0
        #: What was taken last.
        self.last: Stored | None = None
        self.queue = WorkQueue(queue_bytes)
        self.memory = HostMemory(queue_bytes)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(folder, error) from error

    def add(self, name: str, tensor: Tensor, metadata: dict[str, Any]) -> None:
        """Take one tensor with its metadata: it is copied now, and stored and listed in the background.

        Its name is that of its `.pt` file below the folder, whatever it is stored in.

        Raises:
            CaptureError: an earlier one could not be written (full disk); nothing half-written stays.
        """
        stored = Stored(tensor.numel() * tensor.element_size())
        values = host_copy(tensor, self.memory)
        self.queue.put(lambda: self._write(name, stored, values, metadata), stored.num_bytes)
        self.num_bytes += stored.num_bytes
        self.last = stored

    def refer(self, stored: Stored, metadata: dict[str, Any]) -> None:
        """List a tensor whose values were added before."""
        self.queue.put(lambda: self._list(stored, metadata))

    def leave_out(self, metadata: dict[str, Any]) -> None:
        """List a tensor without values; the metadata says why."""
        nothing = {"file": None, "bytes": 0, "hash": None}
        self.queue.put(lambda: self._append(MANIFEST, {**resolved(metadata), **nothing}))

    def add_statistics(self, metadata: dict[str, Any]) -> None:
        """Keep a tensor's statistics alone."""
        self.queue.put(lambda: self._append(STATISTICS, resolved(metadata)))

    def flush(self) -> None:
        """Wait until everything taken is on disk, in whole files.

        Raises:
            CaptureError: something could not be written.
        """
        self.queue.put(self._seal)
        self.queue.flush()
        self.memory.let_go()

    def let_go(self) -> None:
        """Nothing more comes: give back the memory of copies once they are written."""
        self.queue.put(self.memory.let_go)

    def close(self) -> None:
        """Finish what is queued, whatever comes of it."""
        self.queue.close()
        with contextlib.suppress(CaptureError):
            self._seal()

    @property
    def bytes_per_s(self) -> float:
        """The rate at which values are written, while any are."""
        return self.written_bytes / self.queue.worked_s if self.queue.worked_s else 0.0

    def _write(self, name: str, stored: Stored, copy: HostCopy, metadata: dict[str, Any]) -> None:
        values = copy.wait()
        try:
            stored.place = self._values.write(name, values, resolved(metadata))
        except (OSError, RuntimeError) as error:
            raise _cannot_write(self.folder / name, error, stored.num_bytes) from error
        stored.hash = content_hash(values)
        copy.release()
        self._list(stored, metadata)
        self.written_bytes += stored.num_bytes

    def _seal(self) -> None:
        try:
            self._values.seal()
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def _list(self, stored: Stored, metadata: dict[str, Any]) -> None:
        place = {**stored.place, "bytes": stored.num_bytes, "hash": stored.hash}
        self._append(MANIFEST, {**resolved(metadata), **place})

    def _append(self, name: str, line: dict[str, Any]) -> None:
        path = part_of(self.folder / name, self.rank)
        content = (json.dumps(line) + "\n").encode()
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                written = os.write(descriptor, content)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _cannot_write(path, error) from error
        if written < len(content):
            raise _cannot_write(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def resolved(metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata with statistics and numbers that were left on the tensor's device as JSON holds them."""
    return {key: _plain(value) for key, value in metadata.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Summary):
        return value.record()
    return float(value) if isinstance(value, Tensor) else value


def content_hash(values: Tensor) -> str:
    """Hex sha256 of a contiguous CPU tensor's bytes, without its shape and dtype."""
    return hashlib.sha256(content_of(values)).hexdigest()


def _cannot_write(path: Path, error: Exception, wanted_bytes: int = 0) -> CaptureError:
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    if isinstance(error, RuntimeError) and _free_bytes(path) < wanted_bytes:
        reason = os.strerror(errno.ENOSPC)  # torch's zip writer says where it noticed, not why
    return CaptureError(
        f"captured tensors cannot be written to {path}: {reason}; free some space, set capture.dir to "
        "another disk, or capture=stats"
    )


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(path.parent).free
