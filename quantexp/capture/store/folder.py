"""Writes the capture folder: values in files of their own or in shards, and a line for each tensor in its lists.

    <quant_type>/<name>.pt            {"tensor": ..., "metadata": {...}}, written by `torch.save`; with
                                      `capture.layout=by_type` also ../<quant_type>/<name>.pt, a link (`by_type`)
    shards/rank0-00001.safetensors    a batch; a tensor's key is the name of its `.pt` file without the suffix
    manifest.jsonl, statistics.jsonl  a line for each tensor; ranks other than 0 write their own lists

Tensors are copied to host memory when they are recorded, and written in the background, in order. A file is written
under a temporary name and renamed, so a file with its final name is complete. The lines of a batch are appended in one
write after its values are written, so everything that the manifest names is complete even if the process is killed at
any moment: the kernel keeps completed writes. There is no fsync: a power failure may lose the last seconds, which the
hashes detect. `finish_capture` joins the lists at the end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from quantexp.capture.store.deferred import Deferred, count_all
from quantexp.capture.store.files import PtFiles, ShardFiles, Stored, Values
from quantexp.capture.store.manifest import MANIFEST, STATISTICS, part_of
from quantexp.capture.store.metadata import About
from quantexp.capture.store.queue import HostMemory, WorkQueue, host_copy
from quantexp.capture.store.values import content_hash
from quantexp.errors import CaptureError
from quantexp.schema import StoreKind

#: The largest fraction of the queue that a batch takes, inverse.
_SHARE = 8
#: The reason for missing statistics.
CHANGED = "it was changed in place before it was counted"
#: The default limit of pending bytes.
QUEUE_BYTES = 1 << 30


@dataclass(frozen=True)
class Line:
    """A line of a list, and the values that are written before it."""

    about: About
    listing: str = MANIFEST
    #: None for a tensor without values.
    stored: Stored | None = None
    #: The name and a copy of values that are not written yet.
    name: str = ""
    copied: Callable[[], Tensor] | None = None


class CaptureStore:
    """Writes one rank's captured tensors, in the background."""

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        queue_bytes: int = QUEUE_BYTES,
        kind: StoreKind = StoreKind.pt,
        *,
        by_type: bool = False,
    ) -> None:
        """`by_type` also links each `.pt` file into the folder of its format beside `folder`."""
        self.rank, self._kind, self._by_type = rank, kind, by_type
        #: Bytes of values added, and of those written.
        self.num_bytes = 0
        self.written_bytes = 0
        #: The last added values.
        self.last: Stored | None = None
        self.queue: WorkQueue[Sequence[Line]] = WorkQueue(queue_bytes, self._write)
        self.memory = HostMemory(queue_bytes)
        #: The pending batch, and its reserved bytes.
        self._batch: list[Line] = []
        self._reserved = 0
        self._writing_s = 0.0
        self.begin(folder)

    def begin(self, folder: Path) -> None:
        """Write what comes next into this folder.

        Raises:
            CaptureError: it cannot be made.
        """
        self.folder = folder
        is_pt = self._kind is StoreKind.pt
        self._files = (
            PtFiles(folder, by_type=self._by_type) if is_pt else ShardFiles(folder, self.rank)
        )
        self._batch_bytes = min(self._files.batch_bytes, self.queue.most_bytes // _SHARE)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(folder, error) from error

    def add(self, name: str, tensor: Tensor, about: About) -> None:
        """Add one tensor with its metadata: it is copied now, and stored and listed in the background.

        `name` is that of its `.pt` file relative to the folder, in every kind of store.

        Raises:
            CaptureError: an earlier tensor could not be written (full disk); partial files are removed.
        """
        stored = Stored(tensor.numel() * tensor.element_size())
        self._reserve(stored.num_bytes)
        copied = host_copy(tensor, self.memory)
        if about.deferred is not None and about.deferred.is_of(tensor):
            about.deferred.look_at(copied)  # instead of the tensor, which may change
        self._add(Line(about, MANIFEST, stored, name, copied))
        self.num_bytes += stored.num_bytes
        self.last = stored

    def refer(self, stored: Stored, about: About) -> None:
        """List a tensor whose values are already added."""
        self._add(Line(about, stored=stored))

    def leave_out(self, about: About) -> None:
        """List a tensor without values; the metadata has the reason."""
        self._reserve(about.held_bytes)
        self._add(Line(about))

    def add_statistics(self, about: About) -> None:
        """Add a tensor's statistics without values."""
        self._reserve(about.held_bytes)
        self._add(Line(about, STATISTICS))

    def send(self) -> None:
        """Send the pending batch to the background thread."""
        batch, num_bytes = self._batch, self._reserved
        if not batch:
            return
        self._batch, self._reserved = [], 0
        for line in batch:
            line.about.made()
        self.queue.put(batch, num_bytes)

    def _reserve(self, num_bytes: int) -> None:
        """Wait for room in the queue, after sending the pending batch, which would otherwise never free its bytes."""
        if not self.queue.has_room(num_bytes):
            self.send()
        self.queue.reserve(num_bytes)
        self._reserved += num_bytes

    def _add(self, line: Line) -> None:
        self._batch.append(line)
        if self._reserved >= self._batch_bytes or len(self._batch) >= self._files.batch_lines:
            self.send()

    def settle(self, pending: Sequence[Deferred]) -> None:
        """Compute now what is left of these statistics, whose tensors are about to change."""
        count_all(deferred for deferred in pending if not deferred.is_settled)

    def flush(self) -> None:
        """Wait until all added tensors are on disk, in complete files.

        Raises:
            CaptureError: a tensor could not be written.
        """
        self.send()
        self.queue.flush()

    def lists(self) -> list[Path]:
        """The lists that this rank has begun."""
        files = [part_of(self.folder / name, self.rank) for name in (MANIFEST, STATISTICS)]
        return [file for file in files if file.exists()]

    def close(self) -> None:
        """Finish the queue, ignoring errors."""
        with contextlib.suppress(CaptureError):
            self.send()
        self.queue.close()

    @property
    def bytes_per_s(self) -> float:
        """The rate at which values are written; 0 while nothing is written."""
        return self.written_bytes / self._writing_s if self._writing_s else 0.0

    def _write(self, batch: Sequence[Line]) -> None:
        """Write the values of a batch, and list what is written and its statistics."""
        count_all(line.about.deferred for line in batch if line.about.deferred is not None)
        for line in batch:
            line.about.finish()
        try:
            self._write_values(batch)
        except CaptureError:
            with contextlib.suppress(CaptureError):
                self._list(batch)
            raise
        self._list(batch)

    def _write_values(self, batch: Sequence[Line]) -> None:
        values = [
            Values(line.name, line.copied(), line.about.resolved, line.stored)
            for line in batch
            if line.copied is not None and line.stored is not None
        ]
        for one in values:
            one.stored.hash = content_hash(one.tensor)
        start = time.perf_counter()
        try:
            self._files.write(values)
        except (OSError, RuntimeError) as error:
            failed = next(one for one in values if not one.stored.place)
            path = self.folder / failed.name
            raise _cannot_write(path, error, failed.stored.num_bytes) from error
        finally:
            for one in values:
                self.memory.give_back(one.tensor)
            self._writing_s += time.perf_counter() - start
            self.written_bytes += sum(one.stored.num_bytes for one in values if one.stored.place)

    def _list(self, batch: Iterable[Line]) -> None:
        lists: dict[str, list[bytes]] = {MANIFEST: [], STATISTICS: []}
        for line in batch:
            about = line.about
            if line.listing == STATISTICS and about.deferred is not None and about.deferred.changed:
                lists[MANIFEST].append(_line(about.with_more(left_out=CHANGED), None))
            elif line.listing == STATISTICS:
                lists[STATISTICS].append(about.line())
            elif line.stored is None or line.stored.place:
                lists[MANIFEST].append(_line(about, line.stored))
        for name, lines in lists.items():
            self._append(name, lines)

    def _append(self, name: str, lines: Sequence[bytes]) -> None:
        if not lines:
            return
        path, content = part_of(self.folder / name, self.rank), b"".join(lines)
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


def _line(about: About, stored: Stored | None) -> bytes:
    """The manifest's line of stored values, or of a tensor without values."""
    if stored is None:
        return about.line({"file": None, "bytes": 0, "hash": None})
    return about.line({**stored.place, "bytes": stored.num_bytes, "hash": stored.hash})


def _cannot_write(path: Path, error: Exception, needed_bytes: int = 0) -> CaptureError:
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    missing = ""
    if isinstance(error, RuntimeError):  # torch's zip writer reports a position, not the cause
        free = _free_bytes(path)
        reason = f"it takes no more bytes, of {needed_bytes:,} (a quota, or a limit of file sizes)"
        if free < needed_bytes:
            reason = os.strerror(errno.ENOSPC)
            missing = f"; {needed_bytes - free:,} bytes are missing"
    return CaptureError(
        f"captured tensors cannot be written to {path}: {reason}; free some space, set capture.dir to "
        f"another disk, or capture=stats{missing}"
    )


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(path.parent).free
