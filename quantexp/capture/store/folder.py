"""The capture folder: values as files or in shards, `manifest.jsonl` with a line for each tensor, `statistics.jsonl`.

Tensors are copied to host memory when they are recorded, and written in the background, in order. A manifest line is
appended in one write after its values are written, so everything that the manifest names is complete even if the
process is killed at any moment: the kernel keeps completed writes. There is no fsync: a power failure may lose the last
seconds, which the hashes detect. Ranks other than 0 write their own lists, which `finish_capture` joins at the end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from quantexp.capture.record.deferred import Deferred, count_all
from quantexp.capture.record.host import HostCopy, HostMemory, host_copy
from quantexp.capture.store.files import Prepared, PtFiles
from quantexp.capture.store.manifest import MANIFEST, STATISTICS, part_of
from quantexp.capture.store.metadata import About
from quantexp.capture.store.queue import WorkQueue
from quantexp.capture.store.shards import ShardFiles
from quantexp.errors import CaptureError
from quantexp.schema import StoreKind

#: Maximum tensors and bytes of a batch, and the fraction of the queue that a batch may take (its inverse). Batches
#: exist because each separate step of the background threads takes the GIL from training.
_TOGETHER, _TOGETHER_BYTES, _SHARE = 32, 1 << 24, 8
#: The minimum write rate of one thread into the page cache.
_CACHE_BYTES_PER_S = 5e8
#: The reason for missing statistics.
CHANGED = "it was changed in place before it was counted"
#: The default limit of pending bytes.
QUEUE_BYTES = 1 << 30


@dataclass
class Stored:
    """Values in the capture folder; their location and hash are known once they are written."""

    num_bytes: int
    #: `file`, and in a shard `key` and `offsets`.
    place: dict[str, Any] = field(default_factory=dict)
    hash: str | None = None


@dataclass
class _Taken:
    """A tensor in the queue."""

    name: str
    stored: Stored
    copy: HostCopy
    about: About
    prepared: Prepared | None = None


@dataclass(frozen=True)
class _Line:
    """A line of the manifest for values that were added before, or for a tensor without values."""

    about: About
    stored: Stored | None = None


#: A task of the disk thread: write and list values, list only, or call a function.
_Task = _Taken | _Line | Callable[[], None]


class CaptureStore:
    """Writes one rank's captured tensors, in the background."""

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        queue_bytes: int = QUEUE_BYTES,
        kind: StoreKind = StoreKind.pt,
        works_beside: bool = True,
    ) -> None:
        """Without `works_beside`, the calling thread does all work except writing to disk."""
        self.folder, self.rank, self.works_beside = folder, rank, works_beside
        self._values = PtFiles(folder) if kind is StoreKind.pt else ShardFiles(folder, rank)
        #: Bytes of values added, and of those written.
        self.num_bytes = 0
        self.written_bytes = 0
        #: The last added values.
        self.last: Stored | None = None
        self.queue: WorkQueue[Sequence[_Task]] = WorkQueue(
            queue_bytes, self._write_all, works_beside
        )
        self.memory = HostMemory(queue_bytes)
        #: Pending batch: values and their lines, whose bytes the queue already counts, and statistics.
        self._tasks: list[_Taken | _Line] = []
        self._task_bytes = 0
        self._gathered: list[About] = []
        self._gathered_bytes = 0
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
        values = host_copy(tensor, self.memory)
        if about.deferred is not None and about.deferred.is_of(tensor):
            about.deferred.look_at(values.wait)  # instead of the tensor, which may change
        self._gather(_Taken(name, stored, values, about), stored.num_bytes)
        self.num_bytes += stored.num_bytes
        self.last = stored

    def refer(self, stored: Stored, about: About) -> None:
        """List a tensor whose values are already added."""
        self._gather(_Line(about, stored), 0)

    def leave_out(self, about: About) -> None:
        """List a tensor without values; the metadata has the reason."""
        num_bytes = about.held_bytes
        self._reserve(num_bytes)
        self._gather(_Line(about), num_bytes)

    def add_statistics(self, about: About) -> None:
        """Add a tensor's statistics without values; they are written with a batch, or by `send`."""
        self._gathered.append(about)
        self._gathered_bytes += about.held_bytes
        if self._is_enough(self._gathered, self._gathered_bytes):
            self._send_statistics()

    def send(self) -> None:
        """Send the pending batch to the background threads."""
        self._send_tasks()
        self._send_statistics()

    def _reserve(self, num_bytes: int) -> None:
        """Wait for room in the queue, after sending the pending batch, which would otherwise never free its bytes."""
        if not self.queue.has_room(num_bytes):
            self._send_tasks()
        self.queue.reserve(num_bytes)

    def _gather(self, task: _Taken | _Line, num_bytes: int) -> None:
        self._tasks.append(task)
        self._task_bytes += num_bytes
        if self._is_enough(self._tasks, self._task_bytes):
            self._send_tasks()

    def _is_enough(self, together: Sequence[object], num_bytes: int) -> bool:
        most_bytes = min(_TOGETHER_BYTES, self.queue.most_bytes // _SHARE)
        return len(together) >= _TOGETHER or num_bytes >= most_bytes

    def _send_tasks(self) -> None:
        if not self._tasks:
            return
        together, num_bytes = self._tasks, self._task_bytes
        self._tasks, self._task_bytes = [], 0
        _make(task.about for task in together)
        self.queue.put_reserved(lambda: self._prepare(together), num_bytes, then=together)

    def _send_statistics(self) -> None:
        if not self._gathered:
            return
        together, num_bytes = self._gathered, self._gathered_bytes
        self._gathered, self._gathered_bytes = [], 0
        _make(together)
        self._reserve(num_bytes)
        listed = partial(self._list_statistics, together)
        self.queue.put_reserved(lambda: _finish(together), num_bytes, then=[listed])

    def settle(self, held: Sequence[Deferred]) -> None:
        """Wait until the tensors of these sent statistics may change."""
        self.queue.wait_for(lambda: all(one.is_settled for one in held))

    def flush(self) -> None:
        """Wait until all added tensors are on disk, in complete files.

        Raises:
            CaptureError: a tensor could not be written.
        """
        self.send()
        self.queue.then([self._seal])
        self.queue.flush()
        self.memory.let_go()

    def let_go(self) -> None:
        """Free the memory of copies once they are written; call it when no more tensors come."""
        self.send()
        self.queue.then([self.memory.let_go])

    def close(self) -> None:
        """Finish the queue, ignoring errors."""
        with contextlib.suppress(CaptureError):
            self.send()
        self.queue.close()
        with contextlib.suppress(CaptureError):
            self._seal()

    @property
    def bytes_per_s(self) -> float:
        """The rate at which values are written; 0 while nothing is written."""
        seconds = self.queue.followed_s
        return self.written_bytes / seconds if seconds else 0.0

    def _prepare(self, together: Sequence[_Taken | _Line]) -> None:
        values = [task.copy.wait() if isinstance(task, _Taken) else None for task in together]
        _finish([task.about for task in together])
        for task, copied in zip(together, values, strict=True):
            if isinstance(task, _Taken) and copied is not None:
                metadata = task.about.resolved
                task.prepared = self._values.prepared(task.name, copied, metadata)

    def _write_all(self, pieces: Sequence[Sequence[_Task]]) -> None:
        """Write all prepared batches, and list them in one write."""
        tasks = list(chain.from_iterable(pieces))
        try:
            self._write([task for task in tasks if isinstance(task, _Taken)])
        except CaptureError:
            with contextlib.suppress(CaptureError):
                self._follow_up(tasks)
            raise
        self._follow_up(tasks)

    def _follow_up(self, tasks: Sequence[_Task]) -> None:
        """List the written values, and call the queued functions."""
        self._list(tasks)
        for task in tasks:
            if not isinstance(task, _Taken | _Line):
                task()

    def _write(self, together: Sequence[_Taken]) -> None:
        """Write values; after an error, the values before the failed one have their places."""
        prepared = [taken.prepared for taken in together if taken.prepared is not None]
        try:
            self._values.write(prepared, self._is_behind())
        except (OSError, RuntimeError) as error:
            failed = next(one for one in prepared if one.place is None)
            path = self.folder / failed.name
            raise _cannot_write(path, error, failed.values.nbytes) from error
        finally:
            for taken, one in zip(together, prepared, strict=True):
                taken.copy.release()
                if one.place is not None:
                    taken.stored.place, taken.stored.hash = one.place, one.hash
                    self.written_bytes += taken.stored.num_bytes

    def _is_behind(self) -> bool:
        """Whether many bytes are pending because the disk is slower than the page cache."""
        much = self.queue.most_bytes // 2
        return self.queue.num_bytes > much and self.bytes_per_s < _CACHE_BYTES_PER_S

    def _seal(self) -> None:
        try:
            self._values.seal()
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def _list_statistics(self, together: Sequence[About]) -> None:
        kept, left_out = list[bytes](), list[bytes]()
        for about in together:
            if about.deferred is not None and about.deferred.changed:
                left_out.append(_line(about.with_more(left_out=CHANGED), None))
            else:
                kept.append(about.line())
        self._append(MANIFEST, left_out)
        self._append(STATISTICS, kept)

    def _list(self, tasks: Sequence[_Task]) -> None:
        listed = (task for task in tasks if isinstance(task, _Taken | _Line))
        lines = [
            _line(task.about, task.stored)
            for task in listed
            if task.stored is None or task.stored.place
        ]
        self._append(MANIFEST, lines)

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


def _make(together: Iterable[About]) -> None:
    """Build the metadata now."""
    for about in together:
        about.made()


def _finish(together: Sequence[About]) -> None:
    """Compute all deferred statistics in one call, and complete the metadata with them."""
    count_all(about.deferred for about in together if about.deferred is not None)
    for about in together:
        about.finish()


def _cannot_write(path: Path, error: Exception, needed_bytes: int = 0) -> CaptureError:
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    if isinstance(error, RuntimeError) and _free_bytes(path) < needed_bytes:
        reason = os.strerror(errno.ENOSPC)  # torch's zip writer reports a position, not the cause
    return CaptureError(
        f"captured tensors cannot be written to {path}: {reason}; free some space, set capture.dir to "
        "another disk, or capture=stats"
    )


def _free_bytes(path: Path) -> int:
    return shutil.disk_usage(path.parent).free
