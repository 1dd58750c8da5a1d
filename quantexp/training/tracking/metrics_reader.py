"""metrics.jsonl read as it grows, as points, some at a time."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import BinaryIO

from quantexp.training.tracking.events import Point, point

#: Lines read at once: what is held in memory for a tracker that has fallen behind.
MAX_LINES = 500


class MetricsReader:
    """From an offset on; it stays with the file it has opened, should that be moved."""

    def __init__(self, file: Path, offset: int = 0) -> None:
        self._path = file
        self._file: BinaryIO | None = None
        #: Bytes that were accepted.
        self.offset = offset
        self._read_to = offset

    def read(self) -> list[Point]:
        """The next points, the same ones until they are accepted; a line that is not whole yet is left for later.

        Lines that are not of this version are passed over.
        """
        if self._file is None:
            if not self._path.exists():
                return []
            self._file = self._path.open("rb")
        self._file.seek(self.offset)
        self._read_to = self.offset
        points: list[Point] = []
        for _ in range(MAX_LINES):
            line = self._file.readline()
            if not line.endswith(b"\n"):
                break
            self._read_to += len(line)
            with contextlib.suppress(KeyError, TypeError, ValueError):
                points.append(point(json.loads(line)))
        return points

    def accept(self) -> None:
        """What was read last is done with."""
        self.offset = self._read_to

    def close(self) -> None:
        """Nothing more is read."""
        if self._file is not None:
            self._file.close()
