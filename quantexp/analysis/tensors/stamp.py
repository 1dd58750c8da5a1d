"""What shows that a captured tensor is the one that an earlier command looked at."""

from __future__ import annotations

import os
from typing import Any

from quantexp.capture.reader import CapturedTensor


def stamp_of(entry: CapturedTensor) -> list[Any]:
    """Of each part of the tensor: size and time of the file, the place in it, the hash of the values; as JSON has them.

    Raises:
        CaptureError: the entry has no file, or one outside its folder.
        OSError: the file is not there.
    """
    stamp: list[Any] = []
    for stored in entry.stored:
        stat, metadata = os.stat(stored.path), stored.metadata  # noqa: PTH116
        offsets = metadata.get("offsets")
        place = [metadata.get("key"), list(offsets) if offsets else None, metadata.get("hash")]
        stamp += [stat.st_size, stat.st_mtime_ns, *place]
    return stamp
