"""The capture folder: values as files or in shards, `manifest.jsonl` with a line for each tensor, `statistics.jsonl`.

Tensors are copied to host memory when they are recorded, and written in the background, in order. The lines of a batch
are appended in one write after its values are written, so everything that the manifest names is complete even if the
process is killed at any moment: the kernel keeps completed writes. There is no fsync: a power failure may lose the last
seconds, which the hashes detect. Ranks other than 0 write their own lists, which `finish_capture` joins at the end.

A copy does not block the training step. From a GPU it goes to pinned memory on a side stream: training continues, a
reader of the values waits only for the copy, and the tensor's memory is not reused before it ends. On a CPU the memory
of earlier copies is used again: fresh memory takes several times as long as filling it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from quantexp.capture.store.content import content_hash
from quantexp.capture.store.deferred import Deferred, count_all
from quantexp.capture.store.manifest import MANIFEST, STATISTICS, part_of
from quantexp.capture.store.metadata import About
from quantexp.capture.store.queue import WorkQueue
from quantexp.capture.store.writers import PtFiles, ShardFiles, Stored, Values
from quantexp.errors import CaptureError
from quantexp.schema import StoreKind

#: The largest fraction of the queue that a batch takes, inverse.
_SHARE = 8
#: The reason for missing statistics.
CHANGED = "it was changed in place before it was counted"
#: The default limit of pending bytes.
QUEUE_BYTES = 1 << 30


@dataclass(frozen=True)
class _Line:
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
    ) -> None:
        self.folder, self.rank = folder, rank
        self._files = PtFiles(folder) if kind is StoreKind.pt else ShardFiles(folder, rank)
        #: Bytes of values added, and of those written.
        self.num_bytes = 0
        self.written_bytes = 0
        #: The last added values.
        self.last: Stored | None = None
        self.queue: WorkQueue[Sequence[_Line]] = WorkQueue(queue_bytes, self._write)
        self.memory = HostMemory(queue_bytes)
        self._batch_bytes = min(self._files.batch_bytes, queue_bytes // _SHARE)
        #: The pending batch, and its reserved bytes.
        self._batch: list[_Line] = []
        self._reserved = 0
        self._writing_s = 0.0
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
        self._add(_Line(about, MANIFEST, stored, name, copied))
        self.num_bytes += stored.num_bytes
        self.last = stored

    def refer(self, stored: Stored, about: About) -> None:
        """List a tensor whose values are already added."""
        self._add(_Line(about, stored=stored))

    def leave_out(self, about: About) -> None:
        """List a tensor without values; the metadata has the reason."""
        self._reserve(about.held_bytes)
        self._add(_Line(about))

    def add_statistics(self, about: About) -> None:
        """Add a tensor's statistics without values."""
        self._reserve(about.held_bytes)
        self._add(_Line(about, STATISTICS))

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

    def _add(self, line: _Line) -> None:
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

    def close(self) -> None:
        """Finish the queue, ignoring errors."""
        with contextlib.suppress(CaptureError):
            self.send()
        self.queue.close()

    @property
    def bytes_per_s(self) -> float:
        """The rate at which values are written; 0 while nothing is written."""
        return self.written_bytes / self._writing_s if self._writing_s else 0.0

    def _write(self, batch: Sequence[_Line]) -> None:
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

    def _write_values(self, batch: Sequence[_Line]) -> None:
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

    def _list(self, batch: Iterable[_Line]) -> None:
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


class HostMemory:
    """Memory for copies on a CPU: at most `most_bytes` in use and free, unless more is in use."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        #: Bytes in use and free.
        self.num_bytes = 0
        self._free: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}
        self._lock = threading.Lock()

    def take(self, like: Tensor) -> Tensor:
        """A contiguous tensor of this dtype and shape, not initialised."""
        with self._lock:
            if same := self._free.get((like.dtype, like.shape)):
                return same.pop()
            self.num_bytes += like.nbytes
            self._shrink()
        return torch.empty(like.shape, dtype=like.dtype)

    def give_back(self, memory: Tensor) -> None:
        """Return a tensor that is no longer used; memory of a GPU's copy is torch's own."""
        if not memory.is_pinned():
            with self._lock:
                self._free.setdefault((memory.dtype, memory.shape), []).append(memory)
                self._shrink()

    def let_go(self) -> None:
        """Free all memory, as soon as it is given back."""
        with self._lock:
            self.most_bytes = 0
            self._shrink()

    def _shrink(self) -> None:
        while self.num_bytes > self.most_bytes and self._free:
            key, same = next(iter(self._free.items()))
            if same:
                self.num_bytes -= same.pop().nbytes
            else:
                del self._free[key]


def host_copy(x: Tensor, memory: HostMemory) -> Callable[[], Tensor]:
    """Start a copy; the function waits for it and returns the contiguous host tensor."""
    x = x.detach()
    if x.device.type == "cuda":
        return _from_gpu(x)
    copied = memory.take(x).copy_(x)
    return lambda: copied


def _from_gpu(x: Tensor) -> Callable[[], Tensor]:
    side = _side_stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        host.copy_(x, non_blocking=True)
        x.record_stream(side)
        copied_event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied_event.record(side)

    def wait() -> Tensor:
        copied_event.synchronize()
        return host

    return wait


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
