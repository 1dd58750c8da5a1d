"""Power failures: records what a writer does to a folder, and makes the states in which a disk may be afterwards.

A file system may lose, after a power failure, whatever no fsync has forced to the disk, in the way of ALICE (Pillai et
al., All File Systems Are Not Created Equal, OSDI 2014):

    names       created, renamed, removed: kept up to some moment, which no fsync of their folder may be after
    contents    of each file written since its last fsync: the old, the new, a beginning of it, or zeros

The folder is looked at before and after each call that orders writes (rename, unlink, mkdir, fsync). So writes of any
kind are recorded, those of C code too.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import pytest

Names = dict[str, int]


@dataclass
class Recording:
    """The states of a folder while a writer works in it."""

    folder: Path
    #: After each event: path -> inode of each file.
    names: list[Names] = field(default_factory=list)
    #: Inode -> (event, content) whenever it changed.
    contents: dict[int, list[tuple[int, bytes]]] = field(default_factory=dict)
    #: Inode -> events at which an fsync forced its content; folder -> those at which its names were.
    synced: dict[int, list[int]] = field(default_factory=dict)
    synced_names: list[tuple[int, str]] = field(default_factory=list)
    #: Every file seen, open, so that no removed file's inode becomes another's.
    _handles: list[BinaryIO] = field(default_factory=list)

    def look(self) -> None:
        """Record the current state as an event."""
        names: Names = {}
        for parent, _, files in os.walk(self.folder):
            for name in files:
                path = Path(parent) / name
                inode = path.stat().st_ino
                names[str(path.relative_to(self.folder))] = inode
                if inode not in self.contents:
                    self._handles.append(path.open("rb"))
                content, versions = path.read_bytes(), self.contents.setdefault(inode, [])
                if not versions or versions[-1][1] != content:
                    versions.append((len(self.names), content))
        self.names.append(names)

    def close(self) -> None:
        """Let go of the files; nothing more is recorded."""
        for handle in self._handles:
            handle.close()

    def sync(self, path: Path) -> None:
        """Record an fsync of a file or folder."""
        self.look()
        event = len(self.names) - 1
        if path.is_dir():
            self.synced_names.append((event, str(path)))
        else:
            self.synced.setdefault(path.stat().st_ino, []).append(event)

    def crash(self, source: random.Random, target: Path) -> int:
        """Write a state in which the disk may be after a power failure; returns the event at which it happened."""
        last = len(self.names) - 1
        event = last if source.random() < 0.3 else source.randint(0, last)
        kept = source.randint(
            max((at for at, _ in self.synced_names if at <= event), default=0), event
        )
        for path, inode in self.names[kept].items():
            file = target / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self._content(source, inode, event))
        return event

    def _content(self, source: random.Random, inode: int, event: int) -> bytes:
        """One of the contents that a file may have."""
        forced = max((at for at in self.synced.get(inode, ()) if at <= event), default=-1)
        versions = [(at, content) for at, content in self.contents[inode] if at <= event]
        durable = next((c for at, c in reversed(versions) if at <= forced), b"")
        later = [content for at, content in versions if at > forced]
        if not later:
            return durable
        new = source.choice(later)
        cut = source.randrange(len(new) + 1)
        same = next((i for i, (a, b) in enumerate(zip(durable, new, strict=False)) if a != b), 0)
        if new.startswith(durable):
            same = len(durable)
        return source.choice(
            (durable, new, new[: max(cut, same)], new[:same] + bytes(len(new) - same))
        )


@contextmanager
def recorded(folder: Path) -> Iterator[Recording]:
    """Record what is done in a folder."""
    recording = Recording(folder)
    originals = {name: getattr(os, name) for name in ("replace", "rename", "unlink", "mkdir")}
    fsync = os.fsync

    def around(name: str) -> Callable[..., object]:
        def call(*arguments: object, **more: object) -> object:
            recording.look()
            result = originals[name](*arguments, **more)
            recording.look()
            return result

        return call

    def forced(descriptor: int) -> None:
        fsync(descriptor)
        recording.sync(Path(f"/proc/self/fd/{descriptor}").readlink())

    with pytest.MonkeyPatch.context() as patch:
        for name in originals:
            patch.setattr(os, name, around(name))
        patch.setattr(os, "fsync", forced)
        recording.look()
        yield recording
    recording.look()
    recording.close()
